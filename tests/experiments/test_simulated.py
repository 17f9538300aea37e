"""The experiments on the simulator and on divergence: figures that are known beforehand, and files."""

import json
from itertools import pairwise

import pytest

from experiments import ablation, calibrate, divergence, hit_rate_effect, overhead
from radixkv.simulate import Simulator, at_once, run


def rows_of(path):
    result = json.loads(path.read_text())
    assert set(result) >= {"config", "environment", "rows"}
    assert path.with_suffix(".png").stat().st_size > 1000
    return result["rows"]


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 63, 64, 100, 511, 512, 513, 1000])
def test_what_diverging_requests_compute_and_hold(shared):
    config = divergence.Config(num_requests=4)
    prompts = divergence.diverging(config, shared)
    total = shared + config.own_tokens
    for size in config.block_sizes:
        for name, cache in divergence.caches(size).items():
            computed, held = divergence.serve_together(prompts, cache)
            matched = shared if name == "radix, partial blocks" else shared // size * size
            assert computed == 3 * (total - matched)
            whole = shared // size
            assert held == whole + 4 * (-(-total // size) - whole)


def test_every_d_around_a_border_is_there():
    distances = divergence.Config().distances()
    assert distances[0] == 0 and distances[-1] == 4096
    for border in range(64, 4096, 64):
        assert {border - 2, border - 1, border, border + 1, border + 2} <= set(distances)


def test_divergence_and_a_trace(tmp_path):
    trace = tmp_path / "my.jsonl"
    lines = [{"prompt": "the same beginning, " * 8 + f"and end {i}", "output": "yes"} for i in range(8)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--smoke", "--trace", str(trace), "--tokenizer", "bytes", "--out", str(tmp_path)]
    divergence.main(options)
    rows = rows_of(tmp_path / "divergence.json")
    assert {row["cache"] for row in rows} == {"flat hash", "radix", "radix, partial blocks"}
    found = [row for row in rows if row["part"] == "traces"]
    # 7 of 8 prompts share 168 bytes; whole blocks of 64 keep 128 of them
    computed = {(row["cache"], row["block_size"]): row["num_computed_tokens"] for row in found}
    assert computed["flat hash", 64] - computed["radix, partial blocks", 64] == 7 * 40
    assert computed["radix", 64] == computed["flat hash", 64]


def test_limited_matches_come_to_their_share():
    config = hit_rate_effect.Config(num_problems=3, num_open=10, pool_tokens=20_000)
    requests = hit_rate_effect.tree_of_thought(config)
    most = hit_rate_effect.measure(config, requests, 1.0)[0]["hit_rate"]
    assert hit_rate_effect.measure(config, requests, 0.0)[0]["hit_rate"] == 0
    assert hit_rate_effect.measure(config, requests, 0.5)[0]["hit_rate"] == pytest.approx(most / 2, rel=0.1)
    assert [r.namespace for r in hit_rate_effect.limited(requests, 1.0)] == [None] * len(requests)


def test_more_hits_serve_more(tmp_path):
    hit_rate_effect.main(["--smoke", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "hit_rate_effect.json")
    assert [row["num_requests"] for row in rows] == [rows[0]["num_requests"]] * len(rows)
    for fewer, more in pairwise(rows):
        assert fewer["hit_rate"] < more["hit_rate"]
        assert fewer["request_throughput"] < more["request_throughput"]
        assert fewer["ttft_p50_ms"] > more["ttft_p50_ms"]


def test_a_model_that_does_not_fit_ends_with_a_message(tmp_path, capsys):
    with pytest.raises(SystemExit):
        hit_rate_effect.main(["--model", "llama-3-70b", "--smoke", "--out", str(tmp_path)])
    assert "num_gpus" in capsys.readouterr().err


def test_overhead_counts_all_that_is_spent(tmp_path):
    overhead.main(["--smoke", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "overhead.json")
    assert {row["traffic"] for row in rows} == {"zero hits", "conversations"}
    for row in rows:
        spent = [row[f"{name}_s"] for name in ("tree", "scheduler", "plan")]
        assert min(spent) > 0 and row["share"] == pytest.approx(sum(spent) / row["duration_s"])
        assert (row["hit_rate"] > 0.3) == (row["traffic"] == "conversations")
        assert row["num_planned_steps"] == 0  # none shares a whole cell with another that runs


def test_publishing_at_commit_shares_nothing_within_a_step():
    config = ablation.Config(num_open=8)
    (first,) = ablation.workload("few_shot", 1, config)
    requests = [first] * 6

    class Slow:
        def step_s(self, load):
            return 1.0

    hits = {}
    for variant in ablation.VARIANTS:
        scheduler = ablation.make_scheduler(variant, config, 1000, max_num_batched_tokens=10_000)
        checked = []

        def on_step(stats, scheduler=scheduler, checked=checked):
            scheduler.manager.check()
            checked.append(stats)

        run(Simulator(scheduler, Slow(), on_step=on_step), at_once(requests))
        assert checked
        hits[variant.name] = scheduler.num_hit_tokens
    whole = (first.num_prompt_tokens - 1) // 16 * 16
    # Without in-batch sharing six equal prompts in one step are computed six times; with it, once.
    assert all(count == (5 * whole if "sharing" in name or "tree att" in name else 0) for name, count in hits.items())


def test_ablation_measures_equal_answers(tmp_path):
    ablation.main(["--smoke", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "ablation.json")
    assert len(rows) == 3 * len(ablation.VARIANTS)
    by_name = {(row["workload"], row["variant"]): row for row in rows if row["part"] == "simulated"}
    for workload in ("few_shot", "multi_turn"):
        assert by_name[workload, "no cache"]["hit_rate"] == 0
        full = by_name[workload, "+ tree attention"]
        assert (
            full["hit_rate"] > 0.3 and full["request_throughput"] > by_name[workload, "no cache"]["request_throughput"]
        )
    measured = [row for row in rows if row["part"] == "measured"]
    assert measured[0]["hit_rate"] == 0 < measured[1]["hit_rate"] <= measured[-1]["hit_rate"]


@pytest.mark.slow
def test_calibration_comes_near(tmp_path):
    """Hits are the engine's exactly; times are a fit's, on a machine that others use too, so the bounds are wide."""
    calibrate.main(["--smoke", "--out", str(tmp_path)])
    for row in rows_of(tmp_path / "calibrate.json")[1:]:
        assert row["num_cached_tokens_simulated"] == row["num_cached_tokens_measured"]
        assert abs(row["busy_s_error"]) < 0.5

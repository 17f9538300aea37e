"""experiments.compare and index_cost: the fields other scripts read, the options, the errors."""

import json
import random

import pytest

from experiments import compare, index_cost
from radixkv.inspect.__main__ import main as inspect_main

FIELDS = [
    "trace",
    "cache",
    "block_size",
    "partial_blocks",
    "num_blocks",
    "policy",
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_computed_tokens",
    "hit_rate",
    "num_evicted_blocks",
    "peak_blocks",
    "index_us_per_request",
    "hash_us_per_request",
    "index_bytes_per_token",
]


def run(tmp_path, *options):
    compare.main([*options, "--serve", "off", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "compare.json").read_text())
    assert set(result) == {"config", "environment", "rows", "serving"}
    assert (tmp_path / "compare.png").stat().st_size > 1000
    return result["rows"]


def test_the_embedded_workload_by_default(tmp_path, capsys):
    rows = run(tmp_path, "--limit", "60")
    assert all(set(FIELDS) <= set(row) for row in rows)
    assert {row["cache"] for row in rows} == {"null", "flat_hash", "radix"}
    assert all(row["num_computed_tokens"] + row["num_cached_tokens"] == row["num_prompt_tokens"] for row in rows)
    by_size = {(r["cache"], r["block_size"]): r for r in rows if r["num_blocks"] is None}
    assert by_size["null", 16]["num_cached_tokens"] == 0
    for size in (16, 128):
        flat, radix = by_size["flat_hash", size], by_size["radix", size]
        assert radix["num_cached_tokens"] > flat["num_cached_tokens"] > 0
        assert radix["share_of_optimum"] == 1
        assert flat["hash_us_per_request"] > 0 == radix["hash_us_per_request"]
    assert by_size["radix", 16]["num_cached_tokens"] == by_size["radix", 128]["num_cached_tokens"]
    assert "embedded: 60 requests" in capsys.readouterr().out


def test_then_the_engine_serves_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "SERVED_REQUESTS", 4)
    compare.main(["--limit", "5", "--out", str(tmp_path)])
    serving = json.loads((tmp_path / "compare.json").read_text())["serving"]
    assert [row["cache"] for row in serving] == ["null", "flat_hash", "radix"]
    assert serving[0]["num_cached_tokens"] == 0 < serving[1]["num_cached_tokens"] <= serving[2]["num_cached_tokens"]
    assert "the same tokens from each" in capsys.readouterr().out


def write_trace(tmp_path, name="my.jsonl"):
    path = tmp_path / name
    lines = [{"prompt": "the same beginning, " * 8 + f"and end {i}", "output": "yes"} for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_trace_of_ones_own(tmp_path):
    trace = write_trace(tmp_path)
    options = ["--block-size", "1", "16", "--partial-blocks", "on", "off", "--num-blocks", "20", "unbounded"]
    rows = run(tmp_path, "--trace", trace, *options, "--policy", "lru", "cost", "--cache-outputs", "on")
    seen = {(r["cache"], r["block_size"], r["partial_blocks"], r["num_blocks"], r["policy"]) for r in rows}
    assert len(seen) == len(rows)  # no row twice
    assert ("radix", 16, False, 20, "cost") in seen and ("flat_hash", 16, False, 20, "cost") not in seen
    # 7 of 8 prompts share 168 bytes; whole blocks of 16 keep 160 of them
    hits = {
        (r["cache"], r["block_size"], r["partial_blocks"]): r["num_cached_tokens"] for r in rows if not r["num_blocks"]
    }
    assert hits["radix", 1, False] == hits["radix", 16, True] == 7 * 168
    assert hits["radix", 16, False] == hits["flat_hash", 16, False] == 7 * 160


def write_claude_log(tmp_path):
    """Ten calls to Anthropic's API: each with a long system prompt of its own, and all but the same question."""
    rng = random.Random(0)
    path = tmp_path / "claude.jsonl"
    lines = [
        {
            "model": "claude",
            "max_tokens": 1000,
            "system": f"{i} " + "".join(rng.choice("abcdef") for _ in range(19_798)),
            "messages": [{"role": "user", "content": f"Summarise what the log of this session says, please, in {i}"}],
            "surprise": "x" * 200,
        }
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_system_prompt_beside_the_messages_counts_and_what_is_not_read_is_said(tmp_path, capsys):
    trace = write_claude_log(tmp_path)
    rows = run(tmp_path, "--trace", trace)
    assert all(row["num_prompt_tokens"] > 198_000 and row["hit_rate"] < 0.003 for row in rows)
    (warning,) = rows[0]["remarks"]
    assert warning.startswith("surprise is not understood and was not read: 10 times, 1.0% of its records' text")
    assert f"Warning: {warning}" in capsys.readouterr().out
    compare.show(json.loads((tmp_path / "compare.json").read_text()))  # the report of the results says it too
    assert f"Warning: {warning}" in capsys.readouterr().out
    assert inspect_main(["why", trace, "9"]) == 0
    shown = capsys.readouterr().out
    assert "the first 19 are the same" in shown  # <|im_start|>system and a line end, no more
    first, second = (line for line in shown.splitlines() if line.split()[:1] in (["first"], ["second"]))
    assert first.split()[1].isdigit() and second.split()[1] == "9"  # where the system prompts part, not the questions
    assert "warning: surprise is not understood" in shown


def test_an_equal_prompt_to_another_model_is_not_what_a_request_shares_most_with(tmp_path, capsys):
    path = tmp_path / "models.jsonl"
    asked = [
        ("a", "the same prompt"),
        ("a", "the same, but not to its end"),
        ("b", "the same prompt"),
        ("a", "the same prompt"),
    ]
    path.write_text("".join(json.dumps({"model": model, "prompt": prompt}) + "\n" for model, prompt in asked))
    rows = run(tmp_path, "--trace", str(path), "--block-size", "1", "--cache", "radix")
    assert rows[0]["num_cached_tokens"] == len("the same") + len("the same prompt") - 1
    assert inspect_main(["why", str(path), "3"]) == 0
    assert "the first is request 0" in capsys.readouterr().out


def test_what_has_ended_is_kept_when_a_later_trace_breaks(tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "fine"}\n{"prompt": 5}\n')
    with pytest.raises(SystemExit):
        run(tmp_path, "--trace", write_trace(tmp_path), str(broken))
    assert "broken.jsonl: line 2" in capsys.readouterr().err
    assert {row["trace"] for row in json.loads((tmp_path / "compare.json").read_text())["rows"]} == {"my"}


def test_equal_names_are_told_apart(tmp_path):
    (tmp_path / "other").mkdir()
    traces = [write_trace(tmp_path), write_trace(tmp_path, "other/my.jsonl")]
    rows = run(tmp_path, "--trace", *traces, "--cache", "radix", "flat_hash", "--num-blocks", "5")
    assert [row["trace"] for row in rows] == [traces[0]] * 2 + [traces[1]] * 2
    assert all(row["num_refused_requests"] == 8 and row["num_cached_tokens"] == 0 for row in rows)


def test_pools_of_the_embedded_workload_are_of_equal_tokens(tmp_path):
    rows = run(tmp_path, "--limit", "20", "--cache", "radix")
    pools = {(row["num_blocks"] or 0) * row["block_size"] for row in rows}
    assert pools == {0, *compare.EMBEDDED_POOLS}
    optimum = [row["share_of_optimum"] for row in rows if row["num_blocks"] is None]
    assert optimum == [1, 1]
    whole = run(tmp_path, "--limit", "20", "--cache", "null", "radix", "--partial-blocks", "off", "--block-size", "128")
    assert whole[0]["share_of_optimum"] == 0 < whole[1]["share_of_optimum"] < 1


def test_files_are_traces_of_their_own_unless_joined(tmp_path):
    traces = [write_trace(tmp_path, "a.jsonl"), write_trace(tmp_path, "b.jsonl")]
    apart = run(tmp_path, "--trace", *traces, "--cache", "radix")
    assert [row["trace"] for row in apart] == ["a", "b"]
    (joined,) = run(tmp_path, "--trace", *traces, "--cache", "radix", "--join")
    assert joined["num_requests"] == 16 and joined["num_cached_tokens"] > sum(row["num_cached_tokens"] for row in apart)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "missing.jsonl"], "missing.jsonl"),
        (["--tokenizer", "nonsense", "--trace", __file__], "nonsense"),
        (["--block-size", "0"], "block_size"),
        (["--num-blocks", "many"], "many"),
        (["--policy", "best"], "best"),
        (["--limit", "0"], "no request"),
        (["--limit", "-1"], "limit"),
        (["--cache", "radix", "--hash-algorithm", "xxhash"], "--hash-algorithm"),
        (["--cache", "flat_hash", "--policy", "cost"], "--policy"),
        (["--skip-bad"], "--skip-bad"),
        (["--trace", __file__, "--seed", "3"], "--seed"),
    ],
)
def test_bad_options_end_with_a_message(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        compare.main([*options, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "compare.json").exists()


def test_index_cost_measures_every_operation(tmp_path):
    index_cost.main(["--smoke", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "index_cost.json").read_text())["rows"]
    fields = {"cache", "block_size", "operation", "num_leaves", "mean_us", "p50_us", "p99_us", "num_freed_tokens"}
    assert all(fields <= set(row) for row in rows)
    assert {"admit", "insert", "deep_admit", "evict64", "admit_8192", "hash_8192"} <= {row["operation"] for row in rows}
    assert all(row["num_freed_tokens"] == 64 for row in rows if row["operation"] == "evict64")
    hit_rates = {(r["cache"], r["block_size"]): r["hit_rate"] for r in rows if r["operation"] == "admit"}
    assert hit_rates["radix", 16] == hit_rates["flat_hash", 16] > 0.5
    assert (tmp_path / "index_cost.png").exists()

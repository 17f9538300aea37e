"""experiments.hybrid_gain, and `compare --model` of a model with states or windows."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from experiments import compare, hybrid_gain
from radixkv.cache.namespace import Namespace
from radixkv.simulate.cost_model import Roofline

QWEN = "qwen3.5-35b-a3b"
COST = Roofline.of(QWEN, "h100-sxm", 4)


@dataclass
class Request:
    prompt: bytes
    namespace: Namespace | None = None


def prompts(*lengths, seed=0):
    """Prompts that share one beginning, of so many tokens each."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 1000, max(lengths), dtype=np.int32)
    for length in lengths:
        yield Request(np.concatenate([shared[:length], rng.integers(1000, 2000, 20, dtype=np.int32)]).tobytes())


def by_label(rows):
    return {row["label"]: row for row in rows}


def test_short_prefixes_hit_the_tree_alone():
    """A prefix shorter than vLLM's block of 1,056 tokens: its blocks find nothing, the tree all from the third on."""
    rows = by_label(hybrid_gain.replay_all(prompts(*[500] * 6), QWEN, [None], COST, "short"))
    assert set(rows) == {"flat_hash 1056", "flat_hash 1056, unit 16", "radix"}
    assert rows["flat_hash 1056"]["num_cached_tokens"] == 0
    # The first leaves a checkpoint 256 tokens before its end, the second one where it parts.
    assert rows["radix"]["num_cached_tokens"] == 520 - 256 + 4 * 500
    assert all(row["optimum"] == 5 * 500 for row in rows.values())
    assert all(row["num_cached_tokens"] + row["num_computed_tokens"] == 6 * 520 for row in rows.values())


def test_seconds_are_those_of_full_batches():
    """What is computed once more costs what it costs in a busy server, whatever it was cut into."""
    (row, *_) = hybrid_gain.replay_all(prompts(9_000, seed=1), "gpt-oss-20b", [None], COST, "one")
    (twice, *_) = hybrid_gain.replay_all(
        [*prompts(9_000, seed=1), *prompts(9_000, seed=2)], "gpt-oss-20b", [None], COST, "two"
    )
    assert twice["num_computed_tokens"] == 2 * row["num_computed_tokens"]
    assert twice["prefill_s"] == pytest.approx(2 * row["prefill_s"], rel=0.02)


def test_pools_hold_no_more_than_their_bytes():
    pool = 1.5 * hybrid_gain.GIB
    requests = [*prompts(3_000, 3_000, seed=1), *prompts(2_500, 2_500, seed=2)] * 3
    for row in hybrid_gain.replay_all(requests, QWEN, [pool], COST, "pool"):
        assert 0 < row["peak_bytes"] <= pool and not row["num_refused_requests"]
    with pytest.raises(ValueError, match="--pool-gib: expected at least two blocks"):
        hybrid_gain.replay_all([], QWEN, [1.0], COST, "none")


def test_the_comparison_takes_a_model(tmp_path, capsys):
    trace = tmp_path / "my.jsonl"
    body = {"messages": [{"role": "system", "content": "Be brief. " * 60}, {"role": "user", "content": ""}], "odd": 1}
    lines = []
    for number in range(6):
        body["messages"][1]["content"] = f"What is {number}?"
        lines.append(json.dumps(body))
    trace.write_text("\n".join(lines))
    options = ["--trace", str(trace), "--model", QWEN, "--pool-gib", "unbounded", "2", "--out", str(tmp_path)]
    compare.main(options)
    rows = json.loads((tmp_path / "compare_hybrid.json").read_text())["rows"]
    assert [row["pool_gib"] for row in rows] == [None] * 3 + [2.0] * 3
    assert (tmp_path / "compare_hybrid.png").stat().st_size > 1000
    assert not (tmp_path / "compare.json").exists()
    told = capsys.readouterr().out
    assert "radix against flat_hash 1056, pool unbounded" in told and "odd" in told and "UTF-8 bytes" in told


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--model", QWEN, "--block-size", "32"), "--block-size: concerns nothing that is asked for with qwen3.5"),
        (("--model", QWEN, "--cache", "radix"), "--cache: concerns nothing"),
        (("--model", QWEN, "--pool-gib", "-1"), "--pool-gib: expected numbers over 0, or 'unbounded', got '-1'"),
        (("--model", "qwen3-next-80b-a3b", "--num-gpus", "1"), "num_gpus: expected enough for qwen3-next-80b-a3b"),
        (("--pool-gib", "2"), "--pool-gib: concerns models with states or windows, got llama-3-8b"),
        (("--model", "nosuch"), "choose from .*qwen3.5-35b-a3b"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, capsys, options, reason):
    with pytest.raises(SystemExit):
        compare.main([*options, "--limit", "2", "--serve", "off", "--out", str(tmp_path)])
    import re

    assert re.search(reason, " ".join(capsys.readouterr().err.split()))

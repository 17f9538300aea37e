"""A request of no tokens is counted, and everything that replays a trace goes on behind it."""

import json

import numpy as np
import pytest

from experiments import compare, divergence
from experiments.tree_bytes import Serving, snapshots
from radixkv.blocks.bounds import BlockPaths
from radixkv.blocks.config import CACHES, CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import pack
from radixkv.inspect import compare_prompts, survey
from radixkv.inspect.__main__ import main
from radixkv.inspect.survey import Passage, token_list
from radixkv.scheduling.scheduler import Scheduler
from radixkv.simulate import ClosedLoop, Roofline, Simulator, at_once, run
from radixkv.traces import open_trace
from tests.traces.trace_files import write_lines

FULL = [{"prompt": "the same beginning, " * 5 + f"and end {i}", "output": "yes"} for i in range(4)]
EMPTY = [{"prompt": "", "output": "o"}, {"prompt": [""]}, {"prompt_token_ids": []}, {"messages": []}, {"prompt": []}]


@pytest.fixture
def trace(tmp_path):
    """Empty prompts before, between and after others."""
    return write_lines(tmp_path / "t.jsonl", EMPTY[0], *FULL[:2], *EMPTY[1:], *FULL[2:], EMPTY[0])


def test_they_are_requests_and_counted(trace):
    read = open_trace(trace)
    assert [request.num_prompt_tokens == 0 for request in read] == [1, 0, 0, 1, 1, 1, 1, 0, 0, 1]
    assert (read.counts.num_requests, read.counts.num_empty, read.counts.num_bad) == (10, 6, 0)
    assert read.counts.remarks() == ["6 requests are empty and counted as of no tokens"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("cache_outputs", [False, True])
def test_a_replay_goes_on(trace, cache, cache_outputs):
    with_empty, without = (Replay(CacheConfig(cache, 16), cache_outputs=cache_outputs) for _ in range(2))
    for request in open_trace(trace):
        hit = with_empty.feed(request.prompt, request.output, request.namespace)
        assert hit == (without.feed(request.prompt, request.output) if request.prompt else 0)
    assert with_empty.num_requests == without.num_requests + 6 == 10
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_refused_requests", "hit_rate", "peak_blocks"):
        assert getattr(with_empty, name) == getattr(without, name)
    assert with_empty.cache.num_cached_tokens == without.cache.num_cached_tokens


@pytest.mark.parametrize("block_size", [1, 16])
def test_bounds(trace, block_size):
    pairs = [(request.prompt, request.output) for request in open_trace(trace)]
    bounds = [BlockPaths(each, block_size) for each in (pairs, [pair for pair in pairs if pair[0]])]
    for of in (BlockPaths.order_optimum, BlockPaths.infinite_hits, BlockPaths.pool_blocks):
        assert of(bounds[0]) == of(bounds[1]) > 0
    assert bounds[0].eviction_bound(20) == bounds[1].eviction_bound(20)
    alone = BlockPaths([(b"", pack(range(40)))], block_size)
    assert (alone.order_optimum(), alone.infinite_hits(), alone.eviction_bound(1)) == (0, 0, 0)


@pytest.mark.parametrize("arrivals", [at_once, lambda requests: ClosedLoop(requests, 2)])
def test_the_simulator_passes_over_them(trace, arrivals):
    told = []
    scheduler = Scheduler(KVManager(RadixCache(16), 1000))
    simulator = Simulator(scheduler, Roofline.of("llama-3-8b", "h100-sxm"))
    result = run(simulator, arrivals(open_trace(trace)), on_ended=told.append)
    assert (len(result.served), result.num_refused, result.num_empty) == (4, 0, 6)
    assert sum(told) == 10


def test_inspect(trace, capsys):
    assert main([str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "10 requests" in shown and "warning: 6 requests are empty" in shown
    for first, second in ((0, 1), (1, 0), (0, 3)):
        assert main(["why", str(trace), str(first), str(second)]) == 0
        assert "the first 0 are the same" in capsys.readouterr().out
    assert main(["why", str(trace), "1"]) == 0
    assert main(["why", str(trace), "3"]) == 0
    found = survey(Replay(CacheConfig("radix", 1)).cache.snapshot(), [Passage(b"", 0)])
    assert (found.num_requests, found.num_prompt_tokens) == (1, 0)
    difference = compare_prompts(b"", pack([1, 2]), token_list)
    assert (difference.num_tokens, difference.num_common) == ((0, 2), 0)


def test_experiments(trace, tmp_path, capsys):
    compare.main(["--trace", str(trace), "--out", str(tmp_path), "--cache-outputs", "on"])
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert all(
        row["num_requests"] == 10 and row["num_cached_tokens"] + row["num_computed_tokens"] > 400 for row in rows
    )
    assert "Warning: 6 requests are empty and counted as of no tokens" in capsys.readouterr().out
    only = write_lines(tmp_path / "only.jsonl", EMPTY[0])
    compare.main(["--trace", str(only), "--out", str(tmp_path)])
    assert {row["hit_rate"] for row in json.loads((tmp_path / "compare.json").read_text())["rows"]} == {0.0}
    for path in (trace, only):
        rows = divergence.run_trace(str(path), divergence.Config(tokenizer="bytes", block_sizes=(16,)))
        assert all(np.isfinite(row["over_least"]) for row in rows)
    serving = Serving(tokenizer="bytes", pool_tokens=4096, every_steps=1, min_seqs=1, output_tokens=4)
    assert list(snapshots(str(trace), serving, 16))

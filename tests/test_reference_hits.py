"""Hits on real traces, against integers computed by an independent program. Needs the traces; skips without them."""

import dataclasses

import pytest

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.traces import open_trace
from tests.sampling import few
from tests.shared_files import shared_file

# (requests, prompt tokens), then hits of an infinite cache at block sizes 1, 16, 64: prompts cached, outputs cached too
TEXT_TRACES = {
    "tau_bench_airline.conversations": (
        (2454, 28631325),
        (26966419, 26948080, 26889984),
        (27626363, 27608080, 27553088),
    ),
    "mtbench101.conversations": ((4208, 2512949), (1162200, 1130464, 1027776), (2049567, 2017808, 1918016)),
    "mini_swe_agent.conversations": ((402, 12222426), (11412711, 11409664, 11400320), (11593093, 11589968, 11581120)),
    "bbh_3shot.requests": ((1620, 5152641), (4651148, 4638560, 4606464), (4651148, 4638560, 4606464)),
    "loogle_shortdep.requests": ((80, 6836190), (6396529, 6395952, 6394176), (6396529, 6395952, 6394176)),
    "tot_game24.requests": ((10609, 7106455), (7072063, 7022288, 6573440), (7072063, 7022288, 6573440)),
}
CONFIGS = {
    CacheConfig("radix", 1): 0,
    CacheConfig("radix", 16, partial_blocks=True): 0,
    CacheConfig("radix", 16, partial_blocks=False): 1,
    CacheConfig("flat_hash", 16): 1,
    CacheConfig("radix", 64, partial_blocks=False): 2,
    CacheConfig("flat_hash", 64): 2,
}


@pytest.mark.parametrize("cache_outputs", [False, True], ids=["in", "io"])
@pytest.mark.parametrize("name", few(sorted(TEXT_TRACES, key=lambda name: TEXT_TRACES[name][0]), 2))
def test_hits_of_an_infinite_cache(name, cache_outputs):
    size, hits_in, hits_io = TEXT_TRACES[name]
    replays = {config: Replay(config, cache_outputs=cache_outputs) for config in CONFIGS}
    for request in open_trace(shared_file(f"traces/{name}.jsonl")):
        for replay in replays.values():
            replay.feed(request.prompt, request.output)
    for config, which in CONFIGS.items():
        replay = replays[config]
        assert (replay.num_requests, replay.num_prompt_tokens) == size
        assert replay.num_cached_tokens == (hits_io if cache_outputs else hits_in)[which], config
        replay.cache.check()


MOONCAKE_BLOCKS = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000, None)
MOONCAKE = {
    CacheConfig("flat_hash", 512): (0.046, 0.069, 0.219, 0.337, 0.363, 0.371, 0.373),
    CacheConfig("radix", 512, partial_blocks=False): (0.046, 0.069, 0.219, 0.337, 0.363, 0.371, 0.373),
    CacheConfig("radix", 512, partial_blocks=True): (0.045, 0.067, 0.216, 0.332, 0.362, 0.371, 0.374),
}


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(MOONCAKE_BLOCKS)), ids=map(str, MOONCAKE_BLOCKS))
def test_mooncake_at_every_capacity(at):
    trace = open_trace(shared_file("traces/mooncake_conversation.jsonl"))
    replays = {config: Replay(dataclasses.replace(config, num_blocks=MOONCAKE_BLOCKS[at])) for config in MOONCAKE}
    for request in trace:
        for replay in replays.values():
            replay.feed(request.prompt)
    for config, replay in replays.items():
        assert replay.num_requests == 12_031
        assert replay.num_refused_requests == 0
        assert replay.hit_rate == pytest.approx(MOONCAKE[config][at], abs=0.005), config

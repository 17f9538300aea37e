"""The bounds against exhaustive search, the caches against the bounds, and theorem 3.1 of the RadixAttention paper."""

import itertools
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.dry_run import dry_run
from radixkv.blocks.bounds import BlockPaths
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES
from radixkv.cache.tokens import pack
from radixkv.scheduling.ordering import ORDERS
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def paths_of(prompts, block_size=1):
    return BlockPaths([(pack(prompt), b"") for prompt in prompts], block_size)


def best_by_search(paths, num_blocks):
    """Tries every eviction, of any block whose children are gone, none of the request being served."""
    parents = {block: path[i - 1] if i else None for path in paths.paths for i, block in enumerate(path)}

    @cache
    def best(number, cached):
        if number == len(paths.paths):
            return 0
        path = paths.paths[number]
        if paths.num_blocks[number] > num_blocks:
            return best(number + 1, cached)
        hit = paths.block_size * sum(block in cached for block in path[: paths.num_matchable[number]])
        return hit + max(best(number + 1, left) for left in fitting(cached | set(path), frozenset(path)))

    def fitting(cached, pinned):
        if len(cached) <= num_blocks:
            return {frozenset(cached)}
        leaves = cached - {parents[block] for block in cached} - pinned
        return set().union(*(fitting(cached - {leaf}, pinned) for leaf in leaves))

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=2, max_size=7), data=st.data())
def test_furthest_next_use_is_the_best_there_is(prompts, data):
    # An odd token ends each, so that no whole block is left out of the match.
    paths = paths_of([[token for token in prompt for _ in range(2)] + [7] for prompt in prompts], 2)
    num_blocks = data.draw(st.integers(max(paths.num_blocks), max(max(paths.num_blocks), len(paths.depths))))
    assert paths.eviction_bound(num_blocks) == best_by_search(paths, num_blocks)
    assert paths.eviction_bound(10**6) == paths.infinite_hits()


@settings(max_examples=40, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=5))
def test_the_order_optimum_is_the_best_of_all_orders(prompts):
    orders = [paths_of(order).infinite_hits() for order in itertools.permutations(prompts)]
    assert paths_of(prompts).order_optimum() == max(orders)


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, block_size=st.sampled_from([1, 2]), extra=st.integers(0, 6), with_outputs=st.booleans())
def test_no_policy_beats_the_bound(prompts, block_size, extra, with_outputs):
    requests = [(pack(prompt), pack([5] * (i % 3) if with_outputs else [])) for i, prompt in enumerate(prompts)]
    paths = BlockPaths(requests, block_size)
    num_blocks = max(paths.num_blocks) + extra
    bound = paths.eviction_bound(num_blocks)
    assert bound <= paths.infinite_hits()
    for policy in POLICIES:
        for name in ("radix", "flat_hash"):
            config = CacheConfig(name, block_size, partial_blocks=False, num_blocks=num_blocks, policy=policy)
            replay = Replay(config, cache_outputs=True)
            for prompt, output in requests:
                replay.feed(prompt, output)
            assert replay.num_cached_tokens <= bound
    unbounded = Replay(CacheConfig("radix", block_size, partial_blocks=False), cache_outputs=True)
    for prompt, output in requests:
        unbounded.feed(prompt, output)
    assert unbounded.num_cached_tokens == paths.infinite_hits()


def serve(prompts, order, num_blocks, block_size=1, max_num_seqs=1):
    config = SchedulerConfig(order=order, max_overtakes=10**6, max_num_seqs=max_num_seqs)
    scheduler = Scheduler(KVManager(RadixCache(block_size, partial_blocks=False), num_blocks), config)
    params = SamplingParams(max_tokens=1)
    requests = [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    return dry_run(scheduler, requests).num_hit_tokens


@settings(max_examples=150, deadline=None)
@given(prompts=PROMPTS, block_size=st.sampled_from([1, 2]))
def test_depth_first_is_optimal_where_the_pool_holds_the_longest_request(prompts, block_size):
    """Theorem 3.1, with everything queued at once and one request running at a time."""
    paths = paths_of(prompts, block_size)
    num_blocks = max(paths.num_blocks)
    optimum = paths.order_optimum()
    assert serve(prompts, "depth_first", num_blocks, block_size) == optimum
    for order in ORDERS:
        assert serve(prompts, order, num_blocks, block_size) <= optimum
        assert serve(prompts, order, 2 * num_blocks, block_size, max_num_seqs=4) <= optimum


@settings(max_examples=100, deadline=None)
@given(prompts=PROMPTS)
def test_longest_prefix_is_depth_first_where_the_pool_holds_everything(prompts):
    paths = paths_of(prompts)
    assume(len({tuple(prompt) for prompt in prompts}) == len(prompts))
    hits = serve(prompts, "longest_prefix", len(paths.depths) + max(paths.num_blocks))
    assert hits >= paths.order_optimum() - len(prompts)  # a prompt that is the start of another may come after it


@pytest.mark.parametrize("num_blocks", [-1, 1.5])
def test_bad_pools_are_named(num_blocks):
    with pytest.raises(ValueError, match="num_blocks"):
        paths_of([[1, 2]]).eviction_bound(num_blocks)


def test_the_pool_of_the_experiments():
    paths = paths_of([list(range(i * 100, i * 100 + 40)) for i in range(20)], 4)
    assert paths.pool_blocks() == 50  # a quarter of 200
    assert paths_of([list(range(40))] * 20, 4).pool_blocks() == 20  # twice the longest

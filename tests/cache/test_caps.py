"""Caps of tenants: no tenant evicts all others, and the counts hold under random operations."""

import random
from functools import partial

import pytest

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import LoRA, Salt
from radixkv.cache.radix.cache import RadixCache
from tests.cache.conftest import RandomRun, content_keys

CACHES = {
    "radix": partial(RadixCache, partial_blocks=False),
    "radix cost": partial(RadixCache, partial_blocks=False, policy="cost"),
    "flat_hash": FlatHashCache,
}


class CappedRun(RandomRun):
    """Random operations; what each tenant holds is counted from what was handed over and not given back."""

    def __init__(self, cache, seed, caps):
        super().__init__(cache, seed, num_blocks=80)
        self.caps = caps
        self.num_given_up = 0

    def run(self, num_operations):
        for index in range(num_operations):
            super().run(1)
            if index % 40 == 39:
                self.reset()
                self.check()
        return self

    def check(self):
        given_up = self.cache.evict(self.cache.num_dead_blocks).tolist()
        self.free += given_up
        self.num_given_up += len(given_up)
        super().check()
        pinned = set()
        for lease, tokens, namespace, *_ in self.live:
            count = lease.num_tokens // self.cache.block_size
            pinned.update(content_keys(tokens, namespace, self.cache.block_size)[:count])
        held = {}
        for block in set(range(self.num_blocks)) - set(self.free):
            key = self.contents[block]
            # content_keys puts (token, part) where a part starts; the outermost salt owns what follows
            salts = [part.value for token in key for part in parts_in(token) if isinstance(part, Salt)]
            if salts and key not in pinned:
                held[salts[0]] = held.get(salts[0], 0) + 1
        if isinstance(self.cache, RadixCache) and self.cache.tree.uncommitted:
            return  # what a step has yet to compute can't be given up before it has
        for tenant, count in held.items():
            assert count <= self.caps.get(tenant, 10**9), (tenant, count)


def parts_in(token):
    while isinstance(token, tuple):
        token, part = token
        yield part


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_no_tenant_holds_more_than_its_cap(name, block_size):
    given_up = 0
    for seed in range(12):
        caps = {"a": random.Random(seed).randrange(4), "b": 6}
        run = CappedRun(CACHES[name](block_size, tenant_caps=caps), seed, caps).run(200)
        given_up += run.num_given_up
        run.finish()
    assert given_up > 8


@pytest.mark.parametrize("cache", ["radix", "flat_hash"])
def test_a_flood_of_one_tenant_leaves_the_others_their_prefixes(cache):
    def rest_of_quiet(cap):
        replay = Replay(CacheConfig(cache, 16, num_blocks=200, tenant_cap=cap))
        quiet = list(range(50_000, 50_000 + 640))
        replay.feed(quiet, namespace=Salt("quiet"))
        for i in range(200):
            replay.feed(list(range(1000 * i, 1000 * i + 320)), namespace=Salt("loud"))
        replay.manager.check()
        return replay.feed(quiet, namespace=Salt("quiet"))

    assert rest_of_quiet(None) == 0
    assert rest_of_quiet(100) >= 624


def test_what_stands_before_the_salt_is_nobodys_and_a_lora_is_no_tenant():
    cache = RadixCache(1, tenant_caps=2)
    manager = KVManager(cache, 100)

    def serve(tokens, namespace):
        one = manager.begin(tokens, namespace)
        manager.grow(one, len(tokens))
        manager.publish(one, tokens)
        manager.commit()
        manager.end(one)
        manager.check()

    serve([1, 2, 3, 4, 5, 6, 7, 8], Salt("a", start=4))
    assert cache.peek([1, 2, 3, 4]) == 4
    assert cache.peek([1, 2, 3, 4, 5, 6, 7, 8], Salt("a", start=4)) == 6
    serve(list(range(100, 120)), LoRA("a"))
    assert cache.peek(list(range(100, 120)), LoRA("a")) == 20
    assert cache.sizes.evictable == 26 and manager.allocator.num_free == 74


def test_what_runs_is_not_counted_and_goes_over_the_cap_when_it_ends():
    cache = RadixCache(1, tenant_caps={"a": 3})
    manager = KVManager(cache, 50)
    one = manager.begin(list(range(20)), Salt("a"))
    manager.grow(one, 20)
    manager.publish(one, list(range(20)))
    manager.commit()
    assert cache.sizes.pinned == 20
    manager.end(one)
    assert cache.sizes == (0, 3) and manager.allocator.num_free == 47
    assert cache.peek(list(range(20)), Salt("a")) == 3  # tail first


@pytest.mark.parametrize("caps", [-1, 1.5, {"a": -2}, {"a": True}])
def test_bad_caps_are_named(caps):
    for make in (RadixCache, FlatHashCache):
        with pytest.raises(ValueError, match="tenant_caps"):
            make(16, tenant_caps=caps)


@pytest.mark.parametrize("partial_blocks", [False, True])
def test_a_step_that_fails_over_a_cap_leaves_each_block_one_owner(partial_blocks):
    manager = KVManager(RadixCache(4, partial_blocks=partial_blocks, tenant_caps=1), 6)
    first = manager.begin([1] * 12, Salt("a"))
    manager.grow(first, 12)
    manager.publish(first, [1] * 12)
    manager.withdraw()
    second = manager.begin([2] * 24)
    manager.grow(second, 24)  # the first has given its blocks back
    manager.publish(second, [2] * 24)
    manager.commit()
    third = manager.begin([3] * 8)
    with pytest.raises(OutOfBlocks):
        manager.grow(third, 8)
    manager.cancel(third)
    manager.check()
    manager.end(second)
    manager.end(first)
    manager.check()
    assert manager.sizes.num_blocks == 6


@pytest.mark.parametrize("name", CACHES)
def test_random_steps_that_fail_under_caps(name):
    rng = random.Random(11)
    manager = KVManager(CACHES[name](2, tenant_caps={"a": 2, "b": 0}), 24)
    running = []
    for _ in range(600):
        for _ in range(rng.randrange(3)):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 12))]
            sequence = manager.begin(tokens, rng.choice([None, Salt("a"), Salt("b"), Salt("c")]))
            try:
                manager.grow(sequence, len(tokens))
            except OutOfBlocks:
                manager.cancel(sequence)
                continue
            manager.publish(sequence, tokens)
            running.append((sequence, tokens))
        (manager.withdraw if rng.random() < 0.3 else manager.commit)()
        manager.check()
        while len(running) > 2 or (running and rng.random() < 0.4):
            sequence, _ = running.pop(rng.randrange(len(running)))
            manager.end(sequence)
            manager.check()
    for sequence, _ in running:
        manager.end(sequence)
    manager.check()


@pytest.mark.parametrize("name", CACHES)
def test_tenants_that_came_once_leave_nothing(name):
    manager = KVManager(CACHES[name](4, tenant_caps=1000), 50)
    for i in range(3000):
        sequence = manager.begin([1] * 9, Salt(f"tenant {i}"))
        manager.grow(sequence, 9)
        manager.publish(sequence, [1] * 9)
        manager.commit()
        manager.end(sequence)
    cache = manager.cache
    kept = (
        [cache._tenants._unpinned] if name == "flat_hash" else [cache._tenants._leaves_of, cache._tenants.num_unpinned]
    )
    assert all(len(each) <= 51 for each in kept)


def test_caps_name_tenants_by_what_their_salts_say():
    with pytest.raises(ValueError, match="tenant_caps"):
        RadixCache(4, tenant_caps={Salt("a"): 1})


@pytest.mark.parametrize("name", CACHES)
def test_caps_count_rightly_after_a_reset_with_leases_held(name):
    rng = random.Random(5)
    cache = CACHES[name](1, tenant_caps=6)
    free, held = list(range(200)), []
    for _ in range(300):
        tenant = Salt(rng.choice("ab"))
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        lease = cache.acquire(tokens, tenant)
        rest = tokens[lease.num_tokens :]
        taken = [free.pop() for _ in rest]
        duplicates = cache.insert(lease, rest, taken)
        assert not len(duplicates)
        cache.commit()
        held.append(lease)
        while len(held) > 3:
            cache.release(held.pop(rng.randrange(len(held))))
        if rng.random() < 0.1:
            free += cache.reset(rng.choice([None, Salt("a")])).block_ids.tolist()
        free += cache.evict(cache.num_dead_blocks).tolist()
        cache.check()
        assert sum(cache.sizes) + len(free) == 200
    for lease in held:
        cache.release(lease)
    free += cache.reset().block_ids.tolist()
    free += cache.evict(200).tolist()
    cache.check()
    assert sorted(free) == list(range(200))


def test_a_split_of_all_that_a_tenant_holds_keeps_it_under_its_cap():
    cache = RadixCache(1, tenant_caps=8)
    tenant = Salt("a")

    def put(tokens, block):
        lease = cache.acquire(tokens, tenant)
        rest = tokens[lease.num_tokens :]
        cache.insert(lease, rest, list(range(block, block + len(rest))))
        cache.commit()
        cache.release(lease)
        cache.check()

    put([1, 2, 3, 4, 5, 6, 7, 8], 0)
    cache.cancel(cache.acquire([1, 2, 3, 9], tenant))  # splits the one leaf, and lets it go again
    known = [node for last_use, _, node in cache._tenants._leaves_of["a"] if node.entry and node.last_use == last_use]
    assert known == cache.tree.leaves.in_order()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_what_hangs_where_a_salt_was_cut_off_belongs_to_no_tenant(policy):
    cache = RadixCache(1, policy=policy, tenant_caps={"a": 0})

    def begin(tokens, block, namespace=None):
        lease = cache.acquire(tokens, namespace)
        rest = tokens[lease.num_tokens :]
        cache.insert(lease, rest, list(range(block, block + len(rest))))
        cache.commit()
        return lease

    cache.release(begin([1, 2, 3, 4], 0, Salt("a", start=2)))
    assert cache.peek([1, 2, 3, 4], Salt("a", start=2)) == 2 and cache.num_dead_blocks == 2
    first, second = begin([1, 2, 5], 10), begin([1, 2, 6], 20)
    cache.release(first)
    cache.release(second)
    cache.check()
    assert cache.peek([1, 2, 5]) == 3 and cache.peek([1, 2, 6]) == 3


def test_of_a_tenant_over_its_cap_what_requests_wait_for_goes_last():
    cache = RadixCache(1, tenant_caps=4)
    tenant = Salt("a")
    watch = cache.watch([1, 2, 9], tenant, rank=(0, 0))
    for block, tokens in enumerate([[1, 2], [3, 4], [5, 6]]):
        lease = cache.acquire(tokens, tenant)
        cache.insert(lease, tokens, [10 * block, 10 * block + 1])
        cache.commit()
        cache.release(lease)
        cache.check()
    assert watch.num_tokens == 2
    assert cache.evict(cache.num_dead_blocks).tolist() == [11, 10]
    lease = cache.acquire([5, 6], tenant)
    cache.release(cache.acquire([], tenant))
    cache.insert(lease, [7, 8, 9], [30, 31, 32])
    cache.commit()
    cache.release(lease)  # five of them are one leaf, used last
    assert cache.evict(cache.num_dead_blocks).tolist() == [32, 31, 30]
    assert watch.num_tokens == 2
    cache.check()


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_blocks_of_a_step_under_way_are_given_up_after_it_alone(is_withdrawn):
    cache = RadixCache(1, tenant_caps=1)
    lease = cache.acquire([], Salt("a"))
    cache.insert(lease, [1, 2, 3], [10, 11, 12])
    cache.release(lease)
    assert cache.sizes == (0, 3) and cache.num_dead_blocks == 0
    cache.check()
    if is_withdrawn:
        assert cache.withdraw().tolist() == [10, 11, 12]
        assert cache.sizes == (0, 0)
    else:
        cache.commit()
        assert cache.evict(cache.num_dead_blocks).tolist() == [12, 11]
    cache.check()

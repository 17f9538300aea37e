"""Watches: matches that pin nothing, follow what changes, and let what they match go last."""

import random
from functools import partial

import numpy as np
import pytest

from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import Salt
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from tests.cache.conftest import RandomRun, content_keys

CACHES = {
    "radix": partial(RadixCache, partial_blocks=False),
    "radix lfu": partial(RadixCache, partial_blocks=False, policy="lfu"),
    "flat_hash": FlatHashCache,
}


class WatchedRun(RandomRun):
    """Random operations, and watches that come and go; each held against a new match after every operation."""

    def __init__(self, cache, seed):
        super().__init__(cache, seed, num_blocks=120)
        self.watches = []  # [watch, tokens, namespace, the last number it told]
        self.num_told = self.num_spared = 0

    def run(self, num_operations):
        names = ["acquire", "insert", "release"] * 3
        names += ["advance", "commit", "withdraw", "evict", "cancel", "reset", "watch", "watch", "unwatch"]
        for _ in range(num_operations):
            getattr(self, self.random.choice(names))()
            self.check()
            for watch, tokens, namespace, told in self.watches:
                assert watch.num_tokens == self.cache.peek(tokens, namespace) == told[-1]
        return self

    def watch(self):
        if len(self.watches) < 12:
            tokens, namespace = self.request()
            told = []
            rank = self.random.choice([None, (0.0, float(self.random.randrange(5)))])
            made = self.cache.watch(tokens, namespace, rank=rank, changed=lambda: told.append(made.num_tokens))
            told.append(made.num_tokens)
            self.watches.append((made, tokens, namespace, told))

    def unwatch(self):
        if self.watches:
            made, _, _, told = self.watches.pop(self.random.randrange(len(self.watches)))
            self.cache.unwatch(made)
            self.num_told += len(told) - 1
            with pytest.raises(ValueError, match="watch"):
                self.cache.unwatch(made)

    def evict(self):
        wanted = set()
        for watch, tokens, namespace, _ in self.watches:
            if watch.rank is not None:
                keys = content_keys(tokens, namespace, self.cache.block_size)
                wanted.update(keys[: watch.num_tokens // self.cache.block_size])
        before = len(self.free)
        unpinned = self.unpinned()
        super().evict()
        gone = [self.contents[block] for block in self.free[before:]]
        spared = [key for key in gone if key in wanted]
        if spared:  # only once nothing else was left
            assert not [key for key in unpinned if key not in wanted and key not in gone]
        self.num_spared += bool(wanted & unpinned and gone and not spared)

    def unpinned(self):
        pinned = set()
        for lease, tokens, namespace, *_ in self.live:
            count = lease.num_tokens // self.cache.block_size
            pinned.update(content_keys(tokens, namespace, self.cache.block_size)[:count])
        held = {self.contents[block] for block in range(self.num_blocks) if block not in self.free}
        return held - pinned


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_watches_follow_every_change_and_spare_what_they_match(name, block_size):
    told = spared = 0
    for seed in range(25):
        run = WatchedRun(CACHES[name](block_size), seed).run(160)
        while run.watches:
            run.unwatch()
        told, spared = told + run.num_told, spared + run.num_spared
        run.finish()
    assert told > 100 and spared > 5


def put(cache, tokens, block, namespace=None):
    lease = cache.acquire(tokens, namespace)
    rest = tokens[lease.num_tokens :]
    cache.insert(lease, rest, np.arange(block, block + len(rest), dtype=np.int32))
    cache.commit()
    cache.release(lease)


@pytest.mark.parametrize("make", [RadixCache, FlatHashCache])
@pytest.mark.parametrize("tenant", [None, Salt("tenant")])
def test_watches_follow_a_reset(make, tenant):
    cache = make(1)
    texts = [[1, 2, 3, 4], [1, 2, 5], [7, 8], [7, 8, 9, 10]]
    for text, block in zip(texts, (10, 20, 30, 40), strict=True):
        put(cache, text, block, tenant)
    held = cache.acquire([1, 2, 3], tenant)
    told = set()
    watches = [
        cache.watch([*text, 11], tenant, rank=(0, 1), changed=lambda i=i: told.add(i)) for i, text in enumerate(texts)
    ]
    assert [watch.num_tokens for watch in watches] == [4, 3, 2, 4]
    cache.reset(tenant)
    assert [watch.num_tokens for watch in watches] == [0] * 4
    assert told == {0, 1, 2, 3}
    put(cache, [1, 2, 5, 11], 50, tenant)
    assert [watch.num_tokens for watch in watches] == [2, 4, 0, 0]
    cache.release(held)
    assert [watch.num_tokens for watch in watches] == [2, 4, 0, 0]
    for watch in watches:
        cache.unwatch(watch)
    cache.check()


@pytest.mark.parametrize("make", [RadixCache, FlatHashCache])
def test_what_is_wanted_goes_last_the_lowest_rank_first(make):
    cache = make(1)
    for text, block in (([1, 2], 10), ([3, 4], 20), ([5, 6], 30)):
        put(cache, text, block)
    low = cache.watch([1, 2, 9], rank=(0, 1))
    cache.watch([3, 4, 9], rank=(0, 2))
    cache.watch([5, 6, 9])  # wants to know, and no more
    assert cache.evict(1).tolist() == [31]
    put(cache, [7], 40)
    assert cache.evict(3).tolist() == [30, 40, 11]
    assert low.num_tokens == 1
    cache.unwatch(low)
    assert cache.evict(9).tolist() == [10, 21, 20]


def test_of_a_leaf_the_part_that_nobody_wants_goes_first():
    cache = RadixCache(1)
    put(cache, list(range(10)), 0)
    put(cache, [50], 50)
    watch = cache.watch([0, 1, 2, 3, 99], rank=(0, 0))
    assert cache.evict(7).tolist() == [9, 8, 7, 6, 5, 4, 50]
    assert watch.num_tokens == 4
    assert cache.evict(9).tolist() == [3, 2, 1, 0]
    assert watch.num_tokens == 0


def test_no_cache_no_match():
    cache = NullCache(16)
    watch = cache.watch(range(100), rank=(0, 0))
    assert watch.num_tokens == 0
    cache.unwatch(watch)


def test_a_thousand_watches_behind_one_document_cost_one_look_each():
    """What changes for one of them changes for all: in chunks, and with the document evicted again."""
    rng = random.Random(0)
    cache = RadixCache(16)
    document = [rng.randrange(1000) for _ in range(8192)]
    watches = [cache.watch([*document, 10_000 + i], rank=(0, -i)) for i in range(1000)]
    lease = cache.acquire([])
    for start in range(0, 8192, 2048):
        cache.insert(lease, document[start : start + 2048], range(start // 16, start // 16 + 128))
        assert {watch.num_tokens for watch in watches} == {start + 2048}
    cache.commit()
    cache.release(lease)
    cache.evict(100)
    assert {watch.num_tokens for watch in watches} == {8192 - 1600}
    cache.check()


def test_what_is_watched_keeps_its_namespace():
    cache = RadixCache(1)
    watch = cache.watch([1, 2, 3], Salt("waits"))
    for i in range(3000):  # many times more namespaces than are kept for those that no node holds
        cache.cancel(cache.acquire([1, 2], Salt(f"passes {i}")))
    put(cache, [1, 2, 3], 10, Salt("waits"))
    assert watch.num_tokens == 3
    cache.check()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_watches_follow_hashes_that_collide(bits):
    rng = random.Random(bits)
    cache = FlatHashCache(1, digest_bits=bits, verify=True)
    watches, block = [], 0
    for _ in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        match rng.randrange(4):
            case 0:
                watches.append(cache.watch(tokens, rank=(0, rng.randrange(3))))
            case 1 if watches:
                cache.unwatch(watches.pop(rng.randrange(len(watches))))
            case 2:
                cache.evict(rng.randrange(4))
            case _:
                put(cache, tokens, block)
                block += 8
        cache.check()
        assert all(watch.num_tokens >= 0 for watch in watches)
    while watches:
        cache.unwatch(watches.pop())
    cache.check()

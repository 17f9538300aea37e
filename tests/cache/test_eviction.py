"""Eviction policies: which leaf goes first, on the tree."""

import numpy as np
import pytest

from radixkv.cache.contract import PartialBlock
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.eviction import Policy
from radixkv.cache.radix.policies import make_policy
from radixkv.cache.radix.policies.cost import Cost
from radixkv.cache.radix.policies.lfu import Lfu
from radixkv.cache.radix.policies.probation import Probation


def put(cache, tokens, block, tail=None):
    lease = cache.acquire(tokens)
    rest = tokens[lease.num_tokens :]
    cache.insert(lease, rest, np.arange(block, block + len(rest), dtype=np.int32))
    cache.commit()
    cache.release(lease, tail)


def use(cache, tokens):
    cache.release(cache.acquire(tokens))


def order(cache):
    """The first tokens' blocks in the order in which single blocks go."""
    return cache.evict(10**6).tolist()


@pytest.mark.parametrize(
    ("policy", "first"), [("lru", [1, 2, 0]), ("fifo", [0, 1, 2]), ("lfu", [1, 2, 0]), ("probation", [1, 2, 0])]
)
def test_what_was_used_again(policy, first):
    cache = RadixCache(1, policy=policy)
    for block in range(3):
        put(cache, [10 + block], block)
    use(cache, [10])
    assert order(cache) == first


def test_lfu_counts_uses_that_overlap_and_forgets_old_ones():
    cache = RadixCache(1, policy=Lfu(half_life=10))
    put(cache, [1], 1)
    put(cache, [2], 2)
    together = [cache.acquire([1]) for _ in range(5)]
    for lease in together:
        cache.release(lease)
    for _ in range(3):
        use(cache, [2])
    assert order(cache) == [2, 1]  # three uses against five at once
    cache = RadixCache(1, policy=Lfu(half_life=10))
    put(cache, [1], 1)
    for _ in range(5):
        use(cache, [1])
    for i in range(100):
        put(cache, [100 + i], 100 + i)
    put(cache, [2], 2)
    use(cache, [2])
    gone = order(cache)
    assert gone[-1] == 2
    assert gone.index(1) < 50  # used six times, but long ago


@pytest.mark.parametrize("policy", ["fifo", "lfu", "cost"])
def test_what_is_added_to_a_sequence_has_its_own_age(policy):
    cache = RadixCache(1, policy=policy)
    put(cache, [1, 2], 0)
    for _ in range(9):
        use(cache, [1, 2])
    put(cache, [7], 50)
    put(cache, [1, 2, 3], 100)  # a longer conversation: block 100 is new
    leaves = {node.blocks: node for node in cache.tree.leaves.in_order()}
    newest = leaves[np.array([100], np.int32).tobytes()]
    assert newest.num_tokens == 1 and newest.born > 1
    if policy == "lfu":
        assert newest.policy_state < newest.parent.policy_state
    if policy == "cost":
        assert newest.policy_state == 1 and newest.parent.policy_state == 11


@pytest.mark.parametrize("policy", ["lfu", "fifo", "cost", "probation"])
def test_a_split_keeps_age_and_policy_state(policy):
    cache = RadixCache(1, policy=policy)
    put(cache, [1, 2, 3, 4], 0)
    use(cache, [1, 2, 3, 4])
    (whole,) = cache.tree.root.children.values()
    born, policy_state = whole.born, whole.policy_state
    lease = cache.acquire([1, 2])
    upper = lease.cursor
    (lower,) = upper.children.values()
    assert (upper.born, upper.policy_state, lower.born, lower.policy_state) == (born, policy_state, born, policy_state)
    cache.cancel(lease)
    assert len(cache.tree.root.children) == 1 and cache.tree.leaves.in_order()[0].num_tokens == 4  # joined again


def test_cost_keeps_what_is_deep_and_full():
    cache = RadixCache(1, policy=Cost(knee_tokens=10))
    put(cache, [1], 0)
    put(cache, list(range(100, 140)), 100)
    lease = cache.acquire(list(range(100, 139)))  # the last token apart, deep in its sequence
    cache.release(lease)
    assert cache.evict(1).tolist() == [0]
    whole = RadixCache(16, policy="cost")
    lease = whole.acquire([])
    whole.insert(lease, list(range(16)), [0])
    whole.commit()
    whole.release(lease)
    lease = whole.acquire([])
    whole.release(lease, PartialBlock([500, 501], 1))
    use(whole, list(range(16)))
    assert whole.evict(1).tolist() == [1]


def test_cost_forgets_what_is_not_used_again():
    cache = RadixCache(1, policy=Cost())
    put(cache, [1], 1)
    for _ in range(20):
        use(cache, [1])
    for i in range(60):
        put(cache, [100 + i], 100 + i)
        put(cache, [1000 + i], 1000 + i)
        cache.evict(2)
    assert cache.peek([1]) == 0 and cache.tree.policy._age > 20  # its twenty uses are outlived in the end


def test_lru_lets_a_tail_look_older_by_what_is_empty_of_it():
    cache = RadixCache(16)
    lease = cache.acquire([])
    cache.insert(lease, list(range(16)), [0])
    cache.commit()
    cache.release(lease)
    lease = cache.acquire([])
    cache.release(lease, PartialBlock([500, 501], 1))  # later, but two tokens of sixteen
    assert cache.evict(1).tolist() == [1]


def test_a_scan_does_not_push_out_what_is_used_again():
    def kept(policy):
        cache = RadixCache(1, policy=policy)
        held = 0
        for i in range(600):
            if i % (4 if i < 200 else 13) == 0:  # often at first, then so seldom that lru would lose it
                held += cache.peek([1, 2, 3])
                put(cache, [1, 2, 3], 10_000 + 10 * i)
            put(cache, [100 + i], i)
            cache.evict(max(cache.sizes.evictable - 12, 0))
        return held

    assert kept("probation") == 3 * 80  # but for the first time, always
    assert kept("lru") < 3 * 51


def test_a_policy_of_ones_own():
    class Largest(Policy):
        def rank(self, node):
            return -node.num_tokens

    cache = RadixCache(1, policy=Largest())
    put(cache, [1], 0)
    put(cache, [5, 6, 7], 10)
    put(cache, [9, 9], 20)
    assert cache.evict(1).tolist() == [12]


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: Lfu(0), "half_life"), (lambda: Cost(0), "knee_tokens"), (lambda: Probation(1.5), "share")],
)
def test_bad_sizes_are_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()
    with pytest.raises(ValueError, match="policy"):
        make_policy("best")

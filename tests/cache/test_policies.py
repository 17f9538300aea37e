"""Every registered policy: what it declares, and sieve and s3fifo against the algorithms as their papers state them."""

import random
from collections import deque

import numpy as np
import pytest

from radixkv.cache.contract import PartialBlock
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.eviction import Policy, overrides
from radixkv.cache.radix.policies import POLICIES, find_policies, make_policy
from radixkv.cache.radix.policies.fifo import Fifo

LRU = POLICIES["lru"]


class Silent(Policy):
    """Overrides nothing."""

    name = "silent"


class CalledLru(Policy):
    """lru, by way of every method that a policy may override."""

    name = "called lru"

    def __init__(self):
        self.num_calls = 0

    def begin(self):
        return super().begin()

    def touch(self, node, tick):
        self.num_calls += 1
        super().touch(node, tick)

    def rank(self, node):
        self.num_calls += 1
        return super().rank(node)

    def evicted(self, node, rank, num_left):
        self.num_calls += 1
        super().evicted(node, rank, num_left)


def script(seed, policy, block_size):
    """Random requests with partly filled last blocks in a small pool. Returns every hit and every block evicted."""
    rng = random.Random(seed)
    cache = RadixCache(block_size, policy=policy)
    texts, running, found, block = [[]], [], [], 0
    for _ in range(250):
        text = rng.choice(texts)
        text = text[: rng.randint(0, len(text))] + [rng.randrange(3) for _ in range(rng.randint(0, 4 * block_size))]
        texts = [*texts[-20:], text]
        lease = cache.acquire(text)
        found.append((lease.num_tokens, lease.block_ids.tolist(), lease.partial))
        if rng.random() < 0.1:
            cache.cancel(lease)
            continue
        rest = text[lease.num_tokens :]
        num_full = len(rest) // block_size
        found.append(cache.insert(lease, rest, range(block, block + num_full)).tolist())
        cache.commit()
        running.append((lease, text))
        block += num_full
        while len(running) > rng.randrange(4):
            lease, text = running.pop(rng.randrange(len(running)))
            left = text[lease.num_tokens :] if rng.random() < 0.7 else []
            cache.release(lease, PartialBlock(left, block) if left else None)
            block += 1
        found.append(cache.evict(max(cache.sizes.evictable - 20, 0)).tolist())
    cache.check()
    return found


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("policy", [Silent, CalledLru])
def test_a_policy_that_overrides_nothing_or_calls_lru_is_lru(policy, block_size):
    for seed in range(10):
        made = policy()
        found = script(seed, made, block_size)
        assert found == script(seed, "lru", block_size)
        assert policy is Silent or made.num_calls > 200
    assert found != script(seed, "fifo", block_size)  # the script can tell policies apart


def test_what_is_not_overridden_is_not_called(monkeypatch):
    def called(*_):
        raise AssertionError("lru was called")

    for method in ("touch", "rank", "evicted"):
        monkeypatch.setattr(Policy, method, called)
        assert not overrides(Policy(), method) and not overrides(Silent(), method)
    script(0, "lru", 4)
    script(0, Silent(), 4)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_serves_two_caches_one_after_the_other(name):
    policy = make_policy(name)
    assert script(1, policy, 4) == script(1, policy, 4)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_partial_block_looks_older_by_what_the_policy_declares(name):
    """What a lower rank means is the policy's own; of one whose rank is an age, the partly filled leaf goes first."""
    shown = []

    class Watched(POLICIES[name]):
        def rank(self, node):
            if node.num_tokens == 2:
                shown.append(node.older)
            return super().rank(node)

    for policy in (Watched(), name):
        cache = RadixCache(16, policy=policy)
        for i in range(6):  # so that an age of eviction is known
            lease = cache.acquire([])
            cache.insert(lease, [100 + i] * 16, [10 + i])
            cache.commit()
            cache.release(lease)
        cache.evict(1)
        lease = cache.acquire([])
        cache.release(lease, PartialBlock([500, 501], 1))
        gone = cache.evict(6).tolist()
        if name in ("lru", "fifo", "lfu", "probation"):
            assert shown and gone.index(1) == 0
    assert all((older > 0) == (POLICIES[name].partial_ageing > 0) for older in shown)


def test_the_registry_takes_one_policy_from_each_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    one = "from radixkv.cache.radix.eviction import Policy\nclass One(Policy):\n    name = 'one'\n"

    def found(package, **files):
        (tmp_path / package).mkdir()
        for name, text in files.items():
            (tmp_path / package / f"{name}.py").write_text(text)
        return find_policies(package, [str(tmp_path / package)])

    policies = found("first_policies", one=one)
    assert set(policies) == {"lru", "one"} and policies["one"].__name__ == "One"
    with pytest.raises(ValueError, match="not taken"):
        found("second_policies", one=one, two=one)
    with pytest.raises(ValueError, match="one subclass of Policy, got 0"):
        found("third_policies", none=one.splitlines()[0])


@pytest.mark.parametrize(("attribute", "bad"), [("partial_ageing", -1), ("partial_ageing", "1"), ("grows_in_place", 1)])
def test_declarations_without_meaning_are_named(attribute, bad):
    policy = Fifo()
    setattr(policy, attribute, bad)
    with pytest.raises(ValueError, match=attribute):
        RadixCache(16, policy=policy)


# ---- the algorithms on a flat cache of objects, each a leaf of one block under the root


class PlainSieve:
    """SIEVE as the paper states it: a queue, a visited bit for each object, a hand."""

    def __init__(self, size):
        self.size, self.queue, self.visited, self.hand = size, [], set(), None  # the oldest first

    def use(self, key):
        """Returns the object evicted, or None."""
        if key in self.queue:
            self.visited.add(key)
            return None
        gone = None
        if len(self.queue) == self.size:
            at = self.queue.index(self.hand) if self.hand is not None else 0
            while self.queue[at] in self.visited:
                self.visited.remove(self.queue[at])
                at = (at + 1) % len(self.queue)
            gone = self.queue.pop(at)
            self.hand = self.queue[at] if at < len(self.queue) else None
        self.queue.append(key)
        if gone is not None and self.hand is None and at < len(self.queue) - 1:
            self.hand = self.queue[at]
        return gone


class PlainS3Fifo:
    """S3-FIFO as the paper states it, but that each eviction chooses its queue anew after every promotion."""

    def __init__(self, size):
        self.size, self.small, self.main, self.uses, self.ghosts = size, deque(), deque(), {}, deque()

    def use(self, key):
        """Returns the object evicted, or None."""
        if key in self.uses:
            self.uses[key] = min(self.uses[key] + 1, 3)
            return None
        gone = self.evict() if len(self.uses) == self.size else None
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.uses[key] = 0
        return gone

    def evict(self):
        while True:
            if len(self.small) * 10 >= self.size:
                key = self.small.popleft()
                if self.uses[key] > 1:
                    self.uses[key] = 0
                    self.main.append(key)
                    continue
                self.ghosts.append(key)
                while len(self.ghosts) > self.size * 9 // 10:
                    self.ghosts.popleft()
            else:
                key = self.main.popleft()
                if self.uses[key]:
                    self.uses[key] -= 1
                    self.main.append(key)
                    continue
            del self.uses[key]
            return key


@pytest.mark.parametrize(("name", "model"), [("sieve", PlainSieve), ("s3fifo", PlainS3Fifo)])
@pytest.mark.parametrize("size", [10, 20, 50])
def test_on_a_flat_cache_a_policy_evicts_what_its_paper_evicts(name, model, size):
    num_evicted = num_hits = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        plain, cache, block_of, block = model(size), RadixCache(1, policy=name), {}, 0
        for key in (rng.zipf(1.2, 800) % (4 * size)).tolist():
            expected = plain.use(key)
            lease = cache.acquire([key])
            if lease.num_tokens:
                assert expected is None
                num_hits += 1
            elif len(block_of) == size:
                (gone,) = cache.evict(1).tolist()
                assert gone == block_of.pop(expected)
                num_evicted += 1
            if not lease.num_tokens:
                cache.insert(lease, [key], [block])
                block_of[key] = block
                block += 1
            cache.commit()
            cache.release(lease)
        cache.check()
    assert num_evicted > 500 and num_hits > 500


@pytest.mark.parametrize("name", ["sieve", "s3fifo"])
def test_a_scan_does_not_push_out_what_is_used_again(name):
    def kept(policy):
        cache, held = RadixCache(1, policy=policy), 0
        for i in range(800):
            if i % (4 if i < 200 else 13) == 0:  # often at first, then so seldom that lru would lose it
                held += cache.peek([1, 2, 3])
                lease = cache.acquire([1, 2, 3])
                rest = [1, 2, 3][lease.num_tokens :]
                cache.insert(lease, rest, range(10_000 + 10 * i, 10_000 + 10 * i + len(rest)))
                cache.commit()
                cache.release(lease)
            lease = cache.acquire([100 + i])
            cache.insert(lease, [100 + i], [i])
            cache.commit()
            cache.release(lease)
            cache.evict(max(cache.sizes.evictable - 12, 0))
        return held

    assert kept(name) > kept("lru")


def test_the_hand_of_sieve_does_not_turn_back_for_what_becomes_a_leaf_behind_it():
    cache = RadixCache(1, policy="sieve")

    def put(tokens, block):
        lease = cache.acquire(tokens)
        rest = tokens[lease.num_tokens :]
        cache.insert(lease, rest, range(block, block + len(rest)))
        cache.commit()
        cache.release(lease)

    put([1], 0)
    put([1, 2], 10)
    put([1, 2], 10)  # a use
    put([7], 20)
    put([7], 20)
    # All are visited. In its second pass the hand finds [1] with a child, evicts that, and goes on to [7].
    assert cache.evict(3).tolist() == [10, 20, 0]

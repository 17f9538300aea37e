"""Radix without partial blocks and a leaf-first flat hash under lru are the same cache, operation for operation.

Under another policy they are the same but for the choice of leaves, which the flat hash takes over from radix.
"""

import random

import pytest

from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES
from tests.cache.leaf_first_oracle import LeafFirstFlatHash
from tests.sampling import few

NUM_RUNS = 1000
NUM_OPERATIONS = 200


class Run:
    """Both caches under the same random operations, compared after each."""

    def __init__(self, seed, block_size, policy="lru"):
        self.random = random.Random(seed)
        self.block_size = block_size
        self.policy = policy
        self.radix = RadixCache(block_size, partial_blocks=False, policy=policy)
        self.oracle = LeafFirstFlatHash(block_size)
        self.live = []  # [radix lease, oracle lease, tokens, may be cancelled]
        self.next_block = 0
        self.num_hits = self.num_evicted = self.num_withdrawn = 0
        self.alphabet = self.random.choice([2, 3, 8])
        self.texts = [()]

    def tokens(self):
        """Something that often continues, or diverges from, what was there before."""
        text = self.random.choice(self.texts)
        text = text[: self.random.randint(0, len(text))]
        text += tuple(self.random.randrange(self.alphabet) for _ in range(self.random.randint(0, 5 * self.block_size)))
        self.texts.append(text)
        del self.texts[:-20]
        return text

    def acquire(self):
        tokens = self.tokens()
        assert self.radix.peek(list(tokens)) == self.oracle.peek(tokens)
        lease, other = self.radix.acquire(list(tokens)), self.oracle.acquire(tokens)
        assert lease.num_tokens == len(other.path) * self.block_size
        assert lease.block_ids.tolist() == [self.oracle.entries[key].block for key in other.path]
        self.num_hits += lease.num_tokens
        self.live.append([lease, other, tokens, True])

    def insert(self):
        if not self.live:
            return
        entry = self.random.choice(self.live)
        lease, other, tokens, _ = entry
        rest = tokens[lease.num_tokens :]
        rest = rest[: self.random.randint(0, len(rest))]
        blocks = list(range(self.next_block, self.next_block + len(rest) // self.block_size))
        self.next_block += len(blocks)
        duplicates = self.radix.insert(lease, list(rest), blocks)
        assert [tuple(pair) for pair in duplicates.tolist()] == self.oracle.insert(other, rest, blocks)
        assert lease.num_tokens == len(other.path) * self.block_size
        entry[3] = False

    def advance(self):
        if not self.live:
            return
        entry = self.random.choice(self.live)
        lease, other, tokens, _ = entry
        gained = self.radix.advance(lease, list(tokens[lease.num_tokens :]))
        assert len(gained) * self.block_size == self.oracle.advance(other, tokens[len(other.path) * self.block_size :])
        entry[3] = False

    def release(self):
        if self.live:
            lease, other, _, _ = self.live.pop(self.random.randrange(len(self.live)))
            self.radix.release(lease)
            self.oracle.release(other)

    def cancel(self):
        cancellable = [entry for entry in self.live if entry[3]]
        if cancellable:
            entry = self.random.choice(cancellable)
            self.live.remove(entry)
            self.radix.cancel(entry[0])
            self.oracle.cancel(entry[1])

    def evict(self):
        num_blocks = self.random.choice([0, 1, 1, 2, 3, 7, 100])
        num_evictable = self.radix.sizes.evictable
        evicted = self.radix.evict(num_blocks).tolist()
        if self.policy == "lru":
            assert evicted == self.oracle.evict(num_blocks)
        else:
            assert len(evicted) == min(num_blocks, num_evictable)
            self.oracle.give_up(evicted)
        self.num_evicted += len(evicted)

    def commit(self):
        self.radix.commit()
        self.oracle.commit()

    def withdraw(self):
        withdrawn = self.radix.withdraw().tolist()
        assert sorted(withdrawn) == sorted(self.oracle.withdraw())
        for lease, other, _, _ in self.live:
            assert lease.num_tokens == len(other.path) * self.block_size
        self.num_withdrawn += len(withdrawn)

    def step(self):
        operations = [self.acquire, self.insert, self.release, self.advance, self.evict, self.commit]
        operations += [self.cancel, self.withdraw]
        self.random.choices(operations, [5, 5, 3, 1, 1.5, 2, 0.5, 0.3])[0]()
        self.radix.check([entry[0] for entry in self.live])
        assert self.radix.sizes == self.oracle.sizes


def compare(seeds, block_size, policy):
    hits = evicted = withdrawn = 0
    for seed in seeds:
        run = Run(seed, block_size, policy)
        for _ in range(NUM_OPERATIONS):
            run.step()
        hits, evicted, withdrawn = hits + run.num_hits, evicted + run.num_evicted, withdrawn + run.num_withdrawn
    assert min(hits, evicted, withdrawn) > 2 * len(seeds)  # the runs did meet what they are meant to compare


@pytest.mark.parametrize("block_size", few([4, 1, 2, 16], 1))
def test_same_hits_and_evictions_as_a_leaf_first_flat_hash(block_size):
    compare(range(NUM_RUNS // 4), block_size, "lru")


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"lru"}))
@pytest.mark.parametrize("block_size", few([4, 1], 1))
def test_same_hits_under_every_policy(block_size, policy):
    compare(range(25), block_size, policy)

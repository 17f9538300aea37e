"""The caches that the contract tests run on, and random operations on any of them under a shadow pool."""

import random
from functools import partial

import pytest

from radixkv.cache.contract import NO_BLOCKS
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import LoRA, Media, Salt, parts
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES

# Called with a block size. A new cache is one line here; a policy that is registered is here.
FACTORIES = {
    "null": NullCache,
    **{
        "radix" if name == "lru" else f"radix {name}": partial(RadixCache, partial_blocks=False, policy=name)
        for name in POLICIES
    },
    "flat_hash": FlatHashCache,
    "flat_hash_verified": partial(FlatHashCache, hash_algorithm="xxhash_cbor", verify=True),
    "flat_hash_colliding": partial(FlatHashCache, verify=True, digest_bits=3),
}

NAMESPACES = [
    None,
    Salt("a"),
    Salt("b", start=3),
    LoRA("a"),
    LoRA("a", version=2),
    LoRA("a", start=2),
    Media("x", 1, 4),
    Media("y", 1, 4),
    (LoRA("b", "there"), Media("x", 2, 4), Salt("a", start=5)),
]


@pytest.fixture(params=FACTORIES)
def make_cache(request):
    return FACTORIES[request.param]


def content_keys(token_ids, namespace, block_size):
    """What each full block holds: all tokens up to its end, and the namespace parts where they start."""
    marks = list(token_ids)
    for part in parts(namespace):
        if part.start < len(marks):
            marks[part.start] = (marks[part.start], part)
    return [tuple(marks[:end]) for end in range(block_size, len(marks) + 1, block_size)]


class RandomRun:
    """Random operations on a cache over a pool of num_blocks blocks.

    After each: check(), the ownership sum, and every block that was handed out holds exactly its request's history.
    With a model, which sees content keys instead of tokens, also the same blocks and the same order.
    """

    def __init__(self, cache, seed, *, num_blocks=40, model=None):
        self.random = random.Random(seed)
        self.cache, self.model = cache, model
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.contents = {}  # by block id: the content key written there
        self.live = []  # [lease, tokens, namespace, may be cancelled, the model's lease]
        self.texts = [([], None)]
        self.num_hits = self.num_evicted = self.num_withdrawn = 0

    def run(self, num_operations):
        often = ["acquire", "insert", "release"] * 3
        names = [*often, "advance", "advance", "commit", "withdraw", "evict", "cancel"]
        for _ in range(num_operations):
            getattr(self, self.random.choice(names))()
            self.check()
        return self

    def check(self):
        self.cache.check()
        pinned, evictable = self.cache.sizes
        assert len(self.free) + pinned + evictable == self.num_blocks  # a block is private within `insert` alone
        if self.model:
            assert (pinned, evictable) == self.model.sizes()

    def request(self):
        """Tokens and namespace that often continue, or diverge from, those of an earlier request."""
        block_size = self.cache.block_size
        text, namespace = self.random.choice(self.texts)
        if self.random.random() < 0.5:
            text = text[: self.random.randint(0, len(text))]
        if self.random.random() < 0.2:
            namespace = self.random.choice(NAMESPACES)
        text = text + [self.random.randrange(3) for _ in range(self.random.randint(0, 3 * block_size))]
        self.texts = [*self.texts[-7:], (text[: 8 * block_size], namespace)]
        return self.texts[-1]

    def expect(self, keys, blocks):
        assert [self.contents[block] for block in blocks] == keys[: len(blocks)]

    def acquire(self):
        tokens, namespace = self.request()
        cached = self.cache.peek(tokens, namespace)
        lease = self.cache.acquire(tokens, namespace)
        assert cached == lease.num_tokens == len(lease.block_ids) * self.cache.block_size
        keys = content_keys(tokens, namespace, self.cache.block_size)
        self.expect(keys, lease.block_ids.tolist())
        self.num_hits += len(lease.block_ids)
        handle = self.model and self.model.acquire(keys)
        if self.model:
            assert handle == lease.block_ids.tolist()
        self.live.append([lease, tokens, namespace, True, handle])

    def pick(self):
        return self.random.choice(self.live) if self.live else None

    def insert(self):
        entry = self.pick()
        if entry is None:
            return
        lease, tokens, namespace, _, handle = entry
        entry[3] = False
        block_size, before = self.cache.block_size, lease.num_tokens
        rest = tokens[before:]
        if self.random.random() < 0.5:
            rest = rest[: self.random.randint(0, len(rest))]
        count = min(len(rest) // block_size, len(self.free))
        rest = rest[: count * block_size + block_size - 1]
        blocks = [self.free.pop() for _ in range(count)]
        keys = content_keys(tokens, namespace, block_size)[before // block_size :][:count]
        self.contents.update(zip(blocks, keys, strict=True))
        duplicates = self.cache.insert(lease, rest, blocks).tolist()
        self.expect(keys, [cached for _, cached in duplicates])
        moved = (lease.num_tokens - before) // block_size
        assert moved in (0, count)
        self.free += [mine for mine, _ in duplicates] if moved else blocks
        if self.model:
            self.model.insert(handle, keys, blocks)

    def advance(self):
        entry = self.pick()
        if entry is None:
            return
        lease, tokens, namespace, _, handle = entry
        before = lease.num_tokens
        gained = self.cache.advance(lease, tokens[before:]).tolist()
        entry[3] = entry[3] and not gained
        assert lease.num_tokens == before + len(gained) * self.cache.block_size
        keys = content_keys(tokens, namespace, self.cache.block_size)[before // self.cache.block_size :]
        self.expect(keys, gained)
        if self.model:
            assert self.model.advance(handle, keys) == gained

    def release(self):
        if not self.live:
            return
        lease, *_, handle = self.live.pop(self.random.randrange(len(self.live)))
        self.cache.release(lease)
        if self.model:
            self.model.release(handle)

    def cancel(self):
        entry = self.pick()
        if entry is None or not entry[3]:
            return
        self.live.remove(entry)
        self.cache.cancel(entry[0])
        if self.model:
            self.model.cancel(entry[4])

    def commit(self):
        self.cache.commit()
        if self.model:
            self.model.commit()

    def withdraw(self):
        blocks = self.cache.withdraw().tolist()
        self.free += blocks
        self.num_withdrawn += len(blocks)
        if self.model:
            assert self.model.withdraw() == blocks
        for lease, *_, handle in self.live:
            if self.model:
                assert lease.num_tokens == len(handle) * self.cache.block_size

    def reset(self):
        """Forgets everything or one namespace, and then lets go of the leases that it concerned."""
        self.commit()
        self.free += self.cache.reset(self.random.choice(NAMESPACES)).block_ids.tolist()
        for entry in [entry for entry in self.live if entry[0].is_stale]:
            self.live.remove(entry)
            self.cache.release(entry[0])
        self.free += self.cache.evict(self.cache.num_dead_blocks).tolist()

    def evict(self):
        asked = self.random.randint(0, 6)
        before = self.cache.sizes
        blocks = self.cache.evict(asked).tolist()
        assert len(blocks) == min(asked, before.evictable)
        assert self.cache.sizes == (before.pinned, before.evictable - len(blocks))
        self.free += blocks
        self.num_evicted += len(blocks)
        if self.model:
            assert self.model.evict(asked) == blocks

    def finish(self):
        """Releases everything and evicts it: nothing is left and nothing is lost."""
        while self.live:
            self.release()
        self.commit()
        self.free += self.cache.evict(self.num_blocks).tolist()
        assert sorted(self.free) == list(range(self.num_blocks))
        assert self.cache.sizes == (0, 0)
        assert self.cache.evict(1).tolist() == NO_BLOCKS.tolist()


@pytest.fixture
def random_run():
    return RandomRun

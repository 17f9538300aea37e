"""Replays traces as ids of blocks, one token a block: the hits of the tokens, at a tenth of the cost.

The manager and the caches are the real ones.
"""

from collections import deque
from collections.abc import Sequence

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.bounds import BlockPaths
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.contract import PrefixCache, Watch
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES
from radixkv.cache.radix.policies.cost import Cost
from radixkv.cache.tokens import pack

HISTORY = tuple(POLICIES)
NAMES = (*HISTORY, "flat_hash", "queue_aware", "flat_hash queue_aware")


def make_cache(name: str, block_size: int) -> PrefixCache:
    """Returns a cache of blocks of one token: each stands for a block of the trace."""
    if name.startswith("flat_hash"):
        return FlatHashCache(1, hash_algorithm="sha256")
    if name == "cost":  # its positions are blocks here
        return RadixCache(1, policy=Cost(max(30_000 // block_size, 1)))
    return RadixCache(1, policy="lru" if name == "queue_aware" else name)


class Queue:
    """The requests that wait: the next so many, but of a session only the first of them."""

    def __init__(self, cache: PrefixCache, keys: Sequence[bytes], sessions: Sequence[str | None], length: int) -> None:
        self._cache, self._keys, self._sessions = cache, keys, sessions
        self._watches: dict[int, Watch] = {}
        self._behind: dict[str | None, deque[int]] = {}
        for number in range(min(length, len(keys))):
            self._enter(number)
        self._next = length

    def _enter(self, number: int) -> None:
        line = self._behind.setdefault(self._sessions[number], deque())
        line.append(number)
        if len(line) == 1:
            self._watch(number)

    def _watch(self, number: int) -> None:
        self._watches[number] = self._cache.watch(self._keys[number], rank=(0, -number))

    def start(self, number: int) -> None:
        """A request leaves the queue; another comes in, and the next of its session."""
        self._cache.unwatch(self._watches.pop(number))
        line = self._behind[self._sessions[number]]
        line.popleft()
        if line:
            self._watch(line[0])
        if self._next < len(self._keys):
            self._enter(self._next)
            self._next += 1


def replay(name: str, paths: BlockPaths, sessions: Sequence[str | None], num_blocks: int, num_waiting: int) -> int:
    """Returns the tokens hit."""
    cache = make_cache(name, paths.block_size)
    manager = KVManager(cache, num_blocks)
    # What may be matched, and one token that is computed in any case.
    prompts = [pack([*path[:most], 0]) for path, most in zip(paths.paths, paths.num_matchable, strict=True)]
    queue = Queue(cache, prompts, sessions, num_waiting) if name.endswith("queue_aware") else None
    hits = 0
    for number, path in enumerate(paths.paths):
        if queue is not None:
            queue.start(number)
        sequence = manager.begin(prompts[number])
        try:
            manager.grow(sequence, paths.num_blocks[number])
        except OutOfBlocks:
            manager.cancel(sequence)
            continue
        hits += sequence.num_cached_tokens * paths.block_size
        manager.publish(sequence, pack(path))
        manager.commit()
        manager.end(sequence)
    return hits

"""The watches of a flat hash: how far the hashes of a request are held, kept up to date.

Every watch is listed under each hash that it matches and under the first that it misses, so that a block that is
added or removed finds the watches that it concerns. A match counts by hash alone: with `verify=True` a lookup may end
before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from radixkv.cache.contract import CacheCorruption, Rank, Watch


class _Chain:
    """The hashes of a watch: those known so far, and the rest, which are made when they are needed."""

    __slots__ = ("hashes", "num_held", "rest")

    def __init__(self, rest: Iterator[bytes]) -> None:
        self.hashes: list[bytes] = []
        self.rest = rest
        self.num_held = 0

    def next(self) -> bytes | None:
        """Returns the first hash that is not held; None after the last full block."""
        if self.num_held == len(self.hashes):
            found = next(self.rest, None)
            if found is None:
                return None
            self.hashes.append(found)
        return self.hashes[self.num_held]


class HashWatches:
    """Watches by hash.

    Args:
        held: the hashes of the cache, as a collection that changes with it.
    """

    def __init__(self, held: Collection[bytes], block_size: int) -> None:
        self._held, self._block_size = held, block_size
        self._matching: dict[bytes, dict[Watch, int]] = {}  # by hash: the watches that match it, and which block it is
        self._missing: dict[bytes, dict[Watch, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._matching or self._missing)

    def add(self, watch: Watch, hashes: Iterator[bytes]) -> None:
        """Matches a watch and keeps it up to date from now on. Cost: a hash for each block matched, and one more."""
        watch.cursor = _Chain(hashes)
        self._match(watch)

    def remove(self, watch: Watch) -> list[bytes]:
        """Ends a watch; returns the hashes that are deferred no longer, the first block's first. O(blocks matched)."""
        chain: _Chain = watch.cursor
        self._forget_missing(watch)
        undeferred = self._cut(watch, 0)
        chain.num_held = 0
        watch.cursor = watch.changed = None
        return undeferred

    def end_all(self) -> None:
        """Ends every watch."""
        for group in self._matching.values(), self._missing.values():
            for watch in [watch for watches in group for watch in watches]:
                watch.cursor = watch.changed = None

    def added(self, hashes: list[bytes]) -> None:
        """Blocks with these hashes were added. O(n), and the matches of the watches that missed them."""
        for block_hash in hashes:
            for watch in self._missing.pop(block_hash, ()):
                self._match(watch)

    def removed(self, block_hash: bytes) -> list[bytes]:
        """The last block of a hash is gone. Returns the hashes that are deferred no longer."""
        undeferred: list[bytes] = []
        for watch, index in list(self._matching.get(block_hash, {}).items()):
            self._forget_missing(watch)
            undeferred += self._cut(watch, index)
            self._missing.setdefault(block_hash, {})[watch] = None
            watch.move(index * self._block_size)
        return undeferred

    def rank(self, block_hash: bytes) -> Rank | None:
        """Returns the highest rank of the watches that match a hash; None where none has one. O(such watches)."""
        ranks = [watch.rank for watch in self._matching.get(block_hash, ()) if watch.rank is not None]
        return max(ranks, default=None)

    def _match(self, watch: Watch) -> None:
        chain: _Chain = watch.cursor
        while (block_hash := chain.next()) is not None:
            if block_hash not in self._held:
                self._missing.setdefault(block_hash, {})[watch] = None
                break
            # A hash that collides may stand in a chain more than once: its first place is what counts.
            self._matching.setdefault(block_hash, {}).setdefault(watch, chain.num_held)
            chain.num_held += 1
        watch.move(chain.num_held * self._block_size)

    def _cut(self, watch: Watch, num_held: int) -> list[bytes]:
        chain: _Chain = watch.cursor
        undeferred = []
        for block_hash in chain.hashes[num_held : chain.num_held]:
            others = self._matching.get(block_hash, {})
            if others.get(watch, -1) < num_held:
                continue  # done already, or matched by an earlier block too
            del others[watch]
            if not others:
                del self._matching[block_hash]
            if watch.rank is not None:
                undeferred.append(block_hash)
        chain.num_held = num_held
        return undeferred

    def _forget_missing(self, watch: Watch) -> None:
        missing = watch.cursor.next()
        if missing is not None:
            others = self._missing[missing]
            del others[watch]
            if not others:
                del self._missing[missing]

    def check(self) -> None:
        """Raises CacheCorruption unless every watch stands where its hashes say. O(watches * blocks)."""
        watches = {watch for group in self._matching.values() for watch in group}
        watches.update(watch for group in self._missing.values() for watch in group)
        for watch in watches:
            chain: _Chain = watch.cursor
            missing = chain.next()
            held = chain.hashes[: chain.num_held]
            is_held = all(self._matching.get(h, {}).get(watch) == held.index(h) for h in held)
            if not is_held or not all(h in self._held for h in chain.hashes[: chain.num_held]):
                raise CacheCorruption(f"violated: a watch matches what is held, got {watch}")
            if missing is not None and (missing in self._held or watch not in self._missing.get(missing, ())):
                raise CacheCorruption(f"violated: a watch ends at the first block that is not held, got {watch}")

"""The flat map itself: from a hash to the blocks that have it, and back."""

from collections.abc import Iterable, Sequence

from radixkv.cache.contract import CacheCorruption


class BlockMap:
    """Blocks by hash. A hash may have several blocks, because blocks of equal content are kept side by side.

    Attributes:
        held: by hash, its one block as an int, or all its blocks as the keys of a dict, the oldest first. (A dict for
            each hash would cost more than all the rest of the map.)
        hash_of: by block id, in the order of insertion.
    """

    __slots__ = ("_num_shared", "hash_of", "held")

    def __init__(self) -> None:
        self.held: dict[bytes, int | dict[int, None]] = {}
        self.hash_of: dict[int, bytes] = {}
        self._num_shared = 0  # hashes that have a dict; while there is none, no lookup has to tell

    def add(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Adds blocks that are not in the map. O(n)."""
        held = self.held
        for block_hash, block in zip(hashes, block_ids, strict=True):
            known = held.setdefault(block_hash, block)
            if known != block:
                if isinstance(known, int):
                    held[block_hash] = {known: None, block: None}
                    self._num_shared += 1
                else:
                    known[block] = None
        self.hash_of.update(zip(block_ids, hashes, strict=True))

    def oldest(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the oldest block of each hash; all of them must be in the map. O(n)."""
        found = map(self.held.__getitem__, hashes)
        if not self._num_shared:
            return list(found)  # type: ignore[arg-type]
        return [known if isinstance(known, int) else next(iter(known)) for known in found]

    def all(self, block_hash: bytes) -> Iterable[int]:
        """Returns every block of a hash, the oldest first. O(1)."""
        known = self.held.get(block_hash, ())
        return (known,) if isinstance(known, int) else known

    def remove(self, block_ids: Iterable[int]) -> None:
        """Removes blocks; each must be in the map. O(n)."""
        held, hash_of = self.held, self.hash_of
        for block in block_ids:
            block_hash = hash_of.pop(block)
            known = held[block_hash]
            if isinstance(known, int):
                del held[block_hash]
            else:
                del known[block]
                if len(known) == 1:
                    held[block_hash] = next(iter(known))
                    self._num_shared -= 1

    def check(self) -> None:
        """Raises CacheCorruption unless both directions agree. O(blocks)."""
        if {block: block_hash for block_hash in self.held for block in self.all(block_hash)} != self.hash_of:
            raise CacheCorruption("the map from hashes to blocks and the blocks' hashes differ")
        shared = [known for known in self.held.values() if isinstance(known, dict)]
        if len(shared) != self._num_shared or any(len(known) < 2 for known in shared):
            raise CacheCorruption("a hash with a dict of fewer than two blocks, or a wrong count of such dicts")

"""Which parts of namespaces a flat hash's blocks depend on: a digest tells nobody."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from radixkv.cache.hashing import Parts
from radixkv.cache.namespace import Part


class BlockParts(dict[int, Parts]):
    """Parts by block id; blocks that depend on none, which are most, cost nothing."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def keep(self, block_ids: Sequence[int], parts: Parts, num_before: int) -> None:
        """Notes what blocks depend on. O(n).

        Args:
            block_ids: [n] of one request, num_before blocks of it stand before them.
            parts: of the request; a part concerns the block that it starts in, and all after it.
        """
        if not parts:
            return
        for index, block in enumerate(block_ids, num_before + 1):
            if parts[0].start < index * self._block_size:  # sorted by start
                last = parts[-1].start < index * self._block_size
                self[block] = parts if last else tuple(p for p in parts if p.start < index * self._block_size)

    def depending_on(self, concerned: Container[Part]) -> list[int]:
        """Returns the blocks that depend on one of these parts, each with start 0. O(blocks that depend on any)."""
        return [block for block, parts in self.items() if any(replace(p, start=0) in concerned for p in parts)]

    def forget(self, block_ids: Iterable[int]) -> None:
        """Blocks that are no longer in the map."""
        if self:
            for block in block_ids:
                self.pop(block, None)

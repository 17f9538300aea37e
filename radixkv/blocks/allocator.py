"""Free block ids, and nothing else."""

from collections.abc import Sequence

import numpy as np

from radixkv.cache.contract import Blocks, check_count


class OutOfBlocks(RuntimeError):
    """More blocks were wanted than are free or could be made free. Nothing was changed."""


class BlockAllocator:
    """A stack of free block ids: what was freed last is handed out first (its KV may still be in a processor's cache).

    Args:
        num_blocks: size of the pool, ids first .. first + num_blocks - 1, handed out in that order at first; None for a
            pool that grows as needed.
        first: the lowest id; those below are reserved for another use, such as a null block.

    Cost: O(blocks) per call; 9 bytes per block of the pool.
    """

    def __init__(self, num_blocks: int | None = None, *, first: int = 0) -> None:
        self.num_blocks = None if num_blocks is None else check_count("num_blocks", num_blocks)
        self.first = check_count("first", first)
        self._next_id = self.first  # ids from here on were never handed out
        self._freed = np.empty(64, np.int32)  # a stack of ids that were, and came back
        self._num_freed = 0
        self._is_free = np.ones(64, bool)
        self._place = np.zeros(64, np.int32)  # scratch, by id

    @property
    def num_used(self) -> int:
        """Blocks handed out and not freed."""
        return self._next_id - self.first - self._num_freed

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out now; of a growing pool, those it need not grow for."""
        unused = 0 if self.num_blocks is None else self.first + self.num_blocks - self._next_id
        return self._num_freed + unused

    def take(self, num_blocks: int) -> Blocks:
        """Returns [num_blocks] int32 block ids, the caller's from now on.

        Raises:
            OutOfBlocks: fewer are free.
        """
        num_blocks = check_count("num_blocks", num_blocks)
        if self.num_blocks is not None and num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        if num_blocks <= self._num_freed:
            self._num_freed -= num_blocks
            taken = self._freed[self._num_freed : self._num_freed + num_blocks][::-1].copy()
            self._is_free[taken] = False
            return taken
        num_old = self._num_freed
        taken = np.empty(num_blocks, np.int32)
        taken[:num_old] = self._freed[self._num_freed - num_old : self._num_freed][::-1]
        self._num_freed -= num_old
        end = self._next_id + num_blocks - num_old
        taken[num_old:] = np.arange(self._next_id, end, dtype=np.int32)
        self._next_id = end
        if end > len(self._is_free):
            self._is_free = np.concatenate([self._is_free, np.ones(end, bool)])
            self._place = np.zeros(len(self._is_free), np.int32)
        self._is_free[taken] = False
        return taken

    def free(self, block_ids: Blocks | Sequence[int]) -> None:
        """Takes blocks back. The first of them is the next to be handed out.

        Raises:
            ValueError: one of them is free already, comes twice or is not of this pool; none is freed then.
        """
        freed = np.asarray(block_ids, np.int32)
        if not freed.size:
            return
        is_one = (
            freed.size == 1 and self.first <= freed[0] < self._next_id
        )  # the usual case, of an eviction for one more block
        if not is_one or self._is_free[freed[0]]:
            self._check_used(freed)
        self._is_free[freed] = True
        num_freed = self._num_freed + len(freed)
        if num_freed > len(self._freed):
            self._freed = np.concatenate([self._freed, np.empty(num_freed, np.int32)])
        self._freed[self._num_freed : num_freed] = freed[::-1]
        self._num_freed = num_freed

    def _check_used(self, freed: Blocks) -> None:
        if freed.min() < self.first or freed.max() >= self._next_id:
            bad = freed[(freed < self.first) | (freed >= self._next_id)][0]
            handed_out = f"{self.first} <= id < {self._next_id}"
            raise ValueError(f"block_ids: expected ids of blocks handed out ({handed_out}), got {bad}")
        if self._is_free[freed].any():
            raise ValueError(f"block_ids: expected blocks in use, got {freed[self._is_free[freed]][0]}, which is free")
        places = np.arange(len(freed), dtype=np.int32)
        self._place[freed] = places
        twice = self._place[freed] != places  # a block given twice remembers its last place alone
        if twice.any():
            raise ValueError(f"block_ids: expected each block once, got {freed[twice][0]} twice")

    def free_ids(self) -> Blocks:
        """Returns the free ids in the order in which they are handed out (of a growing pool, those it has)."""
        unused = np.arange(self._next_id, self.first + (self.num_blocks or 0), dtype=np.int32)
        return np.concatenate([self._freed[: self._num_freed][::-1], unused])

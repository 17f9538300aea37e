"""Which cached blocks are referenced, and in which order the others go. Called by `radixkv.cache.flat_hash.cache`.

This is the hashed part of vLLM's free queue (`FreeKVCacheBlockQueue`); blocks without a hash are the allocator's.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.radix.watches import Rank


class FreeQueue:
    """Reference counts of blocks, and the queue of those whose count is zero.

    A pinned block keeps its place in the queue until it is released, which moves it to the end, and is passed over
    meanwhile: so a pin costs no queue operation, and one that is cancelled leaves the order as it was. A block that is
    spared when its turn comes stands beside the queue from then on, until it is released once more or spared no longer.

    Attributes:
        num_pins: by block id, where above 0.
    """

    __slots__ = ("_num_passed", "_order", "_passed", "_spared", "num_pins")

    def __init__(self) -> None:
        self.num_pins: Counter[int] = Counter()
        self._order: OrderedDict[int, None] = OrderedDict()  # a plain dict gets slow at its front as that empties
        self._passed: dict[int, int] = {}  # blocks passed over at the front and not released since: their order there
        self._num_passed = 0
        self._spared: dict[int, None] = {}

    def pin(self, blocks: Iterable[int]) -> None:
        """Pins blocks once more, new ones for the first time. O(n)."""
        self.num_pins.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Takes one pin off each, and moves them to the end of the queue, the last of `blocks` first. O(n)."""
        num_pins, order = self.num_pins, self._order
        for block in reversed(blocks):
            left = num_pins[block] - 1
            if left:
                num_pins[block] = left
            else:
                num_pins.pop(block)  # Counter has a `del` in Python, which costs four times as much
            if block in order:
                order.move_to_end(block)
            else:
                order[block] = None
        for aside in (self._passed, self._spared):
            if aside:
                for block in blocks:
                    aside.pop(block, None)

    def cancel(self, blocks: Sequence[int]) -> None:
        """Takes one pin off each, and leaves the order as if it had never been. O(n), and O(blocks passed over)."""
        num_pins = self.num_pins
        for block in blocks:
            left = num_pins[block] - 1
            if left:
                num_pins[block] = left
            else:
                num_pins.pop(block)
        passed = self._passed
        if passed and not passed.keys().isdisjoint(blocks):
            # Those passed over go back to the front, among others that did so before them.
            front = [block for block in passed if block not in num_pins]
            for block in sorted(front, key=passed.__getitem__, reverse=True):
                self._order[block] = None
                self._order.move_to_end(block, last=False)

    def take(self, num_blocks: int, rank: Callable[[int], Rank | None] | None = None) -> list[int]:
        """Takes the first unpinned blocks out, at most num_blocks.

        Args:
            rank: of a block that is spared while there are others, the lowest going first; None of the others.

        Cost: O(num_blocks), and once for each block passed or spared; a sort of those spared where no others are left.
        """
        order, num_pins = self._order, self.num_pins
        taken: list[int] = []
        while len(taken) < num_blocks and order:
            block, _ = order.popitem(last=False)
            if block in num_pins:
                self._passed.setdefault(block, self._num_passed)
                self._num_passed += 1
                continue
            if self._passed:
                self._passed.pop(block, None)
            if rank is not None and rank(block) is not None:
                self._spared[block] = None
            else:
                taken.append(block)
        if len(taken) < num_blocks and self._spared:
            left = [block for block in self._spared if block not in num_pins]
            if rank is not None:
                left.sort(key=lambda block: rank(block) or (-inf, 0))
            for block in left[: num_blocks - len(taken)]:
                del self._spared[block]
                taken.append(block)
        return taken

    def unspare(self, blocks: Iterable[int]) -> None:
        """Puts blocks that were spared, if they were, at the front of the queue. O(n)."""
        for block in blocks:
            if block in self._spared:
                del self._spared[block]
                self._order[block] = None
                self._order.move_to_end(block, last=False)

    def remove(self, blocks: Iterable[int]) -> None:
        """Takes unpinned blocks out, wherever they stand. O(n)."""
        for block in blocks:
            if block in self._spared:
                del self._spared[block]
            else:
                del self._order[block]
            self._passed.pop(block, None)

    def unpinned(self) -> list[int]:
        """Returns the unpinned blocks, the next to go first. O(queue)."""
        return [block for block in (*self._order, *self._spared) if block not in self.num_pins]

    def check(self) -> None:
        """Raises CacheCorruption unless every block has one state. O(blocks)."""
        if any(count < 1 for count in self.num_pins.values()):
            raise CacheCorruption("a pin count below 1")
        if not self._order.keys().isdisjoint(self._spared):
            raise CacheCorruption("a block that is spared stands in the queue as well")
        if not self._passed.keys() <= self.num_pins.keys() | self._order.keys():
            raise CacheCorruption("a block that was passed over is neither pinned nor queued")

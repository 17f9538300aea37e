"""Which cached blocks are pinned, and in which order the others are evicted.

This is the hashed part of vLLM's free queue (`FreeKVCacheBlockQueue`); blocks without a hash are the allocator's.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf

from radixkv.cache.contract import CacheCorruption, Rank


class QueueObserver:
    """Told of every change of a queue that it is attached to. Each method here does nothing."""

    def pinned(self, blocks: Iterable[int]) -> None:
        """Blocks, new ones among them, got one more pin."""

    def unpinned(self, blocks: Iterable[int], *, is_first: bool) -> None:
        """Blocks lost their last pin. They are evicted in this order, after all others.

        Args:
            is_first: the pins were cancelled instead: about where they were, in the reverse of this order.
        """

    def removed(self, blocks: Iterable[int]) -> None:
        """Unpinned blocks were taken out."""


class FreeQueue:
    """Pin counts of blocks, and the queue of those whose count is zero.

    A pinned block keeps its place in the queue until it is released, which moves it to the end, and is skipped
    meanwhile: so a pin costs no queue operation, and one that is cancelled leaves the order as it was. A block that is
    deferred when its turn comes stands beside the queue from then on, until it is released once more or deferred no
    longer.

    Attributes:
        num_pins: by block id, where above 0.
        observers: told of each change.
    """

    __slots__ = ("_deferred", "_num_skipped", "_order", "_skipped", "num_pins", "observers")

    def __init__(self) -> None:
        self.observers: tuple[QueueObserver, ...] = ()
        self.num_pins: Counter[int] = Counter()
        self._order: OrderedDict[int, None] = OrderedDict()  # a plain dict gets slow at its front as that empties
        self._skipped: dict[int, int] = {}  # blocks skipped at the front and not released since: their order there
        self._num_skipped = 0
        self._deferred: dict[int, None] = {}

    def pin(self, blocks: Sequence[int]) -> None:
        """Pins blocks once more, new ones for the first time. O(n)."""
        self.num_pins.update(blocks)
        for observer in self.observers:
            observer.pinned(blocks)

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
        for aside in (self._skipped, self._deferred):
            if aside:
                for block in blocks:
                    aside.pop(block, None)
        for observer in self.observers:
            observer.unpinned([block for block in reversed(blocks) if block not in num_pins], is_first=False)

    def cancel(self, blocks: Sequence[int]) -> None:
        """Takes one pin off each, and leaves the order as if it had never been. O(n), and O(blocks skipped)."""
        num_pins = self.num_pins
        for block in blocks:
            left = num_pins[block] - 1
            if left:
                num_pins[block] = left
            else:
                num_pins.pop(block)
        passed = self._skipped
        if passed and not passed.keys().isdisjoint(blocks):
            # Those skipped go back to the front, among others that did so before them.
            front = [block for block in passed if block not in num_pins]
            for block in sorted(front, key=passed.__getitem__, reverse=True):
                self._order[block] = None
                self._order.move_to_end(block, last=False)
        for observer in self.observers:
            observer.unpinned([block for block in reversed(blocks) if block not in num_pins], is_first=True)

    def take(self, num_blocks: int, rank: Callable[[int], Rank | None] | None = None) -> list[int]:
        """Takes the first unpinned blocks out, at most num_blocks.

        Args:
            rank: of a block that is deferred while there are others, the lowest going first; None of the others.

        Cost: O(num_blocks), and once for each block skipped or deferred; a sort of those deferred where no others are
        left.
        """
        order, num_pins = self._order, self.num_pins
        taken: list[int] = []
        while len(taken) < num_blocks and order:
            block, _ = order.popitem(last=False)
            if block in num_pins:
                self._skipped.setdefault(block, self._num_skipped)
                self._num_skipped += 1
                continue
            if self._skipped:
                self._skipped.pop(block, None)
            if rank is not None and rank(block) is not None:
                self._deferred[block] = None
            else:
                taken.append(block)
        if len(taken) < num_blocks and self._deferred:
            left = [block for block in self._deferred if block not in num_pins]
            if rank is not None:
                left.sort(key=lambda block: rank(block) or (-inf, 0))
            for block in left[: num_blocks - len(taken)]:
                del self._deferred[block]
                taken.append(block)
        for observer in self.observers:
            observer.removed(taken)
        return taken

    def end_deferral(self, blocks: Iterable[int]) -> None:
        """Puts those of the blocks that were deferred at the front of the queue. O(n)."""
        for block in blocks:
            if block in self._deferred:
                del self._deferred[block]
                self._order[block] = None
                self._order.move_to_end(block, last=False)

    def remove(self, blocks: Sequence[int]) -> None:
        """Takes unpinned blocks out, wherever they stand. O(n)."""
        for block in blocks:
            if block in self._deferred:
                del self._deferred[block]
            else:
                del self._order[block]
            self._skipped.pop(block, None)
        for observer in self.observers:
            observer.removed(blocks)

    def unpinned(self) -> list[int]:
        """Returns the unpinned blocks, the next to go first. O(queue)."""
        return [block for block in (*self._order, *self._deferred) if block not in self.num_pins]

    def check(self) -> None:
        """Raises CacheCorruption unless every block has one state. O(blocks)."""
        if any(count < 1 for count in self.num_pins.values()):
            raise CacheCorruption("a pin count below 1")
        if not self._order.keys().isdisjoint(self._deferred):
            raise CacheCorruption("a block that is deferred stands in the queue as well")
        if not self._skipped.keys() <= self.num_pins.keys() | self._order.keys():
            raise CacheCorruption("a block that was skipped is neither pinned nor queued")

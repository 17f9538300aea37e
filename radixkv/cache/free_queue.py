"""Which cached blocks are referenced, and in which order the others go. Called by `radixkv.cache.flat_hash`.

This is the hashed part of vLLM's free queue (`FreeKVCacheBlockQueue`); blocks without a hash are the allocator's.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class FreeQueue:
    """Reference counts of blocks, and the queue of those whose count is zero.

    Attributes:
        num_pins: by block id, where above 0.
        order: blocks without a pin, the next to go first.
    """

    __slots__ = ("num_pins", "order")

    def __init__(self) -> None:
        self.num_pins: dict[int, int] = {}
        self.order: OrderedDict[int, None] = OrderedDict()  # a plain dict gets slow at its front as that empties

    def add_pinned(self, blocks: Iterable[int]) -> None:
        """Adds new blocks, each with one pin. O(n)."""
        self.num_pins.update(dict.fromkeys(blocks, 1))

    def pin(self, blocks: Iterable[int]) -> None:
        """Pins blocks once more; takes out of the queue those that were in it. O(n)."""
        num_pins, order = self.num_pins, self.order
        for block in blocks:
            if block in num_pins:
                num_pins[block] += 1
            else:
                num_pins[block] = 1
                del order[block]

    def unpin(self, blocks: Sequence[int]) -> None:
        """Takes one pin off each; those left without join the queue's end, the last of `blocks` first. O(n)."""
        num_pins, order = self.num_pins, self.order
        for block in reversed(blocks):
            left = num_pins[block] - 1
            if left:
                num_pins[block] = left
            else:
                del num_pins[block]
                order[block] = None

    def first(self, num_blocks: int) -> list[int]:
        """Returns the first blocks of the queue, at most num_blocks, and leaves them there. O(num_blocks)."""
        return list(islice(self.order, num_blocks))

    def remove(self, blocks: Iterable[int]) -> None:
        """Takes blocks out of the queue for good; each must be there. O(n)."""
        order = self.order
        for block in blocks:
            del order[block]

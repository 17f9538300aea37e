"""In which order the leaves of the radix tree are evicted."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import Any

from radixkv.cache.radix.node import Node


class LeafOrder:
    """Leaves by rank, equal ranks by when they entered.

    What is queued last mostly ranks last: under lru always, but for parents of evicted leaves and for cancelled leases.
    So it goes to the end of a queue, and what ranks before its end to a heap beside it. The entry of a leaf that is
    removed stays where it is, no longer valid, and is skipped: adding and removing cost a fifth of what they do in a
    sorted list, and taking the first costs nothing that grows with the leaves.

    Cost: `add` and `remove` O(1) for the queue, O(log of the heap) else; `first` amortised the same. Entries
    that are not valid are swept out when they outnumber the leaves.
    """

    __slots__ = ("_heap", "_last_entry", "_num_leaves", "_queue")

    def __init__(self, first_entry: int = 0) -> None:
        self._queue: deque[tuple[Any, int, Node]] = deque()  # (rank, entry, node): valid while node.entry is entry
        self._heap: list[tuple[Any, int, Node]] = []
        self._num_leaves = 0
        self._last_entry = first_entry

    def __len__(self) -> int:
        return self._num_leaves

    def add(self, node: Node, rank: Any) -> None:
        """Puts a leaf in; it must not be in."""
        self._last_entry = node.entry = self._last_entry + 1
        self._num_leaves += 1
        queue = self._queue
        if not queue or rank >= queue[-1][0]:
            queue.append((rank, node.entry, node))
        else:
            heappush(self._heap, (rank, node.entry, node))
        if len(queue) + len(self._heap) > 2 * self._num_leaves + 64:
            self.sweep()

    def remove(self, node: Node) -> None:
        """Takes a leaf out; it must be in."""
        node.entry = 0
        self._num_leaves -= 1

    def first(self) -> tuple[Any, Node] | None:
        """Returns the rank and the leaf of the lowest rank; None where there is none."""
        queue, heap = self._queue, self._heap
        while queue and queue[0][2].entry != queue[0][1]:
            queue.popleft()
        while heap and heap[0][2].entry != heap[0][1]:
            heappop(heap)
        if not queue and not heap:
            return None
        rank, _, node = heap[0] if not queue or (heap and heap[0] < queue[0]) else queue[0]
        return rank, node

    def in_order(self) -> list[Node]:
        """Returns all leaves, the first first. O(leaves log leaves)."""
        return [node for _, entry, node in sorted((*self._queue, *self._heap)) if node.entry == entry]

    def sweep(self) -> None:
        """Drops the entries of leaves that were removed. O(entries)."""
        self._queue = deque(item for item in self._queue if item[2].entry == item[1])
        self._heap = [item for item in self._heap if item[2].entry == item[1]]
        heapify(self._heap)

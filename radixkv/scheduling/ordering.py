"""Which of the waiting sequences of one priority is tried next.

An order knows what waits and nothing of blocks. A pass of admissions: `begin_pass`, then `next` again and again, each
time followed by `remove` (it was admitted) or `skip` (not in this pass).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from radixkv.scheduling.sequence import Sequence


class Order(Protocol):
    """The waiting sequences of one priority, and which of them is next."""

    uses_matches: bool  # whether sequences must come with a watch

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence, *, is_started: bool) -> None:
        """Takes one out: it was admitted, or waits no longer for another reason."""

    def begin_pass(self) -> None:
        """A new pass of admissions: nothing is skipped yet."""

    def next(self) -> Sequence | None:
        """Returns the sequence to try next, without those that were skipped in this pass; None: no other."""
        ...

    def skip(self, sequence: Sequence) -> None: ...

    def changed(self, sequence: Sequence) -> None:
        """Its watch has moved."""


class Sorted:
    """Sorted by a key that does not change while a sequence waits; the base of the orders that ask no cache.

    Cost: a pass where nothing changed looks at what it skips, each once; entering and leaving O(log waiting) keys.
    """

    uses_matches = False

    def __init__(self) -> None:
        self._waiting = SortedKeyList(key=self.key)
        self._skipped: set[int] = set()
        self._at: int | None = None  # the place to look at next; None: to be found again

    def key(self, sequence: Sequence) -> Any:
        raise NotImplementedError

    def start(self) -> int:
        """Returns the place at which a pass begins; from the end it goes on at the front."""
        return 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        self._at = None

    def remove(self, sequence: Sequence, *, is_started: bool) -> None:
        self._waiting.remove(sequence)
        self._at = None

    def begin_pass(self) -> None:
        if self._skipped:
            self._skipped.clear()
            self._at = None

    def next(self) -> Sequence | None:
        if len(self._skipped) >= len(self._waiting):
            return None
        if self._at is None:
            self._at = self.start()
        while True:
            sequence = self._waiting[self._at % len(self._waiting)]
            if sequence.sequence_id not in self._skipped:
                return sequence
            self._at += 1

    def skip(self, sequence: Sequence) -> None:
        self._skipped.add(sequence.sequence_id)

    def changed(self, sequence: Sequence) -> None:
        pass


class Fcfs(Sorted):
    """First come, first served; who was preempted keeps his place."""

    def key(self, sequence: Sequence) -> Any:
        return sequence.arrival


class Random(Sorted):
    """As drawn on arrival: what an order is worth that knows nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed

    def key(self, sequence: Sequence) -> Any:
        return random.Random(f"{self._seed} {sequence.arrival}").random()


class DepthFirst(Sorted):
    """As a depth-first walk of the tree of all that wait: the next in the order of tokens after the last admitted.

    Sorting by tokens is such a walk; requests that share a prefix stand side by side, and each prefix is finished with
    before the next is begun. Optimal when the pool holds the longest request (RadixAttention, theorem 3.1).
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple | None = None

    def key(self, sequence: Sequence) -> tuple:
        # The prompt alone: what is appended while it waits must not move it.
        return (repr(sequence.request.namespace), sequence.prompt, sequence.arrival)

    def start(self) -> int:
        return self._waiting.bisect_key_left(self._last) if self._last is not None else 0

    def remove(self, sequence: Sequence, *, is_started: bool) -> None:
        super().remove(sequence, is_started=is_started)
        if is_started:
            self._last = self.key(sequence)


class LongestPrefix:
    """The one with most tokens cached first (RadixAttention's order), the earliest of equals.

    Matches are watches of the cache: what another publishes or an eviction takes moves those whom it concerns, so no
    pass matches anything. Cost: O(log waiting) for each match that has changed since the last pass.
    """

    uses_matches = True

    def __init__(self) -> None:
        self._waiting: set[Sequence] = set()
        self._heap: list[tuple[int, tuple[int, int], int, Sequence]] = []  # also of what has changed or left since
        self._changed: set[Sequence] = set()
        self._skipped: set[Sequence] = set()

    @staticmethod
    def _entry(sequence: Sequence) -> tuple[int, tuple[int, int], int, Sequence]:
        assert sequence.watch is not None
        return (-sequence.watch.num_tokens, sequence.arrival, sequence.sequence_id, sequence)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        self._changed.add(sequence)

    def remove(self, sequence: Sequence, *, is_started: bool) -> None:
        self._waiting.remove(sequence)
        self._changed.discard(sequence)
        self._skipped.discard(sequence)

    def changed(self, sequence: Sequence) -> None:
        self._changed.add(sequence)

    def begin_pass(self) -> None:
        self._changed |= self._skipped
        self._skipped.clear()

    def next(self) -> Sequence | None:
        if len(self._changed) > len(self._waiting) // 8 or len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [self._entry(sequence) for sequence in self._waiting]
            heapify(self._heap)
        else:
            for sequence in self._changed:
                heappush(self._heap, self._entry(sequence))
        self._changed.clear()
        heap = self._heap
        while heap:
            matched, _, _, sequence = heap[0]
            is_there = sequence in self._waiting and sequence not in self._skipped
            if is_there and sequence.watch is not None and -matched == sequence.watch.num_tokens:
                return sequence
            heappop(heap)
        return None

    def skip(self, sequence: Sequence) -> None:
        self._skipped.add(sequence)


# Each makes an order; of a seed, where it draws.
ORDERS: dict[str, Callable[[int], Order]] = {
    "fcfs": lambda seed: Fcfs(),
    "random": Random,
    "longest_prefix": lambda seed: LongestPrefix(),
    "depth_first": lambda seed: DepthFirst(),
}


def make_order(name: str, seed: int = 0) -> Order:
    """Returns an order of that name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {name!r}")
    return ORDERS[name](seed)

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

from radixkv.scheduling.sequence import WaitingSequence

# num_matched_tokens negated, arrival, and a number that no other has, so that nothing further is compared
Entry = tuple[int, tuple[int, int], int, WaitingSequence]


class Order(Protocol):
    """The waiting sequences of one priority, and which of them is next.

    Attributes:
        uses_matches: whether sequences must come with a watch.
    """

    uses_matches: bool

    def __len__(self) -> int:
        """How many wait."""
        ...

    def add(self, waiting: WaitingSequence) -> None:
        """Takes one in. O(log waiting)."""

    def remove(self, waiting: WaitingSequence, *, is_started: bool) -> None:
        """Takes one out: it was admitted (`is_started`), or waits no longer for another reason. O(log waiting)."""

    def begin_pass(self) -> None:
        """Begins a pass of admissions: nothing is skipped yet. O(skipped in the pass before)."""

    def next(self) -> WaitingSequence | None:
        """Returns the sequence to try next, of those not skipped in this pass; None: no other."""
        ...

    def skip(self, waiting: WaitingSequence) -> None:
        """Leaves one out for the rest of this pass."""

    def changed(self, waiting: WaitingSequence) -> None:
        """Is told that more or fewer tokens of one are cached than before."""


class Sorted:
    """Sorted by a key that does not change while a sequence waits; the base of the orders that ask no cache.

    Cost: a pass where nothing changed looks at what it skips, each once; entering and leaving O(log waiting) keys.
    """

    uses_matches = False

    def __init__(self) -> None:
        self._waiting = SortedKeyList(key=self.key)
        self._skipped: set[WaitingSequence] = set()
        self._at: int | None = None  # the place to look at next; None: to be found again

    def key(self, waiting: WaitingSequence) -> Any:
        """Returns what sequences are sorted by, the least first."""
        raise NotImplementedError

    def start(self) -> int:
        """Returns the place at which a pass begins; from the end it goes on at the front."""
        return 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: WaitingSequence) -> None:
        """Takes one in. O(log waiting)."""
        self._waiting.add(waiting)
        self._at = None

    def remove(self, waiting: WaitingSequence, *, is_started: bool) -> None:
        """Takes one out. O(log waiting)."""
        self._waiting.remove(waiting)
        self._skipped.discard(waiting)
        self._at = None

    def begin_pass(self) -> None:
        """Begins a pass: nothing is skipped yet."""
        if self._skipped:
            self._skipped.clear()
            self._at = None

    def next(self) -> WaitingSequence | None:
        """Returns the one to try next; None: no other in this pass."""
        if len(self._skipped) >= len(self._waiting):
            return None
        if self._at is None:
            self._at = self.start()
        while True:
            waiting = self._waiting[self._at % len(self._waiting)]
            if waiting not in self._skipped:
                return waiting
            self._at += 1

    def skip(self, waiting: WaitingSequence) -> None:
        """Leaves one out for the rest of this pass. O(1)."""
        self._skipped.add(waiting)

    def changed(self, waiting: WaitingSequence) -> None:
        """Does nothing: the order does not depend on what is cached."""


class Fcfs(Sorted):
    """First come, first served; a preempted sequence keeps its place."""

    def key(self, waiting: WaitingSequence) -> Any:
        """By arrival."""
        return waiting.sequence.arrival


class Random(Sorted):
    """As drawn on arrival: the baseline that uses no knowledge."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed

    def key(self, waiting: WaitingSequence) -> Any:
        """By a number drawn from the seed and the arrival."""
        return random.Random(f"{self._seed} {waiting.sequence.arrival}").random()


class DepthFirst(Sorted):
    """As a depth-first walk of the tree of all that wait: the next in the order of tokens after the last admitted.

    Sorting by tokens is such a walk: requests that share a prefix are neighbours, and each prefix is finished before
    the next begins. Optimal when the pool holds the longest request (RadixAttention, theorem 3.1).
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple | None = None

    def key(self, waiting: WaitingSequence) -> tuple:
        """By namespace, then by the tokens of the prompt."""
        # The prompt alone: what is appended while it waits must not move it.
        sequence = waiting.sequence
        return (repr(sequence.request.namespace), sequence.prompt, sequence.arrival)

    def start(self) -> int:
        """Behind the one that was admitted last."""
        return self._waiting.bisect_key_left(self._last) if self._last is not None else 0

    def remove(self, waiting: WaitingSequence, *, is_started: bool) -> None:
        """Takes one out. O(log waiting)."""
        super().remove(waiting, is_started=is_started)
        if is_started:
            self._last = self.key(waiting)


class LongestPrefix:
    """The one with most tokens cached first (RadixAttention's order), the earliest of equals.

    Matches are watches of the cache: publishing and eviction move those that they concern, so no pass matches
    anything. Cost: O(log waiting) for each match that has changed since the last pass.
    """

    uses_matches = True

    def __init__(self) -> None:
        self._waiting: set[WaitingSequence] = set()
        self._heap: list[Entry] = []  # also of what has changed or left since
        self._changed: set[WaitingSequence] = set()
        self._skipped: set[WaitingSequence] = set()

    @staticmethod
    def _entry(waiting: WaitingSequence) -> Entry:
        sequence = waiting.sequence
        return (-waiting.num_matched_tokens, sequence.arrival, waiting.number, waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: WaitingSequence) -> None:
        """Takes one in. O(log waiting)."""
        self._waiting.add(waiting)
        self._changed.add(waiting)

    def remove(self, waiting: WaitingSequence, *, is_started: bool) -> None:
        """Takes one out. O(log waiting)."""
        self._waiting.remove(waiting)
        self._changed.discard(waiting)
        self._skipped.discard(waiting)

    def changed(self, waiting: WaitingSequence) -> None:
        """Is told that more or fewer of its tokens are cached. O(1)."""
        self._changed.add(waiting)

    def begin_pass(self) -> None:
        """Begins a pass: nothing is skipped yet."""
        self._changed |= self._skipped
        self._skipped.clear()

    def next(self) -> WaitingSequence | None:
        """Returns the one to try next; None: no other in this pass."""
        if len(self._changed) > len(self._waiting) // 8 or len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [self._entry(waiting) for waiting in self._waiting]
            heapify(self._heap)
        else:
            for waiting in self._changed:
                heappush(self._heap, self._entry(waiting))
        self._changed.clear()
        heap = self._heap
        while heap:
            matched, _, _, waiting = heap[0]
            is_there = waiting in self._waiting and waiting not in self._skipped
            if is_there and -matched == waiting.num_matched_tokens:
                return waiting
            heappop(heap)
        return None

    def skip(self, waiting: WaitingSequence) -> None:
        """Leaves one out for the rest of this pass. O(1)."""
        self._skipped.add(waiting)


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

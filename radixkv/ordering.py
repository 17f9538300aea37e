"""Which waiting sequence is tried next. Called by `radixkv.scheduler`, which bounds how often one may be overtaken.

An order knows what waits and nothing of blocks; `next` may be asked again after each admission of one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from sortedcontainers import SortedKeyList

from radixkv.cache.base import PrefixCache
from radixkv.sequence import Sequence
from radixkv.tokens import num_common_tokens


class Order(Protocol):
    """The waiting sequences, and which of them is next."""

    def add(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def begin_pass(self) -> None:
        """A new pass of admissions: the cache may have changed."""

    def next(self, skipped: set[int]) -> Sequence | None:
        """Returns the sequence to try next, leaving out those whose sequence_id is in `skipped`; None: no other."""
        ...

    def started(self, sequence: Sequence) -> None:
        """One was admitted; it was removed before."""


class Fcfs:
    """First come, first served."""

    def __init__(self, cache: PrefixCache) -> None:
        self._waiting = SortedKeyList(key=lambda sequence: sequence.arrival)

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def begin_pass(self) -> None:
        pass

    def next(self, skipped: set[int]) -> Sequence | None:
        return next((s for s in self._waiting if s.sequence_id not in skipped), None)

    def started(self, sequence: Sequence) -> None:
        pass


class LongestPrefix:
    """The one with most tokens cached first (RadixAttention's order), the earliest of equals.

    What is known of a match ages: it is looked at anew for a few in each pass, for newcomers, and for whoever is about
    to be chosen. Who shares a prefix with the one just admitted learns of it at once: that is published at once.

    Cost: a pass looks at REFRESHED matches and those of newcomers; an admission compares the first tokens of all that
    wait with one.
    """

    REFRESHED = 32

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._matched: dict[Sequence, int] = {}
        self._sorted = SortedKeyList(key=lambda sequence: (-self._matched[sequence], sequence.arrival))
        self._newcomers: dict[Sequence, None] = {}
        self._turn: deque[Sequence] = deque()  # whose turn it is to be looked at; may hold some that wait no longer
        self._is_known: set[Sequence] = set()  # looked at in this pass

    def add(self, sequence: Sequence) -> None:
        self._matched[sequence] = 0
        self._sorted.add(sequence)
        self._newcomers[sequence] = None
        self._turn.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._sorted.remove(sequence)
        del self._matched[sequence]
        self._newcomers.pop(sequence, None)

    def begin_pass(self) -> None:
        self._is_known.clear()
        for sequence in self._newcomers:
            self._look(sequence)
        self._newcomers.clear()
        for _ in range(min(self.REFRESHED, len(self._turn))):
            sequence = self._turn.popleft()
            if sequence in self._matched:
                self._look(sequence)
                self._turn.append(sequence)

    def _look(self, sequence: Sequence) -> None:
        self._set(sequence, self._cache.peek(sequence.packed(), sequence.request.namespace))
        self._is_known.add(sequence)

    def _set(self, sequence: Sequence, matched: int) -> None:
        if matched != self._matched[sequence]:
            self._sorted.remove(sequence)
            self._matched[sequence] = matched
            self._sorted.add(sequence)

    def next(self, skipped: set[int]) -> Sequence | None:
        while True:
            best = next((s for s in self._sorted if s.sequence_id not in skipped), None)
            if best is None or best in self._is_known:
                return best
            self._look(best)  # it may have been evicted, and another may be before it now

    def started(self, sequence: Sequence) -> None:
        tokens, namespace = sequence.packed(), sequence.request.namespace
        head = tokens[:64]
        for other, matched in list(self._matched.items()):
            if other.packed().startswith(head) and other.request.namespace == namespace:
                self._set(other, max(matched, num_common_tokens(other.packed(), tokens)))


class DepthFirst:
    """As a depth-first walk of the tree of all that wait: the next in the order of tokens after the last admitted.

    Sorting by tokens is such a walk; requests that share a prefix stand side by side, and each prefix is finished with
    before the next is begun. Optimal when the pool holds the longest request (RadixAttention, theorem 3.1).
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._waiting = SortedKeyList(key=self._key)
        self._last: tuple | None = None

    @staticmethod
    def _key(sequence: Sequence) -> tuple:
        # The prompt alone: what is appended while it waits must not move it.
        return (repr(sequence.request.namespace), sequence.prompt, sequence.arrival)

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def begin_pass(self) -> None:
        pass

    def next(self, skipped: set[int]) -> Sequence | None:
        at = self._waiting.bisect_key_left(self._last) if self._last is not None else 0
        for index in range(len(self._waiting)):
            sequence = self._waiting[(at + index) % len(self._waiting)]
            if sequence.sequence_id not in skipped:
                return sequence
        return None

    def started(self, sequence: Sequence) -> None:
        self._last = self._key(sequence)


ORDERS: dict[str, Callable[[PrefixCache], Order]] = {
    "fcfs": Fcfs,
    "longest_prefix": LongestPrefix,
    "depth_first": DepthFirst,
}


def make_order(name: str, cache: PrefixCache) -> Order:
    """Returns the order of that name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {name!r}")
    return ORDERS[name](cache)

"""Which waiting sequence is tried next. Called by `radixkv.scheduler`, which bounds how often one may be overtaken.

An order knows what waits and nothing of blocks; `next` may be asked again after each admission of one pass.
"""

from __future__ import annotations

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

    Cost: a peek for each that waits in each pass in which somebody may be admitted, and a comparison of tokens with
    whoever was admitted, because that one's prefix is published at once.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._matched: dict[Sequence, int] = {}
        self._is_stale = True

    def add(self, sequence: Sequence) -> None:
        self._matched[sequence] = 0
        self._is_stale = True

    def remove(self, sequence: Sequence) -> None:
        del self._matched[sequence]

    def begin_pass(self) -> None:
        self._is_stale = True

    def next(self, skipped: set[int]) -> Sequence | None:
        if self._is_stale:
            for sequence in self._matched:
                self._matched[sequence] = self._cache.peek(sequence.packed(), sequence.request.namespace)
            self._is_stale = False
        candidates = (item for item in self._matched.items() if item[0].sequence_id not in skipped)
        best = min(candidates, key=lambda item: (-item[1], item[0].arrival), default=None)
        return best[0] if best else None

    def started(self, sequence: Sequence) -> None:
        tokens = sequence.packed()
        for other, matched in self._matched.items():
            if other.request.namespace == sequence.request.namespace:
                self._matched[other] = max(matched, num_common_tokens(other.packed(), tokens))


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
    if name not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {name!r}")
    return ORDERS[name](cache)

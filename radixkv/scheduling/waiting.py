"""The queue of waiting sequences: priorities, an order within each, and a bound on how long anything waits.

**The bound.** A sequence that begins to wait as the q-th to do so is *due* as soon as q + max_overtakes have left the
queue (started, or ended otherwise), and while one is due nothing else starts. Whatever the order, the priorities and
what arrives later,

    number of starts before its own  <=  w + max_overtakes,    w: how many waited when it began to wait
    number of those that began to wait after it  <=  max_overtakes

So no sequence starts more than max_overtakes places later than under first come, first served. (At most one is due at a
time, except for those that come due because others were aborted, and these count as having left.) In time: from one
start to the next pass at most as many steps as what runs takes to its end, since with nothing running the next
candidate fits. A preempted sequence begins to wait anew, with a new number; only what arrived before it preempts it, so
finally often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sortedcontainers import SortedDict

from radixkv.cache.contract import PrefixCache
from radixkv.scheduling.ordering import Order, make_order
from radixkv.scheduling.sequence import Sequence, WaitingSequence


class WaitingQueue:
    """What waits, and which of it is next: the one that is due, else the highest priority's in its order.

    Args:
        cache: follows how much of each waiting sequence it holds, where the order or the eviction uses that.
        order: a name in `radixkv.scheduling.ordering.ORDERS`.
        max_overtakes: the bound, in sequences.
        queue_aware: let the cache evict last what waiting sequences match.
        seed: of the random order.

    Raises:
        ValueError: there is no order of that name.
    """

    def __init__(
        self, cache: PrefixCache, order: str, max_overtakes: int, *, queue_aware: bool = False, seed: int = 0
    ) -> None:
        self._cache = cache
        self._make_order = lambda: make_order(order, seed)
        self._is_watched = self._make_order().uses_matches or queue_aware
        self._queue_aware = queue_aware
        self._max_overtakes = max_overtakes
        self._orders: SortedDict = SortedDict()  # by -priority
        self._entries: OrderedDict[Sequence, WaitingSequence] = OrderedDict()  # in the order of their numbers
        self._num_entered = self._num_left = 0
        self._skipped: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they began to wait."""
        return iter(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence begin to wait. O(log waiting), and a match where the cache follows it."""
        waiting = WaitingSequence(sequence, self._num_entered)
        self._num_entered += 1
        order = self._order(sequence)
        if self._is_watched:
            waiting.watch = self._cache.watch(
                sequence.packed(),
                sequence.request.namespace,
                # Needed sooner, evicted later.
                rank=(sequence.request.priority, -waiting.number) if self._queue_aware else None,
                changed=lambda: order.changed(waiting),
            )
        self._entries[sequence] = waiting
        order.add(waiting)

    def remove(self, sequence: Sequence, *, is_started: bool) -> None:
        """Takes a sequence out that starts, or that ends without having started. O(log waiting)."""
        waiting = self._entries.pop(sequence)
        self._num_left += 1
        order = self._order(sequence)
        order.remove(waiting, is_started=is_started)
        if not len(order) and len(self._orders) > 1:  # there may be as many priorities as requests
            del self._orders[-sequence.request.priority]
        self._skipped.discard(sequence)
        if waiting.watch is not None:
            self._cache.unwatch(waiting.watch)

    def begin_pass(self) -> None:
        """Begins a pass of admissions: nothing is skipped yet."""
        self._skipped.clear()
        for order in self._orders.values():
            order.begin_pass()

    def next(self) -> Sequence | None:
        """Returns the sequence to try next; None: no other may start in this pass."""
        oldest = next(iter(self._entries.values()), None)
        if oldest is not None and self._num_left >= oldest.number + self._max_overtakes:
            return None if oldest.sequence in self._skipped else oldest.sequence
        for order in self._orders.values():
            waiting = order.next()
            if waiting is not None:
                return waiting.sequence
        return None

    def skip(self, sequence: Sequence) -> None:
        """Leaves a sequence out for the rest of this pass."""
        self._skipped.add(sequence)
        self._order(sequence).skip(self._entries[sequence])

    def _order(self, sequence: Sequence) -> Order:
        key = -sequence.request.priority
        if key not in self._orders:
            self._orders[key] = self._make_order()
        return self._orders[key]

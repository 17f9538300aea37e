"""A cache's events as numbered batches, and their followers: gaps are found, duplicates skipped, restarts noticed.

`EventLog` stands beside a cache and is flushed after every step; `Follower` stands beside an index. What carries
batches from one to the other may drop, double and reorder them: in this process a function call, else
`radixkv.fleet.routing.zmq`.

A batch whose first event is AllBlocksCleared needs nothing from before it. `EventLog.snapshot` makes such a batch of
all that the cache holds, for followers that have missed more than the log has kept.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from radixkv.cache.contract import PrefixCache
from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from radixkv.fleet.routing.wire import EventBatch

MEDIUM = "GPU"  # as vLLM calls the memory that a forward pass reads
KEPT_BATCHES = 10_000
MAX_AHEAD = 1_000

Numbered = tuple[int, EventBatch]


class EventLog:
    """Collects a cache's events into batches, numbers them from 0, and keeps the last ones.

    Args:
        cache: subscribed to here; what it holds already is in the first batch.
        num_kept: batches kept for `replay`.
        clock: seconds, for the time of each batch.

    Attributes:
        next_number: of the batch that comes next.
    """

    def __init__(
        self, cache: PrefixCache, *, num_kept: int = KEPT_BATCHES, clock: Callable[[], float] = time.time
    ) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept: expected an int >= 1, got {num_kept}")
        self.next_number = 0
        self._cache = cache
        self._clock = clock
        self._pending: list[Event] = [AllBlocksCleared()]  # a replica that had this address before holds nothing now
        self._kept: deque[Numbered] = deque(maxlen=num_kept)
        self._last_s = float("-inf")
        self._unsubscribe = cache.subscribe(self._hear)

    def flush(self) -> Numbered | None:
        """Makes a batch of what has happened since the last one; None where nothing has."""
        if not self._pending:
            return None
        # Later batches have later times, whatever the clock does: by that a follower tells a restart from a duplicate.
        self._last_s = max(self._clock(), math.nextafter(self._last_s, math.inf))
        numbered = self.next_number, EventBatch(self._last_s, tuple(self._pending))
        self._pending = []
        self.next_number += 1
        self._kept.append(numbered)
        return numbered

    def replay(self, start: int) -> list[Numbered]:
        """Returns the batches from a number on, as far as they are kept: the first may have a higher number."""
        return [numbered for numbered in self._kept if numbered[0] >= start]

    def snapshot(self) -> None:
        """Puts all that the cache holds into the next batch, for everyone. O(content)."""
        self._unsubscribe()
        self._pending = [AllBlocksCleared()]
        self._unsubscribe = self._cache.subscribe(self._hear)

    def close(self) -> None:
        """Hears the cache no longer."""
        self._unsubscribe()

    def _hear(self, _: int, event: Event) -> None:
        self._pending.append(replace(event, medium=MEDIUM) if isinstance(event, BlockStored | BlockRemoved) else event)


class Follower:
    """Applies the batches of one log in order, each once.

    Args:
        apply: called with each event.
        max_ahead: batches held back while an earlier one is missing; then the missing ones are given up.

    Attributes:
        expected: the number of the batch that comes next.
        num_duplicates, num_gaps: batches passed over, and times that something was missing, so far.
    """

    def __init__(self, apply: Callable[[Event], None], *, max_ahead: int = MAX_AHEAD) -> None:
        self.expected = 0
        self.num_duplicates = 0
        self.num_gaps = 0
        self._apply = apply
        self._max_ahead = max_ahead
        self._ahead: dict[int, EventBatch] = {}
        self._last_s = float("-inf")

    @property
    def is_behind(self) -> bool:
        """Whether a batch is missing that others came after: what was applied may be wrong until it is there."""
        return bool(self._ahead)

    def receive(self, number: int, batch: EventBatch) -> int | None:
        """Takes a batch in, in whatever order.

        Returns:
            None; or the number of the first batch that is missing, to be asked for (`EventLog.replay`).
        """
        is_old = batch.ts <= self._last_s if number < self.expected else batch.ts < self._last_s
        if is_old or number in self._ahead:
            self.num_duplicates += 1
            return self.expected if self._ahead else None
        if number < self.expected:
            self._restart()  # the publisher has begun anew: an old number with a new time
        self._ahead[number] = batch
        if len(self._ahead) > self._max_ahead:
            self.give_up()
        return self._drain()

    def give_up(self) -> None:
        """Goes on from the earliest batch at hand: what is missing can't be had. Nothing from before it counts."""
        if not self._ahead:
            return
        self.expected = min(self._ahead)
        if not _starts_anew(self._ahead[self.expected]):
            self._apply(AllBlocksCleared())
        self._drain()

    def _restart(self) -> None:
        self.expected = 0
        self._ahead.clear()
        self._apply(AllBlocksCleared())

    def _drain(self) -> int | None:
        while True:
            batch = self._ahead.pop(self.expected, None)
            if batch is None:
                # What starts anew needs nothing from before it.
                fresh = [number for number, ahead in self._ahead.items() if _starts_anew(ahead)]
                if not fresh:
                    break
                self.expected = max(fresh)
                self._ahead = {number: ahead for number, ahead in self._ahead.items() if number >= self.expected}
                continue
            self.expected += 1
            self._last_s = batch.ts
            for event in batch.events:
                self._apply(event)
        if not self._ahead:
            return None
        self.num_gaps += 1
        return self.expected


def _starts_anew(batch: EventBatch) -> bool:
    return bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)

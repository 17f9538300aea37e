"""The order of a trace file's requests, without the file in memory.

By timestamp; a record without one keeps its place behind the record before it in the file (at the file's start: before
the first that has one), and is counted. A file none of whose first LOOKAHEAD records has a timestamp is read turn by
turn: the first request of every record in file order, then the second ones, and so on; timestamps that come later are
not looked at, and counted. Records are read once where they fit a bounded cache, else again from their offsets.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from radixkv.traces.reader import Item

# With so many records without a timestamp at its start a file has none, and need not be read to its end to be ordered.
LOOKAHEAD = 32

Load = Callable[[int, int, int, int], Item]
OnOdd = Callable[[int, int, bool], None]


@dataclass(slots=True)
class Entry:
    """A record that was understood, and where to find it again."""

    number: int
    offset: int
    size_bytes: int
    item: Item


@dataclass(slots=True)
class _Index:
    """Where records are; 32 bytes each, and their items as long as they fit `budget_bytes`.

    What came first stays: rounds over all records would flush a cache of the most recent ones before its first hit.
    """

    load: Load
    budget_bytes: int
    numbers: array = field(default_factory=lambda: array("q"))
    offsets: array = field(default_factory=lambda: array("q"))
    sizes: array = field(default_factory=lambda: array("q"))
    num_requests: array = field(default_factory=lambda: array("q"))
    items: dict[int, Item] = field(default_factory=dict)

    def add(self, entry: Entry) -> int:
        at = len(self.numbers)
        self.numbers.append(entry.number)
        self.offsets.append(entry.offset)
        self.sizes.append(entry.size_bytes)
        self.num_requests.append(entry.item.num_requests)
        if entry.item.num_bytes <= self.budget_bytes:
            self.budget_bytes -= entry.item.num_bytes
            self.items[at] = entry.item
        return at

    def get(self, at: int, turn: int) -> tuple[int, Item, int]:
        item = self.items.get(at)
        if item is None:
            item = self.load(self.numbers[at], self.offsets[at], self.sizes[at], self.num_requests[at])
        return self.numbers[at], item, turn

    def drop(self, at: int) -> None:
        item = self.items.pop(at, None)
        if item is not None:
            self.budget_bytes += item.num_bytes


def in_order(entries: Iterator[Entry], load: Load, cache_bytes: int, on_odd: OnOdd) -> Iterator[tuple[int, Item, int]]:
    """Puts requests in order.

    Args:
        entries: the records in file order.
        load: reads the record of (number, offset, size_bytes, num_requests) again.
        cache_bytes: how much may be kept of items.
        on_odd: told the number and requests of every record that has a timestamp and is not ordered by it (True), or
            that has none where others have (False).

    Yields:
        (record number, item, turn), once per request. With timestamps nothing is yielded until all records were read;
        without, they stream after the first LOOKAHEAD.

    Cost: O(requests log requests) time. Memory: with timestamps, 32 bytes a record and 32 a request; without, 48 bytes
    a record of several turns, nothing for the others.
    """
    index = _Index(load, cache_bytes)
    owners, turns, times = array("q"), array("q"), array("d")
    here: float | None = None  # when the record before started, as far as is known
    for entry in entries:
        num_requests, stamps = entry.item.num_requests, entry.item.timestamps_s
        if not num_requests:
            continue
        if stamps is not None:
            if here is None:  # those before it had none: they come with it, before it
                times = array("d", [stamps[0]] * len(times))
                for at in range(len(index.numbers)):
                    on_odd(index.numbers[at], index.num_requests[at], False)
            here = stamps[0]
        elif here is not None:
            on_odd(entry.number, num_requests, False)
        at = index.add(entry)
        owners.extend([at] * num_requests)
        turns.extend(range(num_requests))
        times.extend([0.0 if here is None else here] * num_requests if stamps is None else stamps)
        if here is None and len(index.numbers) == LOOKAHEAD:
            break
    if here is None:
        yield from _by_turn(index, entries, on_odd)
        return
    left = array("q", index.num_requests)
    for i in np.argsort(np.array(times, np.float64), kind="stable"):
        at = owners[i]
        yield index.get(at, turns[i])
        left[at] -= 1
        if not left[at]:
            index.drop(at)


def _by_turn(index: _Index, entries: Iterator[Entry], on_odd: OnOdd) -> Iterator[tuple[int, Item, int]]:
    """Yields the first turns of what was indexed already and of the rest; then the later turns."""
    remaining = array("q")
    for at in range(len(index.numbers)):
        yield index.get(at, 0)
        if index.num_requests[at] > 1:
            remaining.append(at)
        else:
            index.drop(at)
    for current in entries:
        if current.item.num_requests and current.item.timestamps_s is not None:
            on_odd(current.number, current.item.num_requests, True)
        if current.item.num_requests:
            yield current.number, current.item, 0
        if current.item.num_requests > 1:
            remaining.append(index.add(current))
    turn = 1
    while remaining:
        later = array("q")
        for at in remaining:
            yield index.get(at, turn)
            if index.num_requests[at] > turn + 1:
                later.append(at)
            else:
                index.drop(at)
        remaining = later
        turn += 1

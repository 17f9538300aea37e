"""The order of a trace file's requests, without the file in memory.

By timestamp where every request has one; else turn by turn: the first request of every record in file order, then the
second ones, and so on. Records are read once where they fit a bounded cache, else again from their offsets.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from radixkv.workloads.reader import Item

Load = Callable[[int, int, int, int], Item]


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


def in_order(entries: Iterator[Entry], load: Load, cache_bytes: int) -> Iterator[tuple[int, Item, int]]:
    """Puts requests in order.

    Args:
        entries: the records in file order.
        load: reads the record of (number, offset, size_bytes, num_requests) again.
        cache_bytes: how much may be kept of items.

    Yields:
        (record number, item, turn), once per request. Until a record without timestamps shows up nothing is yielded,
        since sorting needs all; from then on records stream.

    Cost: O(requests log requests) time. Memory: with timestamps, 32 bytes a record and 32 a request; without, 48 bytes
    a record of several turns, nothing for the others.
    """
    index = _Index(load, cache_bytes)
    owners, turns, times = array("q"), array("q"), array("d")
    for entry in entries:
        if not entry.item.num_requests:
            continue
        stamps = entry.item.timestamps_s
        if stamps is None:
            yield from _by_turn(index, entry, entries)
            return
        at = index.add(entry)
        for turn, stamp in enumerate(stamps):
            owners.append(at)
            turns.append(turn)
            times.append(stamp)
    left = array("q", index.num_requests)
    for i in np.argsort(np.array(times, np.float64), kind="stable"):
        at = owners[i]
        yield index.get(at, turns[i])
        left[at] -= 1
        if not left[at]:
            index.drop(at)


def _by_turn(index: _Index, entry: Entry, entries: Iterator[Entry]) -> Iterator[tuple[int, Item, int]]:
    """Yields the first turns of what was indexed already, of `entry` and of the rest; then the later turns."""
    remaining = array("q")
    for at in range(len(index.numbers)):
        yield index.get(at, 0)
        if index.num_requests[at] > 1:
            remaining.append(at)
        else:
            index.drop(at)
    for current in chain((entry,), entries):
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

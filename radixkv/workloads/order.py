"""The order of a trace file's requests, without the file in memory.

By timestamp where every request has one; else turn by turn: the first request of every record in file order, then the
second ones, and so on. Records are read once where they fit a bounded cache, else again from their offsets.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from radixkv.workloads.reader import Item

Load = Callable[[int, int, int], Item]


@dataclass(slots=True)
class Entry:
    """A record that was understood, and where to find it again."""

    number: int
    offset: int
    size_bytes: int
    item: Item


@dataclass(slots=True)
class _Index:
    """Where records are; 24 bytes each, and their items as long as they fit `budget_bytes`.

    What came first stays: rounds over all records would flush a cache of the most recent ones before its first hit.
    """

    load: Load
    budget_bytes: int
    numbers: array = field(default_factory=lambda: array("q"))
    offsets: array = field(default_factory=lambda: array("q"))
    sizes: array = field(default_factory=lambda: array("q"))
    items: dict[int, Item] = field(default_factory=dict)

    def add(self, entry: Entry) -> int:
        at = len(self.numbers)
        self.numbers.append(entry.number)
        self.offsets.append(entry.offset)
        self.sizes.append(entry.size_bytes)
        if entry.item.num_bytes <= self.budget_bytes:
            self.budget_bytes -= entry.item.num_bytes
            self.items[at] = entry.item
        return at

    def get(self, at: int) -> Item:
        item = self.items.get(at)
        return self.load(self.numbers[at], self.offsets[at], self.sizes[at]) if item is None else item

    def drop(self, at: int) -> None:
        item = self.items.pop(at, None)
        if item is not None:
            self.budget_bytes += item.num_bytes


def in_order(entries: Iterator[Entry], load: Load, cache_bytes: int) -> Iterator[tuple[int, Item, int]]:
    """Puts requests in order.

    Args:
        entries: the records in file order.
        load: reads the record of (number, offset, size_bytes) again.
        cache_bytes: how much may be kept of items.

    Yields:
        (record number, item, turn), once per request. Until a record without timestamps shows up nothing is yielded,
        since sorting needs all; from then on records stream.

    Cost: O(requests log requests) time; 24 bytes a record (records of one turn without timestamps: none), 16 a
    timestamp.
    """
    index = _Index(load, cache_bytes)
    turns, times = array("q"), array("d")
    owners = array("q")
    for entry in entries:
        stamps = entry.item.timestamps_s
        if stamps is None and entry.item.num_requests:
            yield from _by_turn(index, owners, turns, entry, entries)
            return
        at = index.add(entry) if entry.item.num_requests else -1
        for turn, stamp in enumerate(stamps or ()):
            owners.append(at)
            turns.append(turn)
            times.append(stamp)
    left = np.bincount(np.frombuffer(owners, np.int64)) if owners else np.zeros(0, np.int64)
    for at in np.argsort(np.frombuffer(times, np.float64), kind="stable") if times else ():
        owner = owners[at]
        yield index.numbers[owner], index.get(owner), turns[at]
        left[owner] -= 1
        if not left[owner]:
            index.drop(owner)


def _by_turn(
    index: _Index, owners: array, turns: array, entry: Entry, entries: Iterator[Entry]
) -> Iterator[tuple[int, Item, int]]:
    """Yields the first turns, of what was indexed already, of `entry` and of the rest; then the later turns."""
    remaining: list[tuple[int, int]] = []  # (record, its number of turns), of records with turns to come
    counts: dict[int, int] = {}
    for owner, turn in zip(owners, turns, strict=True):
        counts[owner] = turn + 1
    for at, count in counts.items():
        yield index.numbers[at], index.get(at), 0
        if count > 1:
            remaining.append((at, count))
        else:
            index.drop(at)
    current: Entry | None = entry
    while current is not None:
        item = current.item
        if item.num_requests:
            yield current.number, item, 0
        if item.num_requests > 1:
            remaining.append((index.add(current), item.num_requests))
        current = next(entries, None)
    turn = 1
    while remaining:
        for at, count in remaining:
            yield index.numbers[at], index.get(at), turn
            if turn + 1 == count:
                index.drop(at)
        turn += 1
        remaining = [(at, count) for at, count in remaining if count > turn]

"""The keys of a node's children in sorted order, for partial matches and partial blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedList

# Removed keys that may stay whatever the number of children.
_FEW = 64


class ChildOrder:
    """Sorted keys; one that is removed stays where it is until it is met or there are too many of its kind.

    Children are added and removed far more often than a partial match looks between them, and taking a key out of a
    long sorted list is most of what evicting a leaf would cost.

    Cost: `add` O(log keys); `remove` O(1), amortised; `place`, `up` and `down` O(log keys), amortised.
    """

    __slots__ = ("_gone", "_keys")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = SortedList(keys)
        self._gone: set[bytes] = set()  # removed, and still in _keys

    def add(self, key: bytes) -> None:
        """Puts a key in; it must not be in."""
        if key in self._gone:
            self._gone.remove(key)
        else:
            self._keys.add(key)

    def remove(self, key: bytes) -> None:
        """Takes a key out; it must be in."""
        gone = self._gone
        gone.add(key)
        if len(gone) > _FEW and 2 * len(gone) > len(self._keys):
            self._keys = SortedList(key for key in self._keys if key not in gone)
            gone.clear()

    def place(self, key: bytes) -> int:
        """Returns the place of a key, or the one where it would stand."""
        return self._keys.bisect_left(key)

    def up(self, place: int) -> tuple[bytes, int]:
        """Returns the first key at a place or after it, and the place to go on from; no bytes where there is none."""
        keys, gone = self._keys, self._gone
        while place < len(keys):
            key = keys[place]
            if key not in gone:
                return key, place + 1
            del keys[place]
            gone.remove(key)
        return b"", place

    def down(self, place: int) -> tuple[bytes, int]:
        """Returns the last key before a place, and the place to go on from; no bytes where there is none."""
        keys, gone = self._keys, self._gone
        while place:
            place -= 1
            key = keys[place]
            if key not in gone:
                return key, place
            del keys[place]
            gone.remove(key)
        return b"", 0

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self._keys if key not in self._gone)

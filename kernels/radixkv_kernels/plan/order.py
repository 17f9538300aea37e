"""An order in which sequences with a common prefix stand together: by the last block ids of their full cells."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

FEW = 16
"""Up to so many changed keys are looked up one by one."""
TOP = 1 << 62


def sort_sequences(keys: np.ndarray, whole: np.ndarray, full: np.ndarray) -> np.ndarray:
    """The order [num_seqs] int64 by cells [0, full); ties by number.

    Args:
        keys: [num_seqs, num_cells] int32, last block id of each cell; overwritten where windows hide cells.
        whole, full: [num_seqs]: cells [whole, full) can be shared, and keys of others may be anything.

    O(num_seqs * num_cells), and a sort of as many byte strings.
    """
    num_seqs, num_cells = keys.shape
    if whole.any():
        cells = np.arange(num_cells)
        _fill_before_windows(keys, (cells < full[:, None]) & (cells >= whole[:, None]))
    rows = _as_bytes(keys, full)
    return np.array(sorted(range(num_seqs), key=rows.__getitem__), dtype=np.int64)


def _as_bytes(keys: np.ndarray, full: np.ndarray) -> list[bytes]:
    """Each row's first `full` keys."""
    data, width = keys.tobytes(), keys.itemsize * keys.shape[1]
    ends = (full * keys.itemsize + np.arange(len(keys)) * width).tolist()
    return [data[i * width : end] for i, end in enumerate(ends)]


class KeptOrder:
    """The same order, of rows that change a few at a time.

    Each row has a place, a number that ascends as keys do; so sorting numbers is sorting keys. A row whose key changed
    takes a number halfway between those of its neighbours.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._numbers: list[int] = []
        self._places = np.zeros(0, dtype=np.int64)
        self._cells = np.zeros(0, dtype=np.int64)

    def grow(self, num_rows: int) -> None:
        """Room for rows [0, num_rows); never less."""
        more = num_rows - len(self._places)
        if not more:
            return
        self._places = np.append(self._places, np.zeros(more, dtype=np.int64))
        self._cells = np.append(self._cells, np.full(more, -1))

    def forget(self, row: int) -> None:
        """The row's key is another from now on."""
        self._cells[row] = -1

    def sort(self, rows: np.ndarray, keys: np.ndarray, full: np.ndarray) -> np.ndarray:
        """`sort_sequences` of rows [num_seqs] without windows; keys [all rows, cells], full [num_seqs].

        O(num_seqs), a look-up for each row whose number of full cells is another than at the last call, or where they
        are many or numbers run out a sort of all keys.
        """
        changed = (self._cells.take(rows) != full).nonzero()[0]
        if len(changed):
            if len(changed) > FEW or len(self._keys) > 2 * len(rows) + FEW:
                self._renew(rows, keys, full)
            else:
                for row, cells in zip(rows[changed].tolist(), full[changed].tolist(), strict=True):
                    place = self._place(keys[row, :cells].tobytes())
                    if place is None:
                        self._renew(rows, keys, full)
                        break
                    self._places[row], self._cells[row] = place, cells
        return self._places.take(rows).argsort(kind="stable")

    def _place(self, key: bytes) -> int | None:
        """The key's number; None where there is none left."""
        i = bisect_left(self._keys, key)
        if i < len(self._keys) and self._keys[i] == key:
            return self._numbers[i]
        before = self._numbers[i - 1] if i else 0
        number = (before + (self._numbers[i] if i < len(self._keys) else TOP)) // 2
        if number == before:
            return None
        self._keys.insert(i, key)
        self._numbers.insert(i, number)
        return number

    def _renew(self, rows: np.ndarray, keys: np.ndarray, full: np.ndarray) -> None:
        """Numbers afresh for these rows, none for others."""
        before = self._places[rows].argsort(kind="stable")  # what is nearly sorted is sorted fast
        rows, full = rows[before], full[before]
        found = _as_bytes(keys[:, : int(full.max())].take(rows, axis=0), full)
        order = sorted(range(len(rows)), key=found.__getitem__)
        self._keys, count, last = [], [], None
        for i in order:
            if found[i] != last:
                last = found[i]
                self._keys.append(last)
            count.append(len(self._keys))
        step = TOP // (len(self._keys) + 1)
        self._numbers = list(range(step, step * (len(self._keys) + 1), step))
        self._places[rows[order]] = np.array(count) * step
        self._cells[:] = -1
        self._cells[rows] = full


def _fill_before_windows(keys: np.ndarray, known: np.ndarray) -> None:
    """Gives cells that fell out of a sequence's window the key of a sequence that still has them and agrees later.

    For the order only: without it, sharers whose windows begin in different cells would not meet.
    """
    keys[~known] = -1
    for c in range(keys.shape[1] - 2, -1, -1):
        have = known[:, c] & known[:, c + 1]
        want = known[:, c + 1] & ~known[:, c]
        if not (have.any() and want.any()):
            continue
        following, at = np.unique(keys[have, c + 1], return_index=True)
        place = np.minimum(np.searchsorted(following, keys[want, c + 1]), len(following) - 1)
        found = following[place] == keys[want, c + 1]
        rows = np.nonzero(want)[0][found]
        keys[rows, c] = keys[have, c][at[place[found]]]
        known[rows, c] = True

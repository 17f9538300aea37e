"""Which cells sequences have in common.

Two sequences share a cell where both hold all of it and their blocks of it are the same ids; since a prefix cache gives
one block to one prefix, the last block id of each cell is a good key to sort by, and whether neighbours really agree is
then compared exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Extents:
    """Which cells each sequence has to read, and which of them it can share; every array [num_seqs] int64.

    With the query lengths these are all that a plan knows of lengths: first, last, whole and full are the same for all
    `seq_lens` in [low, high] and for no others, so a step that crosses no cell border keeps its plan. What its rows may
    see in the meantime is what they see at `low` (of a window the first key) and at `high` (the last).
    """

    first: np.ndarray
    """First cell that some row sees; last: one past the last; first == last for a sequence without keys or rows."""
    last: np.ndarray
    whole: np.ndarray
    """Cells [whole, full) can be shared: every token is there, and visible to the sequence's first row."""
    full: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def of(seq_lens: np.ndarray, q_lens: np.ndarray, cell_size: int, window: int | None) -> Extents:
        """seq_lens, q_lens [num_seqs] int64, as `check_lengths` lets them pass; a causal window. O(num_seqs)."""
        if window is None and np.minimum(seq_lens, q_lens).min(initial=1) > 0:
            full = (seq_lens - 1) // cell_size
            zero = np.zeros(full.shape, dtype=np.int64)
            low = full * cell_size + 1
            return Extents(zero, full + 1, zero, full, low, low + (cell_size - 1))
        busy = (seq_lens > 0) & (q_lens > 0)
        # a cell counts as full once a later one exists, so a sequence changes its cells once a cell_size tokens
        full = np.where(busy, (seq_lens - 1) // cell_size, 0)
        last = np.where(busy, full + 1, 0)
        low, high = np.where(busy, full * cell_size + 1, 0), np.where(busy, last * cell_size, 0)
        unseen = q_lens == 0
        high = np.where(unseen, np.iinfo(np.int64).max, high)
        if window is None:
            zero = np.zeros_like(full)
            return Extents(zero, last, zero, full, low, high)
        before = q_lens + window - 1
        lo = np.where(busy, np.maximum(seq_lens - before, 0), 0)
        first = lo // cell_size
        whole = np.minimum(np.where(lo > 0, first + 1, 0), full)
        # a window that begins in a sequence's only cell hides nothing that could be shared
        hides = whole > 0
        low = np.where(hides, np.maximum(low, np.maximum(first * cell_size, 1) + before), low)
        limit = np.where(hides, (first + 1) * cell_size - 1, 0) + before
        high = np.where(full > 0, np.minimum(high, limit), high)
        return Extents(first, last, whole, full, low, high)

    def holds(self, seq_lens: np.ndarray) -> bool:
        """Whether a plan made of these extents serves these lengths. O(num_seqs)."""
        return bool(((seq_lens >= self.low) & (seq_lens <= self.high)).all())


class CellNumbers:
    """A number for each different cell that is in use: equal numbers, equal block ids. Numbers are used again."""

    def __init__(self) -> None:
        self._number_of: dict[bytes, int] = {}
        self._uses: list[int] = []
        self._content: list[bytes] = []
        self._unused: list[int] = []
        self.num_shared = 0
        """Cells that are in use twice or more."""

    def take(self, data: bytes, starts: list[int], stops: list[int]) -> list[int]:
        """The numbers of the cells data[starts[i]:stops[i]] (their block ids), each in use once more. O(data)."""
        uses, numbers = self._uses, []
        for start, stop in zip(starts, stops, strict=True):
            content = data[start:stop]
            number = self._number_of.get(content)
            if number is None:
                if self._unused:
                    number = self._unused.pop()
                    self._content[number] = content
                else:
                    number = len(uses)
                    uses.append(0)
                    self._content.append(content)
                self._number_of[content] = number
            uses[number] += 1
            if uses[number] == 2:
                self.num_shared += 1
            numbers.append(number)
        return numbers

    def release(self, numbers: list[int]) -> None:
        """Each in use once less; a number that is in use no more is free for another cell. O(len(numbers))."""
        uses = self._uses
        for number in numbers:
            uses[number] -= 1
            if uses[number] == 1:
                self.num_shared -= 1
            elif uses[number] == 0:
                del self._number_of[self._content[number]]
                self._content[number] = b""
                self._unused.append(number)


def cell_columns(num_cells: int, cell_size: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last column of a block table that each cell touches, [num_cells] int64."""
    cells = np.arange(num_cells)
    return cells * cell_size // block_size, ((cells + 1) * cell_size - 1) // block_size


def both_hold(whole: np.ndarray, full: np.ndarray, num_cells: int) -> np.ndarray:
    """[num_seqs - 1, num_cells] bool: whether each sequence and the one before it can both share the cell."""
    cells = np.arange(num_cells, dtype=np.int32)
    result: np.ndarray = cells < np.minimum(full[1:], full[:-1]).astype(np.int32)[:, None]
    if whole.any():
        result &= cells >= np.maximum(whole[1:], whole[:-1])[:, None]
    return result


def same_as_before(
    table: np.ndarray,
    order: np.ndarray,
    keys: np.ndarray,
    whole: np.ndarray,
    full: np.ndarray,
    cell_size: int,
    block_size: int,
) -> np.ndarray:
    """Whether each cell is the one of the sequence before it in `order`, compared block by block.

    table: [num_seqs, columns] int32; whole, full: [num_seqs], in `order`. Returns [num_seqs, num_cells] bool, row i
    about order[i]; row 0 is False. O(num_seqs * columns of the cells whose last blocks agree).
    """
    ordered = keys[order]
    same = np.zeros(keys.shape, dtype=bool)
    np.equal(ordered[1:], ordered[:-1], out=same[1:])
    same[1:] &= both_hold(whole, full, keys.shape[1])
    used = same.any(0)
    if not used.any():
        return same
    num_cells = int(np.nonzero(used)[0][-1]) + 1
    begin, end = cell_columns(num_cells, cell_size, block_size)
    if (begin == end).all():
        return same  # a cell has one block, and those were just compared
    rows = _unlike_rows(table, order, same, end)
    if not len(rows):
        return same
    columns = int(end[-1]) + 1
    differ = table[order[rows], :columns] != table[order[rows - 1], :columns]
    if cell_size % block_size == 0:
        different = differ.reshape(len(rows), num_cells, cell_size // block_size).any(2)
    else:
        counts = np.zeros((len(rows), columns + 1), dtype=np.int32)
        np.cumsum(differ, axis=1, out=counts[:, 1:])
        different = counts[:, end + 1] != counts[:, begin]
    same[rows, :num_cells] &= ~different
    return same


def _unlike_rows(table: np.ndarray, order: np.ndarray, same: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Rows of `same` with some True cell whose block ids don't agree from column 0 on, to be looked at cell by cell.

    Comparing whole rows as bytes is twice as fast as comparing numbers, and with block ids of a prefix cache it is all.
    """
    rows = np.flatnonzero(same.any(1))
    num_cells = len(end)
    columns = end[num_cells - 1 - same[rows, num_cells - 1 :: -1].argmax(1)] + 1
    seqs = order.tolist()
    unlike = []
    data, at, known = b"", -1, 0  # `data` begins with the first `known` block ids of sequence number `at` in order
    for row, count in zip(rows.tolist(), columns.tolist(), strict=True):
        if at != row - 1 or known < count:
            data = table[seqs[row - 1], :count].tobytes()
        if data.startswith(table[seqs[row], :count].data):
            at, known = row, count
        else:
            unlike.append(row)
            at = -1
    return np.array(unlike, dtype=np.int64)


def last_block_keys(table: np.ndarray, num_cells: int, cell_size: int, block_size: int) -> np.ndarray:
    """[num_seqs, num_cells] int32: the last block id of each cell; past a table's end its last column."""
    _, end = cell_columns(num_cells, cell_size, block_size)
    return table[:, np.minimum(end, max(0, table.shape[1] - 1))] if num_cells else table[:, :0]

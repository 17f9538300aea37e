"""The block tables of live sequences, each in a row, with a number for each of their cells."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .cells import CellNumbers, cell_columns


class KeptTables:
    """Rows of block ids that come, grow and go. Arrays are [rows, ..] and only grow; a free row may hold anything.

    Arguments are taken as they come: `TreePlanner` checks them. Nothing is undone where a call is interrupted.
    """

    def __init__(self, block_size: int, cell_size: int) -> None:
        self._block_size, self._cell_size = block_size, cell_size
        self._row_of: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._cells = CellNumbers()
        self._columns = np.zeros((2, 0), dtype=np.int64)
        self.blocks = np.zeros((0, 0), dtype=np.int32)
        """[rows, columns] block ids."""
        self.num_blocks = np.zeros(0, dtype=np.int64)
        self.keys = np.zeros((0, 0), dtype=np.int32)
        """[rows, cells]: last block id of each cell whose blocks are all known; numbers: a number for all its ids."""
        self.numbers = np.zeros((0, 0), dtype=np.int32)
        self.num_cells = np.zeros(0, dtype=np.int64)
        self.contents = np.zeros(0, dtype=np.int64)
        """[rows]: how many times other blocks took the place of a row's."""

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, sequence: Hashable) -> bool:
        return sequence in self._row_of

    @property
    def num_shared(self) -> int:
        """Different cells that two sequences or more hold."""
        return self._cells.num_shared

    def row(self, sequence: Hashable) -> int:
        """KeyError where it isn't there."""
        return self._row_of[sequence]

    def rows(self, sequences: Sequence[Hashable]) -> np.ndarray:
        """[num_seqs] int64; KeyError where one isn't there."""
        return np.fromiter(map(self._row_of.__getitem__, sequences), np.int64, len(sequences))

    def add(self, sequence: Hashable, ids: np.ndarray) -> None:
        """A new sequence of the blocks ids [num_blocks]. O(num_blocks)."""
        if not self._free:
            self._grow(max(8, 2 * len(self.blocks)), self.blocks.shape[1])
        if len(ids) > self.blocks.shape[1]:
            self._grow(len(self.blocks), max(len(ids), 2 * self.blocks.shape[1]))
        row = self._row_of[sequence] = self._free.pop()
        self.blocks[row, : len(ids)] = ids
        self.contents[row] += 1
        self.num_blocks[row] = len(ids)
        self._number_cells(row)

    def append(self, row: int, block: int) -> None:
        """O(1), amortised."""
        count = int(self.num_blocks[row])
        if count == self.blocks.shape[1]:
            self._grow(len(self.blocks), max(8, 2 * count))
        self.blocks[row, count] = block
        self.num_blocks[row] = count + 1
        if (count + 1) * self._block_size >= (int(self.num_cells[row]) + 1) * self._cell_size:
            self._number_cells(row)

    def replace(self, row: int, index: int, block: int) -> None:
        """Another block in place of the row's block number `index`. O(cells)."""
        self.blocks[row, index] = block
        self.contents[row] += 1
        self._forget_cells(row, index * self._block_size // self._cell_size)
        self._number_cells(row)

    def remove(self, sequence: Hashable) -> None:
        """Frees the sequence's row; what is written there stays until another takes it. O(cells)."""
        row = self._row_of.pop(sequence)
        self._forget_cells(row, 0)
        self.num_blocks[row] = 0
        self._free.append(row)

    def as_they_were(self, rows: np.ndarray, contents: np.ndarray) -> np.ndarray | None:
        """[len(rows), columns]: block tables that a plan was made of; None where a row has had other blocks since."""
        return self.blocks[rows] if np.array_equal(contents, self.contents[rows]) else None

    def _number_cells(self, row: int) -> None:
        """Numbers the cells of a row whose blocks are there and that have no number yet."""
        done, known = int(self.num_cells[row]), int(self.num_blocks[row]) * self._block_size // self._cell_size
        if done == known:
            return
        begin, end = self._columns[:, done:known]
        blocks = self.blocks[row]
        data = blocks[begin[0] : end[-1] + 1].tobytes()
        start = blocks.itemsize * (begin - begin[0])
        stop = blocks.itemsize * (end - begin[0] + 1)
        self.numbers[row, done:known] = self._cells.take(data, start.tolist(), stop.tolist())
        self.keys[row, done:known] = blocks.take(end)
        self.num_cells[row] = known

    def _forget_cells(self, row: int, first: int) -> None:
        """Takes their numbers from the row's cells [first, all)."""
        self._cells.release(self.numbers[row, first : int(self.num_cells[row])].tolist())
        self.num_cells[row] = min(first, int(self.num_cells[row]))

    def _grow(self, num_rows: int, columns: int) -> None:
        """Makes room; never less."""
        old = len(self.blocks)
        cells = columns * self._block_size // self._cell_size
        self._columns = np.array(cell_columns(cells, self._cell_size, self._block_size))
        for name, width in (("blocks", columns), ("keys", cells), ("numbers", cells)):
            before = getattr(self, name)
            grown = np.zeros((num_rows, width), dtype=np.int32)
            grown[:old, : before.shape[1]] = before
            setattr(self, name, grown)
        for name in ("num_blocks", "num_cells", "contents"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(num_rows - old, dtype=np.int64))))
        self._free[:0] = range(num_rows - 1, old - 1, -1)

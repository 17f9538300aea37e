"""Plans kept up to date while sequences come, grow and go: what an engine calls each step.

Each cell of a sequence gets a number that stands for its block ids, the same for every sequence with the same ids
there; so what neighbours share is a comparison of small arrays, and most steps, in which no sequence crosses a cell
border, return the plan of the step before.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from ..contract import PlanConfig, expect
from .cells import Extents, both_hold, cell_columns
from .cuts import Memo
from .order import KeptOrder, sort_sequences
from .tree_plan import TreePlan, assemble, check_lengths, host_array

MAX_ID = 2**31 - 1


class TreePlanner:
    """The block tables of live sequences, and plans over any of them. Not for several threads at once.

    A call that is interrupted (KeyboardInterrupt, MemoryError) may have changed half of what it was to change: every
    later call raises RuntimeError then, and a new planner is to be made. Errors that a call names change nothing.

    >>> planner = TreePlanner(PlanConfig(block_size=16, num_q_heads=8, num_kv_heads=2))
    >>> planner.add("a", range(20)); planner.add("b", [*range(18), 30])
    >>> planner.plan(["a", "b"], np.array([310, 300]), np.array([0, 1, 2])).shares
    True
    """

    def __init__(self, config: PlanConfig) -> None:
        expect(isinstance(config, PlanConfig), "config", "a PlanConfig", config)
        self.config = config
        self._row_of: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._num_blocks = np.zeros(0, dtype=np.int64)
        # of each cell whose blocks are all known: its last block id, and the number of its block ids
        self._keys = np.zeros((0, 0), dtype=np.int32)
        self._numbers = np.zeros((0, 0), dtype=np.int32)
        self._num_cells = np.zeros(0, dtype=np.int64)
        self._contents = np.zeros(0, dtype=np.int64)  # counts the times that other blocks took the place of a row's
        self._columns = np.zeros((2, 0), dtype=np.int64)
        self._number_of: dict[bytes, int] = {}
        self._uses: list[int] = []
        self._content: list[bytes] = []
        self._unused: list[int] = []
        self._num_shared = 0
        self._order = KeptOrder()
        self._memo = Memo()
        self._last: tuple[TreePlan, list[Hashable], np.ndarray] | None = None  # with its sequences and their rows
        self._changing = False  # while it is, and for ever where that was interrupted

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, sequence: Hashable) -> bool:
        return sequence in self._row_of

    @property
    def may_share(self) -> bool:
        """Whether any two sequences hold a cell of the same blocks; if not, no plan shares anything. O(1)."""
        self._check_whole()
        return self._num_shared > 0

    def add(self, sequence: Hashable, blocks: Sequence[int] | np.ndarray) -> None:
        """A sequence and its block ids; ValueError where it is there already. O(blocks), an array being fastest."""
        expect(sequence not in self._row_of, "sequence", "one that is not there yet", sequence)
        ids = np.asarray(blocks)
        numbers = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
        fit = numbers and (ids.dtype == np.int32 or -MAX_ID <= ids.min(initial=0) <= ids.max(initial=0) <= MAX_ID)
        expect(bool(fit), "blocks", "a sequence of block ids, int32", blocks)
        self._begin()
        if not self._free:
            self._grow(max(8, 2 * len(self._table)), self._table.shape[1])
        if len(ids) > self._table.shape[1]:
            self._grow(len(self._table), max(len(ids), 2 * self._table.shape[1]))
        row = self._row_of[sequence] = self._free.pop()
        self._table[row, : len(ids)] = ids
        self._contents[row] += 1
        self._num_blocks[row] = len(ids)
        self._number_cells(row)
        self._last, self._changing = None, False

    def append(self, sequence: Hashable, block: int) -> None:
        """One more block at the sequence's end; KeyError where it isn't there. O(1), amortised."""
        row = self._row_of[sequence]
        block = block_id(block)
        self._begin()
        count = int(self._num_blocks[row])
        if count == self._table.shape[1]:
            self._grow(len(self._table), max(8, 2 * count))
        self._table[row, count] = block
        self._num_blocks[row] = count + 1
        if (count + 1) * self.config.block_size >= (int(self._num_cells[row]) + 1) * self.config.cell_size:
            self._number_cells(row)
        self._changing = False  # and the last plan holds: of the cells that it knows none is another

    def replace(self, sequence: Hashable, index: int, block: int) -> None:
        """Another block in place of the sequence's block number `index`; IndexError past its end. O(cells)."""
        row = self._row_of[sequence]
        expect(isinstance(index, int | np.integer), "index", "an int", index)
        if not 0 <= index < self._num_blocks[row]:
            raise IndexError(f"index: expected one below {self._num_blocks[row]}, got {index}")
        block = block_id(block)
        self._begin()
        self._table[row, index] = block
        self._contents[row] += 1
        self._forget_cells(row, index * self.config.block_size // self.config.cell_size)
        self._number_cells(row)
        self._last, self._changing = None, False

    def remove(self, sequence: Hashable) -> None:
        """Forgets a sequence; KeyError where it isn't there. O(cells)."""
        row = self._row_of[sequence]
        self._begin()
        del self._row_of[sequence]
        self._forget_cells(row, 0)
        self._num_blocks[row] = 0
        self._free.append(row)
        self._last, self._changing = None, False

    def plan(
        self, sequences: Sequence[Hashable], seq_lens: Tensor | np.ndarray, cu_seqlens_q: Tensor | np.ndarray
    ) -> TreePlan:
        """The plan of a batch of these sequences in this order, equal to `TreePlan.from_block_table` of their tables.

        Args:
            sequences: [num_seqs], each added before.
            seq_lens, cu_seqlens_q: as for `TreePlan.from_block_table`; on the CPU, or it synchronises.

        Returns the plan of the call before, the same object, where `TreePlan.serves` this batch of the same sequences
            and none has got other blocks: then nothing needs to be uploaded.
        Raises KeyError for a sequence that isn't there, ValueError naming the argument; then nothing has changed.
        O(num_seqs), or where a cell border was crossed or the batch changed O(num_seqs * cells).
        """
        self._check_whole()
        lens = host_array("seq_lens", seq_lens, 1).astype(np.int64)
        cu = host_array("cu_seqlens_q", cu_seqlens_q, 1)
        try:
            names = list(sequences)
            known = self._last if self._last is not None and self._last[1] == names else None
            rows = known[2] if known else self._rows_of(names)
        except TypeError:
            raise ValueError(f"sequences: expected a list of names, got {sequences!r}") from None
        fits = len(lens) == len(rows) and (lens <= self._num_blocks.take(rows) * self.config.block_size).all()
        expect(bool(fits), "seq_lens", "a length a sequence, no longer than its blocks", seq_lens)
        if known and known[0].serves(lens, cu):
            return known[0]
        cu = cu.astype(np.int64)
        q_lens = check_lengths(self.config, lens, cu, len(rows))
        extents = Extents.of(lens, q_lens, self.config.cell_size, self.config.window)
        active = q_lens.nonzero()[0]
        some, whole, full = rows, extents.whole, extents.full
        if len(active) < len(rows):
            some, whole, full = rows[active], whole[active], full[active]
        num_cells = int(full.max(initial=0))
        if whole.any():
            order = sort_sequences(self._keys[:, :num_cells].take(some, axis=0), whole, full)
        else:
            self._changing = True
            order = self._order.sort(some, self._keys, full)
            self._changing = False
        numbers = self._numbers[:, :num_cells].take(some.take(order), axis=0)
        same = np.zeros(numbers.shape, dtype=bool)
        np.equal(numbers[1:], numbers[:-1], out=same[1:])
        same[1:] &= both_hold(whole.take(order), full.take(order), num_cells)
        work = assemble(self.config, active[order], same, extents, cu, self._memo)
        plan = TreePlan(self.config, work, extents, cu, lens, partial(self._table_of, rows, self._contents[rows]))
        self._last = plan, names, rows
        return plan

    def _begin(self) -> None:
        """Before anything is changed that plans rest on; `_changing` is taken back once all of it is."""
        self._check_whole()
        self._changing = True

    def _check_whole(self) -> None:
        if self._changing:
            raise RuntimeError("planner: expected one no call of which was interrupted; make a new one")

    def _rows_of(self, names: list[Hashable]) -> np.ndarray:
        rows = np.fromiter(map(self._row_of.__getitem__, names), np.int64, len(names))
        expect(len(set(names)) == len(names), "sequences", "each once", names)
        return rows

    def _table_of(self, rows: np.ndarray, contents: np.ndarray) -> np.ndarray | None:
        """The block tables that a plan was made of, for its `stats`; None once its sequences' rows have others."""
        return self._table[rows] if np.array_equal(contents, self._contents[rows]) else None

    def _number_cells(self, row: int) -> None:
        """Numbers the cells of a row whose blocks are there and that have no number yet."""
        config, uses = self.config, self._uses
        done, known = int(self._num_cells[row]), int(self._num_blocks[row]) * config.block_size // config.cell_size
        if done == known:
            return
        begin, end = self._columns[:, done:known]
        blocks = self._table[row]
        data = blocks[begin[0] : end[-1] + 1].tobytes()
        start = blocks.itemsize * (begin - begin[0])
        stop = blocks.itemsize * (end - begin[0] + 1)
        numbers = []
        for i, j in zip(start.tolist(), stop.tolist(), strict=True):
            content = data[i:j]
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
                self._num_shared += 1
            numbers.append(number)
        self._numbers[row, done:known] = numbers
        self._keys[row, done:known] = blocks.take(end)
        self._num_cells[row] = known

    def _forget_cells(self, row: int, first: int) -> None:
        """Takes their numbers from the row's cells [first, all)."""
        uses = self._uses
        for number in self._numbers[row, first : int(self._num_cells[row])].tolist():
            uses[number] -= 1
            if uses[number] == 1:
                self._num_shared -= 1
            elif uses[number] == 0:
                del self._number_of[self._content[number]]
                self._content[number] = b""
                self._unused.append(number)
        self._num_cells[row] = min(first, int(self._num_cells[row]))
        self._order.forget(row)

    def _grow(self, num_rows: int, columns: int) -> None:
        """Makes room; never less."""
        old = len(self._table)
        cells = columns * self.config.block_size // self.config.cell_size
        self._columns = np.array(cell_columns(cells, self.config.cell_size, self.config.block_size))
        for name, width in (("_table", columns), ("_keys", cells), ("_numbers", cells)):
            before = getattr(self, name)
            grown = np.zeros((num_rows, width), dtype=np.int32)
            grown[:old, : before.shape[1]] = before
            setattr(self, name, grown)
        for name in ("_num_blocks", "_num_cells", "_contents"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(num_rows - old, dtype=np.int64))))
        self._free[:0] = range(num_rows - 1, old - 1, -1)
        self._order.grow(num_rows)


def block_id(block: int) -> int:
    """As an int; ValueError where it is none, or not an int32."""
    try:
        number = operator.index(block)
    except TypeError:
        number = MAX_ID + 1
    expect(-MAX_ID <= number <= MAX_ID, "block", "a block id, int32", block)
    return number

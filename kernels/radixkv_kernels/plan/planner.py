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
from .cells import Extents, both_hold
from .cuts import Memo
from .order import KeptOrder, sort_sequences
from .tables import KeptTables
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
        self._tables = KeptTables(config.block_size, config.cell_size)
        self._order = KeptOrder()
        self._memo = Memo()
        self._last: tuple[TreePlan, list[Hashable], np.ndarray] | None = None  # with its sequences and their rows
        self._changing = False  # while it is, and for ever where that was interrupted

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, sequence: Hashable) -> bool:
        return sequence in self._tables

    @property
    def may_share(self) -> bool:
        """Whether any two sequences hold a cell of the same blocks; if not, no plan shares anything. O(1)."""
        self._check_whole()
        return self._tables.num_shared > 0

    def add(self, sequence: Hashable, blocks: Sequence[int] | np.ndarray) -> None:
        """A sequence and its block ids; ValueError where it is there already. O(blocks), an array being fastest."""
        expect(sequence not in self._tables, "sequence", "one that is not there yet", sequence)
        ids = np.asarray(blocks)
        numbers = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
        fit = numbers and (ids.dtype == np.int32 or -MAX_ID <= ids.min(initial=0) <= ids.max(initial=0) <= MAX_ID)
        expect(bool(fit), "blocks", "a sequence of block ids, int32", blocks)
        self._begin()
        self._tables.add(sequence, ids)
        self._order.grow(len(self._tables.blocks))
        self._last, self._changing = None, False

    def append(self, sequence: Hashable, block: int) -> None:
        """One more block at the sequence's end; KeyError where it isn't there. O(1), amortised."""
        row = self._tables.row(sequence)
        block = block_id(block)
        self._begin()
        self._tables.append(row, block)
        self._changing = False  # the last plan holds: none of its cells has changed

    def replace(self, sequence: Hashable, index: int, block: int) -> None:
        """Another block in place of the sequence's block number `index`; IndexError past its end. O(cells)."""
        row = self._tables.row(sequence)
        expect(isinstance(index, int | np.integer), "index", "an int", index)
        num_blocks = int(self._tables.num_blocks[row])
        if not 0 <= index < num_blocks:
            raise IndexError(f"index: expected one below {num_blocks}, got {index}")
        block = block_id(block)
        self._begin()
        self._tables.replace(row, index, block)
        self._order.forget(row)
        self._last, self._changing = None, False

    def remove(self, sequence: Hashable) -> None:
        """Forgets a sequence; KeyError where it isn't there. O(cells)."""
        row = self._tables.row(sequence)
        self._begin()
        self._tables.remove(sequence)
        self._order.forget(row)
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
        tables = self._tables
        lens = host_array("seq_lens", seq_lens, 1).astype(np.int64)
        cu = host_array("cu_seqlens_q", cu_seqlens_q, 1)
        try:
            names = list(sequences)
            known = self._last if self._last is not None and self._last[1] == names else None
            rows = known[2] if known else tables.rows(names)
            if not known:
                expect(len(set(names)) == len(names), "sequences", "each once", names)
        except TypeError:
            raise ValueError(f"sequences: expected a list of names, got {sequences!r}") from None
        fits = len(lens) == len(rows) and (lens <= tables.num_blocks.take(rows) * self.config.block_size).all()
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
            order = sort_sequences(tables.keys[:, :num_cells].take(some, axis=0), whole, full)
        else:
            self._changing = True
            order = self._order.sort(some, tables.keys, full)
            self._changing = False
        numbers = tables.numbers[:, :num_cells].take(some.take(order), axis=0)
        same = np.zeros(numbers.shape, dtype=bool)
        np.equal(numbers[1:], numbers[:-1], out=same[1:])
        same[1:] &= both_hold(whole.take(order), full.take(order), num_cells)
        work = assemble(self.config, active[order], same, extents, cu, self._memo)
        plan = TreePlan(self.config, work, extents, cu, lens, partial(tables.as_they_were, rows, tables.contents[rows]))
        self._last = plan, names, rows
        return plan

    def _begin(self) -> None:
        """Before anything is changed that plans rest on; `_changing` is taken back once all of it is."""
        self._check_whole()
        self._changing = True

    def _check_whole(self) -> None:
        if self._changing:
            raise RuntimeError("planner: expected one no call of which was interrupted; make a new one")


def block_id(block: int) -> int:
    """As an int; ValueError where it is none, or not an int32."""
    try:
        number = operator.index(block)
    except TypeError:
        number = MAX_ID + 1
    expect(-MAX_ID <= number <= MAX_ID, "block", "a block id, int32", block)
    return number

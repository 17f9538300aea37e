"""What is shared by whom, as a work list for attention: the plan of tree attention.

Made once a step (all layers use it), from block tables alone (`TreePlan.from_block_table`) or incrementally
(`TreePlanner`), and passed to `api.paged_attention(..., plan=...)`. A plan decides which rows read which cells of KV
together; results have the same bits with any plan, and without one. Ideas are from tree attention in DeFT (2404.00242),
FastTree (MLSys 2025) and PAT (2511.22333); the cell rule that makes the cuts invisible is in `contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ..contract import PlanConfig, PlanTensors, WorkList, expect
from .cells import Extents, last_block_keys, same_as_before
from .cuts import Memo, choose_cuts
from .items import Rows, build_items
from .order import sort_sequences
from .stats import PlanStats, measure
from .tensors import PlanBuffers

INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True)
class TreePlan:
    """Work items over a batch. Immutable; holds for every step whose lengths stay within `extents`.

    A query token of the batch is a row; rows are renumbered so that sharers are neighbours. An item is an interval of
    rows and an interval of cells, read through the block table of its first row's sequence; where a row sees none or
    part of a cell, a mask says so.

    A plan is a function of four things, and `assemble`, which makes it, is given no other: its config; `cu_seqlens_q`;
    of each sequence the cells that it reads and can share (`Extents`: no lengths, but ranges of lengths); and in which
    of those cells neighbours have the same blocks. So it serves another batch if and only if these are the same:
    `serves` says so of the second and the third; block tables are its maker's to watch. An item may have cells that no
    row of it sees at a given length, because one does at another length that the plan serves.
    """

    config: PlanConfig
    work: WorkList
    extents: Extents
    cu_seqlens_q: np.ndarray
    """[num_seqs + 1] int64, as given; seq_lens likewise, [num_seqs]."""
    seq_lens: np.ndarray
    _table: Callable[[], np.ndarray | None] = field(repr=False, compare=False)
    _on: dict[torch.device, PlanTensors] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def from_block_table(
        block_table: Tensor | np.ndarray,
        seq_lens: Tensor | np.ndarray,
        cu_seqlens_q: Tensor | np.ndarray,
        *,
        block_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        cell_size: int = 256,
        causal: bool = True,
        window: int | None = None,
        tile_rows: int = 1024,
        lead_runs: int = 4,
        min_items: int = 0,
        kv_itemsize: int = 2,
    ) -> TreePlan:
        """Finds what is shared by comparing block ids; the caller declares nothing.

        Args:
            block_table: [num_seqs, max_blocks] int; ids of blocks that no row sees may be anything. Kept (not copied)
                for `stats`. Tensors off the CPU are copied to it, which synchronises.
            seq_lens: [num_seqs] int, this call's tokens included.
            cu_seqlens_q: [num_seqs + 1] int.
            block_size, num_q_heads, num_kv_heads, causal, window: as the attention call will have them.
            cell_size, tile_rows, lead_runs, min_items, kv_itemsize: see `PlanConfig`.

        Raises ValueError naming the argument. O(num_seqs * max_blocks) where prefixes are shared, and a sort of
        num_seqs keys of one block id a cell.

        >>> table = np.arange(80).reshape(2, 40)
        >>> table[1, :32] = table[0, :32]  # 512 tokens, two cells
        >>> lens, cu = np.array([530, 600]), np.array([0, 1, 2])
        >>> plan = TreePlan.from_block_table(table, lens, cu, block_size=16, num_q_heads=8, num_kv_heads=2)
        >>> plan.shares, plan.stats.num_logical_kv_tokens, plan.stats.num_kv_tokens_read
        (True, 1130, 618)
        """
        config = PlanConfig(
            block_size,
            num_q_heads,
            num_kv_heads,
            cell_size,
            causal,
            window,
            tile_rows,
            lead_runs,
            min_items,
            kv_itemsize,
        )
        table = np.ascontiguousarray(host_array("block_table", block_table, 2), dtype=np.int32)
        lens = host_array("seq_lens", seq_lens, 1).astype(np.int64)
        cu = host_array("cu_seqlens_q", cu_seqlens_q, 1).astype(np.int64)
        q_lens = check_lengths(config, lens, cu, table.shape[0])
        most = int(lens.max(initial=0))
        room = table.shape[1] * block_size
        expect(most <= room, "seq_lens", f"at most block_size * max_blocks = {room} tokens", most)
        extents = Extents.of(lens, q_lens, cell_size, window)
        active = np.flatnonzero(q_lens)
        some = table if len(active) == len(lens) else table[active]
        whole, full = extents.whole[active], extents.full[active]
        keys = last_block_keys(some, int(full.max(initial=0)), cell_size, block_size)
        order = sort_sequences(keys, whole, full)
        same = same_as_before(some, order, keys, whole[order], full[order], cell_size, block_size)
        work = assemble(config, active[order], same, extents, cu, Memo())
        return TreePlan(config, work, extents, cu, lens, partial(_as_it_is, table))

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch."""
        return len(self.seq_lens)

    @property
    def num_items(self) -> int:
        """Items of the work list."""
        return len(self.work.items)

    @property
    def shares(self) -> bool:
        """Whether any item serves several sequences."""
        return bool(self.work.shared.any())

    @cached_property
    def cells(self) -> tuple[int, int]:
        """(cells that items read, cells that their sequences would read one by one). O(num_items + num_rows)."""
        if not self.num_items:
            return 0, 0
        row0, rows, first, last = self.work.items[:, :4].astype(np.int64).T
        group = self.config.group_size
        seqs = np.append(0, np.cumsum(np.diff(self.work.row_seq) != 0))
        num_seqs = seqs[(row0 + rows - 1) // group] - seqs[row0 // group] + 1
        cells = last - first
        return int(cells.sum()), int((cells * num_seqs).sum())

    def host(self) -> WorkList:
        """Its work list."""
        return self.work

    def __getstate__(self) -> dict[str, object]:
        """For pickle and copy: with the block tables, where they are still written down, and without tensors."""
        return {**self.__dict__, "_table": partial(_as_it_is, self._table()), "_on": {}}

    def to(self, device: torch.device | str) -> PlanTensors:
        """The plan on a device; one copy, at the first call for that device."""
        device = torch.device(device)
        if device not in self._on:
            sizes = len(self.work.items), len(self.work.row_token), len(self.work.row_slots)
            self._on[device] = PlanBuffers(*sizes, device).load(self)
        return self._on[device]

    @cached_property
    def stats(self) -> PlanStats:
        """What the plan reads and writes, counted at first use. O(num_seqs * max_blocks log)."""
        table = self._table()
        if table is None:
            raise RuntimeError("stats: expected to be read before the planner gives the plan's sequences other blocks")
        return measure(self.config, self.work, self.seq_lens, self.cu_seqlens_q, table)

    def serves(self, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> bool:
        """Whether it is the plan of a batch of these lengths [num_seqs], [num_seqs + 1] too, of the same block tables.

        O(num_seqs).

        >>> table, cu = np.arange(80).reshape(2, 40), np.array([0, 1, 2])
        >>> plan = TreePlan.from_block_table(
        ...     table, np.array([300, 310]), cu, block_size=16, num_q_heads=8, num_kv_heads=2
        ... )
        >>> plan.serves(np.array([301, 512]), cu), plan.serves(np.array([301, 513]), cu)
        (True, False)
        """
        return np.array_equal(cu_seqlens_q, self.cu_seqlens_q) and self.extents.holds(seq_lens)

    def check_fits(self, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> None:
        """ValueError unless the plan serves a batch of these lengths (its block tables are not looked at)."""
        expect(len(seq_lens) == self.num_seqs, "plan", f"one of {len(seq_lens)} sequences", self.num_seqs)
        if self.serves(seq_lens, cu_seqlens_q):
            return
        same = np.array_equal(cu_seqlens_q, self.cu_seqlens_q)
        expect(same, "plan", "one made with these cu_seqlens_q", self.cu_seqlens_q.tolist())
        expect(
            False,
            "plan",
            "one whose seq_lens have the same cells as this call's; make a new one when a cell border is crossed",
            self.seq_lens.tolist(),
        )


def _as_it_is(table: np.ndarray | None) -> np.ndarray | None:
    """A plan's tables where it has them itself; a function, so that pickle finds it."""
    return table


def assemble(
    config: PlanConfig, order: np.ndarray, same: np.ndarray, extents: Extents, cu_seqlens_q: np.ndarray, memo: Memo
) -> WorkList:
    """A plan's work, for the two ways to plan.

    order: of the sequences with rows. same: [len(order), cells] bool, the cell is that of the sequence before it.
    Not given lengths, because a plan outlives them (see `TreePlan`).
    """
    first, last = extents.first.take(order), extents.last.take(order)
    run_cells, num_seqs = config.run_cells, len(order)
    num_runs = max(1, -(-int(last.max(initial=0)) // run_cells))
    by_cell = np.zeros((num_runs * run_cells, num_seqs), dtype=bool)
    by_cell[: same.shape[1]] = same.T
    q_lens = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).take(order)
    rows = _rows(config, order, q_lens, cu_seqlens_q, extents)
    if num_seqs == 0:
        empty, none = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool)
        base, groups = np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int64)
        return WorkList(np.zeros((0, 5), dtype=np.int32), empty, empty, base, empty, empty, groups, none)
    cuts = choose_cuts(by_cell, first, last, q_lens, run_cells, config.partial_cost, memo)
    work = build_items(cuts, rows, config.cell_size, config.lead_runs, memo)
    if len(work.items) < config.min_items and config.lead_runs > 1:
        work = build_items(cuts, rows, config.cell_size, 1, memo)
    if len(work.items) < config.min_items:
        work = build_items(cuts.by_cell(), rows, config.cell_size, 1, memo)
    return work


def _rows(config: PlanConfig, order: np.ndarray, q_lens: np.ndarray, cu: np.ndarray, extents: Extents) -> Rows:
    """The rows in the plan's order."""
    start = cu.take(order)
    if q_lens.max(initial=1) == 1:  # none has less than one
        tokens, seqs = start.astype(np.int32), order.astype(np.int32)
        return Rows(tokens, seqs, q_lens, None, None, config.group_size, config.tile_rows)
    of = np.repeat(np.arange(len(order)), q_lens)
    token = np.arange(len(of)) - np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
    seq = order[of]
    before_end = q_lens[of] - 1 - token
    hi, lo = extents.high[seq], np.zeros_like(seq)
    if config.window is not None:
        lo = np.maximum(extents.low[seq] - before_end - config.window, 0)
    if config.causal:
        hi = np.maximum(hi - before_end, 0)
    tokens, seqs = (start[of] + token).astype(np.int32), seq.astype(np.int32)
    return Rows(tokens, seqs, q_lens, lo, hi, config.group_size, config.tile_rows)


def host_array(name: str, values: Tensor | np.ndarray, ndim: int) -> np.ndarray:
    """An int array on the host; ValueError naming it otherwise."""
    if isinstance(values, Tensor):
        expect(values.layout == torch.strided, name, "a dense tensor", values.layout)
        real = values.device.type != "meta" and not values.requires_grad
        expect(real, name, "a tensor of numbers, without a gradient", values)
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype not in INDEX_DTYPES:
        expect(isinstance(array, np.ndarray) and array.ndim == ndim, name, f"a tensor of {ndim} dimensions", values)
        expect(array.dtype in INDEX_DTYPES, name, "int32 or int64", array.dtype)
    return array


def check_lengths(config: PlanConfig, seq_lens: np.ndarray, cu: np.ndarray, num_seqs: int) -> np.ndarray:
    """Validates lengths; returns q_lens."""
    if len(seq_lens) != num_seqs or len(cu) != num_seqs + 1:
        expect(len(seq_lens) == num_seqs, "seq_lens", f"shape [{num_seqs}]", list(seq_lens.shape))
        expect(False, "cu_seqlens_q", f"shape [{num_seqs + 1}]", list(cu.shape))
    expect(cu[0] == 0, "cu_seqlens_q", "a first entry of 0", cu[0])
    q_lens: np.ndarray = cu[1:] - cu[:-1]
    expect(q_lens.min(initial=0) >= 0, "cu_seqlens_q", "a non-decreasing sequence", cu)
    expect(seq_lens.min(initial=0) >= 0, "seq_lens", "values >= 0", seq_lens)
    return q_lens

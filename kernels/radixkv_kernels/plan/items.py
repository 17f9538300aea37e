"""From cuts to the work list: items, the place of every partial result, each row's partials in the order of merging.

Rows are query tokens in the plan's order of sequences; *flat* rows count the query heads of a KV head too: flat row =
row * group_size + head.

The batch that `cuts.py` draws (three sequences of one row and one head each, two runs of two cells) comes out as

    item    row  rows  first  last  slot       partials of each row, in the order of merging
    A       0    3     0      1     0          row 0:  A0  C5
    B       1    2     2      3     3          row 1:  A1  D6 | B3  E8
    C       0    1     1      2     5          row 2:  A2  D7 | B4  F9
    D       1    2     1      2     6
    E       1    1     3      4     8          a letter is an item, a number the slot of the row's partial result;
    F       2    1     3      4     9          | is where a run ends

>>> table = np.array([[0, 5, -1, -1], [0, 1, 2, 3], [0, 1, 2, 4]])
>>> plan = TreePlan.from_block_table(
...     table, np.array([1500, 3600, 3500]), np.arange(4),
...     block_size=1024, num_q_heads=1, num_kv_heads=1, cell_size=1024,
... )
>>> plan.work.items.tolist()
[[0, 3, 0, 1, 0], [1, 2, 2, 3, 3], [0, 1, 1, 2, 5], [1, 2, 1, 2, 6], [1, 1, 3, 4, 8], [2, 1, 3, 4, 9]]
>>> [part.tolist() for part in np.split(plan.work.row_slots, plan.work.row_base[1:-1])]
[[0, 5], [1, 6, 3, 8], [2, 7, 4, 9]]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..contract import WorkList
from .cuts import Cuts, Memo, lengths_of


@dataclass(frozen=True, slots=True)
class Rows:
    """The query rows that a plan orders."""

    token: np.ndarray
    """[num_rows] int32: row of q of each row of the plan; seq: its sequence."""
    seq: np.ndarray
    weight: np.ndarray
    """[num_seqs] int64: rows of each sequence, at least 1, in the plan's order."""
    lo: np.ndarray | None
    """[num_rows] int64: first key that the row may see while the plan holds; hi: one past the last.

    None where each sequence has one row.
    """
    hi: np.ndarray | None
    group_size: int
    tile_rows: int
    """Most flat rows of an item."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """A `WorkList` of sequences of one row each, but for which rows they are; its first items as if of one cell."""

    items: np.ndarray
    row_base: np.ndarray
    row_slots: np.ndarray
    slot_cells: np.ndarray
    groups: np.ndarray
    shared: np.ndarray
    begin: np.ndarray
    """As in `Partials`, of the tiles of first items."""


def build_items(cuts: Cuts, rows: Rows, cell_size: int, lead_runs: int, memo: Memo) -> WorkList:
    """The work list of these cuts: first items run by run, then later cells, cell by cell.

    lead_runs: how many whole runs, from the first, one item may fold where the same rows read them.
    O(num_runs * run_cells * num_seqs + num_partials).
    """
    num_runs, run_cells, num_seqs = cuts.same.shape
    start = np.arange(0, num_runs * run_cells, run_cells, dtype=np.int32)[:, None]
    begins, end = cuts.reads, start + (cuts.cut + 1)
    # where windows begin in different runs, a run may come first for some of an item's rows only
    num_lead = 1 if cuts.first.any() else min(lead_runs, num_runs)
    if num_lead > 1:
        basis = tuple(x[:num_lead] for x in (cuts.joined, cuts.cut, cuts.last, cuts.reads))
        folded = memo.keep("folded runs", basis, lambda: _folded_runs(*basis))
        begins = begins.copy()
        begins[1:num_lead] &= np.arange(1, num_lead)[:, None] > folded
        end[0] = end.ravel().take(folded * num_seqs + np.arange(num_seqs))
    if rows.lo is not None or rows.hi is not None:
        return _tile_tokens(rows, Partials.of(cuts, begins), end, cell_size)
    begin_with = begins, cuts.first, cuts.joined, cuts.later
    kept = memo.keep("work", begin_with, lambda: _lay_out(Partials.of(cuts, begins), rows))
    items = kept.items.copy()
    items[: len(kept.begin), 3] = end.ravel().take(kept.begin)
    return WorkList(
        items, rows.token, rows.seq, kept.row_base, kept.row_slots, kept.slot_cells, kept.groups, kept.shared
    )


@dataclass(frozen=True, slots=True)
class Partials:
    """Where partial results begin, those of an item one after the other: first items run by run, then later cells."""

    seqs: np.ndarray
    """[num_partials] int64; in the plan's order. cells: their first cells."""
    cells: np.ndarray
    starts: np.ndarray
    """[num_items] int64: each item's first partial; count: how many sequences it has."""
    count: np.ndarray
    begin: np.ndarray
    """[num_first_items] int64: run * num_seqs + sequence of the first of each; they come before other items."""
    shared: np.ndarray
    """[num_seqs] bool: some item has rows of this sequence and of another; in the plan's order of sequences."""

    @staticmethod
    def of(cuts: Cuts, begins: np.ndarray) -> Partials:
        """begins: [num_runs, num_seqs] bool: the sequence has a first item in this run, so no earlier one folds it."""
        _, run_cells, num_seqs = cuts.same.shape
        begin = begins.ravel().nonzero()[0]
        run = begin // num_seqs
        later = cuts.later
        cells = np.concatenate((run * run_cells + cuts.first.ravel().take(begin), later.cells))
        seqs = np.concatenate((begin - run * num_seqs, later.seqs))
        joined = np.concatenate((cuts.joined.ravel().take(begin), later.joined))
        shared = np.zeros(num_seqs, dtype=bool)
        behind = seqs.compress(joined)
        shared[behind] = shared[behind - 1] = True
        heads = ~joined
        starts = heads.nonzero()[0]
        count = lengths_of(starts, len(seqs)) if len(seqs) else starts
        return Partials(seqs, cells, starts, count, begin.compress(heads[: len(begin)]), shared)


def _lay_out(partials: Partials, rows: Rows) -> _Layout:
    group, num_seqs = rows.group_size, len(rows.weight)
    seqs, cells, starts, begin = partials.seqs, partials.cells, partials.starts, partials.begin
    first_cell = cells.take(starts)
    columns = [seqs.take(starts) * group, partials.count * group, first_cell, first_cell + 1, starts * group]
    groups = np.arange(len(starts))
    if len(starts) and int(partials.count.max()) * group > rows.tile_rows:
        columns, groups = _tiled(columns, rows.tile_rows // group * group or rows.tile_rows)
        begin = begin[groups[groups < len(begin)]]
    order = _by_row(seqs, cells, num_seqs, int(cells.max(initial=0)) + 1)
    base = np.zeros(num_seqs + 1, dtype=np.int32)
    np.bincount(seqs, minlength=num_seqs).cumsum(out=base[1:])
    slots = (order * group).astype(np.int32)
    slot_cells = cells.take(order).astype(np.int32)
    return _Layout(_table(columns), base, slots, slot_cells, groups, partials.shared, begin)


def _folded_runs(joined: np.ndarray, cut: np.ndarray, last: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """[num_seqs]: how many runs the item that begins with run 0 folds besides it; in each the same rows share all."""
    whole = cut == last
    like = (joined[1:] == joined[0]) & whole[1:] & whole[0] & reads[1:]
    like[:, :-1] &= joined[1:, 1:] <= joined[0, 1:]
    heads = (~joined[0]).nonzero()[0]
    like = np.logical_and.reduceat(like, heads, axis=1)
    for run in range(1, len(like)):
        like[run] &= like[run - 1]
    return like.sum(0).repeat(lengths_of(heads, len(whole[0])))


def _table(columns: list[np.ndarray]) -> np.ndarray:
    items = np.empty((len(columns[0]), 5), dtype=np.int32)
    for i, column in enumerate(columns):
        items[:, i] = column
    return items


def _by_row(rows: np.ndarray, cells: np.ndarray, num_rows: int, num_cells: int) -> np.ndarray:
    """The order of (row, cell) pairs; small keys sort in linear time."""
    dtype = np.uint16 if num_rows * num_cells <= 1 << 16 else np.int64
    return (rows * num_cells + cells).astype(dtype).argsort(kind="stable")


def _tiled(columns: list[np.ndarray], tile_rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Items of at most `tile_rows` rows, and the number of the item that each is of."""
    row0, num_rows, first_cell, last_cell, slot = columns
    tiles = -(-num_rows // tile_rows)
    of = np.repeat(np.arange(len(tiles)), tiles)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(num_rows[of] - offset, tile_rows)
    return [row0[of] + offset, rows, first_cell[of], last_cell[of], slot[of] + offset], of


def _tile_tokens(rows: Rows, partials: Partials, end: np.ndarray, cell_size: int) -> WorkList:
    """The work list of sequences of several rows: each tile keeps to the cells that its rows may see."""
    assert rows.lo is not None and rows.hi is not None
    group = rows.group_size
    bounds = np.concatenate(([0], np.cumsum(rows.weight)))
    num_rows = int(bounds[-1])
    first_seq, first_cell = partials.seqs[partials.starts], partials.cells[partials.starts]
    last_cell = first_cell + 1
    last_cell[: len(partials.begin)] = end.ravel()[partials.begin]
    row0, row1 = bounds[first_seq], bounds[first_seq + partials.count]
    nothing = np.zeros_like(row0)
    token_tile = max(1, rows.tile_rows // group)
    columns, groups = _tiled([row0, row1 - row0, first_cell, last_cell, nothing], token_tile)
    token0, tokens, first_cell, last_cell, _ = columns
    span = np.stack((token0, token0 + tokens), 1).ravel()
    top = np.iinfo(np.int64).max
    # rows without keys must not widen a tile
    lo = np.where(rows.hi > rows.lo, rows.lo, top)
    if len(token0):
        low = np.minimum.reduceat(np.append(lo, top), span)[::2]
        high = np.maximum.reduceat(np.append(rows.hi, 0), span)[::2]
        first_cell = np.maximum(first_cell, low // cell_size)
        last_cell = np.minimum(last_cell, -(-high // cell_size))
    keep = first_cell < last_cell
    token0, tokens, first_cell, last_cell = (x[keep] for x in (token0, tokens, first_cell, last_cell))
    groups = groups[keep]
    ends = np.cumsum(tokens)
    slots = ends - tokens
    of = np.repeat(np.arange(len(tokens)), tokens)
    position = np.arange(len(of))
    row = position - slots[of] + token0[of]
    order = _by_row(row, first_cell[of], num_rows, int(last_cell.max(initial=0)))
    base = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=num_rows), out=base[1:])
    columns = [token0 * group, tokens * group, first_cell, last_cell, slots * group]
    if group > rows.tile_rows:
        columns, tile_of = _tiled(columns, rows.tile_rows)
        groups = groups[tile_of]
    return WorkList(
        _table(columns),
        rows.token,
        rows.seq,
        base,
        (order * group).astype(np.int32),
        first_cell[of[order]].astype(np.int32),
        groups,
        partials.shared.repeat(rows.weight),
    )

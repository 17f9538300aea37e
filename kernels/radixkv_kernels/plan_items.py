"""From cuts to the work list: items, the place of every partial result, each row's partials in the order of merging.

Called by `plan.py`, for both ways to plan. Rows are query tokens in the plan's order of sequences; *flat* rows count
the query heads of a KV head too: flat row = row * group_size + head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .plan_cuts import Cuts, lengths_of


@dataclass(frozen=True, slots=True)
class Rows:
    """The query rows that a plan orders."""

    weight: np.ndarray
    """[num_seqs] int64: rows of each sequence, at least 1, in the plan's order."""
    lo: np.ndarray | None
    """[num_rows] int64: first key that the row sees; hi: one past the last. None where each sequence has one row."""
    hi: np.ndarray | None
    group_size: int
    tile_rows: int
    """Most flat rows of an item."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """What kernels read, all int32. Partial results lie in a workspace of `num_slots` flat rows."""

    items: np.ndarray
    """[num_items, 5]: first flat row, flat rows, first cell, one past the last cell, first slot."""
    row_base: np.ndarray
    """[num_rows + 1]: row r's partials are [row_base[r], row_base[r + 1]) of the next two, in order of cells."""
    row_slots: np.ndarray
    """[num_partials]: slot of the row's first head."""
    slot_cells: np.ndarray
    """[num_partials]: first cell of the partial; the first of a run starts a new run in the fold."""
    num_slots: int
    groups: np.ndarray
    """[num_items]: ascending numbers; items of one number are tiles of one group of rows over the same cells."""
    shared: np.ndarray
    """[num_seqs] bool: some item has rows of this sequence and of another; in the plan's order of sequences."""


def build_items(cuts: Cuts, rows: Rows, cell_size: int, lead_runs: int) -> WorkList:
    """The work list of these cuts: first items run by run, then later cells, cell by cell.

    lead_runs: how many whole runs, from the first, one item may fold where the same rows read them.
    O(num_runs * run_cells * num_seqs + num_partials).
    """
    num_runs, run_cells, num_seqs = cuts.same.shape
    start = np.arange(0, num_runs * run_cells, run_cells, dtype=np.int32)[:, None]
    begins, end = cuts.reads, start + cuts.cut + 1
    merged = _merged_runs(cuts, lead_runs)
    if merged is not None:
        begins = begins.copy()
        begins[1:] &= ~merged
        end[0] = end.ravel().take(merged.sum(0) * num_seqs + np.arange(num_seqs))
    # in each list the rows of an item follow one another
    flat = np.flatnonzero(begins)
    heads = [np.flatnonzero(~cuts.joined.ravel()[flat])]
    at = flat[heads[0]]
    seq, cell = [flat % num_seqs], [(start + cuts.first).ravel()[flat]]
    last = [end.ravel()[at]]
    follows = [seq[0][cuts.joined.ravel()[flat]]]
    more = np.flatnonzero((cuts.cut < cuts.last).any(1))
    if len(more):
        k = np.arange(run_cells, dtype=np.int32)[:, None]
        part = (k > cuts.cut[more, None]) & (k <= cuts.last[more, None]) & cuts.reads[more, None]
        goes_on = cuts.same[more] & part
        goes_on[..., 1:] &= part[..., :-1]
        flat = np.flatnonzero(part)
        on = goes_on.ravel()[flat]
        heads.append(np.flatnonzero(~on) + len(seq[0]))
        cell.append(flat // num_seqs)
        seq.append(flat - cell[1] * num_seqs)
        if len(more) < num_runs:
            cell[1] = start[more, 0][cell[1] // run_cells] + cell[1] % run_cells
        last.append(cell[1][~on] + 1)
        follows.append(seq[1][on])
    shared = np.zeros(num_seqs, dtype=bool)
    for behind in follows:
        shared[behind] = True
        shared[behind - 1] = True

    seqs, cells, starts = (np.concatenate(x) if len(x) > 1 else x[0] for x in (seq, cell, heads))
    last_cell = np.concatenate(last) if len(last) > 1 else last[0]
    count = lengths_of(starts, len(seqs)) if len(starts) else starts
    first_seq, first_cell = seqs[starts], cells[starts]
    if rows.lo is not None or rows.hi is not None:
        return _tile_tokens(rows, first_seq, count, first_cell, last_cell, cell_size, shared)

    group = rows.group_size
    columns = [first_seq * group, count * group, first_cell, last_cell, starts * group]
    groups = np.arange(len(count))
    if len(count) and int(count.max()) * group > rows.tile_rows:
        columns, groups = _tiled(columns, rows.tile_rows // group * group or rows.tile_rows)
    order = _by_row(seqs, cells, num_seqs, num_runs * run_cells)
    base = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(np.bincount(seqs, minlength=num_seqs), out=base[1:])
    return WorkList(
        _table(columns),
        base,
        (order * group).astype(np.int32),
        cells[order].astype(np.int32),
        len(seqs) * group,
        groups,
        shared,
    )


def _by_row(rows: np.ndarray, cells: np.ndarray, num_rows: int, num_cells: int) -> np.ndarray:
    """The order of (row, cell) pairs; small keys sort in linear time."""
    dtype = np.uint16 if num_rows * num_cells <= 1 << 16 else np.int64
    return np.argsort((rows * num_cells + cells).astype(dtype), kind="stable")


def _merged_runs(cuts: Cuts, lead_runs: int) -> np.ndarray | None:
    """[num_runs - 1, num_seqs] bool: run r + 1 is folded into the item that began with run 0; None where none is."""
    num_runs, _, num_seqs = cuts.same.shape
    # where windows begin in different runs, a run may come first for some of an item's rows only
    if lead_runs == 1 or num_runs == 1 or cuts.first.any():
        return None
    alone = ~cuts.joined
    at = np.flatnonzero(alone)
    lengths = lengths_of(at, alone.size)
    whole = np.repeat(np.logical_and.reduceat((cuts.cut == cuts.last).ravel(), at), lengths).reshape(alone.shape)
    first = np.repeat(at, lengths).reshape(alone.shape) % num_seqs
    last = first + np.repeat(lengths, lengths).reshape(alone.shape)
    like = (first[1:] == first[:-1]) & (last[1:] == last[:-1])
    like &= whole[1:] & whole[:-1] & cuts.reads[1:] & cuts.reads[:-1]
    for earlier, this in itertools.pairwise(like):
        this &= earlier
    like[lead_runs - 1 :] = False
    return like


def _table(columns: list[np.ndarray]) -> np.ndarray:
    items = np.empty((len(columns[0]), 5), dtype=np.int32)
    for i, column in enumerate(columns):
        items[:, i] = column
    return items


def _tiled(columns: list[np.ndarray], tile_rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Items of at most `tile_rows` rows, and the number of the item that each is of."""
    row0, num_rows, first_cell, last_cell, slot = columns
    tiles = -(-num_rows // tile_rows)
    of = np.repeat(np.arange(len(tiles)), tiles)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    rows = np.minimum(num_rows[of] - offset, tile_rows)
    return [row0[of] + offset, rows, first_cell[of], last_cell[of], slot[of] + offset], of


def _tile_tokens(
    rows: Rows,
    first_seq: np.ndarray,
    count: np.ndarray,
    first_cell: np.ndarray,
    last_cell: np.ndarray,
    cell_size: int,
    shared: np.ndarray,
) -> WorkList:
    """As `build_items`, with sequences of several rows: each tile keeps to the cells that its rows see."""
    assert rows.lo is not None and rows.hi is not None
    group = rows.group_size
    bounds = np.concatenate(([0], np.cumsum(rows.weight)))
    num_rows = int(bounds[-1])
    row0, row1 = bounds[first_seq], bounds[first_seq + count]
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
        base,
        (order * group).astype(np.int32),
        first_cell[of[order]].astype(np.int32),
        len(of) * group,
        groups,
        shared,
    )

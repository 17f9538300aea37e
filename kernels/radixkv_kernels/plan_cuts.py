"""Where the work of each run is cut: which rows share its first item, over how many cells, and what comes cell by cell.

Called by `plan_items.py`. In a run an item is (rows, its first j cells), or one later cell, because only the first part
of a left fold can be folded ahead. A long shared first item saves partial results; an early cut saves reading KV. Both
are counted in cells of KV, and the cheaper is taken, node by node from the leaves of the run's tree to its roots.

Arrays here are [num_runs, run_cells, num_seqs], sequences in the plan's order: an interval of sequences is a stretch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Cuts:
    """The decision, and what it rests on; k counts cells within a run."""

    valid: np.ndarray
    """[num_runs, run_cells, num_seqs] bool: the sequence reads the cell."""
    same: np.ndarray
    """Likewise: and it is the cell of the sequence before it."""
    first: np.ndarray
    """[num_runs, num_seqs] int: first k that the sequence reads; last: the last one. Meaningless in an unread run."""
    last: np.ndarray
    cut: np.ndarray
    """[num_runs, num_seqs] int: the first item ends with this k."""
    joined: np.ndarray
    """[num_runs, num_seqs] bool: the sequence's first item is that of the sequence before it."""

    def by_cell(self) -> Cuts:
        """The finest cuts: every cell an item of its own, shared as before."""
        at = self.first[:, None]
        together = np.take_along_axis(self.same, at, 1)[:, 0]
        return replace(self, cut=self.first, joined=together)


def choose_cuts(
    same: np.ndarray, first: np.ndarray, last: np.ndarray, weight: np.ndarray, run_cells: int, partial_cost: float
) -> Cuts:
    """Cuts every run of every sequence.

    Args:
        same: [num_runs * run_cells, num_seqs] bool, contiguous; see `plan_cells.same_as_before`.
        first, last: [num_seqs] cells that the sequence reads.
        weight: [num_seqs] query rows (tokens) of the sequence.
        partial_cost: what one partial result of one query token costs, in cells of KV.

    O(num_runs * run_cells * num_seqs).
    """
    num_cells, num_seqs = same.shape
    num_runs = num_cells // run_cells
    shape = (num_runs, run_cells, num_seqs)
    cells = np.arange(num_cells)[:, None]
    valid = cells < last
    if first.any():
        valid &= cells >= first
    start = np.arange(num_runs)[:, None] * run_cells
    k_first = np.clip(first - start, 0, run_cells - 1)
    k_last = np.clip(last - 1 - start, 0, run_cells - 1)
    valid, same = valid.reshape(shape), same.reshape(shape)
    cut = k_last.copy()
    if not same.any():
        return Cuts(valid, same, k_first, k_last, cut, np.zeros((num_runs, num_seqs), dtype=bool))
    chain = _chain(valid, same)
    busy = np.nonzero(same.any((1, 2)))[0]
    if len(busy) == num_runs:
        _cut_busy(valid, same, chain, k_first, cut, weight, partial_cost)
    else:
        part = cut[busy]
        _cut_busy(valid[busy], same[busy], chain[busy], k_first[busy], part, weight, partial_cost)
        cut[busy] = part
    joined = np.take_along_axis(chain, cut[:, None], 1)[:, 0]
    joined &= np.take_along_axis(valid, cut[:, None], 1)[:, 0]
    joined[:, 1:] &= cut[:, 1:] == cut[:, :-1]
    joined[:, 0] = False
    return Cuts(valid, same, k_first, k_last, cut, joined)


def _chain(valid: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Whether all cells of the run up to k are those of the sequence before, or read by neither."""
    alike = same.copy()
    alike[..., 1:] |= ~(valid[..., 1:] | valid[..., :-1])
    chain: np.ndarray = np.logical_and.accumulate(alike, axis=1)
    return chain


def _cut_busy(
    valid: np.ndarray,
    same: np.ndarray,
    chain: np.ndarray,
    k_first: np.ndarray,
    cut: np.ndarray,
    weight: np.ndarray,
    partial_cost: float,
) -> None:
    """Sets `cut` [runs, num_seqs] of runs in which something is shared."""
    runs, run_cells, num_seqs = valid.shape
    # a cut pays off only where sharing changes: chains end, or (behind a window's first cell) sharing begins
    branch = ((chain[:, 1:] != chain[:, :-1]) & (valid[:, 1:] | valid[:, :-1])).any((0, 2))
    apart = same > chain
    branch |= (apart[:, 1:] != apart[:, :-1]).any((0, 2))
    if not branch.any():
        return
    rows = weight.astype(np.float32)
    # of one cell read by a group once: each sequence's part, by its rows
    alone = rows / _group_sums(rows, ~same)
    alone *= valid
    later = np.cumsum(alone[:, ::-1], axis=1)[:, ::-1] - alone
    count = np.cumsum(valid[:, ::-1], axis=1)[:, ::-1]
    depth = np.arange(1, run_cells + 1)[:, None] - k_first[:, None]
    cost = depth * (rows / _group_sums(rows, ~chain))
    cost += later
    cost += (partial_cost * rows) * count
    best = np.take_along_axis(cost, cut[:, None], 1)[:, 0]
    for k in np.nonzero(branch)[0][::-1]:
        starts = np.flatnonzero(~chain[:, k])
        here = cost[:, k]
        wins = np.add.reduceat(here.ravel(), starts) <= np.add.reduceat(best.ravel(), starts)
        take = np.repeat(wins, np.diff(starts, append=runs * num_seqs)).reshape(runs, num_seqs)
        take &= valid[:, k]
        np.copyto(best, here, where=take)
        np.copyto(cut, k, where=take)


def _group_sums(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of the interval that each entry is in; starts[..., 0] is True. Shaped as starts."""
    at = np.flatnonzero(starts)
    flat = np.broadcast_to(rows, starts.shape).ravel()
    lengths = np.diff(at, append=starts.size)
    return np.repeat(np.add.reduceat(flat, at), lengths).reshape(starts.shape)

"""Where the work of each run is cut: which rows share its first item, over how many cells, and what comes cell by cell.

Called by `plan_items.py`. In a run an item is (rows, its first j cells), or one later cell, because only the first part
of a left fold can be folded ahead. A long shared first item saves partial results; an early cut saves reading KV. Both
are counted in cells of KV, and the cheaper is taken, node by node from the leaves of the run's tree to its roots.

Arrays here are [num_runs, run_cells, num_seqs], sequences in the plan's order: an interval of sequences is a stretch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Cuts:
    """The decision, and what it rests on; k counts cells within a run."""

    same: np.ndarray
    """[num_runs, run_cells, num_seqs] bool: the sequence's cell is the one of the sequence before it."""
    reads: np.ndarray
    """[num_runs, num_seqs] bool: the sequence reads some of the run."""
    first: np.ndarray
    """[num_runs, num_seqs] int32: first k that the sequence reads; last: the last one. Meaningless in an unread run."""
    last: np.ndarray
    cut: np.ndarray
    """[num_runs, num_seqs] int32: the first item ends with this k."""
    joined: np.ndarray
    """[num_runs, num_seqs] bool: the sequence's first item is that of the sequence before it."""
    weight: np.ndarray
    """[num_seqs] query rows of the sequence."""

    def like(self, other: Cuts) -> np.ndarray:
        """[num_runs] bool: runs that rest on the same as the other's of that number, so the decision is the same."""
        result = np.zeros(len(self.reads), dtype=bool)
        if not np.array_equal(self.weight, other.weight):
            return result
        n = min(len(self.reads), len(other.reads))
        alike = (self.same[:n] == other.same[:n]).all((1, 2))
        for mine, theirs in ((self.reads, other.reads), (self.first, other.first), (self.last, other.last)):
            alike &= (mine[:n] == theirs[:n]).all(1)
        result[:n] = alike
        return result

    def by_cell(self) -> Cuts:
        """The finest cuts: every cell an item of its own, shared as before."""
        return replace(self, cut=self.first, joined=pick(self.same, self.first))


def pick(values: np.ndarray, k: np.ndarray) -> np.ndarray:
    """values[r, k[r, i], i] for every r and i: [runs, k, num_seqs] -> [runs, num_seqs]."""
    runs, size, num_seqs = values.shape
    at = k * num_seqs
    at += np.arange(num_seqs)
    if runs > 1:
        at += np.arange(0, runs * size * num_seqs, size * num_seqs)[:, None]
    return values.ravel().take(at)


def lengths_of(starts: np.ndarray, size: int) -> np.ndarray:
    """How long each stretch is that begins at `starts` [n] (n > 0, ascending) and ends at the next, or at `size`."""
    result = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=result[:-1])
    result[-1] = size - starts[-1]
    return result


def choose_cuts(
    same: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    weight: np.ndarray,
    run_cells: int,
    partial_cost: float,
    before: Cuts | None = None,
) -> Cuts:
    """Cuts every run of every sequence.

    Args:
        same: [num_runs * run_cells, num_seqs] bool, contiguous; see `plan_cells.same_as_before`.
        first, last: [num_seqs] cells that the sequence reads.
        weight: [num_seqs] query rows (tokens) of the sequence.
        partial_cost: what one partial result of one query token costs, in cells of KV.
        before: of an earlier plan of the same costs; runs in which nothing has changed keep its decisions.

    O(num_runs * run_cells * num_seqs) bytes looked at, arithmetic only where sharing changes within a run.
    """
    num_cells, num_seqs = same.shape
    num_runs = num_cells // run_cells
    start = np.arange(0, num_cells, run_cells, dtype=np.int32)[:, None]
    end = last.astype(np.int32) - start
    reads = end > 0
    k_last = np.minimum(np.maximum(end - 1, 0), run_cells - 1)
    if first.any():
        begin = first.astype(np.int32) - start
        k_first = np.minimum(np.maximum(begin, 0), run_cells - 1)
        reads &= begin < run_cells
    else:
        k_first = np.zeros(k_last.shape, dtype=np.int32)
    same = same.reshape(num_runs, run_cells, num_seqs)
    joined = same[:, 0].copy()
    cut = k_last
    mixed = np.flatnonzero((same[:, 1:] != same[:, :-1]).any((1, 2)))
    cuts = Cuts(same, reads, k_first, k_last, cut, joined, weight)
    if not len(mixed):
        return cuts
    cut = k_last.copy()
    if before is not None:
        alike = cuts.like(before)[mixed]
        if alike.any():
            kept, mixed = mixed[alike], mixed[~alike]
            cut[kept], joined[kept] = before.cut[kept], before.joined[kept]
    if len(mixed):
        chain = _chain(same[mixed], k_first[mixed], k_last[mixed], reads[mixed])
        cut[mixed] = part = _cut_mixed(
            same[mixed], chain, k_first[mixed], k_last[mixed], reads[mixed], weight, partial_cost
        )
        joined[mixed] = pick(chain, part)
    joined[:, 1:] &= cut[:, 1:] == cut[:, :-1]
    joined &= reads
    joined[:, 1:] &= reads[:, :-1]
    return replace(cuts, cut=cut)


def _chain(same: np.ndarray, k_first: np.ndarray, k_last: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """Whether all cells of the run up to k are those of the sequence before, or read by neither."""
    k = np.arange(same.shape[1], dtype=np.int32)[:, None]
    valid = (k <= k_last[:, None]) & reads[:, None]
    if k_first.any():
        valid &= k >= k_first[:, None]
    alike = same.copy()
    alike[..., 1:] |= ~(valid[..., 1:] | valid[..., :-1])
    for earlier, this in itertools.pairwise(alike.swapaxes(0, 1)):
        this &= earlier
    return alike


def _cut_mixed(
    same: np.ndarray,
    chain: np.ndarray,
    k_first: np.ndarray,
    k_last: np.ndarray,
    reads: np.ndarray,
    weight: np.ndarray,
    partial_cost: float,
) -> np.ndarray:
    """The cut [runs, num_seqs] of runs in which sharing changes."""
    runs, run_cells, num_seqs = same.shape
    # a cut pays off only where sharing changes: chains end, or (behind a window's first cell) sharing begins
    apart = same > chain
    changes = ((chain[:, 1:] != chain[:, :-1]) | (apart[:, 1:] != apart[:, :-1])).any((0, 2))
    level = np.array([*np.flatnonzero(changes).tolist(), run_cells - 1], dtype=np.int32)
    begin = np.array([0, *(level[:-1] + 1).tolist()], dtype=np.int32)
    # from here on [runs, levels, num_seqs]: a level stands for the cells after the level before it
    rows = weight.astype(np.float32)
    column = k_first[:, None], k_last[:, None]
    count = np.minimum(column[1], level[:, None]) - np.maximum(column[0], begin[:, None]) + 1
    np.maximum(count, 0, out=count)
    count *= reads[:, None]
    count = count.astype(np.float32)
    joint = rows / _group_sums(rows, ~chain[:, level])
    reading = count * (rows / _group_sums(rows, ~same[:, begin]))  # a cell read by a group once, shared out by rows
    count *= partial_cost * rows
    reading += count
    cost = (level[:, None] + 1 - column[0]) * joint
    behind = np.zeros((runs, num_seqs), dtype=np.float32)
    for at in range(len(level) - 2, -1, -1):
        behind += reading[:, at + 1]
        cost[:, at] += behind
    own = np.searchsorted(level, k_last)
    best = (k_last + 1 - k_first) * pick(joint, own)
    cut = k_last.copy()
    for at in range(len(level) - 2, -1, -1):
        k = level[at]
        starts = np.flatnonzero(~chain[:, k])
        here = cost[:, at]
        wins = np.add.reduceat(here.ravel(), starts) <= np.add.reduceat(best.ravel(), starts)
        take = np.repeat(wins, lengths_of(starts, runs * num_seqs)).reshape(runs, num_seqs)
        take &= (k <= k_last) & (k >= k_first)
        np.copyto(best, here, where=take)
        np.copyto(cut, k, where=take)
    return cut


def _group_sums(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of the interval that each entry is in; starts[..., 0] is True. Shaped as starts."""
    at = np.flatnonzero(starts)
    lengths = lengths_of(at, starts.size)
    if rows.max() == 1:
        sums = lengths.astype(np.float32)
    else:
        sums = np.add.reduceat(np.broadcast_to(rows, starts.shape).ravel(), at)
    return np.repeat(sums, lengths).reshape(starts.shape)

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

    same: np.ndarray
    """[num_runs, run_cells, num_seqs] bool: the sequence's cell is the one of the sequence before it."""
    reads: np.ndarray
    """[num_runs, num_seqs] bool: the sequence reads some of the run."""
    first: np.ndarray
    """[num_runs, num_seqs] int16: first k that the sequence reads; last: the last one. Equal in an unread run."""
    last: np.ndarray
    cut: np.ndarray
    """[num_runs, num_seqs] int16: the first item ends with this k."""
    joined: np.ndarray
    """[num_runs, num_seqs] bool: the sequence's first item is that of the sequence before it."""
    basis: tuple[bytes, ...]
    """All that the decisions rest on, to be compared."""

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
        before: of an earlier plan of the same costs, whose decisions are kept where they rest on the same.

    O(num_runs * run_cells * num_seqs) bytes looked at, arithmetic only where sharing changes within a run.
    """
    num_cells, num_seqs = same.shape
    start = np.arange(0, num_cells, run_cells, dtype=np.int32)[:, None]
    end = last.astype(np.int32) - start
    reads = end > 0
    k_last = np.minimum(np.maximum(end - 1, 0), run_cells - 1).astype(np.int16)
    if first.any():
        begin = first.astype(np.int32) - start
        k_first = np.minimum(np.maximum(begin, 0), k_last).astype(np.int16)
        reads &= begin < run_cells
    else:
        k_first = np.zeros(k_last.shape, dtype=np.int16)
    same = same.reshape(-1, run_cells, num_seqs)
    cut, joined = k_last, same[:, 0]
    changes = (same[:, 1:] != same[:, :-1]).any(2)
    mixed = changes.any(1).nonzero()[0]
    basis: tuple[bytes, ...] = ()
    if len(mixed):
        # a cut pays off only where sharing changes
        level = np.array([*changes.any(0).nonzero()[0].tolist(), run_cells - 1], dtype=np.int16)
        shared = same[mixed, level[:, None]]
        reading, column = reads[mixed], (k_first[mixed], k_last[mixed])
        basis = tuple(x.tobytes() for x in (mixed, level, shared, reading, *column, weight))
        cut, joined = cut.copy(), joined.copy()
        if before is not None and before.basis == basis:
            cut[mixed], joined[mixed] = before.cut[mixed], before.joined[mixed]
        else:
            cut[mixed], joined[mixed] = _decide(shared, level, reading, *column, weight, partial_cost)
    return Cuts(same, reads, k_first, k_last, cut, joined, basis)


def _decide(
    shared: np.ndarray,
    level: np.ndarray,
    reads: np.ndarray,
    k_first: np.ndarray,
    k_last: np.ndarray,
    weight: np.ndarray,
    partial_cost: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(cut, joined) [runs, num_seqs] of runs in which sharing changes.

    level: [levels] int32, ascending; each stands for the cells behind the level before it, up to its own, in which
    nothing changes. shared: [levels, runs, num_seqs] bool, `same` of those cells. A node is a stretch of sequences with
    the same cells up to a level; its children are the stretches of the level below that it falls into.
    """
    levels, runs, num_seqs = shared.shape
    columns = runs * num_seqs
    rows = weight.astype(np.float32)
    depth = np.minimum(level[:, None, None], k_last) + (1 - k_first)  # cells read, down to a level
    windowed = k_first.any()
    if windowed:
        np.maximum(depth, 0, out=depth)
    count = depth.copy()
    count[1:] -= depth[:-1]
    chain = shared.copy()
    if windowed:  # a cell that neither reads does not part them
        valid = (count > 0) & reads
        chain[..., 1:] |= ~(valid[..., 1:] | valid[..., :-1])
    for a in range(1, levels):
        chain[a] &= chain[a - 1]

    # cells below a level, each read once by those who share it, and partial results
    below = count[1:] * (rows / _group_sums(rows, ~shared[1:]) + np.float32(partial_cost) * rows)
    for a in range(levels - 3, -1, -1):
        below[a] += below[a + 1]
    heads = ~chain.ravel()
    node = heads.nonzero()[0]
    rank = heads.cumsum()
    bounds = [0, *rank[columns - 1 :: columns].tolist()]
    inner = bounds[-2]
    cost = depth.ravel().take(node).astype(np.float32)
    if windowed:
        cost[cost == 0] = np.inf
    cost[:inner] += np.add.reduceat(below.ravel(), node[:inner])
    child = rank.take(node[:inner] + columns) - 1
    wins = np.empty(len(node), dtype=bool)
    wins[inner:] = True
    for a in range(levels - 2, -1, -1):
        at = slice(bounds[a], bounds[a + 1])
        apart = np.add.reduceat(cost[: bounds[a + 2]], child[at])
        np.less_equal(cost[at], apart, out=wins[at])
        np.minimum(cost[at], apart, out=cost[at])
    # the cut is the first level that wins
    won = wins.repeat(lengths_of(node, chain.size)).reshape(levels, columns).argmax(0)
    cut = np.minimum(level.take(won).reshape(runs, num_seqs), k_last)
    joined = chain.ravel().take(won * columns + np.arange(columns)).reshape(runs, num_seqs)
    joined[:, 1:] &= (cut[:, 1:] == cut[:, :-1]) & reads[:, 1:] & reads[:, :-1]
    return cut, joined


def _group_sums(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rows of the interval that each entry is in; starts[..., 0] is True. Shaped as starts."""
    at = starts.ravel().nonzero()[0]
    lengths = lengths_of(at, starts.size)
    if rows.max() == 1:
        sums = lengths.astype(np.float32)
    else:
        sums = np.add.reduceat(np.broadcast_to(rows, starts.shape).ravel(), at)
    return sums.repeat(lengths).reshape(starts.shape)

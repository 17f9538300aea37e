"""Where the work of each run is cut: which rows share its first item, over how many cells, and what comes cell by cell.

In a run an item is (rows, its first j cells), or one later cell, because only the first part of a left fold can be
folded ahead. A long shared first item saves partial results; an early cut saves reading KV. Both are counted in cells
of KV, and the cheaper is taken, node by node from the leaves of the run's tree to its roots.

Three sequences and two runs of two cells each; equal letters are one item, which its sequences read together:

             run 0     |  run 1
    cell     0    1    |  2    3
    seq 0    A    C    |                 reads run 0 only
    seq 1    A    D    |  B    E         A and B are the first items of their runs: the runs are cut behind k = 0
    seq 2    A    D    |  B    F         C to F are later cells, each an item of those sequences that share it

Sequence 0 parts from the others in cell 1, so a first item of all three sequences can't be longer than cell 0. Cut
behind cell 1 instead, run 0 would have two first items (of sequence 0, and of 1 and 2), and cell 0 would be read twice.

Arrays here are [num_runs, run_cells, num_seqs], sequences in the plan's order: an interval of them is a stretch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np

T = TypeVar("T")


class Memo:
    """The last result of each part of planning. An empty one makes a plan from scratch."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, object]] = {}

    def keep(self, part: str, basis: tuple[object, ...], make: Callable[[], T]) -> T:
        """The part's last result where it rested on equal arrays and objects, else what `make` returns. O(their bytes).

        The result must be a function of `basis` and of the planner's configuration alone, and must not be written to.
        """
        data = [(of.shape, of.tobytes()) if isinstance(of, np.ndarray) else of for of in basis]
        known = self._known.get(part)
        if known is not None and known[0] == data:
            return cast("T", known[1])
        result = make()
        self._known[part] = data, result
        return result


@dataclass(frozen=True, slots=True, eq=False)
class LaterCells:
    """Cells behind the first items of their runs, each an item of those that share it; every array [num_later].

    Ascending by cell, then by sequence.
    """

    cells: np.ndarray
    """int64; counted from the first run. seqs: their sequences."""
    seqs: np.ndarray
    joined: np.ndarray
    """bool: the item is that of the sequence before it."""

    @staticmethod
    def of(runs: np.ndarray, same: np.ndarray, cut: np.ndarray, last: np.ndarray) -> LaterCells:
        """Those of some runs (numbers, ascending); same [len(runs), run_cells, num_seqs], the others without cells."""
        _, run_cells, num_seqs = same.shape
        k = np.arange(run_cells, dtype=np.int16)[:, None]
        part = (k > cut[:, None]) & (k <= last[:, None])
        joined = same & part
        joined[..., 1:] &= part[..., :-1]
        at = part.ravel().nonzero()[0]
        row = at // num_seqs
        cells = (runs[:, None] * run_cells + np.arange(run_cells)).ravel().take(row)
        return LaterCells(cells, at - row * num_seqs, joined.ravel().take(at))


NONE_LATER = LaterCells(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))


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
    later: LaterCells

    def by_cell(self) -> Cuts:
        """The finest cuts: every cell an item of its own, shared as before."""
        all_runs = np.arange(len(self.same))
        later = LaterCells.of(all_runs, self.same, self.first, self.last)
        return replace(self, cut=self.first, joined=pick(self.same, self.first), later=later)


def pick(values: np.ndarray, k: np.ndarray) -> np.ndarray:
    """values[r, k[r, i], i] for every r and i: [runs, k, num_seqs] -> [runs, num_seqs]."""
    runs, size, num_seqs = values.shape
    at = k.astype(np.int64) * num_seqs
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
    memo: Memo,
) -> Cuts:
    """Cuts every run of every sequence.

    Args:
        same: [num_runs * run_cells, num_seqs] bool, contiguous; see `cells.same_as_before`.
        first, last: [num_seqs] cells that the sequence reads.
        weight: [num_seqs] query rows (tokens) of the sequence.
        partial_cost: what one partial result of one query token costs, in cells of KV.
        memo: of plans of the same costs.

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
    cut, joined, later = k_last, same[:, 0], NONE_LATER
    mixed, level, shared = memo.keep("changes", (same,), lambda: _changes(same))
    if len(mixed):
        basis = mixed, shared, level, reads[mixed], k_first[mixed], k_last[mixed], weight

        def decide() -> tuple[np.ndarray, np.ndarray, LaterCells]:
            cut, joined = _decide(*basis[1:], partial_cost, memo)
            return cut, joined, LaterCells.of(mixed, same[mixed], cut, basis[5])

        cut, joined = cut.copy(), joined.copy()
        cut[mixed], joined[mixed], later = memo.keep("cuts", basis, decide)
    return Cuts(same, reads, k_first, k_last, cut, joined, later)


def _changes(same: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs in which sharing changes; levels, of all of them; and `same` there [levels, runs, num_seqs].

    A level is a cell of a run after which sharing changes, as a cut pays off nowhere else, or its last.
    """
    changes = (same[:, 1:] != same[:, :-1]).any(2)
    mixed = changes.any(1).nonzero()[0]
    level = np.array([*changes.any(0).nonzero()[0].tolist(), same.shape[1] - 1], dtype=np.int16)
    return mixed, level, same[mixed, level[:, None]]


@dataclass(frozen=True, slots=True)
class _Tree:
    """The nodes of some runs, level by level, runs one after the other as if they were one of more sequences (columns).

    A node is a stretch of sequences with the same cells up to a level; its children are the stretches of the next level
    that it falls into.
    """

    chain: np.ndarray
    """[levels * columns] bool: in one node with the sequence before."""
    at: np.ndarray
    """[num_nodes]: level * columns + first column. size: how many columns."""
    size: np.ndarray
    bounds: list[int]
    """[levels + 1]: nodes of level a are [bounds[a], bounds[a + 1])."""
    child: np.ndarray
    """[nodes of all levels but the last]: the first child."""

    @staticmethod
    def of(shared: np.ndarray, valid: np.ndarray | None) -> _Tree:
        """shared, valid: [levels, runs, num_seqs] bool; where neither of two reads a level's cells, they don't part."""
        levels, columns = len(shared), shared[0].size
        chain = shared.copy()
        if valid is not None:
            chain[..., 1:] |= ~(valid[..., 1:] | valid[..., :-1])
        for a in range(1, levels):
            chain[a] &= chain[a - 1]
        chain = chain.ravel()
        at = (~chain).nonzero()[0]
        rank = (~chain).cumsum()
        bounds = [0, *rank[columns - 1 :: columns].tolist()]
        child = rank.take(at[: bounds[-2]] + columns) - 1
        return _Tree(chain, at, lengths_of(at, chain.size), bounds, child)


def _decide(
    shared: np.ndarray,
    level: np.ndarray,
    reads: np.ndarray,
    k_first: np.ndarray,
    k_last: np.ndarray,
    weight: np.ndarray,
    partial_cost: float,
    memo: Memo,
) -> tuple[np.ndarray, np.ndarray]:
    """(cut, joined) [runs, num_seqs] of runs in which sharing changes.

    level: [levels] int16, ascending; each stands for the cells behind the level before it, up to its own, in which
    nothing changes. shared: [levels, runs, num_seqs] bool, `same` of those cells.
    """
    levels, runs, num_seqs = shared.shape
    columns = runs * num_seqs
    depth = np.minimum((level + 1)[:, None, None], k_last + 1)  # cells read, down to a level
    valid = None
    if k_first.any():
        depth = np.maximum(depth - k_first, 0)
        valid = (np.diff(depth, axis=0, prepend=0) > 0) & reads
    tree = memo.keep("tree", (shared, valid), lambda: _Tree.of(shared, valid))
    # cells below a level: reading, divided among the sequences that share it, and partial results
    below = (depth[1:] - depth[:-1]) * memo.keep(
        "costs", (shared, weight), lambda: _costs(shared, weight, partial_cost)
    )
    for a in range(levels - 3, -1, -1):
        below[a] += below[a + 1]
    cost = depth.ravel().take(tree.at).astype(np.float32)
    if valid is not None:
        cost[cost == 0] = np.inf
    inner = tree.bounds[-2]
    cost[:inner] += np.add.reduceat(below.ravel(), tree.at[:inner])
    wins = np.ones(len(cost), dtype=bool)
    for a in range(levels - 2, -1, -1):
        at = slice(tree.bounds[a], tree.bounds[a + 1])
        apart = np.add.reduceat(cost[: tree.bounds[a + 2]], tree.child[at])
        np.less_equal(cost[at], apart, out=wins[at])
        np.minimum(cost[at], apart, out=cost[at])
    # the cut is the first level that wins
    won = wins.repeat(tree.size).reshape(levels, columns).argmax(0)
    cut = np.minimum(level.take(won).reshape(runs, num_seqs), k_last)
    joined = tree.chain.take(won * columns + np.arange(columns)).reshape(runs, num_seqs)
    joined[:, 1:] &= (cut[:, 1:] == cut[:, :-1]) & reads[:, 1:] & reads[:, :-1]
    return cut, joined


def _costs(shared: np.ndarray, weight: np.ndarray, partial_cost: float) -> np.ndarray:
    """[levels - 1, runs, num_seqs] float32: what a cell of a level but the first costs a sequence, in cells."""
    shared = shared[1:]
    starts = (~shared).ravel().nonzero()[0]
    lengths = lengths_of(starts, shared.size)
    if weight.max() == 1:
        each = np.float32(partial_cost) + np.float32(1) / lengths.astype(np.float32)
        return each.repeat(lengths).reshape(shared.shape)
    rows = np.broadcast_to(weight.astype(np.float32), shared.shape)
    sums = np.add.reduceat(rows.ravel(), starts)
    return rows * (np.float32(partial_cost) + (1 / sums).repeat(lengths).reshape(shared.shape))

"""Many sequences with few rows each: decode, linear drafts, short chunks.

Work is a list of (sequence, cell) pairs of one run: gathered and computed a few at a time, whatever sequences they
belong to, then folded cell after cell for all sequences at once. Which pairs, from where and in which order is made
once a step (`Group`), as all layers agree in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cells import CELL_SIZE, HALF_CELL, RUN_CELLS, RowBounds, View, cell_partials
from .gather import Outside, cells_a_chunk, outside, zero
from .rows import Job
from .state import State

_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pairs that are gathered and computed at once."""

    pairs: slice
    tokens: int
    """Of each cell that are read: CELL_SIZE or HALF_CELL."""
    k_index: Tensor
    v_index: Tensor
    outside: Outside | None
    """What no row sees of them; None where rows see whole cells."""
    seqs: slice | Tensor
    """[pairs] int64: the pairs' sequences of the group."""
    view: View


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a group."""

    active: Tensor | None
    """[active] int64: the sequences that see some of it; None: all."""
    num_pairs: int
    chunks: list[Chunk]
    places: list[slice | Tensor]
    """For each cell, in order, [active] int64: the pair's partial, or the identity that stands behind the last."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of equally many rows (or items of a plan, of equally many): what they read, and in which order."""

    num_seqs: int
    rows: int
    """Of each, padded."""
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class Edges:
    """Of each sequence of a group, [num_seqs] int64."""

    lo: np.ndarray
    """First key that some row sees; hi: one past the last."""
    hi: np.ndarray
    full_lo: np.ndarray
    """Every row sees all keys of [full_lo, full_hi)."""
    full_hi: np.ndarray
    block_start: np.ndarray

    def runs(self) -> list[int]:
        """Runs that some row sees; with windows there may be gaps between them."""
        seen = self.hi > self.lo
        run = CELL_SIZE * RUN_CELLS
        first, last = self.lo[seen] // run, (self.hi[seen] - 1) // run
        size = int(last.max(initial=-1)) + 2
        depth = np.cumsum(np.bincount(first, minlength=size) - np.bincount(last + 1, minlength=size))
        return np.flatnonzero(depth).tolist()


def attend_narrow(job: Job, tokens: int, seqs: np.ndarray) -> None:
    """All rows of `seqs`, each of up to `tokens` rows of q; writes out and lse. O(their KV)."""
    step = narrow_step(job, tokens * job.spec.group_size)
    for start in range(0, len(seqs), step):
        _attend(job, tokens, seqs[start : start + step])


def narrow_step(job: Job, rows: int) -> int:
    """How many sequences of `rows` rows a group may have, for the scratch of a run's partials to stay small."""
    return max(1, _PARTIAL_BYTES // (job.spec.num_kv_heads * rows * job.spec.v_head_dim * 4 * RUN_CELLS))


def _attend(job: Job, tokens: int, seqs: np.ndarray) -> None:
    rows, group, writes = job.layout.part(("narrow", tokens, seqs.tobytes()), lambda: _sequences(job, tokens, seqs))
    q = job.query_rows(rows)
    total = fold_group(job, group, q)
    out, lse = total.finish(job.sinks_of_rows(q.shape[2]), job.v_scale_of_rows())
    for which, of in writes:
        job.write(of, *((out, lse) if which is None else (out[which], lse[which])))


def _sequences(job: Job, tokens: int, seqs: np.ndarray) -> tuple[Tensor, Group, list[tuple[Tensor | None, Tensor]]]:
    """Rows of q [seqs, tokens], the group, and what to write: sequences of it (None: all), their rows [.., tokens]."""
    token = np.arange(tokens)[None, :]
    q_len = job.q_len[seqs][:, None]
    real = token < q_len
    lo, hi, position = job.visible(seqs[:, None], np.minimum(token, q_len - 1))
    # padding tokens repeat the last row, so they widen nothing
    edges = Edges(lo.min(1), hi.max(1), lo.max(1), hi.min(1), job.block_start[seqs])
    group = make_group(job, job.bounds(lo * real, hi * real, position), edges)
    writes: list[tuple[Tensor | None, Tensor]] = []
    for n in np.unique(q_len):  # sequences of the group may have fewer rows than `tokens`
        of = np.nonzero(q_len[:, 0] == n)[0]
        rows = job.index(job.q_start[seqs[of]][:, None] + np.arange(n))
        writes.append((None if len(of) == len(seqs) else job.index(of), rows))
    return job.index(job.q_start[seqs][:, None] + np.minimum(token, q_len - 1)), group, writes


def make_group(job: Job, bounds: RowBounds, edges: Edges) -> Group:
    """The group of sequences with such rows. O(their cells)."""
    num_seqs, rows = bounds.lo.shape
    return Group(num_seqs, rows, [_run(job, bounds, edges, run) for run in edges.runs()])


def fold_group(job: Job, group: Group, q: Tensor) -> State:
    """The state of all rows of a group over their keys: [seqs, num_kv_heads, rows]. O(their KV).

    q: [seqs, num_kv_heads, rows, head_dim] compute_dtype.
    """
    device = q.device
    shape = q.shape[:3]
    total: State | None = None
    for run in group.runs:
        state = _fold_run(job, run, q)
        if total is None and run.active is None:
            total = state
            continue
        if total is None:
            total = State.empty(shape, job.spec.v_head_dim, device)
        if run.active is None:
            total.fold_state(state)
        else:
            total.fold_state_at(run.active, state)
    return State.empty(shape, job.spec.v_head_dim, device) if total is None else total


def _run(job: Job, bounds: RowBounds, edges: Edges, run: int) -> Run:
    """One run: the pairs, first those that need no mask, then the others, then those whose later half no row sees."""
    first = (run * RUN_CELLS + np.arange(RUN_CELLS)) * CELL_SIZE
    lo, hi, full_lo, full_hi = (x[:, None] for x in (edges.lo, edges.hi, edges.full_lo, edges.full_hi))
    seen = (first < hi) & (first + CELL_SIZE > lo) & (hi > lo)
    active = np.nonzero(seen.any(1))[0]
    whole = seen & (first >= full_lo) & (first + CELL_SIZE <= full_hi)
    short = seen & ~whole & (hi <= first + HALF_CELL) & job.math.halves
    kinds = [np.nonzero(kind[active].T) for kind in (whole, seen & ~whole & ~short, short)]
    cell, at = (np.concatenate(x) for x in zip(*kinds, strict=True))
    num_pairs = len(cell)
    places = np.full((RUN_CELLS, len(active)), num_pairs)
    places[cell, at] = np.arange(num_pairs)
    chunks = list(_chunks(job, bounds, edges, active[at], first[cell], [len(seqs) for _, seqs in kinds]))
    return Run(
        None if len(active) == len(edges.lo) else job.index(active),
        num_pairs,
        chunks,
        [_place(job, places[c]) for c in np.nonzero(seen.any(0))[0]],
    )


def _place(job: Job, place: np.ndarray) -> slice | Tensor:
    """Indices, as a slice where they follow one another."""
    first, last = int(place[0]), int(place[-1])
    if (np.diff(place) == 1).all():
        return slice(first, last + 1)
    return job.index(place)


def _chunks(
    job: Job, bounds: RowBounds, edges: Edges, seq: np.ndarray, first: np.ndarray, counts: list[int]
) -> Iterator[Chunk]:
    """`seq`, first [pairs]: sequence of the group and first token of the cell; `counts` of each kind."""
    # tokens of the cell that some row sees
    lo, hi = np.maximum(edges.lo[seq], first), np.minimum(edges.hi[seq], first + CELL_SIZE)
    broken = np.concatenate(([0], np.cumsum(np.diff(seq) != 1)))  # grows where sequences do not follow one another
    ends = list(itertools.accumulate(counts))
    for begin, end, masked, tokens in zip(
        [0, *ends], ends, (False, True, True), (CELL_SIZE, CELL_SIZE, HALF_CELL), strict=False
    ):
        if begin == end:
            continue
        kind = slice(begin, end)
        k_index, v_index = job.indices(edges.block_start[seq[kind]], first[kind], lo[kind], hi[kind], tokens)
        step = cells_a_chunk(job.k_reader, job.v_reader, tokens)
        for a in range(begin, end, step):
            b = min(a + step, end)
            of = slice(int(seq[a]), int(seq[a]) + b - a) if broken[a] == broken[b - 1] else job.index(seq[a:b])
            yield Chunk(
                slice(a, b),
                tokens,
                k_index[a - begin : b - begin],
                v_index[a - begin : b - begin],
                outside(first[a:b].tolist(), lo[a:b].tolist(), hi[a:b].tolist(), tokens) if masked else None,
                of,
                View.of(job.math, job.index(first[a:b]), bounds[of], tokens, masked),
            )


def _fold_run(job: Job, run: Run, q: Tensor) -> State:
    """The state of the run's sequences over it."""
    lse, out = _partials(job, run, q)
    state: State | None = None
    for place in run.places:
        part = lse[place], out[place]
        if state is None:
            state = State.first(*part)
        else:
            state.fold_cell(*part)
    assert state is not None, "a run without a visible cell is never entered"
    return state


def _partials(job: Job, run: Run, q: Tensor) -> tuple[Tensor, Tensor]:
    """The cells' results, in scratch: lse [pairs + 1, num_kv_heads, rows], out [.., v_head_dim] float32.

    The entry behind the last is the identity.
    """
    spec, pairs = job.spec, run.num_pairs
    shape = (pairs + 1, spec.num_kv_heads, q.shape[2])
    lse = job.workspace.take("narrow/lse", shape, torch.float32, q.device)
    out = job.workspace.take("narrow/out", (*shape, spec.v_head_dim), torch.float32, q.device)
    lse[pairs] = -torch.inf
    out[pairs] = 0.0
    for chunk in run.chunks:
        k = job.k_reader.read(chunk.k_index, chunk.tokens)
        v = job.v_reader.read(chunk.v_index, chunk.tokens)
        if chunk.outside is not None:
            zero(k, chunk.outside)
            zero(v, chunk.outside)
        lse[chunk.pairs], out[chunk.pairs] = cell_partials(job.math, q[chunk.seqs], k, v, chunk.view)
    return lse, out

"""Many sequences with few rows each: decode, linear drafts, short chunks.

Work is a list of (sequence, cell) pairs of one run: gathered and computed a few at a time, whatever sequences they
belong to, then folded cell after cell for all sequences at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cells import CELL_SIZE, HALF_CELL, RUN_CELLS, RowBounds, cell_partials
from .gather import cells_a_chunk, zero_outside
from .rows import Job
from .state import State

_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NarrowGroup:
    """Sequences of equally many rows (or items of a plan, of equally many); every array is [num_seqs of the group]."""

    q: Tensor
    """[seqs, num_kv_heads, rows, head_dim] compute_dtype."""
    bounds: RowBounds
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
    device = job.tensors.q.device
    token = np.arange(tokens)[None, :]
    q_len = job.q_len[seqs][:, None]
    real = token < q_len
    lo, hi, position = job.visible(seqs[:, None], np.minimum(token, q_len - 1))
    # padding tokens repeat the last row, so they widen nothing
    group = NarrowGroup(
        job.query_rows(torch.from_numpy(job.q_start[seqs][:, None] + np.minimum(token, q_len - 1)).to(device)),
        job.bounds(lo * real, hi * real, position),
        lo.min(1),
        hi.max(1),
        lo.max(1),
        hi.min(1),
        job.block_start[seqs],
    )
    total = fold_group(job, group)
    out, lse = total.finish(job.sinks_of_rows(group.q.shape[2]), job.v_scale_of_rows())
    _write(job, seqs, tokens, out, lse)


def fold_group(job: Job, group: NarrowGroup) -> State:
    """The state of all rows of a group over their keys in [lo, hi): [seqs, num_kv_heads, rows]. O(their KV)."""
    device = group.q.device
    shape = group.q.shape[:3]
    total: State | None = None
    for run in group.runs():
        active, state = _run(job, group, run)
        if total is None and len(active) == shape[0]:
            total = state
            continue
        if total is None:
            total = State.empty(shape, job.spec.v_head_dim, device)
        if len(active) == shape[0]:
            total.fold_state(state)
        else:
            total.fold_state_at(torch.from_numpy(active).to(device), state)
    return State.empty(shape, job.spec.v_head_dim, device) if total is None else total


def _run(job: Job, group: NarrowGroup, run: int) -> tuple[np.ndarray, State]:
    """One run of the group: the sequences that see some of it, and their state over it."""
    first = (run * RUN_CELLS + np.arange(RUN_CELLS)) * CELL_SIZE
    seen = (first < group.hi[:, None]) & (first + CELL_SIZE > group.lo[:, None]) & (group.hi > group.lo)[:, None]
    active = np.nonzero(seen.any(1))[0]
    seen = seen[active]
    whole = seen & (first >= group.full_lo[active][:, None]) & (first + CELL_SIZE <= group.full_hi[active][:, None])
    short = seen & ~whole & (group.hi[active][:, None] <= first + HALF_CELL) & job.math.halves
    kinds = [np.nonzero(kind.T) for kind in (whole, seen & ~whole & ~short, short)]
    cell, seq = (np.concatenate(x) for x in zip(*kinds, strict=True))
    num_pairs = len(cell)

    lse, out = _partials(job, group, active[seq], first[cell], [len(seqs) for _, seqs in kinds])
    # place[cell, seq]: the pair's partial, or the identity that stands behind the last
    place = np.full((RUN_CELLS, len(active)), num_pairs)
    place[cell, seq] = np.arange(num_pairs)
    where = torch.from_numpy(place).to(lse.device)
    state: State | None = None
    for c in np.nonzero(seen.any(0))[0]:
        part = lse.index_select(0, where[c]), out.index_select(0, where[c])
        if state is None:
            state = State.first(*part)
        else:
            state.fold_cell(*part)
    assert state is not None, "a run without a visible cell is never entered"
    return active, state


def _partials(
    job: Job, group: NarrowGroup, seq: np.ndarray, first: np.ndarray, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """The cells' results, in scratch: lse [pairs + 1, num_kv_heads, rows], out [.., v_head_dim] float32.

    `seq`, `first` [pairs]: sequence of the group and first token of the cell; first those that need no mask, then the
    others, then those whose later half no row sees, `counts` of each. The entry behind the last is the identity.
    """
    spec, device = job.spec, group.q.device
    pairs, rows = len(seq), group.q.shape[2]
    lse = job.workspace.take("narrow/lse", (pairs + 1, spec.num_kv_heads, rows), torch.float32, device)
    out = job.workspace.take("narrow/out", (pairs + 1, spec.num_kv_heads, rows, spec.v_head_dim), torch.float32, device)
    lse[pairs] = -torch.inf
    out[pairs] = 0.0
    # tokens of the cell that some row sees
    lo, hi = np.maximum(group.lo[seq], first), np.minimum(group.hi[seq], first + CELL_SIZE)
    seq_t, first_t = torch.from_numpy(seq).to(device), torch.from_numpy(first).to(device)
    broken = np.concatenate(([0], np.cumsum(np.diff(seq) != 1)))  # grows where sequences do not follow one another
    ends = list(itertools.accumulate(counts))
    for begin, end, masked, tokens in zip(
        [0, *ends], ends, (False, True, True), (CELL_SIZE, CELL_SIZE, HALF_CELL), strict=False
    ):
        if begin == end:
            continue
        kind = slice(begin, end)
        step = cells_a_chunk(job.k_reader, job.v_reader, tokens)
        k_index, v_index = job.indices(group.block_start[seq[kind]], first[kind], lo[kind], hi[kind], tokens)
        for a in range(begin, end, step):
            b = min(a + step, end)
            k = job.k_reader.read(k_index[a - begin : b - begin], tokens)
            v = job.v_reader.read(v_index[a - begin : b - begin], tokens)
            if masked:
                for cells in (k, v):
                    zero_outside(cells, first[a:b].tolist(), lo[a:b].tolist(), hi[a:b].tolist())
            of = slice(int(seq[a]), int(seq[a]) + b - a) if broken[a] == broken[b - 1] else seq_t[a:b]
            lse[a:b], out[a:b] = cell_partials(job.math, group.q[of], k, v, first_t[a:b], group.bounds[of], masked)
    return lse, out


def _write(job: Job, seqs: np.ndarray, tokens: int, out: Tensor, lse: Tensor) -> None:
    """Sequences of the group may have fewer rows than `tokens`: one write for each count of rows."""
    q_len = job.q_len[seqs]
    for n in np.unique(q_len):
        of = np.nonzero(q_len == n)[0]
        rows = torch.from_numpy(job.q_start[seqs[of]][:, None] + np.arange(n)).to(out.device)
        which = torch.from_numpy(of).to(out.device)
        job.write(rows, *((out, lse) if len(of) == len(seqs) else (out[which], lse[which])))

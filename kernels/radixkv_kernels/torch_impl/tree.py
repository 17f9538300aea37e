"""Attention over the items of a plan: KV that several sequences share is read once.

Items are worked on like sequences in the plain path: those with few rows in batches (`narrow`), those with many alone
(`wide`). Each leaves a state in its slots; then every row folds its states in the order that the plan lists. The cells,
the runs and the merge formula are those of the plain path, so the bits are too. What is read and in which order is made
once a step, as all layers agree in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..contract import WorkList
from .cells import CELL_SIZE, RUN_CELLS, RowBounds
from .narrow import Edges, Group, fold_group, make_group, narrow_step
from .rows import NARROW_ROWS, Job
from .state import State
from .wide import WideTile, fold_tiles


@dataclass(frozen=True, slots=True)
class _Rows:
    """The plan's rows with this call's lengths, one entry a flat row (query token, head of the group)."""

    token: Tensor
    """[rows of the plan] int64: their rows of q."""
    lo: np.ndarray
    """[flat rows] int64: first visible key; hi: one past the last; position: the row's own."""
    hi: np.ndarray
    position: np.ndarray

    @staticmethod
    def of(job: Job, work: WorkList) -> _Rows:
        """O(rows)."""
        token, seq = work.row_token.astype(np.int64), work.row_seq.astype(np.int64)
        seen = job.visible(seq, token - job.q_start[seq])
        return _Rows(job.index(token), *(x.repeat(job.spec.group_size) for x in seen))


@dataclass(frozen=True, slots=True)
class _Put:
    """Where the state [items, num_kv_heads, padded rows] of items goes."""

    slots: Tensor
    """[real rows] int64."""
    keep: Tensor | None
    """[items, padded] bool, the rows that are real; None: all."""

    def __call__(self, slots: State, state: State) -> None:
        parts = (x.transpose(1, 2) for x in (state.top, state.total, state.acc))
        for slot, part in zip((slots.top, slots.total, slots.acc), parts, strict=True):
            slot[self.slots] = part.flatten(0, 1) if self.keep is None else part[self.keep]


@dataclass(frozen=True, slots=True)
class _Items:
    """Items whose rows are padded to one number, with what they see."""

    at: Tensor
    """[items, padded] int64: their flat rows, padding repeating an item's last."""
    bounds: RowBounds
    """Padding sees nothing."""
    edges: Edges
    put: _Put

    @staticmethod
    def of(job: Job, work: WorkList, rows: _Rows, items: np.ndarray, padded: int) -> _Items:
        """O(items * padded)."""
        step, count = np.arange(padded), items[:, 1:2]
        at, real = items[:, :1] + np.minimum(step, count - 1), step < count
        lo, hi = rows.lo[at], rows.hi[at]
        first, last = items[:, 2] * CELL_SIZE, items[:, 3] * CELL_SIZE  # kept to the items' cells
        seqs = work.row_seq[items[:, 0] // job.spec.group_size]
        edges = Edges(
            np.maximum(lo.min(1), first), np.minimum(hi.max(1), last), lo.max(1), hi.min(1), job.block_start[seqs]
        )
        keep = None if real.all() else torch.from_numpy(real).to(job.tensors.q.device)
        put = _Put(job.index((items[:, 4:5] + step)[real]), keep)
        return _Items(job.index(at), job.flat_bounds(lo * real, hi * real, rows.position[at]), edges, put)

    def query_rows(self, q: Tensor) -> Tensor:
        """q [flat rows, num_kv_heads, head_dim] -> [items, num_kv_heads, padded, head_dim]."""
        return q[self.at].transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class _Work:
    """The items of rows that share."""

    few: list[tuple[_Items, Group]]
    """Those with few rows, in batches."""
    many: list[tuple[int, list[_Items]]]
    """The others, each alone: tiles of one group of rows, and the sequence through whose blocks they read."""

    @staticmethod
    def of(job: Job, work: WorkList, rows: _Rows) -> _Work:
        """O(cells of the items)."""
        group = job.spec.group_size
        items = work.items.astype(np.int64)
        mine = np.flatnonzero(work.shared[items[:, 0] // group])
        items, groups = items[mine], work.groups[mine]
        is_few = items[:, 1] <= NARROW_ROWS
        few, many = [], []
        for padded, of in _classes(job, items[is_few]):
            step = narrow_step(job, padded)
            for start in range(0, len(of), step):
                made = _Items.of(job, work, rows, of[start : start + step], padded)
                few.append((made, make_group(job, made.bounds, made.edges)))
        items, groups = items[~is_few], groups[~is_few]
        for of in np.split(items, np.flatnonzero(np.diff(groups)) + 1) if len(items) else ():
            tiles = [_Items.of(job, work, rows, item[None], job.math.rows.padded(int(item[1]))) for item in of]
            many.append((int(work.row_seq[of[0, 0] // group]), tiles))
        return _Work(few, many)


def _classes(job: Job, items: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Items by what their rows are padded to."""
    padded = np.where(items[:, 1] <= 16, -(-items[:, 1] // 4) * 4, -(-items[:, 1] // 16) * 16)
    return [(job.math.rows.padded(int(n)), items[padded == n]) for n in np.unique(padded)]


def attend_shared(job: Job, work: WorkList) -> None:
    """All rows of sequences that share; writes out and lse. O(KV of their items)."""
    rows = job.layout.part("tree rows", lambda: _Rows.of(job, work))
    parts = job.layout.part("tree work", lambda: _Work.of(job, work, rows))
    q = job.tensors.q[rows.token]
    q = q.view(-1, job.spec.num_kv_heads, job.spec.group_size, job.spec.head_dim).transpose(1, 2)
    q = q.reshape(-1, job.spec.num_kv_heads, job.spec.head_dim).to(job.math.compute_dtype)
    slots = _slots(job, work)
    for items, group in parts.few:
        items.put(slots, fold_group(job, group, items.query_rows(q)))
    for seq, alone in parts.many:
        tiles = []
        for items in alone:
            edges = items.edges
            lo, hi, full_lo, full_hi = (int(x[0]) for x in (edges.lo, edges.hi, edges.full_lo, edges.full_hi))
            tiles.append(WideTile(items.query_rows(q), items.bounds, lo, hi, full_lo, full_hi))
        fold_tiles(job, seq, tiles)
        for items, tile in zip(alone, tiles, strict=True):
            items.put(slots, tile.result(job))
    _reduce(job, job.layout.part("tree folds", lambda: _Folds.of(job, work)), slots)


def _slots(job: Job, work: WorkList) -> State:
    """[slots, num_kv_heads]: what the items leave."""
    shape = (len(work.row_slots) * job.spec.group_size, job.spec.num_kv_heads)

    def take(name: str, *tail: int) -> Tensor:
        return job.workspace.take(f"tree/{name}", (*shape, *tail), torch.float32, job.tensors.q.device)

    return State(take("top"), take("total"), take("acc", job.spec.v_head_dim))


@dataclass(frozen=True, slots=True)
class _Fold:
    """One partial of some rows."""

    closing: Tensor | None
    """[n] int64: rows whose run ends before it; None: none."""
    rows: Tensor | None
    """[n] int64: whose partial it is; None: all rows'."""
    slots: Tensor
    """[n] int64: slot of each, in units of the group."""
    starts: bool
    """Whether a run begins with it."""


@dataclass(frozen=True, slots=True)
class _Folds:
    """How the states of the rows that share are folded: each row's partials in the order that the plan lists."""

    tokens: Tensor
    """[rows] int64: their rows of q."""
    all_have_one: bool
    """Whether each row has a partial at all."""
    folds: list[_Fold]

    @staticmethod
    def of(job: Job, work: WorkList) -> _Folds:
        """O(partials)."""
        mine = np.flatnonzero(work.shared)
        base = work.row_base[mine].astype(np.int64)
        counts = work.row_base[mine + 1] - base
        folds = []
        for k in range(int(counts.max(initial=0))):
            active = np.flatnonzero(counts > k)
            entry = base[active] + k
            starts = work.slot_cells[entry] % RUN_CELLS == 0 if k else np.ones(len(active), dtype=bool)
            closing = job.index(active[starts]) if k and starts.any() else None
            for which, is_start in ((starts, True), (~starts, False)):
                of = active[which]
                if len(of):
                    slots = job.index(work.row_slots[entry[which]].astype(np.int64) // job.spec.group_size)
                    folds.append(_Fold(closing, None if len(of) == len(mine) else job.index(of), slots, is_start))
                    closing = None
        return _Folds(job.index(work.row_token[mine]), bool(counts.all()), folds)


def _reduce(job: Job, folds: _Folds, slots: State) -> None:
    """Folds the states of the rows that share and writes them."""
    spec, device = job.spec, job.tensors.q.device
    heads = (spec.group_size, spec.num_kv_heads)
    shape = (len(folds.tokens), *heads)
    top, total_of, acc = slots.top.view(-1, *heads), slots.total.view(-1, *heads), slots.acc
    slots = State(top, total_of, acc.view(-1, *heads, spec.v_head_dim))
    total: State | None = None
    run = None if folds.all_have_one else State.empty(shape, spec.v_head_dim, device)  # else all rows get one at once
    for fold in folds.folds:
        if fold.closing is not None:
            assert run is not None, "a run ends behind its first partial"
            if total is None:
                total = State.empty(shape, spec.v_head_dim, device)
            total.fold_state_at(fold.closing, _at(run, fold.closing))
        part = _at(slots, fold.slots)
        if fold.rows is None and (fold.starts or run is None):
            run = part
            continue
        assert run is not None, "where every row has a partial, the first ones are of all rows"
        if fold.rows is None:
            run.fold_state(part)
        elif fold.starts:
            _replace(run, fold.rows, part)
        else:
            run.fold_state_at(fold.rows, part)
    if run is None:  # no rows
        return
    if total is None:
        total = run
    else:
        total.fold_state(run)
    _write(job, folds.tokens, total)


def _at(state: State, index: Tensor) -> State:
    return State(state.top[index], state.total[index], state.acc[index])


def _replace(state: State, index: Tensor, part: State) -> None:
    state.top[index], state.total[index], state.acc[index] = part.top, part.total, part.acc


def _write(job: Job, tokens: Tensor, total: State) -> None:
    """Finishes the state [tokens, group, num_kv_heads] of rows of q."""
    spec = job.spec
    sinks, v_scale = job.tensors.sinks, job.tensors.v_scale
    if sinks is not None:
        sinks = sinks.view(spec.num_kv_heads, spec.group_size).T.contiguous()
    out, lse = total.finish(sinks, None if v_scale is None else v_scale[:, None])
    heads = (len(tokens), spec.num_q_heads)
    job.out[tokens] = out.transpose(1, 2).reshape(*heads, spec.v_head_dim).to(job.out.dtype)
    if job.lse is not None:
        job.lse[tokens] = lse.transpose(1, 2).reshape(heads)

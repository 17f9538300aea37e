"""Attention over the items of a plan: KV that several sequences share is read once.

Items are worked on like sequences in the plain path: those with few rows in batches (`narrow`), those with many alone
(`wide`). Each leaves a state in its slots; then every row folds its states in the order that the plan lists. The cells,
the runs and the merge formula are those of the plain path, so the bits are too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..contract import WorkList
from .cells import CELL_SIZE, RUN_CELLS
from .narrow import NarrowGroup, fold_group, narrow_step
from .rows import NARROW_ROWS, Job
from .state import State
from .wide import WideTile, fold_tiles


@dataclass(frozen=True, slots=True)
class _TreeRows:
    """The plan's rows with this call's lengths, one entry a flat row (query token, head of the group)."""

    work: WorkList
    q: Tensor
    """[flat rows, num_kv_heads, head_dim] compute_dtype."""
    lo: np.ndarray
    """[flat rows] int64: first visible key; hi: one past the last; position: the row's own."""
    hi: np.ndarray
    position: np.ndarray
    slots: State
    """[slots, num_kv_heads]: what the items leave."""

    def item_rows(self, items: np.ndarray, padded: int) -> tuple[np.ndarray, np.ndarray]:
        """[items, padded] flat rows of items, padding repeating an item's last, and which are real."""
        step = np.arange(padded)
        count = items[:, 1:2]
        return items[:, :1] + np.minimum(step, count - 1), step < count

    def put(self, items: np.ndarray, real: np.ndarray, state: State) -> None:
        """Stores the state [items, num_kv_heads, padded rows] of items in their slots."""
        device = self.q.device
        where = torch.from_numpy((items[:, 4:5] + np.arange(real.shape[1]))[real]).to(device)
        parts = (x.transpose(1, 2) for x in (state.top, state.total, state.acc))
        keep = None if real.all() else torch.from_numpy(real).to(device)
        for slot, part in zip((self.slots.top, self.slots.total, self.slots.acc), parts, strict=True):
            slot[where] = part.flatten(0, 1) if keep is None else part[keep]


def attend_shared(job: Job, work: WorkList) -> None:
    """All rows of sequences that share; writes out and lse. O(KV of their items)."""
    rows = _rows(job, work)
    group = job.spec.group_size
    items = work.items.astype(np.int64)
    mine = np.flatnonzero(work.shared[items[:, 0] // group])
    items, groups = items[mine], work.groups[mine]
    few = items[:, 1] <= NARROW_ROWS
    for padded, of in _classes(job, items[few]):
        step = narrow_step(job, padded)
        for start in range(0, len(of), step):
            _narrow(job, rows, of[start : start + step], padded)
    items, groups = items[~few], groups[~few]
    for of in np.split(items, np.flatnonzero(np.diff(groups)) + 1) if len(items) else ():
        _wide(job, rows, of)
    _reduce(job, rows, np.flatnonzero(work.shared))


def _rows(job: Job, work: WorkList) -> _TreeRows:
    spec, device = job.spec, job.tensors.q.device
    token, seq = work.row_token.astype(np.int64), work.row_seq.astype(np.int64)
    q = job.tensors.q[torch.from_numpy(token).to(device)]
    q = q.view(len(token), spec.num_kv_heads, spec.group_size, spec.head_dim).transpose(1, 2)
    flat = q.reshape(-1, spec.num_kv_heads, spec.head_dim).to(job.math.compute_dtype)
    lo, hi, position = (x.repeat(spec.group_size) for x in job.visible(seq, token - job.q_start[seq]))
    shape = (len(work.row_slots) * spec.group_size, spec.num_kv_heads)

    def take(name: str, *tail: int) -> Tensor:
        return job.workspace.take(f"tree/{name}", (*shape, *tail), torch.float32, device)

    slots = State(take("top"), take("total"), take("acc", spec.v_head_dim))
    return _TreeRows(work, flat, lo, hi, position, slots)


def _classes(job: Job, items: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Items by what their rows are padded to."""
    padded = np.where(items[:, 1] <= 16, -(-items[:, 1] // 4) * 4, -(-items[:, 1] // 16) * 16)
    return [(job.math.rows.padded(int(n)), items[padded == n]) for n in np.unique(padded)]


def _edges(rows: _TreeRows, at: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lo.min, hi.max, lo.max, hi.min over each item's rows, kept to the item's cells; all [items]."""
    lo, hi = rows.lo[at], rows.hi[at]
    first, last = items[:, 2] * CELL_SIZE, items[:, 3] * CELL_SIZE
    return np.maximum(lo.min(1), first), np.minimum(hi.max(1), last), lo.max(1), hi.min(1)


def _narrow(job: Job, rows: _TreeRows, items: np.ndarray, padded: int) -> None:
    """Items of up to `padded` flat rows, all at once."""
    device = rows.q.device
    at, real = rows.item_rows(items, padded)
    seqs = rows.work.row_seq[items[:, 0] // job.spec.group_size]
    group = NarrowGroup(
        rows.q[torch.from_numpy(at).to(device)].transpose(1, 2).contiguous(),
        job.flat_bounds(rows.lo[at] * real, rows.hi[at] * real, rows.position[at]),
        *_edges(rows, at, items),
        job.block_start[seqs],
    )
    rows.put(items, real, fold_group(job, group))


def _wide(job: Job, rows: _TreeRows, items: np.ndarray) -> None:
    """Tiles of one group, whose KV is gathered once."""
    device = rows.q.device
    tiles, reals = [], []
    for i in range(len(items)):
        item = items[i : i + 1]
        at, real = rows.item_rows(item, job.math.rows.padded(int(item[0, 1])))
        q = rows.q[torch.from_numpy(at).to(device)].transpose(1, 2).contiguous()
        bounds = job.flat_bounds(rows.lo[at] * real, rows.hi[at] * real, rows.position[at])
        lo, hi, full_lo, full_hi = (int(x[0]) for x in _edges(rows, at, item))
        tiles.append(WideTile(q, bounds, lo, hi, full_lo, full_hi))
        reals.append(real)
    fold_tiles(job, int(rows.work.row_seq[items[0, 0] // job.spec.group_size]), tiles)
    for i, (tile, real) in enumerate(zip(tiles, reals, strict=True)):
        rows.put(items[i : i + 1], real, tile.result(job))


def _reduce(job: Job, rows: _TreeRows, mine: np.ndarray) -> None:
    """Folds the states of the plan's rows `mine` [n] and writes them."""
    spec, work, device = job.spec, rows.work, rows.q.device
    group = spec.group_size
    shape = (len(mine), group, spec.num_kv_heads)
    slots = State(rows.slots.top, rows.slots.total, rows.slots.acc)
    slots.top, slots.total = (x.view(-1, group, spec.num_kv_heads) for x in (slots.top, slots.total))
    slots.acc = slots.acc.view(-1, group, spec.num_kv_heads, spec.v_head_dim)
    base = work.row_base[mine].astype(np.int64)
    counts = work.row_base[mine + 1] - base
    total: State | None = None
    run = State.empty(shape, spec.v_head_dim, device) if not counts.all() else None  # else all rows get one at once
    for k in range(int(counts.max(initial=0))):
        active = np.flatnonzero(counts > k)
        entry = base[active] + k
        starts = work.slot_cells[entry] % RUN_CELLS == 0 if k else np.ones(len(active), dtype=bool)
        if run is not None and k and starts.any():
            new = torch.from_numpy(active[starts]).to(device)
            if total is None:
                total = State.empty(shape, spec.v_head_dim, device)
            total.fold_state_at(new, _at(run, new))
        for which in (starts, ~starts):
            of = active[which]
            if not len(of):
                continue
            part = _at(slots, torch.from_numpy(work.row_slots[entry[which]].astype(np.int64) // group).to(device))
            if len(of) == len(mine):
                if run is None or which is starts:
                    run = part
                else:
                    run.fold_state(part)
                continue
            assert run is not None, "where every row has a partial, the first ones are of all rows"
            if which is starts:
                _replace(run, torch.from_numpy(of).to(device), part)
            else:
                run.fold_state_at(torch.from_numpy(of).to(device), part)
    if run is None:  # no rows
        return
    if total is None:
        total = run
    else:
        total.fold_state(run)
    _write(job, rows.work.row_token[mine], total)


def _at(state: State, index: Tensor) -> State:
    return State(state.top[index], state.total[index], state.acc[index])


def _replace(state: State, index: Tensor, part: State) -> None:
    state.top[index], state.total[index], state.acc[index] = part.top, part.total, part.acc


def _write(job: Job, tokens: np.ndarray, total: State) -> None:
    """Finishes the state [tokens, group, num_kv_heads] of rows of q."""
    spec, device = job.spec, job.tensors.q.device
    sinks, v_scale = job.tensors.sinks, job.tensors.v_scale
    if sinks is not None:
        sinks = sinks.view(spec.num_kv_heads, spec.group_size).T.contiguous()
    out, lse = total.finish(sinks, None if v_scale is None else v_scale[:, None])
    where = torch.from_numpy(tokens.astype(np.int64)).to(device)
    heads = (len(tokens), spec.num_q_heads)
    job.out[where] = out.transpose(1, 2).reshape(*heads, spec.v_head_dim).to(job.out.dtype)
    if job.lse is not None:
        job.lse[where] = lse.transpose(1, 2).reshape(heads)

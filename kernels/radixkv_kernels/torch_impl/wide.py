"""One sequence with many rows: prefill and long chunks.

A run's KV is gathered once; tiles of rows then fold its cells while both are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cells import CELL_SIZE, RUN_CELLS, RowBounds, View, cell_partials
from .gather import outside, zero
from .rows import Job
from .state import State

TILE_ROWS = 1024


@dataclass(slots=True)
class WideTile:
    """Some rows of the sequence (or of an item of a plan); `state` grows run by run."""

    q: Tensor
    """[1, num_kv_heads, rows, head_dim] compute_dtype."""
    bounds: RowBounds
    lo: int
    """First key that some row sees; hi: one past the last; all rows see all keys of [full_lo, full_hi)."""
    hi: int
    full_lo: int
    full_hi: int
    state: State | None = None

    def result(self, job: Job) -> State:
        """The state, empty where no run was folded."""
        return self.state or State.empty(tuple(self.q.shape[:3]), job.spec.v_head_dim, self.q.device)


def attend_wide(job: Job, seq: int) -> None:
    """All rows of one sequence; writes out and lse. O(q_len * visible keys)."""
    pairs = _tiles(job, seq)
    fold_tiles(job, seq, [tile for _, tile in pairs])
    for rows, tile in pairs:
        padded = tile.q.shape[2]
        out, lse = tile.result(job).finish(job.sinks_of_rows(padded), job.v_scale_of_rows())
        job.write(rows, out, lse)


def fold_tiles(job: Job, seq: int, tiles: list[WideTile]) -> None:
    """Sets each tile's state over its keys in [lo, hi), read through the blocks of sequence `seq`."""
    tiles = [t for t in tiles if t.lo < t.hi]
    if not tiles:
        return
    lo, hi = min(t.lo for t in tiles), max(t.hi for t in tiles)
    run_tokens = CELL_SIZE * RUN_CELLS
    for first in range(lo // run_tokens * run_tokens, hi, run_tokens):
        a, b = max(lo, first), min(hi, first + run_tokens)
        cells = np.arange(a // CELL_SIZE, (b - 1) // CELL_SIZE + 1) * CELL_SIZE
        k, v = _gather(job, seq, cells, a, b)
        for tile in tiles:
            _fold_run(job, tile, cells, k, v)


def _tiles(job: Job, seq: int) -> list[tuple[Tensor, WideTile]]:
    """With each tile its rows of q, [1, tokens] int64."""
    q_len, device = int(job.q_len[seq]), job.tensors.q.device
    step = max(1, TILE_ROWS // job.spec.group_size)
    tiles = []
    for start in range(0, q_len, step):
        token = np.arange(start, min(q_len, start + step))[None, :]
        lo, hi, position = job.visible(np.array([[seq]]), token)
        rows = torch.from_numpy(job.q_start[seq] + token).to(device)
        edges = int(lo.min()), int(hi.max()), int(lo.max()), int(hi.min())
        tiles.append((rows, WideTile(job.query_rows(rows), job.bounds(lo, hi, position), *edges)))
    return tiles


def _gather(job: Job, seq: int, cells: np.ndarray, lo: int, hi: int) -> list[Tensor]:
    """Keys and values of cells of one run [cells, num_kv_heads, CELL_SIZE, dim], zero outside of [lo, hi)."""
    n = len(cells)
    start = np.full(n, job.block_start[seq])
    indices = job.indices(start, cells, np.maximum(cells, lo), np.minimum(cells + CELL_SIZE, hi), CELL_SIZE)
    gathered = [reader.read(index) for reader, index in zip((job.k_reader, job.v_reader), indices, strict=True)]
    unseen = outside(cells.tolist(), [lo] * n, [hi] * n, CELL_SIZE)
    for found in gathered:
        zero(found, unseen)
    return gathered


def _fold_run(job: Job, tile: WideTile, cells: np.ndarray, k: Tensor, v: Tensor) -> None:
    """Folds the cells of one run that the tile sees, then the run."""
    run: State | None = None
    for i, first in enumerate(cells.tolist()):
        if first >= tile.hi or first + CELL_SIZE <= tile.lo:
            continue
        masked = first < tile.full_lo or first + CELL_SIZE > tile.full_hi
        at = torch.tensor([first], device=k.device)
        view = View.of(job.math, at, tile.bounds, CELL_SIZE, masked)
        part = cell_partials(job.math, tile.q, k[i : i + 1], v[i : i + 1], view)
        if run is None:
            run = State.first(*part)
        else:
            run.fold_cell(*part)
    if run is None:
        return
    if tile.state is None:
        tile.state = run
    else:
        tile.state.fold_state(run)

"""What a plan reads and writes, counted in tokens: for judging plans, never on the way to a result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..contract import PlanConfig, WorkList


@dataclass(frozen=True, slots=True)
class PlanStats:
    """KV tokens are of one KV head; multiply by num_kv_heads * 2 * head_dim * itemsize for bytes."""

    num_items: int
    num_partials: int
    """(query token, item) pairs: each writes and reads num_q_heads * (v_head_dim + 2) floats."""
    num_kv_tokens_read: int
    """Tokens read, a group of rows over the same cells counted once: its tiles run together and meet in the cache."""
    num_kv_tokens_loaded: int
    """The same with every tile counted."""
    num_unique_kv_tokens: int
    """Distinct cache slots that some row sees: the least that can be read."""
    num_logical_kv_tokens: int
    """Tokens that sequences see, each sequence by itself: what attention without a plan reads."""


def measure(
    config: PlanConfig, work: WorkList, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray, table: np.ndarray
) -> PlanStats:
    """Counts; table [num_seqs, max_blocks] as the plan was made from. O(num_seqs * max_blocks log)."""
    size, group = config.cell_size, config.group_size
    q_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    busy = (q_lens > 0) & (seq_lens > 0)
    lo = np.zeros_like(seq_lens)
    if config.window is not None:
        lo = np.clip(seq_lens - q_lens - config.window + 1, 0, seq_lens)
    logical = int((seq_lens - lo)[busy].sum())
    read = loaded = 0
    if len(work.items):
        row0, rows, first, last = work.items[:, :4].astype(np.int64).T
        span = np.stack((row0 // group, (row0 + rows - 1) // group + 1), 1).ravel()
        seq_lo, seq_hi = lo[work.row_seq], seq_lens[work.row_seq]
        a = np.maximum(first * size, np.minimum.reduceat(np.append(seq_lo, 0), span)[::2])
        b = np.minimum(last * size, np.maximum.reduceat(np.append(seq_hi, 0), span)[::2])
        loaded = int((b - a).sum())
        new = np.flatnonzero(np.diff(work.groups, prepend=-1))
        read = int((np.maximum.reduceat(b, new) - np.minimum.reduceat(a, new)).sum())
    unique = _unique(table, lo, seq_lens, busy, config.block_size)
    return PlanStats(len(work.items), len(work.row_slots), read, loaded, unique, logical)


def _unique(table: np.ndarray, lo: np.ndarray, hi: np.ndarray, busy: np.ndarray, block_size: int) -> int:
    """Distinct slots; those of a block that several sequences see in part are taken to be one stretch."""
    columns = np.arange(table.shape[1])
    seen = (columns >= (lo // block_size)[:, None]) & (columns < -(-hi // block_size)[:, None]) & busy[:, None]
    rows, cols = np.nonzero(seen)
    if not len(rows):
        return 0
    start = np.clip(lo[rows] - cols * block_size, 0, None)
    end = np.clip(hi[rows] - cols * block_size, None, block_size)
    ids = table[rows, cols]
    order = np.argsort(ids, kind="stable")
    new = np.flatnonzero(np.diff(ids[order].astype(np.int64), prepend=np.iinfo(np.int32).min - 1))
    return int((np.maximum.reduceat(end[order], new) - np.minimum.reduceat(start[order], new)).sum())

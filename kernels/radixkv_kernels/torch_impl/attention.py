"""Paged attention on the cell rule: the plan with one item a sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from ..contract import AttentionSpec, AttentionTensors, Plan
from .cells import CELL_SIZE
from .narrow import attend_narrow
from .rows import Job, split
from .tree import attend_shared
from .wide import TILE_ROWS, attend_wide
from .workspace import thread_workspace


def unsupported(spec: AttentionSpec, tensors: AttentionTensors) -> str | None:
    """Does everything, on any device (off the CPU it copies lengths and ids to the host, which synchronises)."""
    return None


def paged_attention(spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None) -> None:
    """See `contract.py`. Scratch: the calling thread's workspace."""
    with _exact(tensors.q.device):
        _attend(Job.of(spec, tensors, out, lse, thread_workspace()), None)


def plan_tile(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, v_head_dim: int, softcap: bool, device: torch.device
) -> tuple[int, int]:
    """See `contract.py`. The same for all."""
    return CELL_SIZE, TILE_ROWS


def tree_attention(
    spec: AttentionSpec,
    tensors: AttentionTensors,
    plan: Plan,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """See `contract.py`. Sequences that share nothing take the plain path. Scratch: the thread's, not `workspace`."""
    config = plan.config
    if config.cell_size != CELL_SIZE:
        raise ValueError(f"plan: expected cell_size {CELL_SIZE} for implementation 'torch', got {config.cell_size}")
    if config.tile_rows < spec.group_size:
        raise ValueError(
            f"plan: expected tile_rows of at least the group size {spec.group_size}, got {config.tile_rows}"
        )
    with _exact(tensors.q.device):
        work = plan.host()
        job = Job.of(spec, tensors, out, lse, thread_workspace(), work)
        if work.shared.any():
            attend_shared(job, work)
            sharers = np.zeros(tensors.num_seqs, dtype=bool)
            sharers[work.row_seq[work.shared]] = True
            _attend(job, sharers)
        else:
            _attend(job, None)


def _exact(device: torch.device) -> AbstractContextManager[object]:
    """Products in the dtypes that they have, whatever the caller's autocast says."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _attend(job: Job, skip: np.ndarray | None) -> None:
    narrow, wide = job.layout.part("split", lambda: split(job, skip))
    for tokens, seqs in narrow:
        attend_narrow(job, tokens, seqs)
    for seq in wide:
        attend_wide(job, seq)

"""Paged attention on the cell rule: the plan with one item a sequence. Called by `api.py` through this package."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..interface import AttentionSpec, AttentionTensors
from ..plan import TreePlan
from .cells import CELL_SIZE
from .narrow import attend_narrow
from .rows import Job, split
from .tree import attend_shared
from .wide import attend_wide
from .workspace import thread_workspace


def unsupported(spec: AttentionSpec, tensors: AttentionTensors) -> str | None:
    """Does everything, on any device (off the CPU it copies lengths to the host, which synchronises)."""
    return None


def paged_attention(spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None) -> None:
    """See `interface.py`. Scratch: the calling thread's workspace."""
    _attend(Job.of(spec, tensors, out, lse, thread_workspace()), None)


def tree_attention(
    spec: AttentionSpec, tensors: AttentionTensors, plan: TreePlan, out: Tensor, lse: Tensor | None
) -> None:
    """See `interface.py`. Sequences that share nothing take the plain path."""
    config = plan.config
    if config.cell_size != CELL_SIZE:
        raise ValueError(f"plan: expected cell_size {CELL_SIZE} for implementation 'torch', got {config.cell_size}")
    if config.tile_rows < spec.group_size:
        raise ValueError(
            f"plan: expected tile_rows of at least the group size {spec.group_size}, got {config.tile_rows}"
        )
    job = Job.of(spec, tensors, out, lse, thread_workspace())
    if not plan.shares:
        _attend(job, None)
        return
    shared = np.zeros(tensors.num_seqs, dtype=bool)
    shared[plan.order] = plan.work.shared
    attend_shared(job, plan, shared)
    _attend(job, shared)


def _attend(job: Job, skip: np.ndarray | None) -> None:
    narrow, wide = split(job, skip)
    for tokens, seqs in narrow:
        attend_narrow(job, tokens, seqs)
    for seq in wide:
        attend_wide(job, seq)

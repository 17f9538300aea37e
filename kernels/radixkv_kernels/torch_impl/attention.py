"""Paged attention on the cell rule: the plan with one item a sequence. Called by `api.py` through this package."""

from __future__ import annotations

from torch import Tensor

from ..interface import AttentionSpec, AttentionTensors
from .narrow import attend_narrow
from .rows import Job, split
from .wide import attend_wide
from .workspace import thread_workspace


def unsupported(spec: AttentionSpec, tensors: AttentionTensors) -> str | None:
    """Does everything, on any device (off the CPU it copies lengths to the host, which synchronises)."""
    return None


def paged_attention(spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None) -> None:
    """See `interface.py`. Scratch: the calling thread's workspace."""
    job = Job.of(spec, tensors, out, lse, thread_workspace())
    narrow, wide = split(job)
    for tokens, seqs in narrow:
        attend_narrow(job, tokens, seqs)
    for seq in wide:
        attend_wide(job, seq)

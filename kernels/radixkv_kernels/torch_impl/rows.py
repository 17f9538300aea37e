"""The call's rows on the host: which keys each sees, and the split into narrow groups and wide sequences.

Sequences with few rows are batched with others of as many rows (decode: one batch); a sequence with many rows is worked
on alone, its KV gathered once for all of them (prefill). The split is for speed: both ways compute the same cells by
the same routine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..contract import AttentionSpec, AttentionTensors, WorkList
from .cells import CellMath, RowBounds
from .gather import CacheReader
from .workspace import Layout, Workspace

NARROW_ROWS = 64
"""Sequences of up to this many rows (tokens * group size) are batched."""


@dataclass(frozen=True, slots=True)
class Job:
    """All that the two paths need of a call."""

    spec: AttentionSpec
    tensors: AttentionTensors
    math: CellMath
    k_reader: CacheReader
    v_reader: CacheReader
    workspace: Workspace
    out: Tensor
    lse: Tensor | None
    q_start: np.ndarray
    """[num_seqs] int64: first row of q; q_len and seq_len likewise; block_start: where its ids begin in block_ids."""
    q_len: np.ndarray
    seq_len: np.ndarray
    block_start: np.ndarray
    block_ids: np.ndarray
    """The tensor of that name, on the host."""
    layout: Layout
    """What the call has in common with those of other layers."""

    @staticmethod
    def of(
        spec: AttentionSpec,
        tensors: AttentionTensors,
        out: Tensor,
        lse: Tensor | None,
        workspace: Workspace,
        plan: WorkList | None = None,
    ) -> Job:
        """Copies lengths and block ids to the host (which synchronises on a GPU), or compares them with the last."""
        math = CellMath.of(spec, tensors)
        cu = tensors.cu_seqlens_q.cpu().numpy().astype(np.int64)
        seq_len = tensors.seq_lens.cpu().numpy().astype(np.int64)
        if tensors.block_indptr is None:
            block_start = np.arange(len(seq_len), dtype=np.int64) * spec.block_stride
        else:
            block_start = tensors.block_indptr[:-1].cpu().numpy().astype(np.int64)
        block_ids = tensors.block_ids.cpu().numpy().reshape(-1)
        k_reader = CacheReader("k", tensors.k_cache, math.compute_dtype, workspace)
        v_reader = CacheReader("v", tensors.v_cache, math.compute_dtype, workspace)
        shape = (math.flash, math.halves, math.compute_dtype, math.rows, math.slopes is None)
        readers = ((reader.layout, reader.token_bytes) for reader in (k_reader, v_reader))
        arrays = (cu, seq_len, block_start, block_ids, *(() if plan is None else plan.arrays))
        layout = workspace.layout((spec, *shape, *readers, out.device, *(array.tobytes() for array in arrays)))
        q_start, q_len = cu[:-1], cu[1:] - cu[:-1]
        return Job(
            spec, tensors, math, k_reader, v_reader, workspace, out, lse, q_start, q_len, seq_len, block_start,
            block_ids, layout,
        )  # fmt: skip

    def visible(self, seqs: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lo, hi, position) of row `token` of each sequence, broadcast: it sees keys [lo, hi), hi == lo for none."""
        position = self.seq_len[seqs] - self.q_len[seqs] + token
        hi = self.seq_len[seqs] + np.zeros_like(token)
        if self.spec.causal:
            hi = np.clip(position + 1, 0, hi)
        lo = np.zeros_like(position)
        if self.spec.window is not None:
            lo = np.clip(position - self.spec.window + 1, 0, hi)
        return lo, hi, position

    def indices(
        self, start: np.ndarray, first: np.ndarray, lo: np.ndarray, hi: np.ndarray, tokens: int
    ) -> tuple[Tensor, Tensor]:
        """What the two readers take for cells: see `CacheReader.index`."""
        cells = (self.block_ids, start, first, lo, hi, tokens)
        k_index = self.k_reader.index(*cells)
        same = self.k_reader.layout == self.v_reader.layout
        return k_index, k_index if same else self.v_reader.index(*cells)

    def index(self, array: np.ndarray) -> Tensor:
        """An int64 array as a tensor on q's device."""
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.tensors.q.device)

    def query_rows(self, rows: Tensor) -> Tensor:
        """q[rows], rows [batch, tokens] -> [batch, num_kv_heads, padded rows, head_dim] compute_dtype, contiguous."""
        spec = self.spec
        batch, tokens = rows.shape
        q = self.tensors.q[rows].view(batch, tokens, spec.num_kv_heads, spec.group_size, spec.head_dim)
        padded = self.math.rows.padded(tokens * spec.group_size)
        result = torch.zeros(
            batch, spec.num_kv_heads, padded, spec.head_dim, dtype=self.math.compute_dtype, device=q.device
        )
        wanted = (batch, spec.num_kv_heads, tokens, spec.group_size, spec.head_dim)
        result[:, :, : tokens * spec.group_size].view(wanted).copy_(q.transpose(1, 2))
        return result

    def bounds(self, lo: np.ndarray, hi: np.ndarray, position: np.ndarray) -> RowBounds:
        """[batch, tokens] each, one entry a token -> one a padded row; padding rows see nothing."""
        batch, tokens = lo.shape
        group = self.spec.group_size
        rows = np.zeros((3, batch, self.math.rows.padded(tokens * group)), dtype=np.int64)
        rows[:, :, : tokens * group] = np.stack((lo, hi, position)).repeat(group, axis=2)
        return RowBounds(*torch.from_numpy(rows).to(self.tensors.q.device))

    def flat_bounds(self, lo: np.ndarray, hi: np.ndarray, position: np.ndarray) -> RowBounds:
        """[batch, padded rows] each, as they are."""
        return RowBounds(*(torch.from_numpy(x).to(self.tensors.q.device) for x in (lo, hi, position)))

    def write(self, rows: Tensor, out: Tensor, lse: Tensor) -> None:
        """Results [batch, num_kv_heads, padded rows (, v_head_dim)] to rows [batch, tokens] of out and lse."""
        spec = self.spec
        batch, tokens = rows.shape
        shape = (batch, spec.num_kv_heads, tokens, spec.group_size)
        used = tokens * spec.group_size
        heads_last = out[:, :, :used].view(*shape, spec.v_head_dim).transpose(1, 2)
        flat = rows.reshape(-1)
        self.out[flat] = heads_last.to(self.out.dtype).reshape(batch * tokens, spec.num_q_heads, spec.v_head_dim)
        if self.lse is not None:
            self.lse[flat] = lse[:, :, :used].view(shape).transpose(1, 2).reshape(batch * tokens, spec.num_q_heads)

    def sinks_of_rows(self, padded: int) -> Tensor | None:
        """[num_kv_heads, padded rows] float32, or None."""
        if self.tensors.sinks is None:
            return None
        grouped = self.tensors.sinks.view(self.spec.num_kv_heads, 1, self.spec.group_size)
        tokens = -(-padded // self.spec.group_size)
        return grouped.expand(-1, tokens, -1).reshape(self.spec.num_kv_heads, -1)[:, :padded].contiguous()

    def v_scale_of_rows(self) -> Tensor | None:
        """[num_kv_heads, 1, 1] float32, or None."""
        return None if self.tensors.v_scale is None else self.tensors.v_scale.view(-1, 1, 1)


def split(job: Job, skip: np.ndarray | None = None) -> tuple[list[tuple[int, np.ndarray]], list[int]]:
    """Narrow groups (tokens a sequence, rounded up to a power of two; sequences), wide sequences. O(num_seqs).

    skip: [num_seqs] bool, sequences to leave out.
    """
    group = job.spec.group_size
    narrow: dict[int, list[int]] = {}
    wide: list[int] = []
    for s, q_len in enumerate(job.q_len.tolist()):
        if q_len == 0 or (skip is not None and skip[s]):
            continue
        tokens = 1 << (q_len - 1).bit_length()
        if q_len == 1 or tokens * group <= NARROW_ROWS:
            narrow.setdefault(tokens, []).append(s)
        else:
            wide.append(s)
    return [(tokens, np.array(seqs)) for tokens, seqs in narrow.items()], wide

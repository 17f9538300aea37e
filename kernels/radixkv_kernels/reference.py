"""Float64, one sequence and one row after another, as the formulas read: the oracle of every other implementation.

Slow on purpose; `implementation="reference"` asks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import FP8, AttentionSpec, AttentionTensors, Plan


def unsupported(spec: AttentionSpec, tensors: AttentionTensors) -> str | None:
    """Does everything."""
    return None


def paged_attention(spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None) -> None:
    """Plain softmax attention, see `contract.py`. O(num_tokens * seq_len * num_q_heads * head_dim)."""
    cu = tensors.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(tensors.seq_lens.tolist()):
        q_len = cu[s + 1] - cu[s]
        for i in range(q_len):
            row, position = cu[s] + i, seq_len - q_len + i
            row_out, row_lse = _row(spec, tensors, s, row, position, seq_len)
            out[row] = row_out.to(out.dtype)
            if lse is not None:
                lse[row] = row_lse.float()


def tree_attention(
    spec: AttentionSpec,
    tensors: AttentionTensors,
    plan: Plan,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """As without a plan: the oracle reads everything row by row."""
    paged_attention(spec, tensors, out, lse)


def plan_tile(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, v_head_dim: int, softcap: bool, device: torch.device
) -> tuple[int, int]:
    """Any will do."""
    return 256, 1024


def _row(
    spec: AttentionSpec, tensors: AttentionTensors, s: int, row: int, position: int, seq_len: int
) -> tuple[Tensor, Tensor]:
    """One query token: ([num_q_heads, v_head_dim], [num_q_heads]) float64."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    end = min(seq_len, position + 1) if spec.causal else seq_len
    if first >= end:
        out = torch.zeros(spec.num_q_heads, spec.v_head_dim, dtype=torch.float64)
        return out, torch.full((spec.num_q_heads,), -torch.inf, dtype=torch.float64)
    tokens = torch.arange(first, end, device=tensors.q.device)
    start = s * spec.block_stride if tensors.block_indptr is None else int(tensors.block_indptr[s])
    blocks = tensors.block_ids[start + tokens // spec.block_size].long()
    offsets = tokens % spec.block_size
    k = tensors.k_cache[blocks, offsets].double().repeat_interleave(spec.group_size, 1)
    v = tensors.v_cache[blocks, offsets].double().repeat_interleave(spec.group_size, 1)
    if tensors.k_scale is not None:
        k = k * tensors.k_scale.double().repeat_interleave(spec.group_size)[:, None]
    if tensors.v_scale is not None:
        v = v * tensors.v_scale.double().repeat_interleave(spec.group_size)[:, None]
    x = torch.einsum("hd,thd->ht", tensors.q[row].double(), k) * spec.scale
    if spec.softcap is not None:
        x = spec.softcap * torch.tanh(x / spec.softcap)
    if tensors.alibi_slopes is not None:
        x = x - tensors.alibi_slopes.double()[:, None] * (position - tokens).abs()
    lse = torch.logsumexp(x, 1)
    if tensors.sinks is not None:
        lse = torch.logaddexp(lse, tensors.sinks.double())
    return torch.einsum("ht,thd->hd", torch.exp(x - lse[:, None]), v), lse


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """One token after another."""
    block_size = k_cache.shape[1]
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                value = values[i].float() if scale is None else values[i].float() / scale[:, None]
                if cache.dtype == FP8:
                    limit = torch.finfo(FP8).max
                    value = value.clamp(-limit, limit)
                cache[slot // block_size, slot % block_size] = value.to(cache.dtype)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """One pair after another."""
    for a, b, n in zip(src.tolist(), dst.tolist(), num_tokens.tolist(), strict=True):
        for cache in (k_cache, v_cache):
            cache[b, :n] = cache[a, :n].clone()


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Weights exp(lse_i - lse) over the states that are not empty."""
    total = torch.logsumexp(lses.double(), 0)
    weights = torch.exp(lses.double() - total)[..., None]
    parts = torch.where(lses[..., None] == -torch.inf, 0.0, outs.double() * weights)
    out.copy_(parts.sum(0))
    if lse is not None:
        lse.copy_(total)

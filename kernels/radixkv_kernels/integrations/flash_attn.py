"""`flash_attn_varlen_func` and `flash_attn_with_kvcache` with flash-attn 2's argument names, order and returns.

What we don't build raises UnsupportedImplementation. Arguments that are hints there (max_seqlen_*, num_splits,
deterministic: every result here is) change nothing. lse comes heads first, natural log; a row that sees no key has
out 0 and lse -inf.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..api import paged_attention, store_kv
from ..contract import UnsupportedImplementation


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over packed sequences.

    Args: q [total_q, num_q_heads, head_dim]; k, v [total_k, num_kv_heads, head_dim], or caches [num_blocks, block_size,
    num_kv_heads, head_dim] with block_table [num_seqs, max_blocks]; cu_seqlens_q, cu_seqlens_k [num_seqs + 1] int32.

    Returns out [total_q, num_q_heads, head_dim], or (out, softmax_lse [num_q_heads, total_q], None) where
    return_attn_probs: the probabilities themselves are not built. Raises UnsupportedImplementation for dropout, a
    window to the right, ALiBi slopes a sequence. Cost: as `paged_attention`.

    >>> q, kv, cu = torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, kv, kv, cu, cu, 3, 3, causal=True).shape
    torch.Size([5, 8, 64])
    """
    _refuse(dropout_p != 0.0, "dropout_p", "attention here is for inference")
    causal, window = _window(causal, window_size)
    seq_lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    if block_table is not None:
        where: dict[str, Any] = {"block_table": block_table, "seq_lens": seq_lens}
        caches = k, v
    else:
        indices = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
        where = {"kv_indptr": cu_seqlens_k, "kv_indices": indices, "last_block_len": torch.ones_like(seq_lens)}
        caches = k[:, None], v[:, None]
    result = paged_attention(
        q,
        *caches,
        cu_seqlens_q=cu_seqlens_q,
        scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap or None,
        alibi_slopes=_slopes(alibi_slopes),
        return_lse=True,
        **where,
    )
    out, lse = result
    return (out, lse.T.contiguous(), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new tokens a sequence over a cache, which k and v are appended to first.

    Args: q [batch, seqlen_q, num_q_heads, head_dim]; k_cache, v_cache [batch_cache, seqlen_cache, num_kv_heads,
    head_dim], or blocks [num_blocks, block_size, ..] with block_table [batch, max_blocks]; k, v [batch, seqlen_new,
    num_kv_heads, head_dim], written at cache_seqlens on; cache_seqlens int or [batch] int32, lengths before k is added
    (None: the whole cache); cache_batch_idx [batch], which cache row each sequence has (no block table then).

    Returns out [batch, seqlen_q, num_q_heads, head_dim], or (out, softmax_lse [batch, num_q_heads, seqlen_q]). Mutates
    the caches where k is given. Raises UnsupportedImplementation for rotary embedding and left padding. Cost: as
    `store_kv` and `paged_attention`.

    >>> k_cache, v_cache = torch.randn(2, 2, 32, 2, 64)
    >>> new = torch.randn(2, 1, 2, 64)
    >>> flash_attn_with_kvcache(torch.randn(2, 1, 8, 64), k_cache, v_cache, new, new, cache_seqlens=7).shape
    torch.Size([2, 1, 8, 64])
    >>> torch.equal(k_cache[:, 7], new[:, 0])
    True
    """
    _refuse(rotary_cos is not None or rotary_sin is not None, "rotary_cos", "apply the rotation before the call")
    _refuse(cache_leftpad is not None, "cache_leftpad", "point the block table at the first real token instead")
    if (k is None) != (v is None):
        raise ValueError(f"v: expected to be given exactly where k is, got k {k is not None}, v {v is not None}")
    causal, window = _window(causal, window_size)
    batch, seqlen_q = q.shape[:2]
    device = q.device
    if block_table is None:
        k_cache, v_cache, block_table = _rows_as_blocks(k_cache, v_cache, cache_batch_idx, batch)
    elif cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: expected None beside block_table, got a tensor")
    block_size = k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * block_size
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    seq_lens = cache_seqlens.to(torch.int32)
    if k is not None and v is not None:
        position = seq_lens[:, None].long() + torch.arange(k.shape[1], device=device)
        if device.type == "cpu" and int(position.max()) >= block_table.shape[1] * block_size:
            limit = block_table.shape[1] * block_size
            raise ValueError(f"cache_seqlens: expected room for k within {limit} tokens, got {int(position.max()) + 1}")
        slots = block_table.long().gather(1, position // block_size) * block_size + position % block_size
        store_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots.flatten())
        seq_lens = seq_lens + k.shape[1]
    result = paged_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen_q,
        scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap or None,
        alibi_slopes=_slopes(alibi_slopes),
        return_lse=True,
    )
    out, lse = (x.unflatten(0, (batch, seqlen_q)) for x in result)
    return (out, lse.transpose(1, 2).contiguous()) if return_softmax_lse else out


def _rows_as_blocks(
    k_cache: Tensor, v_cache: Tensor, cache_batch_idx: Tensor | None, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of one row a sequence as blocks of the largest size that divides its length; a view where it can be."""
    length = k_cache.shape[1]
    block_size = math.gcd(length, 256)
    each = length // block_size
    if k_cache.stride(0) != length * k_cache.stride(1) or v_cache.stride(0) != length * v_cache.stride(1):
        raise ValueError(f"k_cache: expected rows that follow one another in memory, got strides {k_cache.stride()}")
    device = k_cache.device
    row = torch.arange(batch, device=device) if cache_batch_idx is None else cache_batch_idx.long()
    table = row[:, None] * each + torch.arange(each, device=device)
    blocks = [cache.unflatten(1, (each, block_size)).flatten(0, 1) for cache in (k_cache, v_cache)]
    return blocks[0], blocks[1], table.int()


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[bool, int | None]:
    """(left, right) keys to either side, -1 for all -> (causal, window)."""
    left, right = window_size
    if right == 0:
        causal = True
    _refuse(right > 0 and not causal, "window_size", "keys to the right are seen all or not at all")
    return causal, None if left < 0 else left + 1


def _slopes(alibi_slopes: Tensor | None) -> Tensor | None:
    _refuse(alibi_slopes is not None and alibi_slopes.dim() == 2, "alibi_slopes", "one slope a head, not a sequence")
    return alibi_slopes


def _refuse(asked: bool, name: str, reason: str) -> None:
    if asked:
        raise UnsupportedImplementation(f"{name}: {reason}")

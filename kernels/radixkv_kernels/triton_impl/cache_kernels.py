"""Writing the KV cache: new tokens into their slots, and leading rows of blocks onto other blocks.

Both take caches of any strides; fp8 caches as bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numerics import encode_e4m3

_FP8 = torch.float8_e4m3fn


@triton.jit
def store_rows(
    source_ptr, cache_ptr, scale_ptr, token, block, slot, stride_token, stride_head, stride_dim,
    stride_cache_block, stride_cache_slot, stride_cache_head, stride_cache_dim, stride_scale, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """One token's heads from [num_tokens, num_heads, HEAD_DIM] to its slot, divided by the heads' scales."""
    offs_d = tl.arange(0, BLOCK_D)
    for first in range(0, num_heads, BLOCK_H):
        heads = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
        mask = (heads < num_heads)[:, None] & (offs_d < HEAD_DIM)[None, :]
        rows = token * stride_token + heads * stride_head
        x = tl.load(source_ptr + rows[:, None] + (offs_d * stride_dim)[None, :], mask=mask, other=0.0)
        if SCALE:
            scale = tl.load(scale_ptr + heads * stride_scale, mask=heads < num_heads, other=1.0)
            x = tl.math.div_rn(x.to(tl.float32), tl.broadcast_to(scale[:, None], x.shape))
        if FP8:
            x = encode_e4m3(x.to(tl.float32))
        rows = block * stride_cache_block + slot * stride_cache_slot + heads * stride_cache_head
        cache_ptrs = cache_ptr + rows[:, None] + (offs_d * stride_cache_dim)[None, :]
        tl.store(cache_ptrs, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    stride_k_token, stride_k_head, stride_k_dim, stride_v_token, stride_v_head, stride_v_dim,
    stride_kc_block, stride_kc_slot, stride_kc_head, stride_kc_dim,
    stride_vc_block, stride_vc_slot, stride_vc_head, stride_vc_dim, stride_k_scale, stride_v_scale, num_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FP8: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """Stores one token's K and V; a negative slot is skipped."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(slot_mapping_ptr + token)
    if index >= 0:
        block = (index // BLOCK_SIZE).to(tl.int64)
        slot = (index % BLOCK_SIZE).to(tl.int64)
        store_rows(
            k_ptr, k_cache_ptr, k_scale_ptr, token, block, slot, stride_k_token, stride_k_head, stride_k_dim,
            stride_kc_block, stride_kc_slot, stride_kc_head, stride_kc_dim, stride_k_scale, num_heads,
            HEAD_DIM, BLOCK_H, BLOCK_D, FP8, K_SCALE,
        )  # fmt: skip
        store_rows(
            v_ptr, v_cache_ptr, v_scale_ptr, token, block, slot, stride_v_token, stride_v_head, stride_v_dim,
            stride_vc_block, stride_vc_slot, stride_vc_head, stride_vc_dim, stride_v_scale, num_heads,
            V_HEAD_DIM, BLOCK_H, BLOCK_V, FP8, V_SCALE,
        )  # fmt: skip


@triton.jit
def copy_kernel(
    cache_ptr, src_ptr, dst_ptr, num_tokens_ptr, stride_block, stride_slot, stride_head, stride_dim, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies up to BLOCK_ROWS (slot, head) rows of one pair of blocks of one cache."""
    pair = tl.program_id(0)
    num_rows = tl.load(num_tokens_ptr + pair) * num_heads
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    slot = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    offsets = (slot * stride_slot + head * stride_head)[:, None] + (offs_d * stride_dim)[None, :]
    source = cache_ptr + tl.load(src_ptr + pair).to(tl.int64) * stride_block
    target = cache_ptr + tl.load(dst_ptr + pair).to(tl.int64) * stride_block
    tl.store(target + offsets, tl.load(source + offsets, mask=mask, other=0), mask=mask)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """See `contract.py`. One launch, a program a token."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    fp8 = k_cache.dtype == _FP8
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    v_head_dim = v.shape[2]
    store_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k_scale if k_scale is not None else k,
        v_scale if v_scale is not None else v, *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
        k_scale.stride(0) if k_scale is not None else 0, v_scale.stride(0) if v_scale is not None else 0, num_heads,
        BLOCK_SIZE=k_cache.shape[1], HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        BLOCK_H=min(8, triton.next_power_of_2(num_heads)), BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_V=triton.next_power_of_2(v_head_dim), FP8=fp8,
        K_SCALE=k_scale is not None, V_SCALE=v_scale is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def copy_blocks(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """See `contract.py`. Two launches; the grid is that of whole blocks, programs past a pair's count do nothing."""
    if src.numel() == 0:
        return
    for cache in (as_bytes(k_cache), as_bytes(v_cache)):
        _, block_size, num_heads, head_dim = cache.shape
        block_rows = min(32, triton.next_power_of_2(block_size * num_heads))
        copy_kernel[(src.numel(), triton.cdiv(block_size * num_heads, block_rows))](
            cache, src, dst, num_tokens, *cache.stride(), num_heads,
            HEAD_DIM=head_dim, BLOCK_ROWS=block_rows, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip


def as_bytes(cache: Tensor) -> Tensor:
    """An fp8 cache as uint8 of the same shape and strides; any other cache as it is."""
    return cache.view(torch.uint8) if cache.dtype == _FP8 else cache

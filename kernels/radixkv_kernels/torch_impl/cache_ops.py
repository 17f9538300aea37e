"""Writes into the paged cache: new tokens, and rows of partly matching blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """See `contract.py`. O(num_tokens)."""
    keep = slot_mapping >= 0
    all_kept = bool(keep.all()) if slot_mapping.device.type == "cpu" else False
    slots = slot_mapping if all_kept else slot_mapping[keep]
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        kept = values if all_kept else values[keep]
        if scale is not None:
            kept = kept.float() / scale[:, None]
        _put(cache, slots, kept)


def _put(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    values = values.to(cache.dtype) if cache.dtype != torch.float8_e4m3fn else _quantised(values).view(torch.uint8)
    cache = cache.view(values.dtype)
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):  # a slot is a row of one matrix
        cache.flatten(0, 1)[slots] = values
    else:
        cache[torch.div(slots, block_size, rounding_mode="floor"), slots % block_size] = values


def _quantised(values: Tensor) -> Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    return values.float().clamp(-limit, limit).to(torch.float8_e4m3fn)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """See `contract.py`. O(sum of num_tokens)."""
    counts = num_tokens.tolist()
    pairs = list(zip(src.tolist(), dst.tolist(), counts, strict=True))
    for cache in (k_cache, v_cache):
        for a, b, n in pairs:
            if n:
                cache[b, :n].copy_(cache[a, :n])

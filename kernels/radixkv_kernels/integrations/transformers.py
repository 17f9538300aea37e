"""Hugging Face transformers: `register()`, then `attn_implementation="radixkv"`.

The mask function is part of it: without one, transformers hands every attention function `attention_mask=None`, padded
batches included. Ours returns, instead of a mask, the interval of keys that each query sees, [batch, q_len, 2] int64,
and refuses masks that are not causal, windowed or full attention over real tokens in one piece.

The model's own KV cache is read in place, as blocks; sequences start at their first real token, so a row of a padded
batch has the bits it has alone. Forward only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..api import paged_attention
from ..errors import UnsupportedImplementation

NAME = "radixkv"


def register(name: str = NAME) -> None:
    """Makes `attn_implementation=name` known to transformers (5.x): the attention and its mask function. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible_intervals)


def visible_intervals(*args: Any, **kwargs: Any) -> Tensor:
    """Transformers' mask function: same arguments as its `sdpa_mask`; returns [batch, q_len, 2] int64, keys [lo, hi).

    Raises UnsupportedImplementation where a query sees keys with a gap between. O(batch * q_len * kv_len).
    """
    from transformers.masking_utils import sdpa_mask

    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    full = sdpa_mask(*args, **kwargs)
    assert full is not None, "neither way of leaving the mask out was allowed"
    mask = full[:, 0]  # [batch, q_len, kv_len]
    count = mask.sum(-1)
    lo = mask.int().argmax(-1)
    if not bool((count == _last(mask) - lo).all()):
        raise UnsupportedImplementation("attention_mask: the keys that a query sees must have no gap")
    return torch.stack((lo, lo + count), -1)


def _last(mask: Tensor) -> Tensor:
    """One past the last True of each row, the first one's index if there is none (so that the count agrees)."""
    kv_len = mask.shape[-1]
    return torch.where(mask.any(-1), kv_len - mask.flip(-1).int().argmax(-1), 0)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function.

    Args: query [batch, num_q_heads, q_len, head_dim]; key, value [batch, num_kv_heads, kv_len, head_dim];
    attention_mask as `visible_intervals` returns it, or None (all keys real; causal as the module says). Returns
    (out [batch, q_len, num_q_heads, head_dim], None); rows of padding are 0.
    """
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise UnsupportedImplementation("radixkv attention is forward only: use torch.no_grad() and eval()")
    for name in ("position_bias", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedImplementation(f"{name}: not built")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if attention_mask is None:
        hi = torch.arange(q_len) + kv_len - q_len + 1 if causal else torch.full((q_len,), kv_len)
        attention_mask = torch.stack((torch.zeros_like(hi), hi), -1).expand(batch, -1, -1)
    elif attention_mask.dtype != torch.int64 or tuple(attention_mask.shape) != (batch, q_len, 2):
        raise UnsupportedImplementation(
            f"attention_mask: expected what register()'s mask function makes, got {attention_mask.dtype} "
            f"{list(attention_mask.shape)}"
        )
    real, starts, lens, window = _sequences(attention_mask.cpu(), bool(causal))
    block_size = math.gcd(kv_len, 256, *starts.tolist())
    counts = -(-lens // block_size)
    num_kv_heads = key.shape[1]
    first = torch.arange(batch) * (num_kv_heads * kv_len // block_size) + starts // block_size
    indices = torch.cat([torch.arange(n) + f for f, n in zip(first.tolist(), counts.tolist(), strict=True)])
    device = query.device
    real_rows = real.to(device)
    out = query.new_zeros(batch, q_len, query.shape[1], value.shape[3])
    result = paged_attention(
        query.transpose(1, 2)[real_rows],
        _as_blocks(key, block_size),
        _as_blocks(value, block_size),
        cu_seqlens_q=_indptr(real.sum(1)).to(device),
        kv_indptr=_indptr(counts).to(device),
        kv_indices=indices.to(device, torch.int32),
        last_block_len=torch.where(lens > 0, (lens - 1) % block_size + 1, 0).to(device, torch.int32),
        scale=scaling,
        causal=bool(causal),
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    assert isinstance(result, Tensor)
    out[real_rows] = result
    return out, None


def _sequences(bounds: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """Each row's real queries [batch, q_len] bool, first real key and number of keys [batch], and the window.

    Of a right-padded row, the queries behind the last real one see no new key: they are not real.
    """
    lo, hi = bounds.unbind(-1)
    seen = hi > lo
    before = torch.cat((torch.zeros_like(hi[:, :1]), hi.cummax(1).values[:, :-1]), 1)
    real = seen & (hi > before) if causal else seen
    first_real = real & (real.cumsum(1) == 1)
    same_end = (hi == before + 1) if causal else (hi == hi.max(1, keepdim=True).values)
    if not bool((same_end | first_real | ~real).all()):
        raise UnsupportedImplementation("attention_mask: only causal, windowed and full attention")
    big = torch.iinfo(torch.int64).max
    starts = lo.masked_fill(~real, big).min(1).values
    starts = torch.where(real.any(1), starts, 0)
    lens = hi.masked_fill(~real, 0).max(1).values - starts
    bound = real & (lo > starts[:, None])
    width = hi - lo
    if not bool(bound.any()):
        return real, starts, lens, None
    window = int(width[bound][0])
    if not causal or not bool((width[bound] == window).all()) or int(width[real].max()) > window:
        raise UnsupportedImplementation("attention_mask: a window must be the same for all queries, and causal")
    return real, starts, lens, window


def _as_blocks(states: Tensor, block_size: int) -> Tensor:
    """[batch, heads, kv_len, dim] -> a view [blocks, block_size, heads, dim] of the same memory (copied if scattered).

    Tokens t..t + block_size of batch row b are block b * heads * kv_len / block_size + t / block_size; blocks that
    would start in another head's memory exist too, and are never asked for.
    """
    states = states.contiguous()
    batch, heads, kv_len, dim = states.shape
    num_blocks = ((batch - 1) * heads * kv_len + kv_len) // block_size
    return states.as_strided((num_blocks, block_size, heads, dim), (block_size * dim, dim, kv_len * dim, 1))


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)

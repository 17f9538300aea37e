"""Hugging Face transformers: `register()`, then `attn_implementation="radixkv"`.

The mask function is part of it: without one, transformers hands every attention function `attention_mask=None`, padded
batches included. Ours is transformers' own mask that is added to the scores, never left out: models whose attention is
their own add it as well, where a boolean one would add 1 to what is seen and hide nothing. What a mask means is read
off the mask alone: any in which the keys that a query sees have no gap is exact (causal, windows, padding on either
side, packed sequences, chunks, bidirectional blocks as in Gemma 3 and PaliGemma, caches with free room behind); any
other is refused.

The model's own KV cache is read in place, as blocks; sequences start at their first real token, so a row of a padded
batch has the bits it has alone. Forward only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import paged_attention
from ..contract import UnsupportedImplementation

NAME = "radixkv"
_HIDDEN = torch.finfo(torch.float16).min
"""What an additive mask has, or less, where a key is hidden: exp(x + this) is 0 in float32 beside any other key."""


def register(name: str = NAME) -> None:
    """Makes `attn_implementation=name` known to transformers (5.x): the attention and its mask function. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, whole_mask)


def whole_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Transformers' mask function: `eager_mask`, [batch, 1, q_len, kv_len], 0 or the least number; left out nowhere."""
    from transformers.masking_utils import eager_mask

    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask = eager_mask(*args, **kwargs)
    assert mask is not None, "neither way of leaving the mask out was allowed"
    return mask


@torch.compiler.disable
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

    Args: query [batch, num_q_heads, q_len, head_dim]; key, value [batch, num_kv_heads, kv_len, head_dim], one dtype
    (under autocast any, brought to autocast's); attention_mask [batch or 1, heads or 1, q_len or 1, kv_len], the same
    for all heads: bool (True: seen) or added to the scores (0: seen, -65504 or less: not); None: causal as the module
    says, over all keys. Returns (out [batch, q_len, num_q_heads, head_dim], None); rows that see no key are 0.

    Raises UnsupportedImplementation for gradients, dropout, a position bias, and a mask that no run of keys describes.
    """
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise UnsupportedImplementation("radixkv attention is forward only: use torch.no_grad() and eval()")
    for name in ("position_bias", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedImplementation(f"{name}: not built, use attn_implementation='eager'")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    for name, states in (("key", key), ("value", value)):
        if states.dtype != query.dtype:
            raise ValueError(f"{name}: expected query's dtype {query.dtype}, got {states.dtype}")
    batch, num_q_heads, q_len, _ = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        lo, hi = _without_mask(batch, q_len, kv_len, bool(causal))
    else:
        lo, hi = (x.cpu() for x in _intervals(_as_bool(attention_mask), batch, q_len, kv_len))
    device = query.device
    out = query.new_zeros(batch, q_len, num_q_heads, value.shape[3])
    rows_of_q = query.transpose(1, 2)
    segments = _segments(lo, hi)
    block_size = math.gcd(kv_len, 256, *segments.start.unique().tolist())
    caches = _as_blocks(key, block_size), _as_blocks(value, block_size)
    blocks_a_row = num_kv_heads * kv_len // block_size
    for causal, window, of, rows in segments.by_call():
        lens = segments.end[of] - segments.start[of]
        counts = -(-lens // block_size)
        first = segments.batch_row[of] * blocks_a_row + segments.start[of] // block_size
        indptr = _indptr(counts)
        # block i of all is the (i - indptr[s])-th of its segment s
        indices = torch.arange(int(indptr[-1])) + (first - indptr[:-1]).repeat_interleave(counts)
        on_device = rows.to(device)
        result = paged_attention(
            rows_of_q[on_device],
            *caches,
            cu_seqlens_q=_indptr(segments.num_rows[of]).to(device),
            kv_indptr=indptr.to(device),
            kv_indices=indices.to(device, torch.int32),
            last_block_len=((lens - 1) % block_size + 1).to(device, torch.int32),
            scale=scaling,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=s_aux,
        )
        assert isinstance(result, Tensor)
        out[on_device] = result
    return out, None


def _without_mask(batch: int, q_len: int, kv_len: int, causal: bool) -> tuple[Tensor, Tensor]:
    """What queries see where the model gives no mask."""
    causal = causal and q_len > 1
    if causal and q_len != kv_len:
        raise UnsupportedImplementation(
            f"attention_mask: expected a mask for {q_len} causal queries over {kv_len} keys, got None, which does not "
            "say where they stand (continuous batching is not built)"
        )
    hi = torch.arange(1, q_len + 1) if causal else torch.full((q_len,), kv_len)
    return torch.zeros(batch, q_len, dtype=torch.int64), hi.expand(batch, -1)


def _as_bool(mask: Tensor) -> Tensor:
    """A mask that is added to the scores -> True where a key is seen."""
    if mask.dtype == torch.bool or not mask.is_floating_point():
        return mask
    seen = mask == 0
    if not bool((seen | (mask <= _HIDDEN)).all()):
        raise UnsupportedImplementation(
            f"attention_mask: expected 0 and {_HIDDEN:.0f} or less in a mask that is added, got other numbers: a bias "
            "of the scores is not built, use attn_implementation='eager'"
        )
    return seen


def _intervals(mask: Tensor, batch: int, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """(lo, hi) [batch, q_len] int64: each query sees keys [lo, hi), hi == lo for none. O(batch * q_len * kv_len)."""
    wanted = (batch, None, q_len, kv_len)
    fits = mask.dtype == torch.bool and mask.dim() == 4
    fits = fits and all(want is None or have in (1, want) for want, have in zip(wanted, mask.shape, strict=True))
    if not fits or mask.shape[3] != kv_len:
        raise UnsupportedImplementation(
            f"attention_mask: expected bool or float [{batch}, 1, {q_len}, {kv_len}], got {mask.dtype} "
            f"{list(mask.shape)}"
        )
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        raise UnsupportedImplementation("attention_mask: expected the same for all heads, got masks that differ")
    mask = mask[:, 0]
    count = mask.sum(-1)
    as_numbers = mask.to(torch.uint8)
    lo = as_numbers.argmax(-1)
    last = kv_len - as_numbers.flip(-1).argmax(-1)
    if not bool(((count == 0) | (count == last - lo)).all()):
        raise UnsupportedImplementation(
            "attention_mask: expected no gap in the keys that a query sees, got one: use attn_implementation='sdpa'"
        )
    return lo.expand(batch, q_len), (lo + count).expand(batch, q_len)


@dataclass(frozen=True, slots=True)
class _Segments:
    """Queries that follow one another in a batch row and see keys of [start, end) by one rule; [num_segments] each."""

    of_query: Tensor
    """[batch, q_len] int64: each query's segment, -1 where it sees no key."""
    batch_row: Tensor
    num_rows: Tensor
    start: Tensor
    end: Tensor
    causal: Tensor
    """Whether each query sees one key more than the one before; else all see the same last key."""
    window: Tensor
    """As of `paged_attention`; 0: none."""

    def by_call(self) -> list[tuple[bool, int | None, Tensor, Tensor]]:
        """(causal, window, segments [n], their queries [batch, q_len] bool): what one call can compute, in order."""
        calls = []
        for causal, window in torch.stack((self.causal.long(), self.window), 1).unique(dim=0).tolist():
            chosen = (self.causal == bool(causal)) & (self.window == window)
            rows = torch.cat((chosen, chosen.new_zeros(1)))[self.of_query]  # -1 is the one behind the last
            calls.append((bool(causal), window or None, chosen.nonzero()[:, 0], rows))
        return calls


def _segments(lo: Tensor, hi: Tensor) -> _Segments:
    """Cuts [batch, q_len] intervals into the longest segments; a query that no neighbour is like is one of its own.

    Inside of a segment `hi` grows by one or stands, and `lo` stands and then grows by one: a window that was wide
    enough, and then is not.
    """
    seen = hi > lo
    step_lo, step_hi = lo.diff(dim=1), hi.diff(dim=1)
    regular = seen[:, 1:] & seen[:, :-1]
    for step in (step_lo, step_hi):
        regular = regular & ((step == 0) | (step == 1))
    goes_on = (step_hi[:, 1:] == step_hi[:, :-1]) & (step_lo[:, 1:] >= step_lo[:, :-1])
    joins = regular.clone()
    joins[:, 1:] &= ~regular[:, :-1] | goes_on
    begins, ends = seen.clone(), seen.clone()
    begins[:, 1:] &= ~joins
    ends[:, :-1] &= ~joins
    first, last = begins.nonzero().unbind(1), ends.nonzero().unbind(1)
    of_query = (begins.flatten().cumsum(0).view(seen.shape) - 1).masked_fill(~seen, -1)
    num_rows = last[1] - first[1] + 1
    start, end = lo[first], hi[last]
    causal = (num_rows == 1) | (end > hi[first])
    window = (end - lo[last]).masked_fill(lo[last] == start, 0)
    return _Segments(of_query, first[0], num_rows, start, end, causal, window)


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

"""What a user would write in plain torch in place of the kernels: the other side of `kernel_bench.py`.

Each peer reads the same paged cache and is a function of no arguments returning [num_tokens, num_q_heads, head_dim].
Gathers go into buffers allocated once, and the query heads of a group are folded into rows wherever that can be done.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.attention_batches import Batch, Peer


class Gathered:
    """The sequences' KV as [num_seqs, num_kv_heads, context, head_dim], in buffers that are reused."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        flat = batch.k_cache.flatten(1)
        self._buffers = [flat.new_empty(batch.block_table.numel(), flat.shape[1]) for _ in range(2)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        batch = self.batch
        shape = (batch.num_seqs, batch.context, batch.num_kv_heads, batch.q.shape[2])
        ids = batch.block_table.flatten()
        found = [
            torch.index_select(cache.flatten(1), 0, ids, out=buffer).view(shape).transpose(1, 2)
            for cache, buffer in zip((batch.k_cache, batch.v_cache), self._buffers, strict=True)
        ]
        return found[0], found[1]


def gather_sdpa(batch: Batch) -> Peer:
    """Decode: one gather, one scaled_dot_product_attention."""
    gather = Gathered(batch)
    return lambda: batch.unfold(F.scaled_dot_product_attention(batch.folded_q(), *gather()))


def gather_sdpa_by_sequence(batch: Batch) -> Peer:
    """Decode: the same, a sequence at a time, so that a gathered sequence is still in the cache when it is read."""
    one = Batch(batch.q[:1], batch.k_cache, batch.v_cache, batch.block_table[:1], 1, batch.context)
    gathers = [Gathered(one)]

    def run() -> Tensor:
        q, out = batch.folded_q(), []
        for s in range(batch.num_seqs):
            gathers[0].batch = Batch(
                batch.q[s : s + 1], batch.k_cache, batch.v_cache, batch.block_table[s : s + 1], 1, batch.context
            )
            out.append(F.scaled_dot_product_attention(q[s : s + 1], *gathers[0]()))
        return batch.unfold(torch.cat(out))

    return run


def as_people_write_it(batch: Batch) -> Peer:
    """Decode as people write it: index the cache by the block table, SDPA with enable_gqa."""
    shape = (batch.num_seqs, batch.context, batch.num_kv_heads, batch.q.shape[2])

    def run() -> Tensor:
        k, v = (c[batch.block_table].reshape(shape).transpose(1, 2) for c in (batch.k_cache, batch.v_cache))
        return F.scaled_dot_product_attention(batch.q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return run


def flex(batch: Batch) -> Peer:
    """FlexAttention compiled, on gathered KV, with a causal block mask where there are several new tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    gather = Gathered(batch)
    compiled = torch.compile(flex_attention, dynamic=False)
    offset = batch.context - batch.q_len
    mask = None
    if batch.q_len > 1:

        def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q + offset >= kv

        mask = create_block_mask(causal, None, None, batch.q_len, batch.context, device="cpu")

    def run() -> Tensor:
        q = batch.q.view(batch.num_seqs, batch.q_len, -1, batch.q.shape[2]).transpose(1, 2)
        out = compiled(q, *gather(), block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch.q.shape)

    return run


def masked_sdpa(batch: Batch) -> Peer:
    """Prefill: one gather, one scaled_dot_product_attention with a mask prepared beforehand."""
    gather = Gathered(batch)
    group = batch.q.shape[1] // batch.num_kv_heads
    position = torch.arange(batch.context - batch.q_len, batch.context).repeat_interleave(group)
    visible = torch.arange(batch.context) <= position[:, None]
    mask = torch.zeros(visible.shape, dtype=batch.q.dtype).masked_fill_(~visible, -torch.inf)
    return lambda: batch.unfold(F.scaled_dot_product_attention(batch.folded_q(), *gather(), attn_mask=mask))


def two_parts(batch: Batch) -> Peer:
    """Prefill: the cached part without a mask, the new part causal, merged by their log-sum-exp."""
    gather = Gathered(batch)
    cached = batch.context - batch.q_len
    group = batch.q.shape[1] // batch.num_kv_heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run() -> Tensor:
        k, v = gather()
        n, hk, d = batch.num_seqs, batch.num_kv_heads, batch.q.shape[2]
        old, old_lse = flash(batch.folded_q(), k[:, :, :cached], v[:, :, :cached])
        heads = batch.q.view(n, batch.q_len, hk * group, d).transpose(1, 2)
        new_k, new_v = (x[:, :, cached:].repeat_interleave(group, 1) for x in (k, v))
        new, new_lse = flash(heads, new_k, new_v, 0.0, True)
        shape = (n, hk, batch.q_len, group)
        old, old_lse = old.view(*shape, d).transpose(2, 3), old_lse.view(shape).transpose(2, 3)
        new, new_lse = new.view(n, hk, group, batch.q_len, d), new_lse.view(n, hk, group, batch.q_len)
        weight = torch.sigmoid(new_lse - old_lse)[..., None]
        out = torch.lerp(old.float(), new.float(), weight).to(batch.q.dtype)
        return out.permute(0, 3, 1, 2, 4).reshape(batch.q.shape)

    return run

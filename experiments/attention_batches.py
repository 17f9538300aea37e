"""Batches on a paged cache, and attention over them by the torch path: for `kernel_bench` and `tree_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from radixkv_kernels import TreePlan, paged_attention
from torch import Tensor

Peer = Callable[[], Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences of equal shape: q_len new tokens on a context of `context` tokens, new ones included."""

    q: Tensor
    """[num_seqs * q_len, num_q_heads, head_dim]"""
    k_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]"""
    v_cache: Tensor
    block_table: Tensor
    """[num_seqs, context // block_size] int64"""
    q_len: int
    context: int

    @property
    def num_seqs(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]

    def folded_q(self) -> Tensor:
        """[num_seqs, num_kv_heads, q_len * group, head_dim], rows (token, head of the group)."""
        n, hk, d = self.num_seqs, self.num_kv_heads, self.q.shape[2]
        return self.q.view(n, self.q_len, hk, -1, d).transpose(1, 2).reshape(n, hk, -1, d)

    def unfold(self, out: Tensor) -> Tensor:
        """The inverse of `folded_q`, on outputs."""
        n, hk, _, d = out.shape
        return out.view(n, hk, self.q_len, -1, d).transpose(1, 2).reshape(self.q.shape)


@dataclass(frozen=True)
class Heads:
    """What a batch has in each dimension besides its tokens."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


def make_batch(
    heads: Heads, num_seqs: int, own: int, dtype: str, *, prefix: int = 0, q_len: int = 1, seed: int = 0
) -> Batch:
    """Sequences of `own` tokens behind `prefix` that all share; blocks at random, as a cache in use has them."""
    gen = torch.Generator().manual_seed(seed)
    num_shared, num_own = prefix // heads.block_size, own // heads.block_size
    total = num_shared + num_seqs * num_own
    ids = torch.randperm(total, generator=gen)
    table = torch.cat((ids[:num_shared].expand(num_seqs, -1), ids[num_shared:].view(num_seqs, num_own)), 1)
    shape = (total, heads.block_size, heads.num_kv_heads, heads.head_dim)
    kind = getattr(torch, dtype)
    k_cache, v_cache = (torch.randn(shape, generator=gen).to(kind) for _ in range(2))
    q = torch.randn(num_seqs * q_len, heads.num_q_heads, heads.head_dim, generator=gen).to(kind)
    return Batch(q, k_cache, v_cache, table.contiguous(), q_len, prefix + own)


def ours(batch: Batch, *, shared: bool = False) -> Peer:
    """The torch path; `shared` with a plan made beforehand, as one serves all layers."""
    table = batch.block_table.int()
    lens = torch.full((batch.num_seqs,), batch.context, dtype=torch.int32)
    cu = torch.arange(batch.num_seqs + 1, dtype=torch.int32) * batch.q_len
    plan = None
    if shared:
        plan = TreePlan.from_block_table(
            table,
            lens,
            cu,
            block_size=batch.k_cache.shape[1],
            num_q_heads=batch.q.shape[1],
            num_kv_heads=batch.num_kv_heads,
            kv_itemsize=batch.k_cache.itemsize,
        )

    def run() -> Tensor:
        out = paged_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            block_table=table,
            seq_lens=lens,
            cu_seqlens_q=cu,
            plan=plan,
            implementation="torch",
        )
        assert isinstance(out, Tensor)
        return out

    return run

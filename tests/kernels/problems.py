"""Random paged-attention problems, poisoned by NaN wherever nothing may be read; the same in float64 beside.

Used by every test of the kernels, on every implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from radixkv_kernels import paged_attention
from torch import Tensor

from tests.rounding import Exact, attention

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """What varies between problems; the rest follows from `seed`."""

    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    layout: str = "nhd"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    scales: str = "none"
    ragged: bool = False
    seed: int = 0


@dataclass
class Problem:
    """Arguments of `paged_attention`, and each sequence's KV in float64 with the scales applied."""

    shape: Shape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    kwargs: dict[str, Any]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def call(self) -> dict[str, Any]:
        """All arguments of `paged_attention` by name, so that a test may change some."""
        return {"q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "return_lse": True, **self.kwargs}

    def run(self, implementation: str = "torch", **changes: Any) -> tuple[Tensor, Tensor]:
        """(out, lse); out is poisoned beforehand."""
        shape = self.shape
        out = torch.full((self.q.shape[0], shape.num_q_heads, self.v_cache.shape[3]), torch.nan, dtype=shape.dtype)
        kwargs = {**self.kwargs, "out": out, "return_lse": True, "implementation": implementation, **changes}
        result = paged_attention(self.q, self.k_cache, self.v_cache, **kwargs)
        assert isinstance(result, tuple)
        return result


def empty_cache(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> Tensor:
    """A cache full of NaN whose logical shape is [num_blocks, block_size, heads, dim]."""

    def full(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan).to(dtype)

    if layout == "hnd":
        return full(num_blocks, heads, block_size, dim).transpose(1, 2)
    if layout == "interleaved":
        return full(num_blocks, 2, block_size, heads, dim)[:, 1]
    if layout == "token_interleaved":
        return full(num_blocks, block_size, 2, heads, dim)[:, :, 1]
    if layout == "dim_strided":
        return full(num_blocks, block_size, heads, dim, 2)[..., 0]
    assert layout == "nhd"
    return full(num_blocks, block_size, heads, dim)


def make(shape: Shape) -> Problem:
    """Blocks in random order, unused ids -1, every unused slot and block NaN."""
    gen = torch.Generator().manual_seed(shape.seed)
    bs, heads, dim = shape.block_size, shape.num_kv_heads, shape.head_dim
    v_dim = shape.v_head_dim or dim
    kv_dtype = shape.kv_dtype or shape.dtype
    counts = [-(-n // bs) for n in shape.seq_lens]
    num_blocks = sum(counts) + 2
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(shape.seed)).int()
    caches = [empty_cache(num_blocks, bs, heads, d, kv_dtype, shape.layout) for d in (dim, v_dim)]
    scales: list[Tensor | None] = [None, None]
    if shape.scales == "tensor":
        scales = [torch.tensor(0.5), torch.tensor(0.25)]
    elif shape.scales == "head":
        scales = [torch.rand(heads, generator=gen) + 0.25 for _ in range(2)]
    width = max([*counts, 1]) + 1
    table = torch.full((len(counts), width), -1, dtype=torch.int32)
    cu = torch.tensor([0, *shape.q_lens]).cumsum(0).int()
    problem = Problem(
        shape, torch.randn(int(cu[-1]), shape.num_q_heads, dim, generator=gen).to(shape.dtype), *caches, {}
    )
    used = 0
    for s, n in enumerate(shape.seq_lens):
        table[s, : counts[s]] = ids[used : used + counts[s]]
        used += counts[s]
        visible = 0 if shape.window is None else max(0, n - shape.q_lens[s] - shape.window + 1)
        tokens = torch.arange(visible, n)
        blocks, offsets = table[s, tokens // bs].long(), tokens % bs
        for cache, scale, kept, d in zip(caches, scales, (problem.keys, problem.values), (dim, v_dim), strict=True):
            full = torch.full((n, heads, d), torch.nan, dtype=torch.float64)
            data = torch.randn(len(tokens), heads, d, generator=gen).to(kv_dtype)
            if kv_dtype == FP8:
                cache.view(torch.uint8)[blocks, offsets] = data.view(torch.uint8)
            else:
                cache[blocks, offsets] = data
            full[visible:] = data.double() * (1.0 if scale is None else scale.double().reshape(-1, 1))
            kept.append(full)
        table[s, : visible // bs] = 2**31 - 1  # dropped by the engine
    per_head = torch.randn(shape.num_q_heads, generator=gen)
    problem.kwargs.update(
        cu_seqlens_q=cu,
        causal=shape.causal,
        window=shape.window,
        softcap=shape.softcap,
        sinks=per_head if shape.sinks else None,
        alibi_slopes=per_head.abs() / 8 if shape.alibi else None,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    if shape.ragged:
        lens = torch.tensor(shape.seq_lens)
        last = torch.where(lens > 0, (lens - 1) % bs + 1, 0).int()
        indices = torch.cat([table[s, :n] for s, n in enumerate(counts)]) if counts else torch.empty(0)
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        problem.kwargs.update(kv_indptr=indptr, kv_indices=indices.int(), last_block_len=last)
    else:
        problem.kwargs.update(block_table=table, seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32))
    return problem


def exact(problem: Problem) -> Exact:
    """Attention in float64, a second oracle, and what roundings may do."""
    shape, kwargs = problem.shape, problem.kwargs
    parts = []
    row = 0
    for s, (q_len, n) in enumerate(zip(shape.q_lens, shape.seq_lens, strict=True)):
        distance = (n - q_len + torch.arange(q_len))[:, None] - torch.arange(n)
        hidden = torch.zeros(q_len, n, dtype=torch.bool)
        if shape.causal:
            hidden |= distance < 0
        if shape.window is not None:
            hidden |= distance >= shape.window
        options = {"softcap": shape.softcap, "slopes": kwargs["alibi_slopes"], "sinks": kwargs["sinks"]}
        q = problem.q[row : row + q_len]
        parts.append(attention(q, problem.keys[s], problem.values[s], hidden=hidden, distance=distance, **options))
        row += q_len
    return Exact.joined(parts)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def check(problem: Problem, implementation: str = "torch") -> None:
    """Against float64: no more error than roundings explain; nothing is NaN."""
    exact(problem).check(*problem.run(implementation))


def with_shape(shape: Shape, **changes: Any) -> Shape:
    """`dataclasses.replace`, under a name that reads well in tests."""
    return replace(shape, **changes)

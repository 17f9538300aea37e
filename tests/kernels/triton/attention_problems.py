"""Small paged-attention calls for tests: ragged, shuffled over the cache, everything unseen poisoned with NaN.

`Problem` is a plain description, so that a failing case prints as what it is; `build` makes the arguments of
`radixkv_kernels.paged_attention`, and `exactly` the result in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.rounding import Exact, attention

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. seq_lens and q_lens are a sequence each; sizes in tokens."""

    seq_lens: tuple[int, ...] = (150, 1, 0, 260)
    q_lens: tuple[int, ...] = (1, 1, 1, 9)
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    group: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    layout: str = "nhd"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scales: str = "none"
    ragged: bool = False
    seed: int = 0

    def build(self) -> dict[str, Any]:
        """Keyword arguments of paged_attention, `out` filled with NaN included."""
        generator = torch.Generator().manual_seed(self.seed)
        v_head_dim = self.v_head_dim or self.head_dim
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        k_cache, v_cache = _caches(self, sum(counts) + 3, v_head_dim)
        order = (torch.randperm(sum(counts), generator=generator) + 2).tolist()
        table = torch.full((len(counts), max(1, *counts)), -1, dtype=torch.int32)
        for s, (length, q_len) in enumerate(zip(self.seq_lens, self.q_lens, strict=True)):
            first = max(0, length - q_len - self.window + 1) if self.window else 0
            for j in range(first // self.block_size, counts[s]):
                block = table[s, j] = order.pop()
                seen = range(max(first - j * self.block_size, 0), min(self.block_size, length - j * self.block_size))
                for cache in (k_cache, v_cache):
                    values = torch.randn(len(seen), self.num_kv_heads, cache.shape[3], generator=generator)
                    cache[int(block), seen.start : seen.stop] = values.to(cache.dtype)
        num_tokens, num_q_heads = sum(self.q_lens), self.group * self.num_kv_heads
        q = torch.randn(num_tokens, num_q_heads, self.head_dim, generator=generator).to(self.dtype)
        call: dict[str, Any] = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(self.q_lens)], dtype=torch.int32),
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.randn(num_q_heads, generator=generator) if self.sinks else None,
            "k_scale": _scale(self.scales, 0.5, self.num_kv_heads),
            "v_scale": _scale(self.scales, 0.25, self.num_kv_heads),
            "out": torch.full((num_tokens, num_q_heads, v_head_dim), torch.nan, dtype=self.dtype),
            "return_lse": True,
        }
        if self.ragged:
            indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
            ids = torch.cat([table[s, :count] for s, count in enumerate(counts)])
            last = [length - (count - 1) * self.block_size for length, count in zip(self.seq_lens, counts, strict=True)]
            return call | {"kv_indptr": indptr, "kv_indices": ids, "last_block_len": torch.tensor(last)}
        return call | {"block_table": table, "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32)}


def _caches(problem: Problem, num_blocks: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """All NaN, in the layout asked for."""
    dtype = FP8 if problem.fp8 else problem.dtype
    sizes = (problem.block_size, problem.num_kv_heads)
    if problem.layout == "interleaved":
        both = torch.full((num_blocks, 2, *sizes, max(problem.head_dim, v_head_dim)), torch.nan).to(dtype)
        return both[:, 0, :, :, : problem.head_dim], both[:, 1, :, :, :v_head_dim]
    caches = []
    for width in (problem.head_dim, v_head_dim):
        if problem.layout == "hnd":
            cache = torch.full((num_blocks, *reversed(sizes), width), torch.nan).to(dtype).transpose(1, 2)
        else:
            cache = torch.full((num_blocks, *sizes, width), torch.nan).to(dtype)
        caches.append(cache)
    return caches[0], caches[1]


def _scale(kind: str, value: float, num_kv_heads: int) -> float | Tensor | None:
    if kind == "none":
        return None
    return value if kind == "tensor" else value * (1 + torch.arange(num_kv_heads))


def exactly(call: dict[str, Any], problem: Problem) -> Exact:
    """The same attention in float64, a sequence at a time, and what roundings may do."""
    parts = []
    start = 0
    for s, (length, q_len) in enumerate(zip(problem.seq_lens, problem.q_lens, strict=True)):
        q = call["q"][start : start + q_len]
        start += q_len
        blocks = -(-length // problem.block_size)
        if problem.ragged:
            first = int(call["kv_indptr"][s])
            ids = call["kv_indices"][first : first + blocks].long()
        else:
            ids = call["block_table"][s, :blocks].long()
        gathered = []
        for name in ("k", "v"):
            cache = call[f"{name}_cache"][ids.clamp_min(0)].double().flatten(0, 1)[:length].nan_to_num(0.0)
            if call[f"{name}_scale"] is not None:
                cache = cache * torch.as_tensor(call[f"{name}_scale"], dtype=torch.float64).reshape(-1, 1)
            gathered.append(cache)
        distance = torch.arange(length - q_len, length)[:, None] - torch.arange(length)
        hidden = torch.zeros(q_len, length, dtype=torch.bool)
        if problem.causal:
            hidden |= distance < 0
        if problem.window:
            hidden |= distance >= problem.window
        parts.append(attention(q, *gathered, hidden=hidden, softcap=problem.softcap, sinks=call["sinks"]))
    return Exact.joined(parts)


def pairwise(factors: dict[str, Sequence[Any]], seed: int, tries: int = 40) -> list[dict[str, Any]]:
    """Rows of values such that every two values of two factors meet in some row: greedy, about twice the optimum."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }
    rows = []
    while missing:
        best: tuple[int, list[int]] = (-1, [])
        seeds = rng.sample(sorted(missing), min(tries, len(missing)))
        for a, x, b, y in seeds:
            row = [rng.randrange(len(factors[name])) for name in names]
            row[a], row[b] = x, y
            gain = sum((i, row[i], j, row[j]) in missing for i, j in itertools.combinations(range(len(names)), 2))
            best = max(best, (gain, row))
        row = best[1]
        missing -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(names)), 2)}
        rows.append({name: factors[name][index] for name, index in zip(names, row, strict=True)})
    return rows

"""Paged attention on a GPU against the clock, beside what it could reach and what PyTorch has: for `gpu_kernels`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from experiments.lab.harness import Row


@dataclasses.dataclass(frozen=True)
class Workload:
    """One timed call: `batch` sequences of `new` tokens on `cached` ones, in blocks and contiguous."""

    name: str
    batch: int
    new: int
    cached: int
    call: dict[str, Any]
    k: torch.Tensor
    v: torch.Tensor
    """[batch, num_kv_heads, length, head_dim], what the blocks hold."""

    @property
    def kv_bytes(self) -> int:
        return 2 * self.k.numel() * self.call["k_cache"].element_size()

    @property
    def flops(self) -> int:
        pairs = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.batch * pairs * self.call["q"].shape[1] * self.call["q"].shape[2]


def workload(name: str, batch: int, new: int, cached: int, config: Any, dtype: torch.dtype, fp8: bool) -> Workload:
    """Random values, blocks in random order. config: num_q_heads, num_kv_heads, head_dim, block_size."""
    length, size = cached + new, config.block_size
    per_seq = -(-length // size)
    shape = (batch * per_seq, size, config.num_kv_heads, config.head_dim)
    table = torch.randperm(batch * per_seq, device="cuda").reshape(batch, per_seq)
    caches = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)]
    if fp8:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    dense = [cache.to(dtype)[table].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in caches]
    call = {
        "q": torch.randn(batch * new, config.num_q_heads, config.head_dim, device="cuda", dtype=dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cu_seqlens_q": torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new,
        "block_table": table.int(),
        "seq_lens": torch.full((batch,), length, device="cuda", dtype=torch.int32),
        "implementation": "triton",
    }
    return Workload(name, batch, new, cached, call, dense[0], dense[1])


def contenders(work: Workload) -> dict[str, Callable[[], torch.Tensor]]:
    """Ours on blocks; SDPA and FlexAttention on the same KV laid out contiguously, which spares them the gather."""
    from radixkv_kernels import paged_attention
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = work.call["q"].unflatten(0, (work.batch, work.new)).transpose(1, 2).contiguous()
    length = work.k.shape[2]
    mask = causal_lower_right(work.new, length) if work.new > 1 else None
    group = q.shape[1] // work.k.shape[1]
    k_wide, v_wide = (x.repeat_interleave(group, 1) for x in (work.k, work.v)) if work.new > 1 else (work.k, work.v)

    def ours() -> torch.Tensor:
        out = paged_attention(**work.call)
        assert isinstance(out, torch.Tensor)
        return out

    def flat(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def sdpa() -> torch.Tensor:
        if mask is None:
            folded = q.reshape(work.batch, work.k.shape[1], group, -1)
            out = torch.nn.functional.scaled_dot_product_attention(folded, work.k, work.v)
            return out.reshape(work.batch, q.shape[1], -1)
        return flat(torch.nn.functional.scaled_dot_product_attention(q, k_wide, v_wide, attn_mask=mask))

    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if work.new > 1:
        cached = work.cached
        block_mask = create_block_mask(lambda b, h, i, j: j <= i + cached, None, None, work.new, length, device="cuda")

    def flex() -> torch.Tensor:
        return flat(compiled(q, work.k, work.v, block_mask=block_mask, enable_gqa=True))

    return {"radixkv": ours, "sdpa": sdpa, "flex": flex}


def measure(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, alternating, the L2 cache overwritten before every call."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 2):
        for name, function in functions.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def peaks(repeats: int) -> Row:
    """Measured copy bandwidth (GB/s, read plus write) and bf16 matmul rate (TFLOP/s) of this device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    took = measure({"copy": lambda: target.copy_(source), "matmul": lambda: a @ a}, repeats)
    return {
        "part": "peak",
        "name": torch.cuda.get_device_name(),
        "copy_gb_s": 2 * (1 << 30) / took["copy"] / 1e6,
        "matmul_tflop_s": 2 * 8192**3 / took["matmul"] / 1e9,
    }


def agreed(functions: Mapping[str, Callable[[], torch.Tensor]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Those that give what the first gives, and why the others are not timed."""
    agreeing: dict[str, Any] = {}
    refused = {}
    first = None
    for name, function in functions.items():
        try:
            out = function()
        except Exception as error:  # a peer that this torch lacks must not end the run; it is reported
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        first = out if first is None else first
        if float((out.float() - first.float()).norm() / first.float().norm()) < 2e-2:
            agreeing[name] = function
        else:
            refused[name] = "disagrees"
    return agreeing, refused


def time_workloads(config: Any, peak: Row, in_time: Callable[[], bool]) -> Iterator[Row]:
    """One row a workload and dtype; a contender that fails or disagrees is named and not timed."""
    kinds = [("decode", batch, 1, length - 1) for batch, length in config.decode]
    kinds += [("prefill", 1, new, cached) for new, cached in config.prefill]
    for fp8 in (False, True):
        for kind, batch, new, cached in kinds:
            if not in_time():
                return
            name = f"{kind} {batch} x {new} new on {cached} cached{', fp8' if fp8 else ''}"
            work = workload(kind, batch, new, cached, config, torch.bfloat16, fp8)
            agreeing, refused = agreed(contenders(work))
            took = measure(agreeing, config.repeats)
            ms = took.get("radixkv", float("nan"))
            yield {
                "part": "time",
                "name": name,
                "ms": took,
                "not_timed": refused,
                "of_copy_bandwidth": work.kv_bytes / ms / 1e6 / peak["copy_gb_s"],
                "of_matmul_rate": work.flops / ms / 1e9 / peak["matmul_tflop_s"],
            }
            del work
            torch.cuda.empty_cache()

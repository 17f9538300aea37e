"""Attention on a GPU against the clock, beside what the GPU could reach and what PyTorch does on contiguous KV.

Paged attention by itself; and tree attention, kernel, plan and upload apart, in two regimes: a prefix whose KV fits
into the L2 cache, which plain paged decode reads from there again and again, and one that does not.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from radixkv_kernels import PlanBuffers, PlanConfig, TreePlan, TreePlanner, paged_attention, plan_tile, tree_attention
from torch import Tensor

from experiments.lab.harness import Row

DEVICE = "cuda"
NUM_LAYERS = 32
"""A plan serves all layers of a step; its cost is reported a layer too."""


@dataclasses.dataclass(frozen=True)
class Case:
    """num_seqs sequences on one prefix, in tokens; own: what each has behind it."""

    num_seqs: int
    prefix: int
    own: int


CASES = (
    Case(64, 1024, 128),  # 4 MiB of shared KV: in L2
    Case(64, 4096, 128),
    Case(64, 32768, 128),  # 128 MiB: not in L2
    Case(256, 16384, 512),
    Case(8, 1024, 128),
    Case(32, 0, 2048),
)
SMOKE = (Case(4, 1024, 64),)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call: the `new` last tokens of each sequence, in blocks; and the same KV of each sequence contiguous."""

    case: Case
    new: int
    call: dict[str, Any]
    k: Tensor
    """[num_seqs, num_kv_heads, prefix + own, head_dim]"""
    v: Tensor

    @property
    def kv_bytes(self) -> int:
        """Of KV, what sequences share counted once."""
        cache = self.call["k_cache"]
        tokens = self.case.prefix + self.case.num_seqs * self.case.own
        return 2 * tokens * cache[0, 0].numel() * cache.element_size()

    @property
    def flops(self) -> int:
        cached = self.k.shape[2] - self.new
        pairs = self.new * cached + self.new * (self.new + 1) // 2
        return 4 * self.case.num_seqs * pairs * self.call["q"].shape[1] * self.call["q"].shape[2]


def make_batch(
    config: Any, case: Case, new: int = 1, dtype: torch.dtype = torch.bfloat16, *, fp8: bool = False
) -> Batch:
    """Random values, blocks in random order; the prefix's whole blocks are the same of every sequence.

    config: num_q_heads, num_kv_heads, head_dim, block_size.
    """
    size, length = config.block_size, case.prefix + case.own
    shared = case.prefix // size
    own = -(-length // size) - shared
    total = shared + case.num_seqs * own
    ids = torch.randperm(total, device=DEVICE)
    table = torch.cat((ids[:shared].expand(case.num_seqs, -1), ids[shared:].view(case.num_seqs, own)), 1)
    shape = (total, size, config.num_kv_heads, config.head_dim)
    caches = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2)]
    if fp8:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    k, v = (cache.to(dtype)[table].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in caches)
    call = {
        "q": torch.randn(case.num_seqs * new, config.num_q_heads, config.head_dim, device=DEVICE, dtype=dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cu_seqlens_q": torch.arange(case.num_seqs + 1, device=DEVICE, dtype=torch.int32) * new,
        "block_table": table.int().contiguous(),
        "seq_lens": torch.full((case.num_seqs,), length, device=DEVICE, dtype=torch.int32),
        "implementation": "triton",
    }
    return Batch(case, new, call, k, v)


def contenders(batch: Batch) -> dict[str, Callable[[], Tensor]]:
    """Ours on blocks; SDPA and FlexAttention on the same KV laid out contiguously, which spares them the gather."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_seqs, num_kv_heads, length, _ = batch.k.shape
    q = batch.call["q"].unflatten(0, (num_seqs, batch.new)).transpose(1, 2).contiguous()
    group, cached = q.shape[1] // num_kv_heads, length - batch.new
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = block_mask = None
    k_wide, v_wide = batch.k, batch.v
    if batch.new > 1:
        mask = causal_lower_right(batch.new, length)
        k_wide, v_wide = (x.repeat_interleave(group, 1) for x in (batch.k, batch.v))
        block_mask = create_block_mask(lambda b, h, i, j: j <= i + cached, None, None, batch.new, length, device=DEVICE)

    def ours() -> Tensor:
        out = paged_attention(**batch.call)
        assert isinstance(out, Tensor)
        return out

    def flat(out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def sdpa() -> Tensor:
        if mask is None:
            folded = q.reshape(num_seqs, num_kv_heads, group, -1)
            out = torch.nn.functional.scaled_dot_product_attention(folded, batch.k, batch.v)
            return out.reshape(num_seqs, q.shape[1], -1)
        return flat(torch.nn.functional.scaled_dot_product_attention(q, k_wide, v_wide, attn_mask=mask))

    def flex() -> Tensor:
        return flat(compiled(q, batch.k, batch.v, block_mask=block_mask, enable_gqa=True))

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


def plan_config(batch: Batch) -> PlanConfig:
    """What plans of this batch have to be made with on this device."""
    q, cache = batch.call["q"], batch.call["k_cache"]
    tile = plan_tile(q.dtype, q.shape[2], device=DEVICE, implementation="triton")
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return PlanConfig(
        cache.shape[1],
        q.shape[1],
        cache.shape[2],
        **tile,
        min_items=2 * processors // cache.shape[2],
        kv_itemsize=cache.element_size(),
    )


def time_plan(config: PlanConfig, batch: Batch, repeats: int) -> tuple[TreePlan, Row]:
    """The plan, and median host microseconds of making it, of keeping it for a step, and of its upload."""
    table = batch.call["block_table"].cpu().numpy()
    lens = batch.call["seq_lens"].cpu().numpy().astype(np.int64)
    cu = np.arange(len(lens) + 1)
    options = dataclasses.asdict(config)
    taken: dict[str, list[float]] = {"scratch": [], "step": [], "upload": []}
    planner = TreePlanner(config)
    for name, blocks in enumerate(table):
        planner.add(name, blocks)
    names = list(range(len(lens)))
    planner.plan(names, lens, cu)
    for _ in range(repeats):
        start = time.perf_counter()
        plan = TreePlan.from_block_table(table, lens, cu, **options)
        taken["scratch"].append(time.perf_counter() - start)
        start = time.perf_counter()
        planner.plan(names, lens, cu)
        taken["step"].append(time.perf_counter() - start)
        buffers = PlanBuffers(plan.num_items, len(lens), len(plan.work.row_slots), DEVICE)
        torch.cuda.synchronize()
        start = time.perf_counter()
        buffers.load(plan)
        torch.cuda.synchronize()
        taken["upload"].append(time.perf_counter() - start)
    us = {f"plan_{name}_us": statistics.median(values) * 1e6 for name, values in taken.items()}
    return plan, us | {"plan_us_a_layer": (us["plan_scratch_us"] + us["plan_upload_us"]) / NUM_LAYERS}


def time_workloads(config: Any, peak: Row, in_time: Callable[[], bool]) -> Iterator[Row]:
    """One row a workload and dtype; a contender that fails or disagrees is named and not timed."""
    kinds = [("decode", batch, 1, length - 1) for batch, length in config.decode]
    kinds += [("prefill", 1, new, cached) for new, cached in config.prefill]
    for fp8 in (False, True):
        for kind, num_seqs, new, cached in kinds:
            if not in_time():
                return
            batch = make_batch(config, Case(num_seqs, 0, cached + new), new, fp8=fp8)
            agreeing, refused = agreed(contenders(batch))
            took = measure(agreeing, config.repeats)
            ms = took.get("radixkv", float("nan"))
            yield {
                "part": "time",
                "name": f"{kind} {num_seqs} x {new} new on {cached} cached{', fp8' if fp8 else ''}",
                "ms": took,
                "not_timed": refused,
                "of_copy_bandwidth": batch.kv_bytes / ms / 1e6 / peak["copy_gb_s"],
                "of_matmul_rate": batch.flops / ms / 1e9 / peak["matmul_tflop_s"],
            }
            del batch
            torch.cuda.empty_cache()


def tree_rows(
    config: Any,
    peak: Row,
    measure: Callable[[dict[str, Callable[[], Any]], int], dict[str, float]],
    in_time: Callable[[], bool],
) -> Iterator[Row]:
    """A row a case; a contender that fails or disagrees is named and not timed, and none where the bits differ.

    Args:
        config: as `make_batch` takes it; tree (the cases) and repeats.
        measure: median milliseconds of functions, the L2 cache overwritten before each.
    """
    for case in config.tree:
        if not in_time():
            return
        batch = make_batch(config, case)
        plan, plan_row = time_plan(plan_config(batch), batch, config.repeats)
        peers = contenders(batch)
        functions = {"paged": peers.pop("radixkv"), "tree": tree_side(batch, plan), **peers}
        same_bits = torch.equal(functions["tree"](), functions["paged"]())
        row = {
            "part": "tree",
            "name": f"tree {case.num_seqs} on {case.prefix} + {case.own}",
            "passed": same_bits,
            "num_items": plan.num_items,
            "shared_mib": 4 * case.prefix * config.num_kv_heads * config.head_dim / 2**20,
            "ideal": case.num_seqs * (case.prefix + case.own) / (case.prefix + case.num_seqs * case.own),
            **plan_row,
        }
        agreeing, refused = agreed(functions)
        if same_bits:
            took = measure(agreeing, config.repeats)
            rate = batch.kv_bytes / took["tree"] / 1e6
            row |= {"ms": took, "not_timed": refused, "unique_gb_s": rate}
            row["of_copy_bandwidth"] = rate / peak["copy_gb_s"]
        yield row
        del batch, functions
        torch.cuda.empty_cache()


def tree_side(batch: Batch, plan: TreePlan) -> Callable[[], Tensor]:
    """Ours with a plan."""
    out = torch.empty_like(batch.call["q"])

    def tree() -> Tensor:
        tree_attention(**batch.call, plan=plan, out=out)
        return out

    return tree

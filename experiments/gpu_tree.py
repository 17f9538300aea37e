"""Tree attention on a GPU: kernel, plan and upload apart, against attention that reads a shared prefix once a request.

Two regimes: a prefix whose KV fits into the L2 cache, which plain paged decode reads from there again and again, and
one that does not.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from radixkv_kernels import PlanBuffers, PlanConfig, TreePlan, TreePlanner, paged_attention, plan_tile, tree_attention
from torch import Tensor

from experiments.gpu_times import agreed
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
class TreeBatch:
    """One call in blocks, and the same KV of each sequence contiguous."""

    case: Case
    call: dict[str, Any]
    k: Tensor
    """[num_seqs, num_kv_heads, tokens, head_dim]"""
    v: Tensor

    @property
    def unique_bytes(self) -> int:
        case = self.case
        cache = self.call["k_cache"]
        return 2 * (case.prefix + case.num_seqs * case.own) * cache[0, 0].numel() * cache.element_size()


def make_batch(case: Case, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> TreeBatch:
    """Random bfloat16 values, blocks in random order; the prefix's are the same of every sequence."""
    shared, own = case.prefix // block_size, case.own // block_size
    total = shared + case.num_seqs * own
    ids = torch.randperm(total, device=DEVICE)
    table = torch.cat((ids[:shared].expand(case.num_seqs, -1), ids[shared:].view(case.num_seqs, own)), 1)
    shape = (total, block_size, num_kv_heads, head_dim)
    caches = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    k, v = (cache[table].flatten(1, 2).transpose(1, 2).contiguous() for cache in caches)
    lens = torch.full((case.num_seqs,), case.prefix + case.own, device=DEVICE, dtype=torch.int32)
    call = {
        "q": torch.randn(case.num_seqs, num_q_heads, head_dim, device=DEVICE, dtype=torch.bfloat16),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cu_seqlens_q": torch.arange(case.num_seqs + 1, device=DEVICE, dtype=torch.int32),
        "block_table": table.int().contiguous(),
        "seq_lens": lens,
        "implementation": "triton",
    }
    return TreeBatch(case, call, k, v)


def plan_config(batch: TreeBatch) -> PlanConfig:
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


def time_plan(config: PlanConfig, batch: TreeBatch, repeats: int) -> tuple[TreePlan, Row]:
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


def contenders(batch: TreeBatch, plan: TreePlan) -> dict[str, Callable[[], Tensor]]:
    """Ours with and without the plan on blocks; SDPA and FlexAttention on contiguous KV, which spares them a gather."""
    from torch.nn.attention.flex_attention import flex_attention

    q = batch.call["q"]
    num_seqs, num_q_heads, head_dim = q.shape
    folded = q.view(num_seqs, batch.k.shape[1], -1, head_dim)
    compiled = torch.compile(flex_attention, dynamic=False)
    out = torch.empty_like(q)

    def sdpa() -> Tensor:
        result = torch.nn.functional.scaled_dot_product_attention(folded, batch.k, batch.v)
        return result.reshape(num_seqs, num_q_heads, head_dim)

    def flex() -> Tensor:
        result: Tensor = compiled(q[:, :, None], batch.k, batch.v, enable_gqa=True)
        return result[:, :, 0]

    def tree() -> Tensor:
        tree_attention(**batch.call, plan=plan, out=out)
        return out

    def paged() -> Tensor:
        result = paged_attention(**batch.call)
        assert isinstance(result, Tensor)
        return result

    return {"paged": paged, "tree": tree, "sdpa": sdpa, "flex": flex}


def tree_rows(
    config: Any,
    cases: tuple[Case, ...],
    peak: Row,
    measure: Callable[[dict[str, Callable[[], Any]], int], dict[str, float]],
    in_time: Callable[[], bool],
) -> Iterator[Row]:
    """A row a case; a contender that fails or disagrees is named and not timed, and none where the bits differ.

    config: num_q_heads, num_kv_heads, head_dim, block_size, repeats. measure: median milliseconds of functions, the L2
    cache overwritten before each.
    """
    for case in cases:
        if not in_time():
            return
        batch = make_batch(case, config.num_q_heads, config.num_kv_heads, config.head_dim, config.block_size)
        plan, plan_row = time_plan(plan_config(batch), batch, config.repeats)
        functions = contenders(batch, plan)
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
            rate = batch.unique_bytes / took["tree"] / 1e6
            row |= {"ms": took, "not_timed": refused, "unique_gb_s": rate}
            row["of_copy_bandwidth"] = rate / peak["copy_gb_s"]
        yield row
        del batch, functions
        torch.cuda.empty_cache()

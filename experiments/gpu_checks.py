"""Compiled kernels against float64 on the GPU, and bit for bit against themselves: the first half of `gpu_kernels`.

Each check is a small call; together they take every feature through the compiler in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from radixkv_kernels import PlanBuffers, copy_blocks, merge_states, paged_attention, store_kv
from radixkv_kernels.triton_impl import attention

from experiments.gpu_cases import FP8, Case, attend, build, cases, on_cpu, plan_of, rows_of, share
from experiments.lab.harness import Row


def check_case(case: Case, seed: int, device: torch.device) -> Row:
    """Errors of one case. Passes within four roundings of its dtype, lse within float32's."""
    call = build(case, seed, device)
    sinks = torch.randn(call["q"].shape[1], generator=torch.Generator().manual_seed(seed)).to(device)
    rows = []
    extras: tuple[dict[str, Any], ...] = ({}, {"sinks": sinks})
    for extra in extras:
        out = torch.full((*call["q"].shape[:2], case.v_head_dim), torch.nan, dtype=case.dtype, device=device)
        out, lse = paged_attention(**call, **extra, out=out, implementation="triton")
        exact, exact_lse = paged_attention(**on_cpu(call | extra), implementation="reference")
        error = float((out.cpu().double() - exact.double()).norm() / exact.double().norm())
        seen = exact_lse > -torch.inf
        lse_error = float((lse.cpu()[seen] - exact_lse[seen]).abs().max())
        rows.append((error, lse_error, bool((lse.cpu()[~seen] == -torch.inf).all())))
    error, lse_error = max(r[0] for r in rows), max(r[1] for r in rows)
    limit = 2 * torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 2e-6
    passed = error <= limit and lse_error <= 1e-4 and all(r[2] for r in rows)
    return {"part": "check", "name": case.name, "error": error, "lse_error": lse_error, "passed": passed}


def check_bits(device: torch.device) -> Iterator[Row]:
    """torch.equal for splits, alone and batched, chunks, and a replayed CUDA graph."""
    for dtype in (torch.bfloat16, torch.float16):
        case = Case("bits", dtype, seq_lens=(5000, 130, 900), q_lens=(1, 1, 300))
        call = build(case, 7, device)
        whole, _ = attend(call)
        equal: dict[str, bool] = {}
        original = attention.num_processors
        for processors in (1, 12, 4096):
            attention.num_processors = lambda device, n=processors: n  # type: ignore[assignment]
            try:
                equal[f"as on {processors} processors"] = torch.equal(attend(call)[0], whole)
            finally:
                attention.num_processors = original
        equal["alone"] = torch.equal(attend(rows_of(call, 0, 0, 1, 5000))[0], whole[:1])
        parts = [attend(rows_of(call, 2, a, b, 600 + b))[0] for a, b in ((0, 7), (7, 200), (200, 300))]
        equal["chunked"] = torch.equal(torch.cat(parts), whole[2:])
        equal["graph replay"] = torch.equal(replay(call), whole)
        for name, passed in equal.items():
            yield {"part": "bits", "name": f"{str(dtype)[6:]} {name}", "passed": passed}


def replay(call: dict[str, Any]) -> torch.Tensor:
    """Captures the call with sequences of one token, then replays the graph on the real lengths."""
    real = call["seq_lens"].clone()
    lens = torch.ones_like(real)
    fixed = call | {"seq_lens": lens}
    attend(fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(fixed)
    lens.copy_(real)
    graph.replay()
    return out


def check_tree(device: torch.device, some: Iterable[Case]) -> Iterator[Row]:
    """torch.equal with and without a plan, for each case; then a CUDA graph replayed while the plan changes."""
    for seed, case in enumerate(some):
        call = share(build(case, seed, device), 600)
        plan = plan_of(call)
        want, want_lse = attend(call)
        out, lse = attend(call | {"plan": plan.to(device)})
        passed = torch.equal(out, want) and torch.equal(lse, want_lse) and plan.shares
        yield {"part": "tree bits", "name": case.name, "passed": passed, "num_items": plan.num_items}
    if device.type == "cuda":
        call = share(build(Case("graph", seq_lens=(700, 900, 2300), q_lens=(1, 1, 1)), 3, device), 600)
        yield {"part": "tree bits", "name": "graph replay", "passed": torch.equal(replay_plan(call), attend(call)[0])}


def replay_plan(call: dict[str, Any]) -> torch.Tensor:
    """Captures the call with the plan of sequences of one token, then replays it with the plan of the real lengths."""
    real, plan = call["seq_lens"].clone(), plan_of(call)
    lens = torch.ones_like(real)
    buffers = PlanBuffers(4 * plan.num_items, len(real) + 5, 4 * len(plan.work.row_slots), real.device)
    fixed = call | {"seq_lens": lens, "plan": buffers.load(plan_of(call | {"seq_lens": lens}))}
    attend(fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(fixed)
    lens.copy_(real)
    buffers.load(plan)
    graph.replay()
    return out


def check_cache(device: torch.device) -> Iterator[Row]:
    """store_kv, copy_blocks and merge_states against the reference."""
    generator = torch.Generator().manual_seed(11)
    for dtype, cache_dtype in itertools.product((torch.bfloat16, torch.float16, torch.float32), ("same", FP8)):
        stored = dtype if cache_dtype == "same" else FP8
        k = (torch.randn(40, 3, 80, generator=generator) * 100).to(dtype)
        slots = torch.randperm(96, generator=generator)[:40]
        slots[::7] = -1
        caches = [torch.zeros(6, 16, 3, 80).to(stored).to(d) for d in (device, torch.device("cpu")) for _ in range(2)]
        scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 3.0} if stored == FP8 else {}
        store_kv(k.to(device), k.to(device), caches[0], caches[1], slots.to(device), **scales, implementation="triton")
        store_kv(k, k, caches[2], caches[3], slots, **scales, implementation="reference")
        pairs = (torch.tensor([0, 1]), torch.tensor([4, 5]), torch.tensor([3, 16]))
        copy_blocks(caches[0], caches[1], *(p.to(device) for p in pairs), implementation="triton")
        copy_blocks(caches[2], caches[3], *pairs, implementation="reference")
        same = all(torch.equal(a.cpu().float(), b.float()) for a, b in zip(caches[:2], caches[2:], strict=True))
        yield {"part": "cache", "name": f"{str(dtype)[6:]} into {str(stored)[6:]}", "passed": same}
    outs, lses = torch.randn(5, 9, 4, 96, generator=generator), torch.randn(5, 9, 4, generator=generator)
    lses[1:3] = -torch.inf
    out, lse = merge_states(outs.to(device), lses.to(device), implementation="triton")
    exact, exact_lse = merge_states(outs, lses, implementation="reference")
    error = max(float((out.cpu() - exact).abs().max()), float((lse.cpu() - exact_lse).abs().max()))
    yield {"part": "cache", "name": "merge_states", "error": error, "passed": error < 1e-5}


def run_checks(device: torch.device, report: Callable[[Row], None], in_time: Callable[[], bool]) -> list[Row]:
    """All rows; `report` gets each as it comes. Stops early where time is up, which its last row says."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        report(row)

    in_bf16 = itertools.islice(cases(), 9)
    for row in itertools.chain(check_cache(device), check_bits(device), check_tree(device, in_bf16)):
        add(row)
    for seed, case in enumerate(cases()):
        if not in_time():
            add({"part": "check", "name": "stopped: out of time", "passed": False})
            break
        add(check_case(case, seed, device))
    return rows

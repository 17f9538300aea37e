"""Compiled kernels against float64 on the GPU, and bit for bit against themselves: the first half of `gpu_kernels`.

Each check is a small call; together they take every feature through the compiler in every dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from radixkv_kernels import PlanBuffers, TreePlan, copy_blocks, merge_states, paged_attention, plan_tile, store_kv
from radixkv_kernels.triton_impl import attention

from experiments.lab.harness import Row

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: lengths in tokens, a sequence each."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    seq_lens: tuple[int, ...] = (700, 1, 0, 2300, 64)
    q_lens: tuple[int, ...] = (1, 1, 1, 70, 0)
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    v_head_dim: int = 128
    block_size: int = 16
    fp8: bool = False
    hnd: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def cases() -> Iterator[Case]:
    """Every feature in bf16 and fp16, with an fp8 cache too, and a few in fp32."""
    for dtype, fp8 in ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True), (torch.float16, True)):
        tag = f"{str(dtype)[6:]}{' fp8' if fp8 else ''}"
        scales = (("k_scale", 0.5), ("v_scale", 0.25)) if fp8 else ()
        base = Case(f"{tag} plain", dtype, fp8=fp8, options=scales)
        yield base
        yield dataclasses.replace(base, name=f"{tag} window", options=(*scales, ("window", 300)))
        yield dataclasses.replace(base, name=f"{tag} softcap", options=(*scales, ("softcap", 30.0)))
        yield dataclasses.replace(base, name=f"{tag} not causal", options=(*scales, ("causal", False)))
        yield dataclasses.replace(base, name=f"{tag} group 7, block 3, HND", group=7, block_size=3, hnd=True)
        for head_dim, v_head_dim in ((64, 64), (80, 80), (192, 128), (256, 256)):
            name = f"{tag} head_dim {head_dim}/{v_head_dim}"
            yield dataclasses.replace(base, name=name, head_dim=head_dim, v_head_dim=v_head_dim)
    yield Case("fp32 plain", torch.float32)
    yield Case("fp32 group 1, block 48, window", torch.float32, group=1, block_size=48, options=(("window", 50),))


def build(case: Case, seed: int, device: torch.device) -> dict[str, Any]:
    """Arguments of paged_attention on device; what no row may see is NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    dtype = FP8 if case.fp8 else case.dtype
    caches = []
    order = torch.randperm(sum(counts), generator=generator) + 1
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for width in (case.head_dim, case.v_head_dim):
        cache = torch.full((sum(counts) + 1, case.block_size, case.num_kv_heads, width), torch.nan)
        start = 0
        for s, length in enumerate(case.seq_lens):
            ids = order[start : start + counts[s]]
            start += counts[s]
            table[s, : counts[s]] = ids
            for j, block in enumerate(ids.tolist()):
                n = min(case.block_size, length - j * case.block_size)
                cache[block, :n] = torch.randn(n, case.num_kv_heads, width, generator=generator)
        cache = cache.to(dtype).to(device)
        caches.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if case.hnd else cache)
    q = torch.randn(sum(case.q_lens), case.num_kv_heads * case.group, case.head_dim, generator=generator)
    return {
        "q": q.to(case.dtype).to(device),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(case.q_lens)], dtype=torch.int32, device=device),
        "block_table": table.to(device),
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        "return_lse": True,
    } | dict(case.options)


def on_cpu(call: dict[str, Any]) -> dict[str, Any]:
    """The call for the float64 reference: on the CPU, q and a wide cache in float32."""
    moved = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    widened = {name: moved[name].float() for name in ("q", "k_cache", "v_cache") if moved[name].dtype != FP8}
    return moved | widened


def attend(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = paged_attention(**call, implementation="triton")
    return out, lse


def rows_of(call: dict[str, Any], s: int, first: int, last: int, seq_len: int) -> dict[str, Any]:
    """Rows [first, last) of sequence s by itself, when it is seq_len tokens long."""
    start = int(call["cu_seqlens_q"][s])
    device = call["q"].device
    return call | {
        "q": call["q"][start + first : start + last],
        "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32, device=device),
        "block_table": call["block_table"][s : s + 1],
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32, device=device),
    }


def share(call: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The call with the first num_tokens of its longest sequence in every sequence that is longer."""
    table, lens = call["block_table"].clone(), call["seq_lens"].tolist()
    blocks = num_tokens // call["k_cache"].shape[1]
    longest = max(range(len(lens)), key=lens.__getitem__)
    for s, length in enumerate(lens):
        if length > num_tokens:
            table[s, :blocks] = table[longest, :blocks]
    return call | {"block_table": table}


def plan_of(call: dict[str, Any]) -> TreePlan:
    """A plan as the Triton kernels want it."""
    q, k_cache, v_cache = call["q"], call["k_cache"], call["v_cache"]
    options = {name: call[name] for name in ("causal", "window") if name in call}
    return TreePlan.from_block_table(
        call["block_table"],
        call["seq_lens"],
        call["cu_seqlens_q"],
        block_size=k_cache.shape[1],
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        kv_itemsize=4,
        **options,
        **plan_tile(
            q.dtype,
            q.shape[2],
            v_head_dim=v_cache.shape[3],
            kv_dtype=k_cache.dtype,
            softcap=call.get("softcap") is not None,
            device=q.device,
            implementation="triton",
        ),
    )


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
        yield {
            "part": "tree bits",
            "name": "graph replay",
            "passed": torch.equal(replay(call, with_plan=True), attend(call)[0]),
        }


def replay(call: dict[str, Any], *, with_plan: bool = False) -> torch.Tensor:
    """Captures the call with sequences of one token, then replays the graph on the real lengths, and their plan."""
    real = call["seq_lens"].clone()
    lens = torch.ones_like(real)
    fixed = call | {"seq_lens": lens}
    if with_plan:
        plan = plan_of(call)
        buffers = PlanBuffers(4 * plan.num_items, len(real) + 5, 4 * len(plan.work.row_slots), real.device)
        fixed["plan"] = buffers.load(plan_of(fixed))
    attend(fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(fixed)
    lens.copy_(real)
    if with_plan:
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

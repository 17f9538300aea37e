"""The calls that `gpu_checks` makes: every feature of paged attention in every dtype, as tensors on a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from radixkv_kernels import TreePlan, paged_attention, plan_tile

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

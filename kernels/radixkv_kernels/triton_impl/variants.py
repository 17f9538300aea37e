"""What a launch of each kernel would compile: argument types, constants and alignment, for `compile.compile_kernel`.

Kept beside the launchers (`attention.py`, `cache_kernels.py`, `merge_kernel.py`), which it must mirror.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import triton

from . import attention_kernel, cache_kernels, merge_kernel, reduce_kernel
from .config import Config, Key


@dataclasses.dataclass(frozen=True)
class Variant:
    """One compilation: arguments of `compile_kernel` except the architecture."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    needs_mma: bool
    """The kernel has a product of at least 16 rows that tensor cores should do."""

    @property
    def aligned(self) -> set[str]:
        """Addresses and strides that are multiples of 16 in the usual launch; scales' strides are 0 or 1."""
        names = set(self.types) - {"stride_k_scale", "stride_v_scale", "stride_lse_head"}
        return {name for name in names if name.endswith("_ptr") or name.startswith("stride_")}


def attention_variants(key: Key, config: Config) -> Iterator[Variant]:
    """The attention kernel of one table entry: plain, with a window, over a plan's work list, from ragged lists.

    Head sizes are the block itself (no masks) and, once, a size below it (masks).
    """
    for label, head_dim, overrides in (
        ("causal", key.head_block, {}),
        ("window", key.head_block, {"WINDOW": True}),
        ("plan", key.head_block, {"WORK_LIST": True}),
        ("plan, window", key.head_block, {"WORK_LIST": True, "WINDOW": True}),
        ("odd sizes", key.head_block - 16, {"WINDOW": True, "INDPTR": True, "GROUP": 3, "BLOCK_SIZE": 48}),
    ):
        constants: dict[str, Any] = {
            "stride_q_dim": 1,
            "stride_k_dim": 1,
            "stride_v_dim": 1,
            "GROUP": 4,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": head_dim,
            "CAUSAL": True,
            "WINDOW": False,
            "SOFTCAP": key.softcap,
            "FP8": key.fp8,
            "INDPTR": False,
            "WORK_LIST": False,
        } | tile_constants(head_dim, head_dim, config)
        cache = "*u8" if key.fp8 else f"*{key.dtype}"
        pointers = {"q_ptr": f"*{key.dtype}", "k_ptr": cache, "v_ptr": cache}
        pointers |= dict.fromkeys(("k_scale_ptr", "acc_ptr", "ml_ptr"), "*fp32")
        kernel = attention_kernel.attention_kernel
        constants |= overrides
        types = argument_types(kernel, constants, pointers)
        tensor_cores = config.precision != "ieee" and config.block_m >= 16
        yield Variant(label, kernel, types, constants, config.num_warps, config.num_stages, tensor_cores)


def tile_constants(head_dim: int, v_head_dim: int, config: Config) -> dict[str, Any]:
    """The attention kernel's constants that follow from head sizes and an entry; launches use it too."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_V": min(config.block_v, max(16, triton.next_power_of_2(v_head_dim))),
        "PRECISION": config.precision,
        "STAGES": config.num_stages,
    }


def reduce_variants(head_dim: int, dtype: str) -> Iterator[Variant]:
    """The reduction with everything on, for a few heads a program and for one."""
    kernel = reduce_kernel.reduce_kernel
    for block_h, work_list in ((1, False), (8, False), (1, True), (8, True)):
        constants: dict[str, Any] = {
            "stride_out_dim": 1,
            "GROUP": 4,
            "V_HEAD_DIM": head_dim,
            "BLOCK_H": block_h,
            "BLOCK_DV": triton.next_power_of_2(head_dim),
            "V_SLICES": 1,
            "CAUSAL": True,
            "WINDOW": True,
            "SINKS": True,
            "V_SCALE": True,
            "LSE": True,
            "WORK_LIST": work_list,
        }
        floats = ("acc_ptr", "ml_ptr", "lse_ptr", "sinks_ptr", "v_scale_ptr")
        pointers = dict.fromkeys(floats, "*fp32") | {"out_ptr": f"*{dtype}"}
        types = argument_types(kernel, constants, pointers)
        name = f"reduce {block_h} heads{', plan' if work_list else ''}"
        yield Variant(name, kernel, types, constants, reduce_warps(block_h, head_dim), 3, False)


def cache_variants(head_dim: int, dtype: str) -> Iterator[Variant]:
    """store_kv into a cache of dtype and into an fp8 one, copy_blocks and merge_states."""
    block = triton.next_power_of_2(head_dim)
    unit_strides = dict.fromkeys(("stride_k_dim", "stride_v_dim", "stride_kc_dim", "stride_vc_dim"), 1)
    kernel = cache_kernels.store_kernel
    for fp8 in (False, True):
        constants: dict[str, Any] = unit_strides | {
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": head_dim,
            "BLOCK_H": 8,
            "BLOCK_D": block,
            "BLOCK_V": block,
            "FP8": fp8,
            "K_SCALE": fp8,
            "V_SCALE": fp8,
        }
        cache = "*u8" if fp8 else f"*{dtype}"
        pointers = {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "k_cache_ptr": cache, "v_cache_ptr": cache}
        pointers |= {"slot_mapping_ptr": "*i64", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
        name = "store_kv fp8" if fp8 else "store_kv"
        yield Variant(name, kernel, argument_types(kernel, constants, pointers), constants, 4, 1, False)
    kernel = cache_kernels.copy_kernel
    constants = {"stride_dim": 1, "HEAD_DIM": head_dim, "BLOCK_ROWS": 32, "BLOCK_D": block}
    pointers = dict.fromkeys(("src_ptr", "dst_ptr", "num_tokens_ptr"), "*i64") | {"cache_ptr": f"*{dtype}"}
    yield Variant("copy_blocks", kernel, argument_types(kernel, constants, pointers), constants, 4, 1, False)
    kernel = merge_kernel.merge_kernel
    constants = {"stride_outs_dim": 1, "stride_out_dim": 1, "V_HEAD_DIM": head_dim}
    constants |= {"BLOCK_H": 8, "BLOCK_V": block, "LSE": True}
    pointers = {"outs_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "lses_ptr": "*fp32", "lse_ptr": "*fp32"}
    yield Variant("merge_states", kernel, argument_types(kernel, constants, pointers), constants, 4, 3, False)


def reduce_warps(block_h: int, v_head_dim: int) -> int:
    """Warps of a reduction program of block_h heads. Two spill on sm_100 at 64 columns, four at 128."""
    if block_h == 1:
        return 1
    return 4 if v_head_dim <= 64 else 2


def argument_types(kernel: Any, constants: dict[str, Any], pointers: dict[str, str]) -> dict[str, str]:
    """Types by the naming rule: `*_ptr` is in `pointers` or an int32 table, scale and softcap are floats, the rest
    32-bit integers."""
    types = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            continue
        if name.endswith("_ptr"):
            types[name] = pointers.get(name, "*i32")
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i32"
    return types

"""The Triton implementation: CUDA and ROCm devices, and CPU tensors under TRITON_INTERPRET=1 (for tests).

The functions that `contract.py` describes. Importing this package imports triton.

    numerics          the merge formula and fp8 codes, shared by all kernels
    attention_kernel  partials of attention: work items, tiles, cells, runs
    reduce_kernel     partials -> out and lse
    attention         grid, workspace and launches of the two
    cache_kernels     store_kv, copy_blocks
    merge_kernel      merge_states
    config            tile shapes by architecture, head size and dtype: data
    variants, compile, feasible, tuner   making and checking that data
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from ..contract import AttentionSpec, AttentionTensors, Plan, UnsupportedImplementation, expect
from . import attention, cache_kernels, merge_kernel
from .config import Config, Key, head_block, tables
from .numerics import CELL_SIZE

INTERPRETER_ARCH = "sm_90"
"""Whose table the interpreter runs: its 64-row tiles make the fewest loop iterations."""

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def unsupported(spec: AttentionSpec, tensors: AttentionTensors) -> str | None:
    """Why this call can't run here, or None. Never reads a tensor."""
    if tensors.alibi_slopes is not None:
        return "implementation 'triton': alibi_slopes are not implemented; implementation 'torch' has them"
    reason = unsupported_device(tensors.q.device)
    if reason is not None:
        return reason
    found = _find(device_arch(tensors.q.device), config_key(spec, tensors))
    return found if isinstance(found, str) else None


def paged_attention(spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None) -> None:
    """See `contract.py`; two launches, no synchronisation. `unsupported` has been asked first."""
    attention.launch(spec, tensors, out, lse, find_config(spec, tensors))


def tree_attention(
    spec: AttentionSpec,
    tensors: AttentionTensors,
    plan: Plan,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """See `contract.py`; two launches, no synchronisation, and for a `TreePlan` one copy to each device."""
    config, cell = find_config(spec, tensors), CELL_SIZE.value
    made = plan.config
    expect(made.cell_size == cell, "plan", f"cell_size {cell} for implementation 'triton'", made.cell_size)
    expect(made.tile_rows <= config.block_m, "plan", f"tile_rows of at most {config.block_m}", made.tile_rows)
    if plan.shares:
        attention.launch_plan(spec, tensors, plan.to(tensors.q.device), workspace, out, lse, config)
    else:
        attention.launch(spec, tensors, out, lse, config)


def plan_tile(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, v_head_dim: int, softcap: bool, device: torch.device
) -> tuple[int, int]:
    """See `contract.py`. UnsupportedImplementation where there is no table entry."""
    require_device(device)
    fp8 = kv_dtype == torch.float8_e4m3fn
    config = _lookup(device, Key(head_block(head_dim, v_head_dim), _DTYPE_NAMES[dtype], fp8, softcap))
    return CELL_SIZE.value, config.block_m


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """See `contract.py`. UnsupportedImplementation on a device without triton."""
    require_device(k_cache.device)
    cache_kernels.store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """See `contract.py`. UnsupportedImplementation on a device without triton."""
    require_device(k_cache.device)
    cache_kernels.copy_blocks(k_cache, v_cache, src, dst, num_tokens)


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """See `contract.py`. UnsupportedImplementation on a device without triton."""
    require_device(outs.device)
    merge_kernel.merge_states(outs, lses, out, lse)


def config_key(spec: AttentionSpec, tensors: AttentionTensors) -> Key:
    """What the call's table entry is found by."""
    return Key(
        head_block=head_block(spec.head_dim, spec.v_head_dim),
        dtype=_DTYPE_NAMES[tensors.q.dtype],
        fp8=tensors.k_cache.dtype == torch.float8_e4m3fn,
        softcap=spec.softcap is not None,
    )


def find_config(spec: AttentionSpec, tensors: AttentionTensors) -> Config:
    """The call's table entry; UnsupportedImplementation where there is none."""
    return _lookup(tensors.q.device, config_key(spec, tensors))


def _lookup(device: torch.device, key: Key) -> Config:
    found = _find(device_arch(device), key)
    if isinstance(found, str):
        raise UnsupportedImplementation(found)
    return found


def _find(arch: str, key: Key) -> Config | str:
    """An entry, or why there is none."""
    if arch not in tables():
        return f"implementation 'triton': no table of tile shapes for {arch}, only for {', '.join(sorted(tables()))}"
    config = tables()[arch].lookup(key)
    return config or f"implementation 'triton': the table for {arch} has no entry for {key}"


def unsupported_device(device: torch.device) -> str | None:
    """Why kernels can't run on device, or None."""
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return f"implementation 'triton': needs a GPU (or TRITON_INTERPRET=1 on the CPU), got tensors on {device}"


def require_device(device: torch.device) -> None:
    """UnsupportedImplementation unless kernels can run on device."""
    reason = unsupported_device(device)
    if reason is not None:
        raise UnsupportedImplementation(reason)


def interpreted() -> bool:
    """Whether triton's interpreter runs the kernels (decided when this package was imported)."""
    return not isinstance(merge_kernel.merge_kernel, triton.JITFunction)


@functools.cache
def device_arch(device: torch.device) -> str:
    """ "sm_90", "gfx942", ...; INTERPRETER_ARCH on the CPU."""
    if device.type == "cpu":
        return INTERPRETER_ARCH
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"

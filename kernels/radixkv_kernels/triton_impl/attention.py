"""Launches paged attention: chooses the grid and the workspace from sizes known on the host, never from contents.

The work, in two launches:

    attention_kernel   grid (programs, num_kv_heads * value slices); writes partials
    reduce_kernel      grid (tokens, blocks of heads); folds them into out and lse

Without a plan there are tiles * num_splits programs. num_partials is 1 where there are tiles enough to fill the GPU: a
program then folds its tile's whole sequence. Otherwise num_splits programs share a tile, a partial a run of 2,048
tokens or, for a short sequence, a cell of 128; the kernels decide which from seq_lens. With a plan the programs loop to
the number of items that the plan has on the device. No choice changes a bit.

Workspace, float32: acc [num_kv_heads, num_partials, num_rows, v_head_dim] and ml [num_kv_heads, num_partials, num_rows,
value slices, 2]; num_rows is num_tokens * group, with a plan the plan's slots (and num_partials 1).

Nothing here synchronises, and equal shapes give equal grids and buffers, so a CUDA graph can capture a call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import AttentionSpec, AttentionTensors, PlanTensors, expect
from .attention_kernel import attention_kernel
from .config import Config
from .numerics import CELL_SIZE, RUN_CELLS
from .reduce_kernel import reduce_kernel
from .variants import reduce_warps, tile_constants

_INTERPRETER_PROCESSORS = 8
_PLAN_WAVES = 8
"""Programs of a plan's grid over processors: items are of unequal length, and the device deals out what is left."""
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class _Grid:
    """How the work is dealt out, and where its partials lie."""

    programs: int
    tokens: int
    """Programs of the reduction."""
    num_rows: int
    num_splits: int
    num_partials: int
    plan: PlanTensors | None


def launch(
    spec: AttentionSpec,
    tensors: AttentionTensors,
    out: Tensor,
    lse: Tensor | None,
    config: Config,
    *,
    num_splits: int | None = None,
) -> None:
    """Writes out and lse; arguments as `contract.py` describes, config from the table.

    num_splits: programs a tile; None: chosen to fill the device. Results don't depend on it. Allocates the workspace.
    """
    q, num_tokens = tensors.q, tensors.q.shape[0]
    if num_tokens == 0 or tensors.num_seqs == 0:
        return
    num_rows = num_tokens * spec.group_size
    # Sequence s starts at tile cu_seqlens_q[s] * group // BLOCK_M + s, so this holds all tiles whatever the lengths.
    num_tiles = num_rows // config.block_m + tensors.num_seqs
    if num_splits is None:
        programs = num_tiles * spec.num_kv_heads * _num_slices(spec, config)
        num_splits = max(1, 2 * num_processors(q.device) // programs)
    num_partials = max_partials(spec.max_blocks * spec.block_size, num_splits)
    grid = _Grid(num_tiles * num_splits, num_tokens, num_rows, num_splits, num_partials, None)
    _launch(spec, tensors, out, lse, config, grid, None)


def launch_plan(
    spec: AttentionSpec,
    tensors: AttentionTensors,
    plan: PlanTensors,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    config: Config,
) -> None:
    """`launch` over a plan's items. workspace: as `contract.py` says; None: allocated."""
    max_rows, max_items = plan.row_token.shape[0], plan.items.shape[0]
    if max_rows == 0:
        return
    heads = spec.num_kv_heads * _num_slices(spec, config)
    # At least one program, which finds that there is nothing to do.
    programs = max(1, min(max_items, triton.cdiv(_PLAN_WAVES * num_processors(tensors.q.device), heads)))
    grid = _Grid(programs, max_rows, plan.max_slots, 1, 1, plan)
    _launch(spec, tensors, out, lse, config, grid, workspace)


def _launch(
    spec: AttentionSpec,
    tensors: AttentionTensors,
    out: Tensor,
    lse: Tensor | None,
    config: Config,
    grid: _Grid,
    workspace: Tensor | None,
) -> None:
    _give_condition_a_truth_value()
    q, group, plan = tensors.q, spec.group_size, grid.plan
    num_slices = _num_slices(spec, config)
    num_partial_rows = spec.num_kv_heads * grid.num_partials * grid.num_rows
    # Rounded up to 16 bytes: triton compiles anew for an address that is not divisible by 16.
    sizes = -(-num_partial_rows * spec.v_head_dim // 4) * 4, num_partial_rows * num_slices * 2
    if workspace is None:
        workspace = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
    expect(workspace.numel() >= sum(sizes), "workspace", f"at least {sum(sizes)} numbers", workspace.numel())
    acc, ml = workspace[: sum(sizes)].split(sizes)
    fp8 = tensors.k_cache.dtype == _FP8
    k_cache = tensors.k_cache.view(torch.uint8) if fp8 else tensors.k_cache
    v_cache = tensors.v_cache.view(torch.uint8) if fp8 else tensors.v_cache
    k_scale = tensors.k_scale if tensors.k_scale is not None else one(q.device)
    unused = tensors.seq_lens  # a pointer for arguments that a constant turns off
    indptr = tensors.block_indptr
    window = spec.window if spec.window is not None else 0
    items = (plan.items, plan.num_items, plan.row_token, plan.row_seq) if plan else (unused,) * 4
    lists = (plan.row_slots, plan.row_base, plan.slot_cells, plan.row_token) if plan else (unused,) * 4

    attention_kernel[(grid.programs, spec.num_kv_heads * num_slices)](
        q, k_cache, v_cache, tensors.block_ids, indptr if indptr is not None else unused,
        tensors.seq_lens, tensors.cu_seqlens_q, k_scale, acc, ml, *items,
        tensors.num_seqs, grid.num_rows, grid.num_splits, grid.num_partials, window,
        spec.scale, spec.softcap if spec.softcap is not None else 1.0,
        *q.stride(), spec.block_stride, *k_cache.stride(), *v_cache.stride(),
        k_scale.stride(0) if tensors.k_scale is not None else 0,
        GROUP=group, BLOCK_SIZE=spec.block_size, HEAD_DIM=spec.head_dim, V_HEAD_DIM=spec.v_head_dim,
        CAUSAL=spec.causal, WINDOW=spec.window is not None, SOFTCAP=spec.softcap is not None, FP8=fp8,
        INDPTR=indptr is not None, WORK_LIST=plan is not None,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
        **tile_constants(spec.head_dim, spec.v_head_dim, config),
    )  # fmt: skip
    # A program a head where few tokens would leave most of the GPU idle.
    block_h = 8 if grid.tokens * triton.cdiv(spec.num_q_heads, 8) >= num_processors(q.device) else 1
    sinks, v_scale = tensors.sinks, tensors.v_scale
    reduce_kernel[(grid.tokens, triton.cdiv(spec.num_q_heads, block_h))](
        acc, ml, out, lse if lse is not None else acc, tensors.seq_lens, tensors.cu_seqlens_q,
        sinks if sinks is not None else acc, v_scale if v_scale is not None else acc, *lists,
        tensors.num_seqs, spec.num_q_heads, grid.num_rows, grid.num_splits, grid.num_partials, window,
        *out.stride(), *(lse.stride() if lse is not None else (0, 0)),
        v_scale.stride(0) if v_scale is not None else 0,
        GROUP=group, V_HEAD_DIM=spec.v_head_dim, BLOCK_H=block_h,
        BLOCK_DV=triton.next_power_of_2(spec.v_head_dim), V_SLICES=num_slices, CAUSAL=spec.causal,
        WINDOW=spec.window is not None, SINKS=sinks is not None, V_SCALE=v_scale is not None, LSE=lse is not None,
        WORK_LIST=plan is not None,
        num_warps=reduce_warps(block_h, spec.v_head_dim), num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


def _num_slices(spec: AttentionSpec, config: Config) -> int:
    """Programs that share a head's value columns."""
    constants = tile_constants(spec.head_dim, spec.v_head_dim, config)
    return triton.cdiv(spec.v_head_dim, constants["BLOCK_V"])


def max_partials(max_seq_len: int, num_splits: int) -> int:
    """The most partials that a row of a sequence of up to max_seq_len tokens can have: see `cells_per_partial`."""
    if num_splits == 1:
        return 1
    cell, run = CELL_SIZE.value, CELL_SIZE.value * RUN_CELLS.value
    cells = min(triton.cdiv(max_seq_len, cell), (num_splits - 1) * RUN_CELLS.value)
    return max(1, cells, triton.cdiv(max_seq_len, run))


@functools.cache
def _give_condition_a_truth_value() -> None:
    """Lets the interpreter run `while tl.condition(...)`: as triton has it, it loops for ever there."""
    if not hasattr(tl.condition, "__bool__"):
        tl.condition.__bool__ = lambda self: bool(self.condition)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; for the interpreter a small number, so that tests split as well."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _INTERPRETER_PROCESSORS


@functools.cache
def one(device: torch.device) -> Tensor:
    """[1] float32 one on device, made once: the scale of a cache that has none."""
    return torch.ones(1, dtype=torch.float32, device=device)

"""Which implementation runs a call, by name or by device for "auto", and what plans it takes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import TypedDict, cast

import torch

from .contract import FLOAT_DTYPES, Implementation, UnsupportedImplementation, expect

logger = logging.getLogger("radixkv_kernels")

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")
_MODULES = {"reference": ".reference", "torch": ".torch_impl", "triton": ".triton_impl"}


class PlanTile(TypedDict):
    """Keyword arguments of `TreePlan.from_block_table` and `PlanConfig`."""

    cell_size: int
    tile_rows: int


def select_implementation(name: str, device: torch.device) -> Implementation:
    """The implementation called `name`; "auto" is triton on a GPU that has it, else torch.

    Raises ValueError for an unknown name, UnsupportedImplementation where triton was asked for by name and is not
    installed. O(1).
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {IMPLEMENTATIONS}, got {name!r}")
    if name == "auto":
        name = _pick(device.type)
    return _load(name)


@functools.cache
def _pick(device_type: str) -> str:
    """Cached, which is also what makes the log line appear once a device type."""
    has_triton = importlib.util.find_spec("triton") is not None
    name = "triton" if device_type == "cuda" and has_triton else "torch"
    logger.info("implementation 'auto' on %s: %s", device_type, name)
    return name


@functools.cache
def _load(name: str) -> Implementation:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise UnsupportedImplementation("implementation 'triton': triton is not installed")
    return cast(Implementation, importlib.import_module(_MODULES[name], __package__))


def plan_tile(
    dtype: torch.dtype,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
    softcap: bool = False,
    device: torch.device | str = "cpu",
    implementation: str = "auto",
) -> PlanTile:
    """How a plan has to be made for calls of this kind: {"cell_size": ..., "tile_rows": ...}.

    Args:
        dtype, head_dim: q's.
        v_head_dim, kv_dtype: of the cache; None: as q's.
        softcap: whether scores are soft-capped.
        device, implementation: as the call will have them.

    Raises ValueError naming the argument, UnsupportedImplementation where such calls can't run. O(1).
    """
    device = torch.device(device)
    expect(dtype in FLOAT_DTYPES, "dtype", f"one of {FLOAT_DTYPES}", dtype)
    chosen = select_implementation(implementation, device)
    tile = chosen.plan_tile(dtype, kv_dtype or dtype, head_dim, v_head_dim or head_dim, softcap, device)
    return PlanTile(cell_size=tile[0], tile_rows=tile[1])

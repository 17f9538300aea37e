"""The implementations by name, which of them runs a call, and what plans it takes.

An implementation is a module or a folder of this package and an entry here; `contract.py` says what it must do. Its
module is imported by the first call that runs on it, because triton is optional and takes a second to load.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import TypedDict, cast

import torch

from .contract import FLOAT_DTYPES, Implementation, UnsupportedImplementation, expect

logger = logging.getLogger("radixkv_kernels")


@dataclass(frozen=True, slots=True)
class Entry:
    """One implementation.

    Attributes:
        module: in this package, with the seven functions of `contract.Implementation`.
        requires: a package that has to be installed for it; None: none.
        preferred_on: device types on which "auto" takes it; None: on every type that no earlier entry prefers.
    """

    module: str
    requires: str | None = None
    preferred_on: tuple[str, ...] | None = ()

    @property
    def is_installed(self) -> bool:
        """Whether what it requires is there."""
        return self.requires is None or importlib.util.find_spec(self.requires) is not None


IMPLEMENTATIONS: dict[str, Entry] = {
    "triton": Entry(".triton_impl", requires="triton", preferred_on=("cuda",)),
    "torch": Entry(".torch_impl", preferred_on=None),
    "reference": Entry(".reference"),
}
"""By the name that `implementation=` takes, beside "auto"; "auto" asks them in this order."""


class PlanTile(TypedDict):
    """Keyword arguments of `TreePlan.from_block_table` and `PlanConfig`."""

    cell_size: int
    tile_rows: int


def select_implementation(name: str, device: torch.device) -> Implementation:
    """The implementation called `name`; "auto" is triton on a GPU where it is installed, else torch.

    Raises ValueError for an unknown name, UnsupportedImplementation where one was asked for by name and what it
    requires is not installed. O(1); the first call for a name imports it.

    >>> select_implementation("auto", torch.device("cpu")) is select_implementation("torch", torch.device("cpu"))
    True
    """
    if name == "auto":
        name = _pick(device.type)
    elif not isinstance(name, str) or name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {('auto', *IMPLEMENTATIONS)}, got {name!r}")
    return _load(name)


@functools.cache
def _pick(device_type: str) -> str:
    """Cached, which is also what makes the log line appear once a device type."""
    name = next(
        name
        for name, entry in IMPLEMENTATIONS.items()
        if (entry.preferred_on is None or device_type in entry.preferred_on) and entry.is_installed
    )
    logger.info("implementation 'auto' on %s: %s", device_type, name)
    return name


@functools.cache
def _load(name: str) -> Implementation:
    entry = IMPLEMENTATIONS[name]
    if not entry.is_installed:
        raise UnsupportedImplementation(f"implementation {name!r}: {entry.requires} is not installed")
    return cast(Implementation, importlib.import_module(entry.module, __package__))


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
    """How a plan has to be made for calls of this kind: keyword arguments of `PlanConfig` or `from_block_table`.

    Args:
        dtype, head_dim: q's; a number of elements.
        v_head_dim, kv_dtype: of the cache; None: as q's.
        softcap: whether scores are soft-capped.
        device, implementation: as the call will have them.

    Returns {"cell_size": KV tokens of a cell, "tile_rows": most flat rows of an item}.
    Raises ValueError naming the argument, UnsupportedImplementation where such calls can't run. O(1).

    >>> plan_tile(torch.bfloat16, 128)
    {'cell_size': 256, 'tile_rows': 1024}
    """
    device = torch.device(device)
    expect(dtype in FLOAT_DTYPES, "dtype", f"one of {FLOAT_DTYPES}", dtype)
    chosen = select_implementation(implementation, device)
    tile = chosen.plan_tile(dtype, kv_dtype or dtype, head_dim, v_head_dim or head_dim, softcap, device)
    return PlanTile(cell_size=tile[0], tile_rows=tile[1])

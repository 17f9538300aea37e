"""Which implementation runs a call: by name, or by device for "auto". Called by `api.py`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import cast

import torch

from .errors import UnsupportedImplementation
from .interface import Implementation

logger = logging.getLogger("radixkv_kernels")

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")
_MODULES = {"reference": ".reference", "torch": ".torch_impl", "triton": ".triton_impl"}


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

"""Scratch buffers that outlive a call, because a fresh gather buffer costs up to ten times the gather (page faults).

The one piece of state of this package: one workspace a thread, so two threads never share a buffer, and nothing in it
survives as a result.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class Workspace:
    """Named flat buffers that only grow. Memory: the largest call so far; `clear` gives it back."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of that shape with anything in it, valid until the name is taken again. O(1) mostly."""
        size = math.prod(shape)
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # Made in inference mode, it could not be written to outside of it.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)

    def clear(self) -> None:
        """Frees every buffer."""
        self._buffers.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


_per_thread = _PerThread()


def thread_workspace() -> Workspace:
    """The calling thread's workspace."""
    return _per_thread.workspace

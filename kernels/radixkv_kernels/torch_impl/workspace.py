"""What outlives a call: scratch buffers, as a fresh gather buffer costs up to ten times the gather (page faults), and
the layouts of the last calls, as all layers of a step have one.

The one piece of state of this package: one workspace a thread, so two threads never share a buffer. Nothing in it
survives as a result: a layout says what to read and in which order, and is found by the contents of what it was made
from.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

MAX_VIEWS = 64

NUM_LAYOUTS = 4
"""As many kinds of layers as alternate in a model: full attention, windows."""


class Layout:
    """What calls have in common that agree in options, lengths, blocks and plan: made part by part, when asked for.

    Holds no number of q, k or v, and nothing that the caller may change.
    """

    def __init__(self, key: tuple[Hashable, ...]) -> None:
        self.key = key
        self._parts: dict[Hashable, Any] = {}

    def part(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when `name` was first asked for."""
        found = self._parts.get(name)
        if found is None:
            # Tensors made in inference mode could not be used outside of it.
            with torch.inference_mode(False):
                found = self._parts[name] = make()
        return cast(T, found)


class Workspace:
    """Named flat buffers that only grow, and the last layouts. Memory: of the largest call so far, until `clear`."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[Hashable, Any] = {}
        self._layouts: list[Layout] = []  # the one used last comes first

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
            self._views.clear()
        return buffer[:size].view(shape)

    def views(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for this key, views of buffers, as long as no buffer has been replaced. O(1) mostly."""
        found = self._views.get(key)
        if found is None:
            with torch.inference_mode(False):  # views made in it could not be written to outside of it
                found = make()
            # Asked for by few shapes at a time; many are those of a workload that does not repeat them.
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = found
        return cast(T, found)

    def layout(self, key: tuple[Hashable, ...]) -> Layout:
        """The layout of calls with equal keys; a new one where none is kept. O(size of the key)."""
        found = next((layout for layout in self._layouts if layout.key == key), None)
        if found is None:
            found = Layout(key)
        elif found is self._layouts[0]:
            return found
        else:
            self._layouts.remove(found)
        self._layouts = [found, *self._layouts[: NUM_LAYOUTS - 1]]
        return found

    def clear(self) -> None:
        """Frees every buffer and layout."""
        self._buffers.clear()
        self._views.clear()
        self._layouts.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


_per_thread = _PerThread()


def thread_workspace() -> Workspace:
    """The calling thread's workspace."""
    return _per_thread.workspace

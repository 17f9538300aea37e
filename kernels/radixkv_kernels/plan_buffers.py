"""A plan's work list on a device, in buffers of fixed size and address: what kernels (and CUDA graphs of them) read.

For kernels that loop to a number of items in memory; the torch implementation reads the plan itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import TreePlan
from .validate import expect


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """Views of the buffers, int32. Entries past the plan's own are left from earlier plans: don't read them."""

    num_items: Tensor
    """[1]"""
    items: Tensor
    """[max_items, 5]: first flat row, flat rows, first cell, one past the last cell, first slot."""
    row_token: Tensor
    """[max_rows]: row of q of each row of the plan; row_seq its sequence."""
    row_seq: Tensor
    row_base: Tensor
    """[max_rows + 1]: row r's partials are [row_base[r], row_base[r + 1]) of the next two. Rows past its own: none."""
    row_slots: Tensor
    """[max_partials]: slot (flat row of the workspace) of the row's first head."""
    slot_cells: Tensor
    """[max_partials]: first cell of the partial."""


class PlanBuffers:
    """One buffer on the device and its twin on the host; `load` is one copy, and none for the plan loaded last."""

    def __init__(self, max_items: int, max_rows: int, max_partials: int, device: torch.device | str) -> None:
        self.max_items, self.max_rows, self.max_partials = max_items, max_rows, max_partials
        shapes = ((1,), (max_items, 5), (max_rows,), (max_rows,), (max_rows + 1,), (max_partials,), (max_partials,))
        sizes = [torch.Size(shape).numel() for shape in shapes]
        device = torch.device(device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        views = [
            [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]
            for buffer in (self._host, self._device)
        ]
        self._staged = [view.numpy() for view in views[0]]
        self.tensors = PlanTensors(*views[1])
        self._loaded: TreePlan | None = None

    def load(self, plan: TreePlan) -> PlanTensors:
        """Copies the plan to the device; the tensors are the same every time.

        Raises ValueError where the plan is larger than the buffers, which then keep what they had. Waits for the copy
        (the next `load` writes the same host memory). O(size of the buffers).
        """
        if plan is self._loaded:
            return self.tensors
        work, rows = plan.work, len(plan.row_token)
        expect(plan.num_items <= self.max_items, "plan", f"at most max_items = {self.max_items}", plan.num_items)
        expect(rows <= self.max_rows, "plan", f"at most max_rows = {self.max_rows}", rows)
        partials = len(work.row_slots)
        expect(partials <= self.max_partials, "plan", f"at most max_partials = {self.max_partials}", partials)
        num_items, items, row_token, row_seq, row_base, row_slots, slot_cells = self._staged
        num_items[0] = plan.num_items
        items[: plan.num_items] = work.items
        row_token[:rows], row_seq[:rows] = plan.row_token, plan.row_seq
        row_base[: rows + 1] = work.row_base
        row_base[rows + 1 :] = partials
        row_slots[:partials], slot_cells[:partials] = work.row_slots, work.slot_cells
        self._device.copy_(self._host)
        self._loaded = plan
        return self.tensors

"""A plan as plain tensors: what kernels read, what crosses `torch.library`, and what a CUDA graph can be replayed on.

`TreePlan.to` makes them for one plan; `PlanBuffers` keeps them at one size and address from plan to plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..validate import check_tensor, expect
from .items import WorkList

if TYPE_CHECKING:
    from ..contract import AttentionSpec, AttentionTensors
    from .tree_plan import PlanConfig, TreePlan

FIELDS = ("num_items", "items", "row_token", "row_seq", "row_base", "row_slots", "slot_cells")
"""The tensors, in the order of the operator's arguments."""


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """A work list (see `plan_items.WorkList`) on a device, int32. Of buffers, entries past the plan's own are stale."""

    config: PlanConfig
    num_items: Tensor
    """[1]"""
    items: Tensor
    """[max_items, 5]: first flat row, flat rows, first cell, one past the last cell, first slot."""
    row_token: Tensor
    """[max_rows]: row of q of each row of the plan, -1 past its own; row_seq its sequence."""
    row_seq: Tensor
    row_base: Tensor
    """[max_rows + 1]: row r's partials are [row_base[r], row_base[r + 1]) of the next two. Rows past its own: none."""
    row_slots: Tensor
    """[max_partials]: slot (flat row of the workspace) of the row's first head."""
    slot_cells: Tensor
    """[max_partials]: first cell of the partial."""

    @property
    def max_slots(self) -> int:
        """Flat rows of the workspace: one a query head of a KV head and partial."""
        return len(self.row_slots) * self.config.group_size

    def workspace_size(self, v_head_dim: int) -> int:
        """Numbers that a kernel's workspace holds at most: each partial's values, and a maximum and a sum for each 16
        of them."""
        return self.max_slots * self.config.num_kv_heads * (v_head_dim + 2 * -(-v_head_dim // 16)) + 4

    def check_shapes(self, device: torch.device) -> None:
        """ValueError naming the tensor that is not int32, contiguous, on this device and of its shape."""
        rows, partials = self.row_token.shape[0], self.row_slots.shape[0]
        shapes = ((1,), (self.items.shape[0], 5), (rows,), (rows,), (rows + 1,), (partials,), (partials,))
        for name, shape in zip(FIELDS, shapes, strict=True):
            tensor: Tensor = getattr(self, name)
            check_tensor(name, tensor, shape, (torch.int32,), device)
            expect(tensor.is_contiguous(), name, "a contiguous tensor", tensor.stride())

    def host(self, num_seqs: int) -> HostPlan:
        """The plan back on the host, for an implementation that reads it there. Synchronises off the CPU."""
        count = int(self.num_items)
        items = self.items[:count].cpu().numpy()
        row_token, row_seq = self.row_token.cpu().numpy(), self.row_seq.cpu().numpy()
        rows = int((row_token >= 0).sum())
        row_token, row_seq = row_token[:rows], row_seq[:rows]
        base = self.row_base.cpu().numpy()[: rows + 1]
        group = self.config.group_size
        shared = np.zeros(num_seqs, dtype=bool)
        for row0, num_rows in items[:, :2].tolist():
            seqs = row_seq[row0 // group : (row0 + num_rows - 1) // group + 1]
            if (seqs != seqs[0]).any():
                shared[seqs] = True
        partials = int(base[-1])
        row_slots, slot_cells = (x[:partials].cpu().numpy() for x in (self.row_slots, self.slot_cells))
        work = WorkList(items, base, row_slots, slot_cells, partials * group, np.arange(count), shared)
        return HostPlan(work, row_token, row_seq, shared)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What an implementation on the host reads of a plan: `TreePlan` has the same."""

    work: WorkList
    row_token: np.ndarray
    row_seq: np.ndarray
    sharers: np.ndarray
    """[num_seqs] bool: some item has rows of this sequence and of another."""


class PlanBuffers:
    """One buffer on the device and its twin on the host; `load` is one copy, and none for the plan loaded last."""

    def __init__(self, max_items: int, max_rows: int, max_partials: int, device: torch.device | str) -> None:
        self.max_items, self.max_rows, self.max_partials = max_items, max_rows, max_partials
        shapes = ((1,), (max_items, 5), (max_rows,), (max_rows,), (max_rows + 1,), (max_partials,), (max_partials,))
        # 16-byte steps: triton compiles anew for an address that is not divisible by 16
        sizes = [-(-torch.Size(shape).numel() // 4) * 4 for shape in shapes]
        device = torch.device(device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        views = [
            [
                part[: torch.Size(shape).numel()].view(shape)
                for part, shape in zip(buffer.split(sizes), shapes, strict=True)
            ]
            for buffer in (self._host, self._device)
        ]
        self._staged = [view.numpy() for view in views[0]]
        self._views = views[1]
        self._loaded: TreePlan | None = None  # None where that was interrupted too
        self._tensors: PlanTensors | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """A copy, pickled or deep, is of the same sizes, and nothing is loaded."""
        return PlanBuffers, (self.max_items, self.max_rows, self.max_partials, self._device.device)

    def load(self, plan: TreePlan) -> PlanTensors:
        """Copies the plan to the device; the tensors are the same every time.

        Raises ValueError where the plan is larger than the buffers, which then keep what they had. Waits for the copy
        (the next `load` writes the same host memory). O(size of the buffers).
        """
        if plan is self._loaded and self._tensors is not None:
            return self._tensors
        work, rows = plan.work, len(plan.row_token)
        expect(plan.num_items <= self.max_items, "plan", f"at most max_items = {self.max_items}", plan.num_items)
        expect(rows <= self.max_rows, "plan", f"at most max_rows = {self.max_rows}", rows)
        partials = len(work.row_slots)
        expect(partials <= self.max_partials, "plan", f"at most max_partials = {self.max_partials}", partials)
        self._loaded = None
        num_items, items, row_token, row_seq, row_base, row_slots, slot_cells = self._staged
        num_items[0] = plan.num_items
        items[: plan.num_items] = work.items
        row_token[:rows], row_seq[:rows] = plan.row_token, plan.row_seq
        row_token[rows:] = -1
        row_base[: rows + 1] = work.row_base
        row_base[rows + 1 :] = partials
        row_slots[:partials], slot_cells[:partials] = work.row_slots, work.slot_cells
        self._device.copy_(self._host)
        if self._tensors is None or self._tensors.config != plan.config:
            self._tensors = PlanTensors(plan.config, *self._views)
        self._loaded = plan
        return self._tensors


def check_plan(plan: TreePlan | PlanTensors, spec: AttentionSpec, tensors: AttentionTensors, look: bool) -> None:
    """The plan was made for this call. Its block tables are taken on trust."""
    config = plan.config
    for name in ("block_size", "num_q_heads", "num_kv_heads", "causal", "window"):
        want, have = getattr(spec, name), getattr(config, name)
        expect(have == want, "plan", f"one made with {name} {want}", have)
    if isinstance(plan, PlanTensors):
        plan.check_shapes(tensors.q.device)
        return
    expect(plan.num_seqs == tensors.num_seqs, "plan", f"one of {tensors.num_seqs} sequences", plan.num_seqs)
    if look:
        plan.check_fits(tensors.seq_lens.cpu().numpy(), tensors.cu_seqlens_q.cpu().numpy())

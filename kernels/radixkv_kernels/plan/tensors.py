"""How plans get to a device: `PlanBuffers` keeps their tensors at one size and address from plan to plan."""

from __future__ import annotations

import torch

from ..contract import Plan, PlanTensors, expect


class PlanBuffers:
    """Room for plans on a device, and its twin on the host; `load` is one copy, and none for the plan loaded last.

    Args:
        max_items, max_rows, max_partials: what the largest plan has (`len(plan.work.items)`, of row_token, of
            row_slots).
        device: of the tensors; the host's memory is pinned where it is a GPU.

    O(sizes) int32 numbers on each side.

    >>> buffers = PlanBuffers(max_items=8, max_rows=4, max_partials=16, device="cpu")
    >>> table = torch.arange(80, dtype=torch.int32).view(2, 40)
    >>> lens, cu = torch.tensor([300, 300]), torch.tensor([0, 1, 2])
    >>> plan = TreePlan.from_block_table(table, lens, cu, block_size=16, num_q_heads=4, num_kv_heads=2)
    >>> buffers.load(plan).items.shape, int(buffers.load(plan).num_items)
    (torch.Size([8, 5]), 2)
    """

    def __init__(self, max_items: int, max_rows: int, max_partials: int, device: torch.device | str) -> None:
        self.max_items, self.max_rows, self.max_partials = max_items, max_rows, max_partials
        shapes = [torch.Size(shape) for shape in PlanTensors.shapes(max_items, max_rows, max_partials)]
        # 16-byte steps: triton compiles anew for an address that is not divisible by 16
        sizes = [-(-shape.numel() // 4) * 4 for shape in shapes]
        device = torch.device(device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        staged, views = (
            [part[: shape.numel()].view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]
            for buffer in (self._host, self._device)
        )
        self._staged, self._views = [view.numpy() for view in staged], views
        self._loaded: Plan | None = None  # None where that was interrupted too
        self._tensors: PlanTensors | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """A copy, pickled or deep, is of the same sizes, and nothing is loaded."""
        return PlanBuffers, (self.max_items, self.max_rows, self.max_partials, self._device.device)

    def load(self, plan: Plan) -> PlanTensors:
        """Copies the plan to the device; the tensors are the same every time.

        Raises ValueError where the plan is larger than the buffers, which then keep what they had. Waits for the copy
        (the next `load` writes the same host memory). O(size of the buffers).
        """
        if plan is self._loaded and self._tensors is not None:
            return self._tensors
        work = plan.host()
        count, rows, partials = len(work.items), len(work.row_token), len(work.row_slots)
        expect(count <= self.max_items, "plan", f"at most max_items = {self.max_items}", count)
        expect(rows <= self.max_rows, "plan", f"at most max_rows = {self.max_rows}", rows)
        expect(partials <= self.max_partials, "plan", f"at most max_partials = {self.max_partials}", partials)
        self._loaded = None
        num_items, items, row_token, row_seq, row_base, row_slots, slot_cells = self._staged
        num_items[0] = count
        items[:count] = work.items
        row_token[:rows], row_seq[:rows] = work.row_token, work.row_seq
        row_token[rows:] = -1
        row_base[: rows + 1] = work.row_base
        row_base[rows + 1 :] = partials
        row_slots[:partials], slot_cells[:partials] = work.row_slots, work.slot_cells
        self._device.copy_(self._host)
        if self._tensors is None or self._tensors.config != plan.config:
            self._tensors = PlanTensors(plan.config, *self._views)
        self._loaded = plan
        return self._tensors

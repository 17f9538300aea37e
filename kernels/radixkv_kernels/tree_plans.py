"""Which rows of a step read which KV together: the plans of tree attention, kept up to date from step to step.

What sequences share is in their block tables, because a prefix cache gives a prefix one list of blocks: whatever the
scheduler did between two steps (admission, growth, a block replaced by the cache's, preemption, a fork, a step
withdrawn) shows there, and a table that is not the one of the step before is looked at anew. So no part has to report
its changes, and none can be missed. What was known of the step before is taken out while a step is planned and put back
when it is done: whatever is raised on the way, half of a change is never taken for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch

from .contract import PlanConfig
from .plan.planner import TreePlanner
from .plan.tree_plan import TreePlan
from .selection import plan_tile

MODES = ("auto", "on", "off")
AUTO_SHARE = 0.1
"""Under "auto" a plan is used where it saves this share of the cells that are read without one,"""
AUTO_CPU_BYTES = 4 << 20
"""and on a CPU so many bytes of KV a layer: fewer are read again in the time that a plan costs."""


class TreePlans:
    """The plans of an engine's batches, one for each attention window of the model's layers.

    Args:
        windows: of the layers, None for one that sees all; repetitions don't matter.
        num_q_heads, num_kv_heads, head_dim, block_size, dtype, device: as attention will be called with them.
        kv_dtype: of the cache; None: dtype.
        softcap: whether scores are soft-capped.
        mode: "off": never a plan; "on": wherever sequences share a cell; "auto": where that saves enough to pay.

    Attributes:
        num_planned_steps: steps that ran with a plan, so far.

    Raises:
        ValueError: names the argument. UnsupportedImplementation where attention of this kind can't run.

    >>> plans = TreePlans(
    ...     [None],
    ...     num_q_heads=8,
    ...     num_kv_heads=2,
    ...     head_dim=64,
    ...     block_size=16,
    ...     dtype=torch.float32,
    ...     device=torch.device("cpu"),
    ...     mode="on",
    ... )
    >>> tables = [np.arange(20, dtype=np.int32), np.arange(20, dtype=np.int32)]  # two sequences in the same blocks
    >>> plans.of(["a", "b"], tables, np.array([300, 300]), np.array([0, 1, 2]))[None].shares
    True
    """

    def __init__(
        self,
        windows: Iterable[int | None],
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        mode: str,
        kv_dtype: torch.dtype | None = None,
        softcap: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"tree_attention: expected one of {MODES}, got {mode!r}")
        self.mode = mode
        self.num_planned_steps = 0
        self._windows = frozenset(windows) if mode != "off" else frozenset()
        self._least_bytes = AUTO_CPU_BYTES if device.type == "cpu" else 0
        itemsize = (kv_dtype or dtype).itemsize
        tile = plan_tile(dtype, head_dim, kv_dtype=kv_dtype, softcap=softcap, device=device)
        self._configs = [
            PlanConfig(
                block_size,
                num_q_heads,
                num_kv_heads,
                window=window,
                **tile,
                kv_itemsize=itemsize,
                min_items=_min_items(device, num_kv_heads),
            )
            for window in self._windows
        ]
        self._cell_bytes = tile["cell_size"] * 2 * num_kv_heads * head_dim * itemsize
        self._known: _Known | None = None

    def forget(self) -> None:
        """Forgets all sequences; the next step begins anew. O(1), and right at any time, after an interruption too."""
        self._known = None

    def of(
        self,
        names: Sequence[Hashable],
        block_tables: Sequence[np.ndarray],
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
    ) -> Mapping[int | None, TreePlan]:
        """The plans of a batch by window; none where no plan is worth having.

        Args:
            names: [num_seqs] of the batch's sequences, each once. A name may mean another sequence in the next step
                (its row in the batch will do): that costs time and is no mistake.
            block_tables: [num_seqs], each [>= blocks of its length] int32. One that owns its numbers is made read-only:
                it is told apart by identity in later steps, and a number changed in it would pass unnoticed.
            seq_lens: [num_seqs] int64, this step's tokens included; cu_seqlens_q: [num_seqs + 1] int64.

        Cost: O(num_seqs) where tables and cells are those of the step before; else as `TreePlanner`.
        """
        if self.mode == "off" or len(names) < 2:
            return {}
        known = self._known or _Known(self._configs)
        self._known = None
        plans = known.plans(names, block_tables, seq_lens, cu_seqlens_q)
        self._known = known
        chosen = {window: plan for window, plan in plans.items() if self._pays(plan)}
        self.num_planned_steps += bool(chosen)
        return chosen

    def _pays(self, plan: TreePlan) -> bool:
        if self.mode == "on":
            return plan.shares
        read, alone = plan.cells
        saved = alone - read
        return saved > AUTO_SHARE * alone and saved * self._cell_bytes >= self._least_bytes


class _Known:
    """What the step before left: the planners, and the tables that they are up to. Thrown away if a call fails."""

    def __init__(self, configs: Sequence[PlanConfig]) -> None:
        self._planners = [TreePlanner(config) for config in configs]
        self._tables: dict[Hashable, np.ndarray] = {}

    def plans(
        self,
        names: Sequence[Hashable],
        block_tables: Sequence[np.ndarray],
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
    ) -> dict[int | None, TreePlan]:
        """The plans of a batch by window; none where no two sequences hold the same cell."""
        self._follow(names, block_tables)
        if not any(planner.may_share for planner in self._planners):
            return {}
        return {p.config.window: p.plan(names, seq_lens, cu_seqlens_q) for p in self._planners}

    def _follow(self, names: Sequence[Hashable], block_tables: Sequence[np.ndarray]) -> None:
        """Brings the planners up to the tables of these sequences; others are forgotten."""
        tables = self._tables
        for name, table in zip(names, block_tables, strict=True):
            known = tables.get(name)
            if known is not table:
                self._update(name, known, table)
        if len(tables) > len(names):
            for name in tables.keys() - set(names):
                self._remove(name)

    def _update(self, name: Hashable, known: np.ndarray | None, table: np.ndarray) -> None:
        # compared as bytes, in a fifth of the time
        if known is not None and known.dtype == table.dtype and table.tobytes().startswith(known.data):
            for planner in self._planners:
                for block in table[len(known) :].tolist():
                    planner.append(name, block)
        else:
            if known is not None:
                self._remove(name)
            for planner in self._planners:
                planner.add(name, table)
        if table.flags.owndata:
            table.flags.writeable = False
        self._tables[name] = table.copy() if table.flags.writeable else table

    def _remove(self, name: Hashable) -> None:
        for planner in self._planners:
            planner.remove(name)
        del self._tables[name]


def _min_items(device: torch.device, num_kv_heads: int) -> int:
    """Items that fill a device; a CPU works on one after the other."""
    if device.type != "cuda":
        return 0
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count // num_kv_heads

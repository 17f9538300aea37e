"""Which rows of a step read which KV together: the plans of tree attention, kept up to date from step to step.

What sequences share is in their block tables, because a prefix cache gives a prefix one list of blocks: whatever the
scheduler did between two steps (admission, growth, a block replaced by the cache's, preemption, a fork, a step
withdrawn) shows there, and a table that is not the one of the step before is looked at anew. So no part has to report
its changes, and none can be missed. What was known of the step before is taken out while a step is planned and put back
when it is done: whatever is raised on the way, half of a change is never taken for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from radixkv_kernels import PlanConfig, TreePlan, TreePlanner, plan_tile

from radixkv.engine.model.config import ModelConfig
from radixkv.scheduling.batch import ScheduledSequence

MODES = ("auto", "on", "off")
AUTO_SHARE = 0.1
"""Under "auto" a plan is used where it saves this share of the cells that are read without one,"""
AUTO_CPU_BYTES = 4 << 20
"""and on a CPU so many bytes of KV a layer: fewer are read again in the time that a plan costs."""


class TreePlans:
    """The plans of a runner's batches, for each window of the model's layers one.

    Args:
        config, block_size, dtype, device: as attention will be called with them.
        mode: "off": never a plan; "on": wherever sequences share a cell; "auto": where that saves enough to pay.

    Attributes:
        num_planned_steps: steps that ran with a plan, so far.
    """

    def __init__(
        self, config: ModelConfig, *, block_size: int, dtype: torch.dtype, device: torch.device, mode: str
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"tree_attention: expected one of {MODES}, got {mode!r}")
        self.mode = mode
        self.num_planned_steps = 0
        self._windows = frozenset(config.windows) if mode != "off" else frozenset()
        self._least_bytes = AUTO_CPU_BYTES if device.type == "cpu" else 0
        tile = plan_tile(dtype, config.head_dim, device=device)
        self._configs = [
            PlanConfig(
                block_size,
                config.num_q_heads,
                config.num_kv_heads,
                window=window,
                **tile,
                kv_itemsize=dtype.itemsize,
                min_items=_min_items(device, config.num_kv_heads),
            )
            for window in self._windows
        ]
        self._cell_bytes = tile["cell_size"] * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self._known: _Known | None = None

    def forget(self) -> None:
        """Forgets all sequences; the next step begins anew. O(1), and right at any time, after an interruption too."""
        self._known = None

    def of(
        self, sequences: Sequence[ScheduledSequence], seq_lens: np.ndarray, cu_seqlens_q: np.ndarray
    ) -> Mapping[int | None, TreePlan]:
        """The plans of a batch by window; none where no plan is worth having.

        Args:
            sequences: of the batch. A table that owns its numbers is made read-only: it is told apart by identity in
                later steps, and a number changed in it would pass unnoticed.
            seq_lens: [num_seqs] int64, this step's tokens included; cu_seqlens_q: [num_seqs + 1] int64.

        Cost: O(num_seqs) where tables and cells are those of the step before; else as `TreePlanner`.
        """
        if self.mode == "off" or len(sequences) < 2:
            return {}
        known = self._known or _Known(self._configs)
        self._known = None
        plans = known.plans(sequences, seq_lens, cu_seqlens_q)
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
        self._tables: dict[int, np.ndarray] = {}

    def plans(
        self, sequences: Sequence[ScheduledSequence], seq_lens: np.ndarray, cu_seqlens_q: np.ndarray
    ) -> dict[int | None, TreePlan]:
        """The plans of a batch by window; none where no two sequences hold the same cell."""
        self._follow(sequences)
        if not any(planner.may_share for planner in self._planners):
            return {}
        names = [s.sequence_id for s in sequences]
        return {p.config.window: p.plan(names, seq_lens, cu_seqlens_q) for p in self._planners}

    def _follow(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Brings the planners up to the tables of these sequences; others are forgotten."""
        tables = self._tables
        for sequence in sequences:
            known = tables.get(sequence.sequence_id)
            if known is not sequence.block_table:
                self._update(sequence.sequence_id, known, sequence.block_table)
        if len(tables) > len(sequences):
            for name in tables.keys() - {s.sequence_id for s in sequences}:
                self._remove(name)

    def _update(self, name: int, known: np.ndarray | None, table: np.ndarray) -> None:
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

    def _remove(self, name: int) -> None:
        for planner in self._planners:
            planner.remove(name)
        del self._tables[name]


def _min_items(device: torch.device, num_kv_heads: int) -> int:
    """Items that fill a device; a CPU works on one after the other."""
    if device.type != "cuda":
        return 0
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count // num_kv_heads

"""Batches to plan for, and the steps of planning that `experiments.plan_time` times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from radixkv_kernels import PlanBuffers, PlanConfig, TreePlan, TreePlanner


@dataclass(frozen=True)
class Batch:
    """tables: [num_seqs] arrays of block ids, with room to cross a border; lens [num_seqs], scattered over a cell."""

    tables: list[np.ndarray]
    lens: np.ndarray


def make_batch(config: Any, kind: str, length: int, block_size: int) -> Batch:
    """Nothing shared; 8 prompts of 4 branches each; a tree of "agents"; one prompt left late, by each elsewhere."""
    rng, num_blocks = random.Random(config.seed), 0

    def fresh(tokens: int) -> list[int]:
        nonlocal num_blocks
        begin, num_blocks = num_blocks, num_blocks + max(1, tokens // block_size)
        return list(range(begin, num_blocks))

    room = (length + 3 * config.cell_size) // block_size
    if kind == "unshared":
        tables: list[list[int]] = [[] for _ in range(config.num_seqs)]
    elif kind == "prompts":
        prompts = [fresh(rng.randint(length // 4, length // 2)) for _ in range(8)]
        branches = [prompt + fresh(rng.randint(length // 8, length // 3)) for prompt in prompts for _ in range(4)]
        tables = [branches[i % len(branches)] for i in range(config.num_seqs)]
    elif kind == "agents":
        tables = [fresh(length // 2)]
        while len(tables) < config.num_seqs:
            parent = rng.choice(tables)
            kept = parent[: rng.randint(1, len(parent))]
            tables.append((kept + fresh(rng.randint(20, length // 4)))[: (length - config.cell_size) // block_size])
    else:
        prompt = fresh(length - 2 * config.cell_size)
        tables = [prompt[: rng.randint(2 * len(prompt) // 3, len(prompt))] for _ in range(config.num_seqs)]
    tables = [table + fresh((room - len(table)) * block_size) for table in tables]
    rng.shuffle(tables)
    ids = np.random.default_rng(config.seed).permutation(num_blocks).astype(np.int32)
    lens = [length + rng.randrange(config.cell_size) - config.cell_size // 2 for _ in tables]
    return Batch([ids[table] for table in tables], np.array(lens))


class Steps:
    """The steps to time, each a function that returns what it took in seconds."""

    def __init__(self, config: Any, batch: Batch, block_size: int) -> None:
        self.config, self.batch = config, batch
        self.rng = random.Random(config.seed)
        self.names = list(range(config.num_seqs))
        self.cu = np.arange(config.num_seqs + 1)
        self.make = partial(
            TreePlan.from_block_table,
            np.stack(batch.tables),
            batch.lens,
            self.cu,
            block_size=block_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            cell_size=config.cell_size,
        )
        self.planner = TreePlanner(
            PlanConfig(block_size, config.num_q_heads, config.num_kv_heads, cell_size=config.cell_size)
        )
        for name, table in enumerate(batch.tables):
            self.planner.add(name, table)
        plan = self.make()
        self.buffers = PlanBuffers(plan.num_items, config.num_seqs, len(plan.work.row_slots), "cpu")

    def all(self) -> dict[str, Callable[[], float]]:
        """By name."""
        crossing = {f"crossing, {n}": partial(self.crossing, n) for n in self.config.crossing}
        return {
            "from scratch": lambda: took(self.make),
            "no border": lambda: took(self.plan),
            **crossing,
            "admission": self.admission,
            "removal": self.removal,
            "copy": self.copy,
        }

    def plan(self, lens: np.ndarray | None = None) -> TreePlan:
        """Of all sequences."""
        return self.planner.plan(self.names, self.batch.lens if lens is None else lens, self.cu)

    def crossing(self, number: int) -> float:
        """Some sequences are in the next cell."""
        self.plan()
        lens = self.batch.lens.copy()
        lens[self.rng.sample(self.names, number)] += self.config.cell_size
        return took(lambda: self.plan(lens))

    def admission(self) -> float:
        """One comes, last in the batch."""
        gone, rest = self._one_less()
        lens = self.batch.lens[[*rest, gone]]

        def step() -> None:
            self.planner.add(gone, self.batch.tables[gone])
            self.planner.plan([*rest, gone], lens, self.cu)

        return took(step)

    def removal(self) -> float:
        """One goes."""
        gone, rest = self._one_less()
        self.planner.add(gone, self.batch.tables[gone])
        self.plan()
        lens, cu = self.batch.lens[rest], self.cu[:-1]

        def step() -> None:
            self.planner.remove(gone)
            self.planner.plan(rest, lens, cu)

        taken = took(step)
        self.planner.add(gone, self.batch.tables[gone])
        return taken

    def _one_less(self) -> tuple[int, list[int]]:
        gone = self.rng.choice(self.names)
        rest = [name for name in self.names if name != gone]
        self.planner.remove(gone)
        self.planner.plan(rest, self.batch.lens[rest], self.cu[:-1])
        return gone, rest

    def copy(self) -> float:
        """To tensors of the CPU; to a GPU a copy follows."""
        plan = self.make()
        return took(lambda: self.buffers.load(plan))


def took(step: Callable[[], object]) -> float:
    """CPU time of this thread, in seconds."""
    begin = time.thread_time()
    step()
    return time.thread_time() - begin

"""How long does it take to plan tree attention, from scratch and from one step to the next?

Expectation, at batch 256 and contexts of 4k: from scratch at most 1 ms; a decode step in which no sequence crosses a
cell border 20 us; a step in which some cross, or a sequence comes or goes, 250 us. (PAT, 2511.22333, tells of 2 to 9 ms
for a planner in C++, from scratch each time, on another machine.)

    python -m experiments.plan_time                                # half a minute
    python -m experiments.plan_time --smoke --out /tmp/plan_time   # a second

CPU time of one thread, medians; plans as for the torch implementation (cells of 256 tokens). An admission is `add` and
`plan`, a removal `remove` and `plan`, a crossing `plan` alone. "Parting": sequences end in the run of cells where they
part, so that a crossing decides anew where to cut. Copying a plan into its buffers is told apart.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from radixkv_kernels import PlanBuffers, PlanConfig, TreePlan, TreePlanner

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, command

ENTRY = Entry("kernels", seconds=3, place=3)


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


NAME = "plan_time"


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on; sizes in tokens."""

    num_seqs: int = 256
    batches: tuple[tuple[str, int], ...] = (("unshared", 4096), ("prompts", 4096), ("agents", 4096), ("parting", 3700))
    """A name, and the mean length of contexts."""
    block_sizes: tuple[int, ...] = (1, 16)
    crossing: tuple[int, ...] = (1, 8, 256)
    """Sequences that cross a border at once."""
    num_q_heads: int = 32
    num_kv_heads: int = 8
    cell_size: int = 256
    samples: int = 41
    seed: int = 0


SMOKE = Config(num_seqs=32, batches=(("prompts", 1000),), block_sizes=(16,), crossing=(1,), samples=3)


def measure(config: Config, kind: str, length: int, block_size: int) -> list[Row]:
    """A row a kind of step."""
    steps = Steps(config, make_batch(config, kind, length, block_size), block_size)
    rows = []
    for name, step in steps.all().items():
        taken = [step() for _ in range(config.samples)]
        which = {"batch": kind, "length": length, "block_size": block_size, "step": name}
        rows.append({**which, "median_us": statistics.median(taken) * 1e6, "min_us": min(taken) * 1e6})
    return rows


def cells(config: Config) -> Iterator[Cell]:
    """A cell a batch and block size."""
    for kind, length in config.batches:
        for block_size in config.block_sizes:
            yield f"{kind} {block_size}", partial(measure, config, kind, length, block_size)


def show(data: Data) -> None:
    """Prints a line a batch, a column a step."""
    names = dict.fromkeys(row["step"] for row in data["rows"])
    columns = {"trace": "{batch}", "block": "{block_size}", **{name: f"{{{name}:.0f}}" for name in names}}
    lines: dict[tuple[str, int], Row] = {}
    for row in data["rows"]:
        line = lines.setdefault(
            (row["batch"], row["block_size"]), {name: row[name] for name in ("batch", "block_size")}
        )
        line[row["step"]] = row["median_us"]
    print_table("Planning, microseconds of CPU time (median)", columns, lines.values())


def plot(data: Data) -> Figure:
    """Bars a step."""
    return bars(data["rows"], "step", "batch", "median_us", "us of CPU time", "Planning a step of tree attention")


def answer(data: Data) -> str:
    """One sentence: the worst median of each kind of step."""
    worst: dict[str, float] = {}
    for row in data["rows"]:
        worst[row["step"]] = max(row["median_us"], worst.get(row["step"], 0))
    told = "; ".join(f"{name}: {us:.0f}" for name, us in worst.items())
    return f"Planning {data['config']['num_seqs']} sequences takes, in us at worst (medians), {told}."


main = command(__name__, Config(), SMOKE)


if __name__ == "__main__":
    main()

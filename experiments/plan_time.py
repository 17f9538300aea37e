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

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.lab.harness import Row, parser, print_table
from experiments.lab.plots import bars
from experiments.lab.run import Cell, Data, conduct
from experiments.plan_steps import Steps, make_batch

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


def plot(path: Path) -> Path:
    """Bars a step, from the JSON."""
    return bars(path, "step", "batch", "median_us", "us of CPU time", "Planning a step of tree attention")


def answer(data: Data) -> str:
    """One sentence: the worst median of each kind of step."""
    worst: dict[str, float] = {}
    for row in data["rows"]:
        worst[row["step"]] = max(row["median_us"], worst.get(row["step"], 0))
    told = "; ".join(f"{name}: {us:.0f}" for name, us in worst.items())
    return f"Planning {data['config']['num_seqs']} sequences takes, in us at worst (medians), {told}."


def main(argv: Sequence[str] | None = None) -> None:
    given = parser(NAME, __doc__).parse_args(argv)
    config = SMOKE if given.smoke else Config()
    conduct(NAME, given.out, config, cells(config), sys.modules[__name__])


if __name__ == "__main__":
    main()

"""Do the Triton kernels hold on a real GPU, and how near do they come to its bandwidth and its matrix rate?

Expectation: every feature right in bf16, fp16 and fp8; the same bits however the work is split; decode above 0.7 of the
measured copy bandwidth where KV outgrows the L2 cache; prefill above half of the measured matmul rate; on a prefix that
sequences share, tree attention as many times as fast as plain decode as it reads fewer bytes; less where L2 holds it.

    python -m experiments.gpu_kernels --smoke            # under a minute and a half
    python -m experiments.gpu_kernels                    # checks, tunes, times; about 7 minutes at most
    python -m experiments.gpu_kernels --write-table      # also puts the tuned entries into the package's table

Needs a CUDA device (made for torch 2.11 and triton 3.6, no network); without one it says so and exits 0. No speed is
reported where a check failed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from experiments.gpu_report import answer, plot, show
from experiments.gpu_times import measure, peaks, time_workloads
from experiments.gpu_tree import CASES, Case, tree_rows
from experiments.gpu_tree import SMOKE as TREE_SMOKE
from experiments.lab.harness import Row, console, environment, parser, save
from experiments.lab.run import present

__all__ = ["answer", "plot", "show"]  # what shows the rows


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the timed calls (tokens) and the time allowed (seconds from the start)."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    decode: tuple[tuple[int, int], ...] = ((1, 8192), (1, 65536), (8, 16384), (32, 2048), (32, 8192), (256, 2048))
    prefill: tuple[tuple[int, int], ...] = ((2048, 0), (8192, 0), (2048, 6144), (2048, 30720))
    repeats: int = 11
    check_until_s: float = 150.0
    tune_until_s: float = 260.0
    time_until_s: float = 345.0
    tree: tuple[Case, ...] = CASES
    tree_until_s: float = 420.0


SMOKE = Config(
    decode=((4, 1024),),
    prefill=((512, 512),),
    repeats=3,
    tune_until_s=40.0,
    time_until_s=80.0,
    tree=TREE_SMOKE,
    tree_until_s=90.0,
)


def run(config: Config, write_table: bool, report: Callable[[Row], None]) -> list[Row]:
    """Checks, then tunes, then times; each part ends by its time. Timing is left out where a check failed."""
    from experiments.gpu_checks import run_checks
    from experiments.gpu_tuning import tune

    start = time.monotonic()
    rows = run_checks(torch.device("cuda"), report, lambda: time.monotonic() - start < config.check_until_s)
    if not all(row["passed"] for row in rows):
        return rows

    def add(row: Row) -> Row:
        rows.append(row)
        report(row)
        return row

    def measure_config(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return measure(functions, 5)

    for row in tune(config, measure_config, write_table, lambda: time.monotonic() - start < config.tune_until_s):
        add(row)
    peak = add(peaks(config.repeats))
    for row in time_workloads(config, peak, lambda: time.monotonic() - start < config.time_until_s):
        add(row)
    for row in tree_rows(config, config.tree, peak, measure, lambda: time.monotonic() - start < config.tree_until_s):
        add(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, prints a line a row, writes the JSON; exits with 1 where a check failed."""
    options = parser("gpu_kernels", __doc__)
    options.add_argument("--write-table", action="store_true", help="put tuned entries into the package's table")
    given = options.parse_args(arguments)
    if not torch.cuda.is_available():
        console.print("gpu_kernels: no CUDA device here, nothing to do")
        return
    config = SMOKE if given.smoke else Config()
    rows = run(config, given.write_table, report)
    where = environment() | {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
    }
    path = save(given.out, "gpu_kernels", dataclasses.asdict(config), rows, environment=where)
    present(path, sys.modules[__name__])
    if not all(row.get("passed", True) for row in rows):
        raise SystemExit(1)


def report(row: Row) -> None:
    """Prints a row as it comes: where the machine goes away, what it found stays."""
    print(json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

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

from experiments.gpu.timing import CASES, Case, measure, peaks, time_workloads, tree_rows
from experiments.gpu.timing import SMOKE as TREE_SMOKE
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, console, environment, parser, print_table, save
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Data, present

ENTRY = Entry("kernels", seconds=1, place=5)


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
    from experiments.gpu.checks import run_checks
    from experiments.gpu.tuning import tune

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
    for row in tree_rows(config, peak, measure, lambda: time.monotonic() - start < config.tree_until_s):
        add(row)
    return rows


CHECKS = {"part": "{part}", "name": "{name}", "error": "{shown_error}", "passed": "{passed}"}
TIMES = {
    "name": "{name}",
    "ms": "{shown_ms}",
    "of copy bandwidth": "{of_copy_bandwidth:.2f}",
    "of matmul rate": "{shown_rate}",
}


def show(data: Data) -> None:
    """Prints a line a check, and a line a timed call."""
    checks = [row for row in data["rows"] if "passed" in row and row["part"] != "tune"]
    shown = [row | {"shown_error": f"{row['error']:.1e}" if "error" in row else "-"} for row in checks]
    print_table(f"Checks on {data['environment']['device']}", CHECKS, shown)
    print_table("Median ms; peers read contiguous KV", TIMES, [_times(row) for row in _timed(data["rows"])])


def _timed(rows: Sequence[Row]) -> list[Row]:
    """What was timed beside peers."""
    return [row for row in rows if row["part"] in ("time", "tree") and "ms" in row]


def _times(row: Row) -> Row:
    return row | {
        "shown_ms": ", ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items()),
        "shown_rate": f"{row['of_matmul_rate']:.2f}" if "of_matmul_rate" in row else "-",
    }


def plot(data: Data) -> Figure:
    """Draws the time of each call, by side."""
    rows = _timed(data["rows"])
    figure, axis = pyplot().subplots(figsize=(12, 5))
    sides = dict.fromkeys(side for row in rows for side in row["ms"])
    if rows:
        heights = {side: {row["name"]: row["ms"][side] for row in rows if side in row["ms"]} for side in sides}
        draw_bars(axis, heights, rotation=30, ha="right")
        axis.set(yscale="log", ylabel="median ms")
        axis.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence: what failed, or how near the timed calls come to what the GPU can do."""
    device = data["environment"]["device"]
    checks = [row for row in data["rows"] if "passed" in row and row["part"] != "tune"]
    failed = [f"{row['part']} {row['name']}" for row in checks if not row["passed"]]
    if failed:
        return f"{len(failed)} of {len(checks)} checks fail on {device}: {', '.join(failed)}."
    told = [f"All {len(checks)} checks hold on {device}"]
    timed = _timed(data["rows"])
    for kind, field, of in (
        ("decode", "of_copy_bandwidth", "of the copy bandwidth"),
        ("prefill", "of_matmul_rate", "of the matmul rate"),
    ):
        found = [row[field] for row in timed if row["part"] == "time" and row["name"].startswith(kind)]
        if found:
            told.append(f"{kind} reaches {min(found):.2f} to {max(found):.2f} {of}")
    gains = [row["ms"]["paged"] / row["ms"]["tree"] for row in timed if row["part"] == "tree"]
    if gains:
        told.append(f"a shared prefix read once is {min(gains):.1f} to {max(gains):.1f} times as fast as read by each")
    return f"{'; '.join(told)}."


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

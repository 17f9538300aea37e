"""The tables, the plot and the answer of `gpu_kernels.py`, from its rows alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.lab.harness import Row, print_table
from experiments.lab.plots import draw_bars, finish, pyplot
from experiments.lab.run import Data

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


def plot(path: Path) -> Path:
    """Draws the time of each call, by side, from the JSON alone."""
    rows = _timed(json.loads(path.read_text())["rows"])
    figure, axis = pyplot().subplots(figsize=(12, 5))
    sides = dict.fromkeys(side for row in rows for side in row["ms"])
    if rows:
        heights = {side: {row["name"]: row["ms"][side] for row in rows if side in row["ms"]} for side in sides}
        draw_bars(axis, heights, rotation=30, ha="right")
        axis.set(yscale="log", ylabel="median ms")
        axis.legend()
    return finish(figure, path)


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

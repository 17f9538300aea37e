"""The table, the plot and the answer of `calibrate.py`, from its rows alone."""

import json
from pathlib import Path

from experiments.lab.harness import print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data

METRICS = ("num_steps", "busy_s", "num_cached_tokens", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "latency_p50_ms")

COLUMNS = {
    "model": "{model}",
    "workload": "{workload}",
    "cache": "{cache}",
    "steps": "{num_steps_simulated}/{num_steps_measured}",
    "hits": "{num_cached_tokens_simulated}/{num_cached_tokens_measured}",
    "a step": "{step_error:.0%}",
    "busy s": "{busy_s_measured:.2f}",
    "busy": "{busy_s_error:+.0%}",
    "TTFT p50": "{ttft_p50_ms_error:+.0%}",
    "p99": "{ttft_p99_ms_error:+.0%}",
    "TPOT p50": "{tpot_p50_ms_error:+.0%}",
    "latency": "{latency_p50_ms_error:+.0%}",
}


def show(data: Data) -> None:
    """Prints a line for each model, workload and cache."""
    rows = [row for row in data["rows"] if row["part"] == "compared"]
    print_table("Simulated against measured: errors of a step's time (median) and of each metric", COLUMNS, rows)


def plot(path: Path) -> Path:
    """Draws simulated over measured times."""
    rows = [row for row in json.loads(path.read_text())["rows"] if row["part"] == "compared"]
    figure, axis = pyplot().subplots()
    for key, marker in (("busy_s", "o"), ("ttft_p50_ms", "^"), ("ttft_p99_ms", "v"), ("tpot_p50_ms", "s")):
        scale = 1e3 if key == "busy_s" else 1
        points = [(row[f"{key}_measured"] * scale, row[f"{key}_simulated"] * scale) for row in rows]
        axis.plot(*zip(*points, strict=True), marker, label=key.removesuffix("_ms").removesuffix("_s"))
    low, high = axis.get_xlim()
    axis.plot([max(low, 1), high], [max(low, 1), high], color="gray", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured (ms of CPU)", ylabel="simulated (ms)")
    axis.legend()
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence, of the largest errors."""
    rows = [row for row in data["rows"] if row["part"] == "compared"]
    same = all(row["num_cached_tokens_simulated"] == row["num_cached_tokens_measured"] for row in rows)
    busy, ttft = (max(abs(row[f"{key}_error"]) for row in rows) for key in ("busy_s", "ttft_p50_ms"))
    return (
        f"Hits are {'the same' if same else 'NOT the same'}; busy time is off by {busy:.0%} at most, "
        f"median TTFT by {ttft:.0%}."
    )

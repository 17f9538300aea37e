"""The table, the plot and the answer of `overhead.py`, from its rows alone."""

import json
from pathlib import Path

import numpy as np

from experiments.lab.harness import print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data

COLUMNS = {
    "machine": "{machine}",
    "traffic": "{traffic}",
    "block": "{block_size}",
    "open": "{num_open}",
    "hits": "{hit_rate:.0%}",
    "run s": "{duration_s:.1f}",
    "steps": "{num_steps:,}",
    "ms a step": "{step_ms:.1f}",
    "tree s": "{tree_s:.3f}",
    "scheduler s": "{scheduler_s:.3f}",
    "plan s": "{plan_s:.3f}",
    "share": "{share:.2%}",
}


def show(data: Data) -> None:
    """Prints a line a cell."""
    print_table("Host time of ShareGPT-like requests at simulated step times", COLUMNS, data["rows"])


def plot(path: Path) -> Path:
    """Draws the shares of each run, in percent, stacked."""
    rows = json.loads(path.read_text())["rows"]
    figure, axis = pyplot().subplots(figsize=(9, 0.4 * len(rows) + 1.2))
    labels = [f"{r['machine']}, {r['traffic']}, block {r['block_size']}, {r['num_open']} open" for r in rows]
    left = np.zeros(len(rows))
    for name in ("tree", "scheduler", "plan"):
        width = np.array([100 * row[f"{name}_s"] / row["duration_s"] for row in rows])
        axis.barh(labels, width, left=left, label=name)
        left += width
    axis.axvline(0.3, color="gray", linewidth=0.8, linestyle="--")
    axis.invert_yaxis()
    axis.set_xlabel("% of the run (the paper: 0.3)")
    axis.legend()
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence, of the paper's setting."""
    rows = [row for row in data["rows"] if row["machine"].endswith("a10g") and row["traffic"] == "zero hits"]
    row = max(rows, key=lambda row: row["share"])
    return (
        f"At the paper's step times and with zero hits, tree, scheduler and plan take {row['share']:.2%} of a run of "
        f"{row['duration_s']:.0f} s at most, the tree alone {row['tree_s'] / row['duration_s']:.2%}."
    )

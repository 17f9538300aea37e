"""The table, the plot and the answer of `load.py`, from its rows alone."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.lab.harness import Row, print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data


def exponents(rows: Sequence[Row]) -> list[Row]:
    """Fits seconds = a * size ** exponent to each kind, in logarithms."""
    fits = []
    for what in dict.fromkeys(row["what"] for row in rows):
        some = [row for row in rows if row["what"] == what]
        size, seconds = np.log([row["size"] for row in some]), np.log([row["seconds"] for row in some])
        exponent = float(np.polyfit(size, seconds, 1)[0])
        fits.append({"what": what, "exponent": exponent, **{k: some[-1][k] for k in ("size", "seconds")}})
    return fits


def show(data: Data) -> None:
    """Prints a line a kind: its largest size, its time there, and how it grows."""
    columns = {"part": "{what}", "largest": "{size:,}", "CPU s": "{seconds:.3f}", "exponent": "{exponent:.2f}"}
    last = [row for row in data["rows"] if "node_bytes" in row][-1]
    notes = [f"{last['size']:,} nodes: {last['node_bytes']:,.0f} bytes of memory each"]
    print_table("seconds = a * size ** exponent", columns, exponents(data["rows"]), notes)


def plot(path: Path) -> Path:
    """Draws time against size, from the JSON alone."""
    rows = json.loads(path.read_text())["rows"]
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5))
    for fit in exponents(rows):
        some = [row for row in rows if row["what"] == fit["what"]]
        axis = axes[int(fit["what"].startswith("tree"))]
        label = f"{fit['what'].removeprefix('tree: ')}: exponent {fit['exponent']:.2f}"
        axis.plot([row["size"] for row in some], [row["seconds"] for row in some], "o-", label=label)
    for axis, title in zip(axes, ("requests, prompt tokens, decodes", "nodes; 2,000 operations"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=title, ylabel="CPU seconds")
        axis.legend()
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence."""
    told = [f"{f['what']} {f['exponent']:.2f} up to {f['size']:,}" for f in exponents(data["rows"])]
    return f"Fitted exponents of time against size: {', '.join(told)}."

"""The table, the plot and the answer of `tree_bytes.py`, from its rows alone."""

import json
from pathlib import Path

import numpy as np

from experiments.lab.harness import Row, print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data

MEASURES = ("read", "floor", "all")
COLUMNS = {
    "trace": "{tree}",
    "n": "{num_batches}",
    "seqs": "{num_seqs:.0f}",
    "items": "{num_items:.0f}",
    "logical": "{ideal:.2f}",
    "read": "{read_of_unique:.3f}",
    "worst": "{worst_read:.3f}",
    "floor": "{floor_of_unique:.3f}",
    " worst": "{worst_floor:.3f}",
    "+ partials": "{all_of_unique:.3f}",
    "worst ": "{worst_all:.3f}",
    "of saved": "{saved}",
}


def show(data: Data) -> None:
    """Prints a line a tree and trace, and one for all trees and all traces."""
    shown = []
    for kind in ("shape", "trace"):
        rows = [row for row in data["rows"] if row["kind"] == kind]
        for row in rows:
            saved = "-" if row["partial_of_saved"] is None else f"{row['partial_of_saved']:.3f}"
            worst = {f"worst_{of}": row[f"{of}_of_unique"] for of in MEASURES}
            shown.append({"num_batches": 1, **worst, **row, "saved": saved})
        if rows:
            shown.append({"tree": f"all {kind}s", "num_seqs": 0, "num_items": 0, "saved": "-", **_all(rows)})
    print_table("Bytes of a decode step, over those of the unique KV (group size 4, bfloat16)", COLUMNS, shown)


def _all(rows: list[Row]) -> Row:
    """Means and worst."""
    means = {
        key: float(np.mean([row[key] for row in rows])) for key in ("ideal", *(f"{of}_of_unique" for of in MEASURES))
    }
    worst = {}
    for of in MEASURES:
        key = f"worst_{of}"
        worst[key] = max(float(row[key] if key in row else row[f"{of}_of_unique"]) for row in rows)
    return means | worst | {"num_batches": len(rows)}


def plot(path: Path) -> Path:
    """Bytes over unique bytes of each tree and trace, from the JSON."""
    rows = json.loads(path.read_text())["rows"]
    figure, axes = pyplot().subplots(figsize=(8, 0.2 * len(rows) + 1.5))
    at = np.arange(len(rows))
    read = [row["read_of_unique"] for row in rows]
    axes.barh(at, read, 0.8, label="KV")
    axes.barh(at, [r["all_of_unique"] - r["read_of_unique"] for r in rows], 0.8, left=read, label="partial results")
    axes.set_yticks(at, [row["tree"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("bytes over unique KV bytes")
    axes.set_xlim(0.9)
    axes.legend()
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence."""
    told = []
    for kind in ("shape", "trace"):
        rows = [row for row in data["rows"] if row["kind"] == kind]
        if rows:
            a = _all(rows)
            told.append(
                f"over {len(rows)} {kind}s {a['read_of_unique']:.2f} times the unique KV (worst {a['worst_read']:.2f}; "
                f"no plan of whole cells reads less than {a['floor_of_unique']:.2f}, {a['worst_floor']:.2f}) "
                f"and with partial results {a['all_of_unique']:.2f} ({a['worst_all']:.2f}), where each by "
                f"itself reads {a['ideal']:.1f}"
            )
    return f"A decode step reads {'; '.join(told)}."

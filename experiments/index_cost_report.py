"""The table, the plot and the answer of `index_cost.py`, from its rows alone."""

import json
from pathlib import Path

from experiments.harness import print_table
from experiments.lab import Data
from experiments.plots import draw_bars, finish, pyplot

COLUMNS = {
    "cache": "{cache}",
    "block": "{block_size}",
    "operation": "{operation}",
    "leaves": "{leaves}",
    "mean us": "{mean_us:,.1f}",
    "p50": "{p50_us:,.1f}",
    "p99": "{p99_us:,.1f}",
    "of it hash": "{hash_us:,.1f}",
    "freed": "{freed}",
    "B/token": "{memory}",
}


def show(data: Data) -> None:
    """Prints a line an operation."""
    rows = data["rows"]
    shown = [
        each
        | {
            "leaves": f"{each['num_leaves'] or '':,}" if each["num_leaves"] else "",
            "freed": f"{each['num_freed_tokens']:.0f}" if each["num_freed_tokens"] else "",
            "memory": f"{each['index_bytes_per_token']:.1f}" if "index_bytes_per_token" in each else "",
        }
        for each in rows
    ]
    print_table("Index operations, in us", COLUMNS, shown)


def plot(path: Path) -> Path:
    """Draws the mean time of each operation, a bar a cache, from the JSON alone."""
    rows = json.loads(path.read_text())["rows"]
    largest = max((each["num_leaves"] or 0 for each in rows), default=0)
    mine = [each for each in rows if each["num_leaves"] in (None, largest) and each["cache"] != "any"]
    mine = [each for each in mine if each["operation"] != "hash_8192"]
    names = dict.fromkeys((each["cache"], each["block_size"]) for each in mine)
    heights = {
        f"{cache} {block_size}": {
            r["operation"]: r["mean_us"] for r in mine if (r["cache"], r["block_size"]) == (cache, block_size)
        }
        for cache, block_size in names
    }
    figure, axis = pyplot().subplots()
    draw_bars(axis, heights)
    axis.set(yscale="log", ylabel="mean, us", title=f"Index operations (evict64 at {largest:,} leaves)")
    axis.legend()
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence, at block size 16."""
    mean = {(r["cache"], r["operation"]): r["mean_us"] for r in data["rows"] if r["block_size"] == 16}
    if ("flat_hash", "admit") not in mean or ("radix", "admit") not in mean:
        return "Nothing to compare: it needs radix and flat_hash at block size 16."
    times = {name: mean["flat_hash", name] / mean["radix", name] for name in ("admit", "insert", "admit_8192")}
    return (
        f"An admission takes {mean['radix', 'admit']:.1f} us, 1/{times['admit']:.0f} of the flat hash with sha256 "
        f"(1/{times['admit_8192']:.0f} at 8,192 cached tokens), publishing {mean['radix', 'insert']:.1f} us, "
        f"1/{times['insert']:.0f} of it."
    )

"""The table, the plot and the answer of `index_cost.py`, from its rows alone."""

import json
from pathlib import Path

from experiments.lab.harness import print_table
from experiments.lab.plots import draw_bars, finish, pyplot
from experiments.lab.run import Data

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
    """Draws the median time of each operation, a bar a cache, from the JSON alone."""
    rows = json.loads(path.read_text())["rows"]
    largest = max((each["num_leaves"] or 0 for each in rows), default=0)
    mine = [each for each in rows if each["num_leaves"] in (None, largest) and each["cache"] != "any"]
    mine = [each for each in mine if each["operation"] != "hash_8192"]
    names = dict.fromkeys((each["cache"], each["block_size"]) for each in mine)
    heights = {
        f"{cache} {block_size}": {
            r["operation"]: r["p50_us"] for r in mine if (r["cache"], r["block_size"]) == (cache, block_size)
        }
        for cache, block_size in names
    }
    figure, axis = pyplot().subplots()
    draw_bars(axis, heights)
    axis.set(yscale="log", ylabel="median, us", title=f"Index operations (evict64 at {largest:,} leaves)")
    axis.legend()
    return finish(figure, path)


def answer(data: Data) -> str:
    """One sentence, at block size 16."""
    times = {(r["cache"], r["operation"]): r["p50_us"] for r in data["rows"] if r["block_size"] == 16}
    if ("flat_hash", "admit") not in times or ("radix", "admit") not in times:
        return "Nothing to compare: it needs radix and flat_hash at block size 16."
    over = {name: times["flat_hash", name] / times["radix", name] for name in ("admit", "insert", "admit_8192")}
    return (
        f"{times['radix', 'admit']:.1f} us for an admission (median), 1/{over['admit']:.0f} of the flat hash with "
        f"sha256 (1/{over['admit_8192']:.0f} at 8,192 cached tokens), {times['radix', 'insert']:.1f} us to publish, "
        f"1/{over['insert']:.0f} of it."
    )

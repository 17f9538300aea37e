"""Tables and the plot of `divergence.py`, from its rows alone."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.lab.harness import Row, print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data

NAMES = ("flat hash", "radix", "radix, partial blocks")
COLUMNS = {
    "trace": "{trace}",
    "block": "{block_size}",
    "cache": "{cache}",
    "hit rate": "{hit_rate:.2%}",
    "computed": "{num_computed_tokens:,}",
    "over the least": "{over_least:.2f}",
    "blocks held": "{held_blocks:,}",
    "as tokens": "{held_tokens:,}",
}
SUMMARY = {
    "block": "{block_size}",
    "cache": "{cache}",
    "computed again, mean": "{mean:.1f}",
    "most": "{most:.0f}",
    "slots held / tokens": "{held:.3f}",
}


def part(data: Data, name: str) -> list[Row]:
    """Returns the rows of one part."""
    return [row for row in data["rows"] if row["part"] == name]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Returns means over d for each block size and cache."""
    found = []
    for size in dict.fromkeys(row["block_size"] for row in rows):
        for name in NAMES:
            some = [row for row in rows if row["block_size"] == size and row["cache"] == name]
            again = [row["again_per_request"] for row in some]
            held = [row["held_tokens"] / row["unique_tokens"] for row in some]
            numbers = {"mean": np.mean(again), "most": max(again), "held": np.mean(held)}
            found.append({"block_size": size, "cache": name, **numbers})
    return found


def show(data: Data) -> None:
    """Prints means over d, and a line for each trace, block size and cache."""
    config = data["config"]
    print_table(f"{config['num_requests']} requests that share d tokens", SUMMARY, summary(part(data, "distances")))
    if rows := part(data, "traces"):
        print_table(f"Traces without a bound, vocabulary {config['tokenizer']}", COLUMNS, rows)


def answer(data: Data) -> str:
    """One sentence, of blocks of 16."""
    found = {row["cache"]: row for row in summary(part(data, "distances")) if row["block_size"] == 16}
    flat, partial = found["flat hash"], found["radix, partial blocks"]
    text = (
        f"{flat['mean']:.1f} tokens are computed again where requests part inside a block of 16 (mean; "
        f"{flat['most']:.0f} at most), {partial['most']:.0f} with partial blocks"
    )
    worth = [
        f"{row['over_least']:.2f} times as many on {row['trace']}"
        for row in part(data, "traces")
        if row["block_size"] == 16 and row["cache"] == "flat hash"
    ]
    return f"{text}; without them real traces compute {' and '.join(worth)}." if worth else f"{text}."


def plot(path: Path) -> Path:
    """Draws tokens computed again over d, and tokens that a trace computes over the least that it could."""
    data = json.loads(path.read_text())
    rows, trace_rows = part(data, "distances"), part(data, "traces")
    plt = pyplot()
    names = list(dict.fromkeys(row["trace"] for row in trace_rows))
    figure, all_axes = plt.subplots(1, 1 + len(names), figsize=(6 + 3.2 * len(names), 4.2), squeeze=False)
    axes = all_axes[0, 0]
    sizes = list(dict.fromkeys(row["block_size"] for row in rows))
    for size in sizes[::-1]:
        for name, style in (("flat hash", "-"), ("radix, partial blocks", "--")):
            some = [row for row in rows if row["block_size"] == size and row["cache"] == name]
            if name == "flat hash" or size == sizes[-1]:
                label = f"flat hash, blocks of {size}" if name == "flat hash" else "radix, partial blocks, any size"
                points = ([row["shared_tokens"] for row in some], [row["again_per_request"] for row in some])
                axes.plot(*points, style, marker=".", markersize=2, linewidth=0.8, label=label)
    axes.set(xlabel="tokens shared", ylabel="tokens computed again, of each request", xlim=(0, None))
    axes.set_ylim(-10, 760)  # room for the legend
    axes.legend(fontsize=8, ncols=2, loc="upper left")
    for axes, trace in zip(all_axes[0, 1:], names, strict=True):
        for offset, name in enumerate(NAMES):
            some = [row for row in trace_rows if row["trace"] == trace and row["cache"] == name]
            x = np.arange(len(some)) + (offset - 1) * 0.27
            axes.bar(x, [row["over_least"] for row in some], 0.27, label=name)
        axes.set(title=trace, xlabel="block size", xticks=range(len(sizes)), xticklabels=sizes)
        axes.set(ylabel="prompt tokens computed / least", yscale="log")
        axes.legend(fontsize=8)
    figure.tight_layout()
    return finish(figure, path)

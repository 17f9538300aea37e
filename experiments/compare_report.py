"""What experiments.compare shows of its rows: a table and a verdict for each trace, and a picture from the JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.lab.harness import Row, print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Data

SERVED_REQUESTS = 16
SERVING_TITLE = f"The engine on tiny_gpt: {SERVED_REQUESTS} of these requests at once, the same tokens from each; in ms"
COLUMNS = {
    "cache": "{label}",
    "pool": "{pool}",
    "hit rate": "{hit_rate:.2%}",
    "of optimum": "{optimum}",
    "computed": "{computed}",
    "blocks": "{peak_blocks:,}",
    "KV GiB": "{kv_gib:.1f}",
    "evicted": "{num_evicted_blocks:,}",
    "index us": "{index_us_per_request:,.0f}",
    "hash us": "{hash_us_per_request:,.0f}",
    "B/token": "{index_bytes_per_token:.1f}",
}


def label(row: Row) -> str:
    """Names the cache of a row as the table and the plot do."""
    name = f"{row['cache']} {row['block_size']}"
    if row["cache"] == "radix" and row["block_size"] > 1 and not row["partial_blocks"]:
        name += " whole"
    return name if row["policy"] == "lru" else f"{name} {row['policy']}"


def pool(row: Row) -> str:
    return "unbounded" if row["num_blocks"] is None else f"{row['num_blocks']:,}"


def print_rows(rows: Sequence[Row]) -> None:
    """Prints a table for each trace, and under it what radix saves over the flat hash in words."""
    for trace in dict.fromkeys(row["trace"] for row in rows):
        mine = [row for row in rows if row["trace"] == trace]
        first = mine[0]
        shared = any(row["num_cached_tokens"] for row in mine)
        shown = [
            row
            | {
                "label": label(row),
                "pool": pool(row),
                "optimum": f"{row['share_of_optimum']:.2%}" if shared else "-",
                "computed": _count(row["num_computed_tokens"]),
                "kv_gib": row["peak_kv_bytes"] / 2**30,
            }
            for row in mine
        ]
        outputs = "prompts and outputs cached" if first["cache_outputs"] else "prompts cached"
        read = f"read as {first['format']}; " if first.get("format") else ""
        size = f"{first['num_requests']:,} requests, {first['num_prompt_tokens']:,} prompt tokens ({first['tokens']})"
        title = f"{trace}: {read}{size}; {outputs}; KV of {first['model_shape']}"
        print_table(title, COLUMNS, shown, [*_verdicts(mine), *_remarks(mine), *_warnings(first), ""])


def _count(number: int) -> str:
    return f"{number:,}" if number < 100_000 else f"{number / 1000:,.0f}k"


def _verdicts(rows: Sequence[Row]) -> list[str]:
    flat = {(r["block_size"], r["num_blocks"]): r for r in rows if r["cache"] == "flat_hash"}
    lines = []
    for row in rows:
        other = flat.get((row["block_size"], row["num_blocks"]))
        if row["cache"] != "radix" or other is None:
            continue
        saved = other["num_computed_tokens"] - row["num_computed_tokens"]
        share = saved / other["num_computed_tokens"] if other["num_computed_tokens"] else 0.0
        blocks = f"{row['peak_blocks'] / other['peak_blocks'] - 1:+.0%} blocks, " if other["peak_blocks"] else ""
        times = [r["index_us_per_request"] + r["hash_us_per_request"] for r in (row, other)]
        lines.append(
            f"{label(row)} against {label(other)}, pool {pool(row)}: {saved:,} fewer tokens computed ({share:.1%}), "
            f"{blocks}{times[0]:.0f} us a request in index and hashing for {times[1]:.0f}"
        )
    return lines


def _remarks(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"{label(row)}, pool {pool(row)}: {row['num_refused_requests']:,} of {row['num_requests']:,} requests did not "
        "fit into the pool and went past the cache"
        for row in rows
        if row["num_refused_requests"]
    ]
    if rows[0]["tokens"] == "bytes":
        lines.append("tokens are UTF-8 bytes, three to four for each of a model's: --tokenizer qwen3 counts those")
    if rows[0]["tokens"] == "block ids":
        lines.append(
            "a trace of block ids tells of sharing by its own blocks alone: what is shared inside one is unknown"
        )
    if rows[0]["tokens"] == "lengths":
        lines.append("a trace of lengths does not tell what is shared: hits mean nothing")
    return lines


def _warnings(row: Row) -> list[str]:
    """What was odd about the trace, and what of it was not read: figures of it are to be read with that in mind."""
    return [f"Warning: {line}" if not line.startswith(" ") else line for line in row.get("remarks", ())]


def show(data: Data) -> None:
    """Prints a table a trace, and what the engine took where it served."""
    print_rows(data["rows"])
    if data.get("serving"):
        from experiments.serving import COLUMNS

        print_table(SERVING_TITLE, COLUMNS, data["serving"])


def answer(data: Data) -> str:
    """One sentence: what radix computes less than the flat hash, from the least to the most over traces and pools."""
    by = {(row["trace"], row["cache"], row["block_size"], row["num_blocks"]): row for row in data["rows"]}
    told = []
    for size in dict.fromkeys(row["block_size"] for row in data["rows"]):
        saved = [
            1 - by[trace, "radix", size, blocks]["num_computed_tokens"] / row["num_computed_tokens"]
            for (trace, cache, block_size, blocks), row in by.items()
            if (cache, block_size) == ("flat_hash", size) and (trace, "radix", size, blocks) in by
            if row["num_computed_tokens"]
        ]
        if saved:
            least, most = f"{min(saved):.1%}", f"{max(saved):.1%}"
            told.append((least if least == most else f"{least} to {most}", size))
    if not told:
        return "Nothing to compare: it needs radix and flat_hash at one block size."
    traces = ", ".join(dict.fromkeys(row["trace"] for row in data["rows"]))
    (share, size), *rest = told
    more = "".join(f", {each} fewer at blocks of {of}" for each, of in rest)
    return (
        f"A radix tree computes {share} fewer prompt tokens than the flat hash at blocks of {size}{more} "
        f"({traces}; least to most over the pools)."
    )


def plot(path: Path) -> Path:
    """Draws each trace from the JSON alone: hit rate against capacity, or for a single capacity tokens computed."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    plt = pyplot()
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    columns = min(len(traces), 3)
    lines = -(-len(traces) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2 + 5 * columns, 4.2 * lines), squeeze=False)
    for axis, trace in zip(axes.flat, traces, strict=False):
        mine = [row for row in rows if row["trace"] == trace and row["cache"] != "null"]
        if len({row["num_blocks"] for row in mine}) > 1:
            _draw_capacity(plt, axis, mine)
        else:
            _draw_computed(axis, mine or rows)
        axis.set_title(trace)
    for axis in axes.flat[len(traces) :]:
        axis.set_visible(False)
    figure.tight_layout()
    return finish(figure, path)


def _draw_capacity(plt: Any, axis: Any, rows: Sequence[Row]) -> None:
    sizes = list(dict.fromkeys(row["block_size"] for row in rows))
    for name in dict.fromkeys(map(label, rows)):
        line = [row for row in rows if label(row) == name]
        points = sorted(((r["num_blocks"] or r["peak_blocks"]) * r["block_size"], r["hit_rate"]) for r in line)
        color = f"C{sizes.index(line[0]['block_size'])}"
        style = {"flat_hash": "s--"}.get(line[0]["cache"], "o-")
        axis.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=4, alpha=0.85)
    ticks = sorted({row["num_blocks"] * row["block_size"] for row in rows if row["num_blocks"]})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick / 1000:,.0f}k" for tick in ticks])
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set(xlabel="pool, tokens (last point: without bound)", ylabel="hit rate, share of prompt tokens")
    axis.legend()


def _draw_computed(axis: Any, rows: Sequence[Row]) -> None:
    sizes = list(dict.fromkeys(row["block_size"] for row in rows))
    names = list(dict.fromkeys(map(label, rows)))
    computed = [next(row for row in rows if label(row) == name)["num_computed_tokens"] for name in names]
    colors = [f"C{sizes.index(next(r['block_size'] for r in rows if label(r) == name))}" for name in names]
    bars = axis.barh(names[::-1], computed[::-1], color=colors[::-1])
    axis.bar_label(bars, [_count(count) for count in computed[::-1]], padding=3)
    axis.margins(x=0.15)
    axis.set(xlabel="prompt tokens still to be computed")

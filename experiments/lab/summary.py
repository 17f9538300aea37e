"""What the page says first, from the rows: what radix buys over the flat hash, over what traffic, at what price."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from experiments import compare_report
from experiments.lab.harness import Cells, Row
from experiments.lab.run import Data

Results = Mapping[str, Data]  # of the experiments that were run, by name


def buys(results: Results) -> Iterator[str]:
    """Sentences on tokens that are not computed any more."""
    if "compare" in results:
        yield compare_report.answer(results["compare"])
    if "divergence" in results:
        again = {
            row["block_size"]: row["again_per_request"]
            for row in _worst(row for row in results["divergence"]["rows"] if row["part"] == "distances")
        }
        lost = ", ".join(f"{tokens:,.0f} at blocks of {size}" for size, tokens in again.items() if tokens)
        yield (
            "Where two prompts part inside a block, the flat hash computes the block's common tokens again, at most "
            f"{lost}; the tree copies their rows and computes none."
        )
        ratios: dict[str, list[str]] = {}
        for name, size, flat, _ in _traces(results["divergence"]):
            ratios.setdefault(name, []).append(f"{flat['over_least']:.2f} at blocks of {size}")
        if ratios:
            told = "; ".join(f"on {name} {' and '.join(each)}" for name, each in ratios.items())
            yield f"For one prompt token that the tree computes, the flat hash computes {told} (public traces)."


def workloads(results: Results) -> Cells | None:
    """A line for each workload: what is found, and how many tokens the flat hash computes for one of the tree's."""
    if "workload_worth" not in results:
        return None
    lines = []
    rows = results["workload_worth"]["rows"]
    for name, group in groupby(rows, key=lambda row: row["workload"]):
        rates = {(row["cache"], row["block_size"]): row["hit_rate"] for row in group}
        cells = []
        for size in sorted({size for _, size in rates}):
            flat, tree = rates["flat_hash", size], rates["radix", size]
            cells += [f"{flat:.1%}", f"{tree:.1%}", f"{(1 - flat) / (1 - tree):.2f}"]
        lines.append((name, *cells))
    sizes = sorted({row["block_size"] for row in rows})
    headings = [text for size in sizes for text in (f"flat hash {size}", f"radix {size}", f"computes, {size}")]
    note = "computes: prompt tokens that the flat hash computes for each one that the tree does, at that size of block"
    return Cells("Prompt tokens found in the cache", ("workload", *headings), tuple(lines), (note,))


def costs(results: Results) -> Iterator[str]:
    """Sentences on time, memory and blocks."""
    if "index_cost" in results:
        found = {(r["cache"], r["operation"]): r for r in results["index_cost"]["rows"] if r["block_size"] == 16}
        flat, tree = (found.get((cache, "admit")) for cache in ("flat_hash", "radix"))
        if flat and tree:
            yield (
                f"Time: an admission takes {tree['p50_us']:.0f} us in the tree and {flat['p50_us']:.0f} us in the flat "
                f"hash, most of it sha256. Memory of the index: {tree['index_bytes_per_token']:.1f} bytes a cached "
                f"token, {flat['index_bytes_per_token']:.1f} in the flat hash."
            )
    if "divergence" in results:
        more: dict[str, list[str]] = {}
        for name, size, flat, tree in _traces(results["divergence"]):
            share = tree["held_blocks"] / flat["held_blocks"] - 1
            more.setdefault(name, []).append(f"{share:.0%} more blocks of {size}")
        if more:
            told = "; ".join(f"on {name} {' and '.join(each)}" for name, each in more.items())
            yield f"Memory: each request's partly filled last block stays cached, as long as there is room: {told}."
    if "overhead" in results:
        rows = [row for row in results["overhead"]["rows"] if row["machine"].endswith("h100-sxm")]
        shares = [row["share"] for row in rows]
        if shares:
            yield (
                f"Tree, scheduler and plan together take {min(shares):.1%} to {max(shares):.1%} of a run at an H100's "
                "step times (simulated)."
            )


def _worst(rows: Iterator[Row]) -> list[Row]:
    """The row of each block size in which the flat hash computes most again."""
    by_size: dict[int, Row] = {}
    for row in rows:
        best = by_size.get(row["block_size"])
        if row["cache"] == "flat hash" and (best is None or row["again_per_request"] > best["again_per_request"]):
            by_size[row["block_size"]] = row
    return list(by_size.values())


def _traces(data: Data) -> Iterator[tuple[str, int, Row, Row]]:
    """Each real trace at blocks of 16 and 64: its name, the size, the flat hash's row, the tree's."""
    rows = [row for row in data["rows"] if row["part"] == "traces"]
    for name in dict.fromkeys(row["trace"] for row in rows):
        for size in (16, 64):
            of = {r["cache"]: r for r in rows if (r["trace"], r["block_size"]) == (name, size)}
            if "flat hash" in of and "radix, partial blocks" in of:
                yield name, size, of["flat hash"], of["radix, partial blocks"]

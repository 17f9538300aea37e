"""Of a hybrid model's states, which are worth their bytes: where are checkpoints to be made, and which of them kept?

Replays a trace through the tree of a hybrid model, one request at a time, all that runs counted: first without bound
by placement, then at shares of the bytes that the default placement took, by retention and by placement. The layers
are those of Qwen3.5-35B-A3B: 10 of full attention, 30 with states, 32.9 MB at one position in bf16. Expected: without
bound, branch points and ends of prompts come close to full attention's optimum, and a grid does not; where memory is
short no fixed retention is good on every trace, and one that learns from ghosts is near the best on each.

    python -m experiments.checkpoint_placement
    python -m experiments.checkpoint_placement --trace my.jsonl --tokenizer qwen3
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, grouped, parser, print_table, progress
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import EMBEDDED, requests_of
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.hybrid_replay import HybridReplay
from radixkv.blocks.replay import Replay
from radixkv.cache.hybrid.cache import HybridCache
from radixkv.cache.hybrid.placements import DEFAULT_PLACEMENT
from radixkv.cache.hybrid.retentions import RETENTIONS
from radixkv.cache.namespace import Namespace
from radixkv.simulate.model_shapes import MODEL_SHAPES
from radixkv.traces import open_trace
from radixkv.traces.tokenizers import load_tokenizer

ENTRY = Entry("policies", seconds=150, place=3)

# 10 layers of full attention and 30 of the gated delta rule, states in bf16.
LAYERS = replace(MODEL_SHAPES["qwen3.5-35b-a3b"], state_element_bytes=2).layers
PLACEMENTS = (DEFAULT_PLACEMENT, "branch+end", "branch", "end", "grid")
DEFAULT_RETENTION = "adaptive"
DEFAULT = "default"  # what the default placement is called in tables


@dataclass(frozen=True)
class Config:
    """Traces (files; none: the embedded workload), and pools as shares of what the default takes without bound."""

    trace: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.25)
    limit: int | None = None


Requests = list[tuple[bytes, Namespace | None]]


def load(trace: str, config: Config) -> Requests:
    if trace == EMBEDDED:
        found = requests_of(EMBEDDED, config.limit)
    else:
        found = iter(open_trace(trace, tokenizer=load_tokenizer(config.tokenizer), limit=config.limit))
    return [(request.prompt, request.namespace) for request in found]


def cells(config: Config) -> Iterator[Cell]:
    """A cell a trace."""
    for trace in config.trace or (EMBEDDED,):
        yield Path(trace).name.split(".")[0], partial(measure, config, trace)


def replay(requests: Requests, placement: str, retention: str, num_bytes: int | None) -> Row:
    """Returns what came of a trace."""
    found = HybridReplay(HybridCache(LAYERS, placement=placement, retention=retention), num_bytes)
    for prompt, namespace in requests:
        found.feed(prompt, namespace=namespace)
    row: Row = {
        "placement": DEFAULT if placement == DEFAULT_PLACEMENT else placement,
        "retention": retention,
        "hit_tokens": found.num_cached_tokens,
    }
    row |= {"computed_tokens": found.num_computed_tokens, "hit_rate": found.hit_rate, "passes": found.num_passes}
    row |= {"checkpoints": found.cache.num_made, "refused": found.num_refused_requests, "peak_bytes": found.peak_bytes}
    held = found.manager.bytes_by_kind()
    return row | {"kv_bytes": held.kv, "state_bytes": held.states, "row_bytes": held.rows, "pool_bytes": num_bytes}


def measure(config: Config, trace: str) -> list[Row]:
    """Replays a trace by every placement and retention; returns a row for each."""
    requests = load(trace, config)
    full = Replay(CacheConfig("radix", 16))
    for prompt, namespace in requests:
        full.feed(prompt, namespace=namespace)
    common: Row = {
        "trace": Path(trace).name.split(".")[0],
        "requests": len(requests),
        "optimum": full.num_cached_tokens,
    }
    runs = len(PLACEMENTS) + len(config.shares) * (len(RETENTIONS) + len(PLACEMENTS) - 1)
    rows: list[Row] = []
    with progress(common["trace"], runs) as bar:

        def add(placement: str, retention: str, share: float | None, num_bytes: int | None) -> None:
            rows.append(common | {"share": share} | replay(requests, placement, retention, num_bytes))
            rows[-1]["of_optimum"] = rows[-1]["hit_tokens"] / max(common["optimum"], 1)
            bar.advance(bar.task_ids[0])

        for placement in PLACEMENTS:
            add(placement, DEFAULT_RETENTION, None, None)
        most = rows[0]["peak_bytes"]
        for share in config.shares:
            for retention in RETENTIONS:
                add(DEFAULT_PLACEMENT, retention, share, int(share * most))
            for placement in PLACEMENTS[1:]:
                add(placement, DEFAULT_RETENTION, share, int(share * most))
    return rows


def show(data: Data) -> None:
    """Prints a line a placement, then a line a pool and policy."""
    columns = {
        "trace": "{trace}",
        "placement": "{placement}",
        "hits": "{hit_rate:.1%}",
        "of optimum": "{of_optimum:.1%}",
    }
    columns |= {"computed": "{computed_tokens:,}", "passes": "{passes:,}", "checkpoints": "{checkpoints:,}"}
    held = {"KV GB": "{kv_bytes_g:.1f}", "states GB": "{state_bytes_g:.1f}", "rows GB": "{row_bytes_g:.1f}"}
    rows = [
        row | {f"{name}_g": (row[name] or 0) / 1e9 for name in ("kv_bytes", "state_bytes", "row_bytes", "pool_bytes")}
        for row in data["rows"]
    ]
    print_table("Without bound, by placement", columns | held, [row for row in rows if row["share"] is None])
    bounded = [row for row in rows if row["share"] is not None]
    columns = {
        "trace": "{trace}",
        "pool GB": "{pool_bytes_g:.1f}",
        "placement": "{placement}",
        "retention": "{retention}",
    }
    columns |= {"hits": "{hit_rate:.1%}", "of optimum": "{of_optimum:.1%}", "checkpoints": "{checkpoints:,}"}
    print_table("In a pool", columns | held, bounded)


def label(row: Row) -> str:
    """What a curve is called: the retention, or with the default one the placement."""
    return row["retention"] if row["placement"] == DEFAULT else f"{row['placement']}, {row['retention']}"


def plot(data: Data) -> Figure:
    """Draws hit rate against bytes for each trace."""
    plt = pyplot()
    traces = grouped([row for row in data["rows"] if row["share"] is not None], "trace")
    figure, axes = plt.subplots(1, len(traces), squeeze=False, figsize=(5.5 * len(traces), 4))
    for axis, (trace, rows) in zip(axes.flat, traces.items(), strict=True):
        lines: dict[str, list[Row]] = {}
        for row in rows:
            lines.setdefault(label(row), []).append(row)
        for name, points in lines.items():
            axis.plot(
                [p["pool_bytes"] / 1e9 for p in points], [p["of_optimum"] for p in points], marker=".", label=name
            )
        axis.set(title=trace, xscale="log", xlabel="GB", ylabel="hits, of full attention's without bound")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


def answer(data: Data) -> str:
    """How near the default comes without bound, and what its retention is worth in the pools."""
    free = [row for row in data["rows"] if row["share"] is None and row["placement"] == DEFAULT]
    near = min(row["of_optimum"] for row in free)
    pools = grouped([row for row in data["rows"] if row["share"] is not None], "trace")
    gaps: dict[str, list[float]] = {}
    for rows in pools.values():
        for of_pool in grouped(rows, "share").values():
            found = {row["retention"]: row["of_optimum"] for row in of_pool if row["placement"] == DEFAULT}
            for name, hits in found.items():
                gaps.setdefault(name, []).append(max(found.values()) - hits)
    worst = ", ".join(f"{max(each):.1%} with {name}" for name, each in sorted(gaps.items(), key=lambda g: max(g[1])))
    return (
        f"Without bound the default placement hits {near:.1%} of what full attention could. At equal bytes the most "
        f"that is lost against the best retention of the same pool is {worst or 'not measured'}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("checkpoint_placement", __doc__)
    options.add_argument("--trace", nargs="+", default=[], metavar="FILE", help="default: the embedded workload")
    options.add_argument("--tokenizer", default="bytes", help="of traces of text")
    options.add_argument(
        "--share", nargs="+", type=float, default=[], help="pools, of the default's bytes without bound"
    )
    options.add_argument("--limit", type=int, help="read at most so many requests of each trace")
    given = options.parse_args(arguments)
    config = Config(tuple(given.trace), given.tokenizer, tuple(given.share) or Config.shares, given.limit)
    if given.smoke:
        config = Config(shares=(0.1,), limit=100)
    try:
        run_experiment("checkpoint_placement", given.out, config, sys.modules[__name__], at_once=True)
    except (OSError, ValueError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()

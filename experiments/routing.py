"""Eight replicas or one: what does the router save of the hit rate, at what balance, and what does a user wait?

A cache hit only helps on the replica that holds the blocks. Every router serves the same traces: *replayed*, a request
at a time, for hits and for the most that a replica computed over the mean (load); *served*, with a simulated H100 as
every replica, for time to first token and throughput. `one` is one big replica with all the blocks. Expected:
cache_aware keeps 97 % of its hit rate at a load of 1.25 at most; round robin loses most of what conversations share;
longest_match hits all there is to hit and sends it to one replica. The picture has hit rate against 1 to 64 replicas.

    python -m experiments.routing                                  minutes; real traces where there are any
    python -m experiments.routing --short                          the routers of the picture; Mooncake on 8 alone
    python -m experiments.routing --smoke                          the start of the two smallest
    python -m experiments.routing --backend ray --replicas 2       real engines, see experiments.routing_ray
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.lab.harness import Row, fail, parser, print_table
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Cell, Data, conduct
from experiments.routing_replay import ROUTERS, SOURCES, Source, replay
from experiments.routing_served import pool_blocks, serve

PLOTTED = ("round_robin", "consistent_hash", "longest_match", "cache_aware")


@dataclass(frozen=True)
class Config:
    """What to run, of what there is: real traces are no part of the package."""

    sources: tuple[str, ...] = tuple(SOURCES)
    routers: tuple[str, ...] = ROUTERS
    num_replicas: int = 8
    mooncake_replicas: tuple[int, ...] = (4,)  # besides
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaled: tuple[str, ...] = ("tau_bench", "bbh", "chat")
    replay_limit: int | None = None
    served_limit: int = 600
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a trace, pool, number of replicas and router."""
    for source in SOURCES.values():
        if source.name not in config.sources or not source.is_here:
            continue
        short = replace(source, limit=config.replay_limit)
        counts = (config.num_replicas, *(config.mooncake_replicas if source.name == "mooncake" else ()))
        for count in counts:
            for pool in (None, source.pool_blocks):
                yield f"replayed {source.name} {count} {pool} one", partial(_one, short, config, count, pool)
                for router in config.routers:
                    measure = partial(_replayed, short, config, router, count, pool)
                    yield f"replayed {source.name} {count} {pool} {router}", measure
        for pool in (None, pool_blocks(source.block_size)):
            for router in config.routers:
                measure = partial(_served, replace(source, limit=config.served_limit), config, router, pool)
                yield f"served {source.name} {pool} {router}", measure
        if source.name in config.scaled:
            for router in ("round_robin", "cache_aware"):
                for count in config.counts:
                    measure = partial(_replayed, short, config, router, count, None, "scaled")
                    yield f"scaled {source.name} {count} {router}", measure


def _one(source: Source, config: Config, count: int, pool: int | None) -> list[Row]:
    """One big replica with the blocks of all."""
    row = replay(source, source.requests(config.seed), "round_robin", 1, pool and pool * count)
    return [row | {"kind": "replayed", "router": "one", "num_replicas": count, "num_blocks": pool}]


def _replayed(
    source: Source, config: Config, router: str, count: int, pool: int | None, kind: str = "replayed"
) -> list[Row]:
    return [{"kind": kind, **replay(source, source.requests(config.seed), router, count, pool)}]


def _served(source: Source, config: Config, router: str, pool: int | None) -> list[Row]:
    row = serve(source, source.requests(config.seed), router, config.num_replicas, pool)
    return [{"kind": "served", **row}]


REPLAYED = {
    "trace": "{trace}",
    "replicas": "{num_replicas}",
    "blocks each": "{pool}",
    "router": "{router}",
    "hit rate": "{hit_rate:.4f}",
    "of one": "{kept:.1%}",
    "load": "{load_ratio:.3f}",
    "us/decision": "{route_us:.0f}",
}
SERVED = {
    "trace": "{trace}",
    "blocks each": "{pool}",
    "router": "{router}",
    "hit rate": "{hit_rate:.4f}",
    "load": "{load_ratio:.3f}",
    "TTFT p50 ms": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
    "latency p50 ms": "{latency_p50_ms:.0f}",
    "out tok/s": "{output_throughput:.0f}",
}


def _of_kind(data: Data, kind: str) -> list[Row]:
    """Returns the rows of a kind, with the pool in words and the share of one big replica's hit rate."""
    rows = [row for row in data["rows"] if row["kind"] == kind]
    one = {_place(row): row["hit_rate"] for row in rows if row["router"] == "one"}
    return [
        row
        | {"pool": "no bound" if row["num_blocks"] is None else f"{row['num_blocks']:,}"}
        | {"kept": row["hit_rate"] / one[_place(row)] if one.get(_place(row)) else 1.0}
        for row in rows
    ]


def _place(row: Row) -> tuple[Any, ...]:
    return row["trace"], row["num_replicas"], row["num_blocks"]


def show(data: Data) -> None:
    """Prints the tables."""
    print_table("One request at a time", REPLAYED, _of_kind(data, "replayed"))
    config = data["config"]
    title = f"Simulated: {config['num_replicas']} H100 with Llama-3-8B, the first {config['served_limit']} requests"
    print_table(title, SERVED, _of_kind(data, "served"))


def answer(data: Data) -> str:
    """What cache_aware and round robin keep of one big replica's hits, and at what balance."""
    rows = _of_kind(data, "replayed")
    by_router = {name: [row for row in rows if row["router"] == name] for name in ("cache_aware", "round_robin")}
    keeps = {name: [row["kept"] for row in rows] for name, rows in by_router.items()}
    busiest = max(row["load_ratio"] for row in by_router["cache_aware"])
    counts = " and ".join(map(str, sorted({row["num_replicas"] for row in rows})))
    return (
        f"{min(keeps['cache_aware']):.1%} to {max(keeps['cache_aware']):.1%} of one big replica's hits survive "
        f"cache-aware routing over {counts} replicas, {min(keeps['round_robin']):.0%} to "
        f"{max(keeps['round_robin']):.0%} round robin ({len(keeps['cache_aware'])} runs); the busiest replica "
        f"computes at most {busiest:.2f} times the mean."
    )


def plot(path: Path) -> Path:
    """Draws hit rate against replicas, and time to first token on the GPUs' own pools, from the JSON alone."""
    data = json.loads(path.read_text())
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    scaled, served = _of_kind(data, "scaled"), _of_kind(data, "served")
    for router, style in (("round_robin", "--"), ("cache_aware", "-")):
        left.set_prop_cycle(None)
        for trace in dict.fromkeys(row["trace"] for row in scaled):
            mine = [row for row in scaled if (row["trace"], row["router"]) == (trace, router)]
            label = f"{trace}, {router.replace('_', ' ')}"
            left.plot([r["num_replicas"] for r in mine], [r["hit_rate"] for r in mine], style, marker="o", label=label)
    left.set(xscale="log", xlabel="replicas", ylabel="aggregate hit rate", ylim=(0, 1), title="Hits against replicas")
    counts = sorted({row["num_replicas"] for row in scaled})
    left.set_xticks(counts, labels=counts)
    left.minorticks_off()
    left.legend()
    traces = list(dict.fromkeys(row["trace"] for row in served))
    for at, router in enumerate(PLOTTED):
        mine = [row for row in served if row["router"] == router and row["num_blocks"] is not None]
        places = [traces.index(row["trace"]) + 0.2 * (at - 1.5) for row in mine]
        right.bar(places, [row["ttft_p50_ms"] for row in mine], 0.18, label=router.replace("_", " "))
    right.set_xticks(range(len(traces)), labels=traces)
    right.set(yscale="log", ylabel="TTFT p50 (ms), simulated", title="Time to first token")
    right.legend()
    figure.tight_layout()
    return finish(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("routing", __doc__)
    options.add_argument("--replicas", type=int, default=8, help="(8)")
    options.add_argument("--backend", choices=("embedded", "ray"), default="embedded", help="(embedded)")
    options.add_argument("--short", action="store_true", help="the routers of the picture, fewer counts of replicas")
    given = options.parse_args(arguments)
    if given.replicas < 1:
        fail(f"--replicas: expected at least 1, got {given.replicas}")
    if given.backend == "ray":
        from experiments.routing_ray import run as run_ray

        return run_ray(given.replicas, given.out, smoke=given.smoke)
    config = Config(num_replicas=given.replicas)
    if given.short or given.smoke:
        config = replace(config, routers=PLOTTED, mooncake_replicas=(), counts=(1, 4, 16, 64))
    if given.smoke:
        config = replace(config, sources=("bbh", "chat"), counts=(1, 4, 16), replay_limit=150, served_limit=60)
    conduct("routing", given.out, config, cells(config), sys.modules[__name__], at_once=True)


if __name__ == "__main__":
    main()

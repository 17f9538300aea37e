"""Eight replicas or one: what does the router save of the hit rate, at what balance, and what does a user wait?

A cache hit only helps on the replica that holds the blocks. Every router serves the same traces: `replay`, a request at
a time, counts hits and the most that a replica computed over the mean (*load*); `served` puts a simulated H100 behind
every replica and measures time to first token and throughput. `one` is one big replica with all the blocks. Expected:
cache_aware keeps 97 % of its hit rate at a load of 1.25 at most; round robin loses most of what conversations share;
longest_match hits all there is to hit and sends it to one replica. The last plot is hit rate against 1 to 64 replicas.

    python -m experiments.routing --traces ../shared/traces              a quarter of an hour
    python -m experiments.routing --traces ../shared/traces --smoke      under a minute
    python -m experiments.routing                                        the shared-system-prompt chat alone
    python -m experiments.routing --backend ray --replicas 2             real engines, see experiments.routing_ray
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.harness import Row, console, fail, parser, print_table, progress, pyplot, save
from experiments.routing_replay import ROUTERS, SOURCES, Source, replay
from experiments.routing_served import pool_blocks, serve

PLOTTED = ("round_robin", "consistent_hash", "longest_match", "cache_aware")


@dataclass(frozen=True)
class Config:
    """What to run: `pools` are blocks of a replica by block size (None: without bound)."""

    traces: str | None = None
    num_replicas: int = 8
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaled: tuple[str, ...] = ("tau_bench", "bbh")
    replay_limit: int | None = None
    served_limit: int = 1000
    routers: tuple[str, ...] = ROUTERS
    seed: int = 0


def sources(config: Config) -> list[Source]:
    """Returns the chat, and the real traces where there is a folder of them."""
    return [source for source in SOURCES.values() if source.file is None or config.traces is not None]


def pools(source: Source) -> list[int | None]:
    """Returns blocks of a replica: without bound, and few enough to matter."""
    if source.name == "mooncake":
        return [None, 10_000]
    return [None, {"tau_bench": 16_000, "mini_swe": 8_000, "bbh": 3_000, "chat": 2_000}[source.name]]


def run_replays(config: Config) -> list[Row]:
    """Returns a row for each trace, pool and router, and for one big replica; `kept` is the share of its hits."""
    jobs = [
        (source, num_blocks, count)
        for source in sources(config)
        for num_blocks in pools(source)
        for count in ((config.num_replicas, 4) if source.name == "mooncake" else (config.num_replicas,))
    ]
    rows = []
    one = 0.0  # hit rate of one big replica
    with progress("replaying", len(jobs) * (1 + len(config.routers))) as bar:
        for source, num_blocks, count in jobs:
            short = replace(source, limit=config.replay_limit)
            for router, replicas in (("one", 1), *((router, count) for router in config.routers)):
                pool = num_blocks and num_blocks * (count // replicas)
                requests = short.requests(Path(config.traces or ""), config.seed)
                row = replay(source, requests, "round_robin" if router == "one" else router, replicas, pool)
                row |= {"router": router, "num_replicas": count, "num_blocks": num_blocks}
                one = row["hit_rate"] if router == "one" else one
                rows.append(row | {"kept": row["hit_rate"] / one if one else 1.0})
                bar.advance(bar.task_ids[0])
    return rows


def run_served(config: Config) -> list[Row]:
    """Returns a row for each trace, pool and router, in virtual time."""
    return [
        serve(source, short.requests(Path(config.traces or ""), config.seed), router, config.num_replicas, num_blocks)
        for source in sources(config)
        for short in [replace(source, limit=config.served_limit)]
        for num_blocks in (None, pool_blocks(source.block_size))
        for router in config.routers
    ]


def run_scale(config: Config) -> list[Row]:
    """Returns hit rates against the number of replicas, round robin and cache-aware."""
    scaled = [source for source in sources(config) if source.name in config.scaled or config.traces is None]
    jobs = [
        (source, router, n) for source in scaled for router in ("round_robin", "cache_aware") for n in config.counts
    ]
    rows = []
    with progress("1 to 64 replicas", len(jobs)) as bar:
        for source, router, count in jobs:
            requests = replace(source, limit=config.replay_limit).requests(Path(config.traces or ""), config.seed)
            rows.append(replay(source, requests, router, count, None))
            bar.advance(bar.task_ids[0])
    return rows


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


def report(config: Config, replayed: Sequence[Row], served: Sequence[Row]) -> None:
    """Prints the tables, and what cache_aware was to reach."""
    for title, columns, rows in (
        ("One request at a time", REPLAYED, replayed),
        (
            f"Simulated, {config.num_replicas} H100 with Llama-3-8B, first {config.served_limit} requests",
            SERVED,
            served,
        ),
    ):
        print_table(title, columns, [row | {"pool": _pool(row["num_blocks"])} for row in rows])
    for row in replayed:
        if row["router"] == "cache_aware":
            reached = row["kept"] >= 0.97 and row["load_ratio"] <= 1.25
            where = f"{row['trace']}, {row['num_replicas']} replicas, blocks each: {_pool(row['num_blocks'])}"
            what = f"{row['kept']:.1%} of one big replica's hits at a load of {row['load_ratio']:.3f}"
            console.print(f"{'reached' if reached else 'MISSED '} {where}: {what}", highlight=False)


def _pool(num_blocks: int | None) -> str:
    return "no bound" if num_blocks is None else f"{num_blocks:,}"


def plot(rows: Sequence[Row], served: Sequence[Row], path: Path) -> Path:
    """Draws hit rate against replicas, and time to first token against balance of the served traces."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for router, style in (("round_robin", "--"), ("cache_aware", "-")):
        left.set_prop_cycle(None)
        for trace in dict.fromkeys(row["trace"] for row in rows):
            mine = [row for row in rows if (row["trace"], row["router"]) == (trace, router)]
            label = f"{trace}, {router.replace('_', ' ')}"
            left.plot([r["num_replicas"] for r in mine], [r["hit_rate"] for r in mine], style, marker="o", label=label)
    left.set(
        xscale="log", xlabel="replicas", ylabel="aggregate hit rate", ylim=(0, 1), title="Hit rate against replicas"
    )
    left.set_xticks(sorted({row["num_replicas"] for row in rows}), labels=sorted({row["num_replicas"] for row in rows}))
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
    figure.savefig(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("routing", __doc__, "routing.json and routing.png")
    options.add_argument("--traces", metavar="DIR", help="folder of the real traces; without it the chat alone")
    options.add_argument("--replicas", type=int, default=8, help="(8)")
    options.add_argument("--backend", choices=("embedded", "ray"), default="embedded", help="(embedded)")
    options.add_argument("--smoke", action="store_true", help="the start of each trace: under a minute, not to quote")
    given = options.parse_args(arguments)
    if given.replicas < 1:
        fail(f"--replicas: expected at least 1, got {given.replicas}")
    if given.backend == "ray":
        from experiments.routing_ray import run as run_ray

        return run_ray(given.replicas, given.out, smoke=given.smoke)
    config = Config(given.traces, given.replicas)
    if given.smoke:
        config = replace(config, counts=(1, 4, 16), replay_limit=200, served_limit=60)
    try:
        replayed, served, scaled = run_replays(config), run_served(config), run_scale(config)
    except ValueError as error:
        fail(str(error))
    report(config, replayed, served)
    path = save(given.out, "routing", asdict(config), replayed, served=served, scaled=scaled)
    console.print(f"{path}\n{plot(scaled, served, given.out / 'routing.png')}", highlight=False)


if __name__ == "__main__":
    main()

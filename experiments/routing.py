"""Eight replicas or one: what does the router save of the hit rate, at what balance, and what does a user wait?

A cache hit only helps on the replica that holds the blocks. Every router serves the same traces: *replayed*, a request
at a time, for hits and for the most that a replica computed over the mean (load); *served*, with a simulated H100 as
every replica, for time to first token and throughput. `one` is one big replica with all the blocks. Expected:
cache_aware keeps 97 % of its hit rate at a load of 1.25 at most; round robin loses most of what conversations share;
longest_match hits all there is to hit and sends it to one replica. The picture has hit rate against 1 to 64 replicas.

    python -m experiments.routing                                  minutes; real traces where there are any
    python -m experiments.routing --short                          the routers of the picture; Mooncake on 8 alone
    python -m experiments.routing --smoke                          the start of the two smallest
    python -m experiments.routing --backend ray --replicas 2       real engines, see routing_ray.py
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_bars, draw_lines, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import FILES, shared_traces
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.events import Callback
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.fleet.routing.policies import ROUTERS, make_router
from radixkv.fleet.routing.router import Router
from radixkv.fleet.simulated import Fleet
from radixkv.scheduling.scheduler import Scheduler
from radixkv.simulate import Arrivals, ClosedLoop, OpenLoop, Roofline, Simulator, poisson, run, summarize
from radixkv.traces import TraceRequest, open_trace, open_workload

ENTRY = Entry("fleet", seconds=100, place=1, report=("--short",))


@dataclass(frozen=True)
class Source:
    """Where requests come from, in what blocks their KV lies, and how many each replica has in the bounded pool."""

    name: str
    file: str | None
    pool_blocks: int
    block_size: int = 16
    limit: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is made here, or its file is there."""
        return self.file is None or bool(shared_traces(self.file))

    def requests(self, seed: int = 0) -> Iterable[TraceRequest]:
        """Returns its requests, again each time."""
        if self.file is None:
            return open_workload("chat", seed=seed, limit=self.limit, num_requests=2000)
        return open_trace(shared_traces(self.file), limit=self.limit)


SOURCES = {
    source.name: source
    for source in (
        Source("tau_bench", FILES["tau_bench_airline"], 16_000),
        Source("mini_swe", FILES["mini_swe_agent"], 16_000),
        Source("mooncake", FILES["mooncake"], 10_000, 512),
        Source("bbh", FILES["bbh_3shot"], 3_000),
        Source("chat", None, 2_000),
    )
}


def is_indexed(router: str) -> bool:
    """Whether a router of that name keeps an index of what replicas cache, in blocks of a size that it is told."""
    return "block_size" in signature(ROUTERS[router]).parameters


def replay(source: Source, requests: Iterable[TraceRequest], router: str, count: int, num_blocks: int | None) -> Row:
    """Serves requests in order, each before the next one comes.

    Args:
        count: replicas.
        num_blocks: of each replica; None: without bound.

    Returns:
        Hits in prompts, prompts cached; the most that a replica computed over the mean; time of the routing alone.
    """
    now = 0.0
    options: dict[str, Any] = {"block_size": source.block_size} if is_indexed(router) else {}
    names = [f"replica{i}" for i in range(count)]
    made = make_router(router, names, clock=lambda: now, **options)
    replays = {name: Replay(CacheConfig("radix", source.block_size, num_blocks=num_blocks)) for name in names}
    if is_indexed(router):
        for name in names:
            replays[name].cache.subscribe(_listener(made, name))
    routing_s = 0.0
    for request in requests:
        now += 1.0
        started = time.thread_time()
        assignment = made.route(request.prompt, request.namespace)
        routing_s += time.thread_time() - started
        num_cached = replays[assignment.replica].feed(request.prompt, b"", request.namespace)
        made.prefilled(assignment, num_cached)
        made.finish(assignment)
    computed = [each.num_prompt_tokens - each.num_cached_tokens for each in replays.values()]
    num_requests = sum(each.num_requests for each in replays.values())
    num_prompt = sum(each.num_prompt_tokens for each in replays.values())
    return {
        "trace": source.name,
        "router": router,
        "num_replicas": count,
        "num_blocks": num_blocks,
        "num_requests": num_requests,
        "num_prompt_tokens": num_prompt,
        "num_computed_tokens": sum(computed),
        "hit_rate": 1 - sum(computed) / num_prompt,
        "load_ratio": max(computed) * count / sum(computed),
        "route_us": routing_s * 1e6 / num_requests,
    }


def _listener(router: Router, name: str) -> Callback:
    return lambda _, event: router.apply(name, event)


MODEL, GPU = "llama-3-8b", "h100-sxm"
MAX_OUTPUT_TOKENS = 64
OPEN_PER_REPLICA = 12
RATE_PER_REPLICA = {"bbh": 4.0, "chat": 12.0}  # a second
NO_BOUND = 2**26  # blocks: more than any trace fills


def serve(source: Source, requests: Iterable[TraceRequest], router: str, count: int, num_blocks: int | None) -> Row:
    """Serves requests with a fleet.

    Args:
        count: replicas.
        num_blocks: of each replica; None: without bound.
    """
    options: dict[str, Any] = {"block_size": source.block_size} if is_indexed(router) else {}
    cost = Roofline.of(MODEL, GPU)

    def make_simulator(**hooks: Any) -> Simulator:
        manager = KVManager(RadixCache(source.block_size), num_blocks or NO_BOUND)
        return Simulator(Scheduler(manager), cost, **hooks)

    fleet = Fleet(router, make_simulator, num_replicas=count, **options)
    result = run(fleet, _arrivals(source, requests, count))
    found = summarize(result.served)
    busy = [fleet.simulator(name).busy_s for name in fleet.names]
    work = [replica.work_tokens for replica in fleet.router.replicas]
    kept = ("num_requests", "hit_rate", "duration_s", "output_throughput", "request_throughput")
    times = ("ttft_p50_ms", "ttft_p99_ms", "latency_p50_ms", "latency_p99_ms")
    return {
        "trace": source.name,
        "router": router,
        "num_replicas": count,
        "num_blocks": num_blocks,
        **{name: found[name] for name in (*kept, *times)},
        "num_refused": result.num_refused,
        "load_ratio": max(work) * count / sum(work),
        "busy_ratio": max(busy) * count / sum(busy),
    }


def pool_blocks(block_size: int) -> int:
    """Returns the blocks that fit beside the model."""
    return Roofline.of(MODEL, GPU).num_blocks(block_size)


def _arrivals(source: Source, requests: Iterable[TraceRequest], count: int) -> Arrivals:
    cut = _cut(requests)
    if source.name in RATE_PER_REPLICA:
        return poisson(cut, RATE_PER_REPLICA[source.name] * count)
    if source.name == "mooncake":
        return OpenLoop(cut)
    return ClosedLoop(cut, OPEN_PER_REPLICA * count)


def _cut(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    for request in requests:
        yield replace(request, output=request.output[: MAX_OUTPUT_TOKENS * TOKEN_BYTES])


PLOTTED = ("round_robin", "consistent_hash", "longest_match", "cache_aware")


@dataclass(frozen=True)
class Config:
    """What to run, of what there is: real traces are no part of the package."""

    sources: tuple[str, ...] = tuple(SOURCES)
    routers: tuple[str, ...] = tuple(ROUTERS)
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
    by_router = grouped(rows, "router")
    keeps = {name: [row["kept"] for row in by_router[name]] for name in ("cache_aware", "round_robin")}
    busiest = max(row["load_ratio"] for row in by_router["cache_aware"])
    counts = " and ".join(map(str, sorted({row["num_replicas"] for row in rows})))
    return (
        f"{min(keeps['cache_aware']):.1%} to {max(keeps['cache_aware']):.1%} of one big replica's hits survive "
        f"cache-aware routing over {counts} replicas, {min(keeps['round_robin']):.0%} to "
        f"{max(keeps['round_robin']):.0%} round robin ({len(keeps['cache_aware'])} runs); the busiest replica "
        f"computes at most {busiest:.2f} times the mean."
    )


def plot(data: Data) -> Figure:
    """Draws hit rate against replicas, and time to first token on the GPUs' own pools."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    scaled, served = _of_kind(data, "scaled"), _of_kind(data, "served")
    for router, style in (("round_robin", "--"), ("cache_aware", "-")):
        left.set_prop_cycle(None)
        mine = grouped((row for row in scaled if row["router"] == router), "trace").items()
        lines = {f"{trace}, {router.replace('_', ' ')}": some for trace, some in mine}
        draw_lines(left, lines, "num_replicas", "hit_rate", f"o{style}")
    left.set(xscale="log", xlabel="replicas", ylabel="aggregate hit rate", ylim=(0, 1), title="Hits against replicas")
    counts = sorted({row["num_replicas"] for row in scaled})
    left.set_xticks(counts, labels=counts)
    left.minorticks_off()
    bounded = grouped((row for row in served if row["num_blocks"] is not None), "router")
    draw_bars(
        right,
        {name.replace("_", " "): {r["trace"]: r["ttft_p50_ms"] for r in bounded.get(name, ())} for name in PLOTTED},
    )
    right.set(yscale="log", ylabel="TTFT p50 (ms), simulated", title="Time to first token")
    right.legend()
    figure.tight_layout()
    return figure


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
    run_experiment("routing", given.out, config, sys.modules[__name__], at_once=True)


if __name__ == "__main__":
    main()

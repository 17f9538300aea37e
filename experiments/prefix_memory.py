"""How much of the pool do cached prefixes hold, and do they ever keep a running request waiting?

Chats under a few system prompts on a simulated H100, at a load that rises and falls; at each step, what holds the
pool's blocks. Expected: prefixes that no request uses fill whatever is left over and give way as soon as running
requests need it, so that the same requests run at once, and finish no later, as without a cache.

    python -m experiments.prefix_memory
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.scheduling.batch import StepStats
from radixkv.scheduling.scheduler import Scheduler
from radixkv.simulate import OpenLoop, Roofline, Simulator, run, summarize
from radixkv.traces import TraceRequest, open_workload

ENTRY = Entry("serving", seconds=5, place=2)

CACHES = ("null", "flat_hash", "radix")
NUM_POINTS = 200


@dataclass(frozen=True)
class Config:
    """The load rises to its peak and falls again."""

    model: str = "llama-3-8b"
    gpu: str = "h100-sxm"
    num_blocks: int = 6_000
    block_size: int = 16
    num_requests: int = 1_500
    peak_rate_per_s: float = 30.0
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a cache."""
    for cache in CACHES:
        yield cache, partial(measure, config, cache)


def traffic(config: Config) -> list[TraceRequest]:
    """Chats with arrivals whose rate is half a wave of a sine."""
    rng = np.random.default_rng(config.seed)
    requests = list(open_workload("multi_turn", seed=config.seed, limit=config.num_requests))
    share = (np.arange(len(requests)) + 0.5) / len(requests)
    rates = config.peak_rate_per_s * np.maximum(np.sin(np.pi * share), 0.1)
    times = np.cumsum(rng.exponential(1 / rates))
    return [replace(request, timestamp_s=float(at)) for request, at in zip(requests, times, strict=True)]


def measure(config: Config, cache: str) -> list[Row]:
    """Serves the traffic; a row of what came of it, with the pool's holders at points in time."""
    cost = Roofline.of(config.model, config.gpu)
    scheduler = Scheduler(KVManager(CacheConfig(cache, config.block_size).make(), config.num_blocks))
    points: list[tuple[float, int, int, int, int]] = []

    def on_step(stats: StepStats) -> None:
        sizes = stats.sizes
        running = sizes.private + sizes.pinned
        points.append((simulator.now_s, running, sizes.evictable, sizes.free, stats.num_running))

    simulator = Simulator(scheduler, cost, on_step=on_step)
    row = summarize(run(simulator, OpenLoop(traffic(config))).served)
    kept = points[:: max(len(points) // NUM_POINTS, 1)]
    mean_cached = sum(point[2] for point in points) / len(points) / config.num_blocks
    return [
        {
            "cache": cache,
            "mean_cached_share": mean_cached,
            "peak_running_share": max(point[1] for point in points) / config.num_blocks,
            "peak_running": max(point[4] for point in points),
            "num_preemptions": scheduler.num_preemptions,
            "time_s": [point[0] for point in kept],
            "running_blocks": [point[1] for point in kept],
            "cached_blocks": [point[2] for point in kept],
            "free_blocks": [point[3] for point in kept],
            **{name: value for name, value in row.items() if not isinstance(value, list)},
        }
    ]


COLUMNS = {
    "cache": "{cache}",
    "hit rate": "{hit_rate:.1%}",
    "held by idle prefixes": "{mean_cached_share:.0%}",
    "by running at most": "{peak_running_share:.0%}",
    "running at most": "{peak_running}",
    "preemptions": "{num_preemptions}",
    "TTFT p50 ms": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
}


def show(data: Data) -> None:
    """Prints a line a cache."""
    sizes = data["config"]
    title = f"{sizes['num_requests']:,} requests, pool of {sizes['num_blocks']:,} blocks, simulated {sizes['gpu']}"
    print_table(title, COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws what holds the pool over time."""
    rows = data["rows"]
    figure, axes = pyplot().subplots(1, len(rows), figsize=(12, 4), sharey=True)
    for axis, row in zip(axes, rows, strict=True):
        held = [row["running_blocks"], row["cached_blocks"], row["free_blocks"]]
        axis.stackplot(row["time_s"], *held, labels=("running requests", "idle prefixes", "free"), alpha=0.8)
        axis.set(title=row["cache"], xlabel="virtual time, s")
    axes[0].set(ylabel="blocks")
    axes[0].legend(loc="upper left")
    return figure


def answer(data: Data) -> str:
    """One sentence."""
    by = {row["cache"]: row for row in data["rows"]}
    radix, null = by["radix"], by["null"]
    return (
        f"Idle prefixes hold {radix['mean_cached_share']:.0%} of the pool on average and give way: at the peak "
        f"running requests hold {radix['peak_running_share']:.0%} of it "
        f"(without a cache {null['peak_running_share']:.0%}), with "
        f"{radix['num_preemptions']} preemptions for {null['num_preemptions']}, and the 99th percentile of the time to "
        f"the first token is {radix['ttft_p99_ms']:,.0f} ms for {null['ttft_p99_ms']:,.0f}."
    )


main = command(__name__, Config(), Config(num_requests=200, num_blocks=2_500))


if __name__ == "__main__":
    main()

"""What does a hit rate buy, as matched tokens are limited from 0 to 100 %: batch size, latency, throughput?

After figure 8 (a, b) of the RadixAttention paper (2312.07104): tree-of-thought requests, 512 of them waiting or running
at any time, of which each may match no more than a share of what an infinite cache would have for it. What a request
may not match is salted with its own name from there on, so that it is computed and held again, by the real scheduler,
manager and tree in virtual time. Expected: the batch grows with the hit rate, as shared KV is held once and prompts
take less of a step's budget; time to first token and latency fall, throughput rises, most where hits are many.

    python -m experiments.hit_rate_effect                                       half a minute
    python -m experiments.hit_rate_effect --model llama-3-70b --num-gpus 8
    python -m experiments.hit_rate_effect --smoke
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, parser, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.namespace import Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.batch import StepStats
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate import GPUS, ClosedLoop, Roofline, Simulator, run, summarize
from radixkv.simulate.model_shapes import MODEL_SHAPES
from radixkv.traces import TraceRequest, open_workload

ENTRY = Entry("policies", seconds=12, place=4)


@dataclass(frozen=True)
class Config:
    """Problems of tree of thought, `num_open` requests at once; a pool of `pool_tokens` at most."""

    model: str = "llama-3-8b"
    gpu: str = "h100-sxm"
    num_gpus: int = 1
    shares: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
    num_problems: int = 96
    num_open: int = 512
    pool_tokens: int = 60_000
    instruction_tokens: int = 600
    block_size: int = 16
    max_num_seqs: int = 512
    seed: int = 0


def tree_of_thought(config: Config) -> list[TraceRequest]:
    """Returns the requests of all problems; those of a level may run side by side, so each is a session by itself."""
    sizes = {"num_problems": config.num_problems, "instruction_tokens": config.instruction_tokens}
    made = open_workload("tree_of_thought", seed=config.seed, **sizes)
    return [replace(request, id=str(number), session=None) for number, request in enumerate(made)]


def limited(requests: Sequence[TraceRequest], share: float) -> list[TraceRequest]:
    """Returns the requests, each unable to match more than a share of what an infinite cache has for it."""
    replay = Replay(CacheConfig("radix"), cache_outputs=True)
    found = []
    for request in requests:
        most = replay.feed(request.prompt, request.output)
        keep = int(most * share)
        salted = replace(request, namespace=Salt(request.id, start=keep)) if keep < most or not most else request
        found.append(salted if share < 1 else request)
    return found


def measure(config: Config, requests: Sequence[TraceRequest], share: float) -> list[Row]:
    """Serves the requests in virtual time at one share; one row."""
    cost = Roofline.of(config.model, config.gpu, config.num_gpus)
    num_blocks = min(cost.num_blocks(config.block_size), config.pool_tokens // config.block_size)
    batches: list[tuple[int, float]] = []

    def on_step(stats: StepStats) -> None:
        batches.append((stats.num_running, stats.forward_s))

    scheduler = Scheduler(
        KVManager(RadixCache(config.block_size), num_blocks), SchedulerConfig(max_num_seqs=config.max_num_seqs)
    )
    simulator = Simulator(scheduler, cost, on_step=on_step)
    arrivals = ClosedLoop(limited(requests, share), config.num_open)
    row = summarize(run(simulator, arrivals).served)
    num_running, seconds = np.array(batches).T
    found = {
        "share": share,
        "batch_size": float((num_running * seconds).sum() / seconds.sum()),
        "num_steps": simulator.num_steps,
        "num_blocks": num_blocks,
    }
    return [found | row]


def cells(config: Config) -> Iterator[Cell]:
    """Yields a cell for each share."""
    requests = tree_of_thought(config)
    for share in config.shares:
        yield f"{share:.0%}", partial(measure, config, requests, share)


COLUMNS = {
    "may match": "{share:.0%}",
    "hit rate": "{hit_rate:.1%}",
    "batch size": "{batch_size:.1f}",
    "TTFT p50 ms": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
    "latency p50 ms": "{latency_p50_ms:.0f}",
    "p99 ": "{latency_p99_ms:.0f}",
    "requests/s": "{request_throughput:.1f}",
    "out tok/s": "{output_throughput:.0f}",
    "preempted": "{num_preemptions}",
}


def show(data: Data) -> None:
    """Prints a line a share."""
    config = data["config"]
    title = f"{config['model']} on {config['num_gpus']} {config['gpu']}: tree of thought, simulated"
    print_table(title, COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws everything over the hit rate that was reached."""
    rows = data["rows"]
    figure, axes = pyplot().subplots(1, 3, figsize=(12, 3.6))
    hit_rates = [100 * row["hit_rate"] for row in rows]
    for axis, title, keys in (
        (axes[0], "running sequences", ("batch_size",)),
        (axes[1], "ms", ("ttft_p50_ms", "latency_p50_ms")),
        (axes[2], "requests / s", ("request_throughput",)),
    ):
        for key in keys:
            axis.plot(hit_rates, [row[key] for row in rows], marker="o", label=key.removesuffix("_ms"))
        axis.set(xlabel="hit rate (%)", ylabel=title, ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    return figure


def answer(data: Data) -> str:
    """One sentence, of the ends."""
    first, last = data["rows"][0], data["rows"][-1]
    return (
        f"From {first['hit_rate']:.0%} to {last['hit_rate']:.0%} hits the batch grows from {first['batch_size']:.0f} "
        f"to {last['batch_size']:.0f} sequences, median TTFT falls from {first['ttft_p50_ms']:,.0f} to "
        f"{last['ttft_p50_ms']:,.0f} ms, and throughput is "
        f"{last['request_throughput'] / first['request_throughput']:.1f} times as high."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("hit_rate_effect", __doc__)
    options.add_argument("--model", default=Config.model, choices=sorted(MODEL_SHAPES), help="(llama-3-8b)")
    options.add_argument("--gpu", default=Config.gpu, choices=sorted(GPUS), help="(h100-sxm)")
    options.add_argument("--num-gpus", type=int, default=1, help="tensor parallel (1)")
    options.add_argument("--pool-tokens", type=int, default=Config.pool_tokens, help="at most (60,000)")
    given = options.parse_args(arguments)
    config = Config(given.model, given.gpu, given.num_gpus, pool_tokens=given.pool_tokens)
    if given.smoke:
        config = replace(config, shares=(0.0, 0.5, 1.0), num_problems=4, num_open=20, pool_tokens=10_000)
    try:
        Roofline.of(config.model, config.gpu, config.num_gpus)
    except ValueError as error:
        fail(str(error))
    run_experiment("hit_rate_effect", given.out, config, sys.modules[__name__], at_once=True)


if __name__ == "__main__":
    main()

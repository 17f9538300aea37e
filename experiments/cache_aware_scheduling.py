"""How much of the best possible hit rate does each order of admissions reach, and what does it cost the tail?

The RadixAttention paper's workloads and the real traces, served by the real scheduler, manager and tree in virtual time
on one GPU, in a pool of max(25 % of the unique tokens, twice the longest request). Requests are all queued at once;
conversations arrive turn by turn, 64 open. The optimum is an infinite cache's: in the best order for what is queued at
once, in the order given for conversations. `aged` is the default bound, at most 256 places later than first come, first
served; without it an order keeps its hit rate and pays with the tail. Expected: depth-first and longest-prefix reach
96 % on average; conversations fall short of it, where 64 of them do not fit; random and fcfs fall short everywhere.

    python -m experiments.cache_aware_scheduling                   some minutes
    python -m experiments.cache_aware_scheduling --smoke           one workload, seconds
    python -m experiments.cache_aware_scheduling --workload mmlu tau_bench_airline
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table, progress
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import PAPER_WORKLOADS, available, is_conversation, pool_blocks, sample_of
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate import ClosedLoop, Roofline, Simulator, at_once, run, summarize
from radixkv.traces import TraceRequest

ENTRY = Entry("policies", seconds=65, place=1)

UNBOUNDED = 10**9
# name -> order, max_overtakes, queue_aware
ORDERS = {
    "fcfs": ("fcfs", UNBOUNDED, False),
    "random": ("random", UNBOUNDED, False),
    "longest": ("longest_prefix", UNBOUNDED, False),
    "longest aged": ("longest_prefix", 256, False),
    "longest queue": ("longest_prefix", UNBOUNDED, True),
    "depth": ("depth_first", UNBOUNDED, False),
    "depth aged": ("depth_first", 256, False),
    "depth queue": ("depth_first", UNBOUNDED, True),
}


@dataclass(frozen=True)
class Config:
    workload: tuple[str, ...] = ()
    model: str = "llama-3-8b"
    gpu: str = "h100-sxm"
    block_size: int = 16
    num_open: int = 64
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    seed: int = 0


def load(name: str, config: Config) -> tuple[list[TraceRequest], bool]:
    """Returns a workload's requests, and whether they are conversations."""
    if name in PAPER_WORKLOADS:
        requests = list(PAPER_WORKLOADS[name](np.random.default_rng(config.seed)))
    else:
        requests = sample_of(name)
    has_turns = name in PAPER_WORKLOADS and requests[0].session is not None
    return requests, has_turns or is_conversation(name)


def optimum(requests: Sequence[TraceRequest], has_turns: bool) -> tuple[float, int]:
    """Returns the hit rate of an infinite cache, to the token, and the unique tokens it then holds."""
    ordered = requests if has_turns else sorted(requests, key=lambda request: request.prompt)
    replay = Replay(CacheConfig("radix", 16), cache_outputs=True)
    for request in ordered:
        replay.feed(request.prompt, request.output, request.namespace)
    return replay.hit_rate, replay.cache.num_cached_tokens


def serve(requests: Sequence[TraceRequest], has_turns: bool, name: str, num_blocks: int, config: Config) -> Row:
    """Serves a workload in one order."""
    order, max_overtakes, queue_aware = ORDERS[name]
    limits = SchedulerConfig(
        config.max_num_batched_tokens, config.max_num_seqs, order, max_overtakes, queue_aware, config.seed
    )
    scheduler = Scheduler(KVManager(RadixCache(config.block_size), num_blocks), limits)
    simulator = Simulator(scheduler, Roofline.of(config.model, config.gpu))
    result = run(simulator, ClosedLoop(requests, config.num_open) if has_turns else at_once(requests))
    assert not result.num_refused, "the pool holds twice the longest request"
    return {"order": name, **summarize(result.served), "num_steps": simulator.num_steps}


def cells(config: Config) -> Iterator[Cell]:
    """A cell a workload, the paper's first."""
    yield from ((name, partial(measure, config, name)) for name in config.workload or (*PAPER_WORKLOADS, *available()))


def measure(config: Config, workload: str) -> list[Row]:
    """Serves a workload in every order."""
    requests, has_turns = load(workload, config)
    best, num_unique = optimum(requests, has_turns)
    pool = pool_blocks(requests, num_unique, config.block_size)
    rows = []
    with progress(workload, len(ORDERS)) as bar:
        for name in ORDERS:
            row: Row = {"workload": workload, "optimum": best, "num_blocks": pool, "has_turns": has_turns}
            row |= serve(requests, has_turns, name, pool, config)
            row["share"] = row["hit_rate"] / best if best else 1.0
            rows.append(row)
            bar.advance(bar.task_ids[0])
    return rows


def means(rows: Sequence[Row]) -> list[Row]:
    """Averages over workloads: all, what is queued at once, conversations."""
    found = []
    for name, of_order in grouped(rows, "order").items():
        row: Row = {"order": name}
        for kind, has_turns in (("all", None), ("at_once", False), ("turns", True)):
            shares = [r["share"] for r in of_order if has_turns is None or r["has_turns"] == has_turns]
            row[kind] = sum(shares) / len(shares) if shares else None
            row[f"{kind} worst"] = min(shares, default=None)
        found.append(row)
    return found


COLUMNS = {
    "workload": "{workload}",
    "order": "{order}",
    "optimum": "{optimum:.1%}",
    "hit rate": "{hit_rate:.1%}",
    "share": "{share:.1%}",
    "requests/s": "{request_throughput:.1f}",
    "TTFT p50 ms": "{ttft_p50_ms:,.0f}",
    "p99 ms": "{ttft_p99_ms:,.0f}",
    "preempted": "{num_preemptions}",
}
MEANS = {"order": "{order}", "all": "{all}", "worst": "{all worst}", "at once": "{at_once}", "turns": "{turns}"}


def show(data: Data) -> None:
    """Prints a line a workload and order, then the averages."""
    print_table("Orders of admission in a quarter of the unique tokens", COLUMNS, data["rows"])
    shown = [
        {k: "-" if v is None else f"{v:.1%}" if isinstance(v, float) else v for k, v in row.items()}
        for row in means(data["rows"])
    ]
    print_table("Share of the optimum, averaged over workloads", MEANS, shown)


def plot(data: Data) -> Figure:
    """Draws each order's share of the optimum for each workload."""
    rows = data["rows"]
    figure, axis = pyplot().subplots(figsize=(13, 4.5))
    draw_bars(
        axis,
        {name: {row["workload"]: row["share"] for row in some} for name, some in grouped(rows, "order").items()},
        rotation=30,
        ha="right",
    )
    axis.axhline(0.96, color="gray", linewidth=0.7, linestyle="--")
    axis.set(ylabel="share of the optimum", ylim=(0, 1.05))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(grouped(rows, "order")), fontsize=8)
    return figure


def answer(data: Data) -> str:
    """The best order's share, where it falls short, and what the bound on waiting costs it."""
    found = means(data["rows"])
    best = max(found, key=lambda row: row["all"])
    aged, first = (next(row for row in found if row["order"] == name) for name in ("longest aged", "fcfs"))
    short = sorted({r["workload"] for r in data["rows"] if r["order"] == best["order"] and r["share"] < 0.96})
    return (
        f"{best['all']:.1%} of the hits that are possible (mean of {len(grouped(data['rows'], 'workload'))} workloads, "
        f"{best['all worst']:.1%} at worst) with the best order, {_words(best['order'])}, {aged['all']:.1%} with the "
        f"default, {first['all']:.1%} first come, first served"
        f"{'; the best is below 96% on ' + ', '.join(short) if short else ''}."
    )


def _words(name: str) -> str:
    order, _, queue_aware = ORDERS.get(name, (name, 0, False))
    return order.replace("_", " ") + (" first and queue-aware eviction" if queue_aware else " first")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("cache_aware_scheduling", __doc__)
    names = (*PAPER_WORKLOADS, *available())
    options.add_argument("--workload", nargs="+", choices=names, default=[], metavar="NAME", help=", ".join(names))
    given = options.parse_args(arguments)
    config = Config(("skeleton of thought",) if given.smoke else tuple(given.workload))
    run_experiment("cache_aware_scheduling", given.out, config, sys.modules[__name__], at_once=True)


if __name__ == "__main__":
    main()

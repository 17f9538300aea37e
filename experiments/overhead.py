"""How much of a serving run goes into the tree, the scheduler and the plan of tree attention?

The RadixAttention paper (2312.07104, section 6.3): 100 ShareGPT requests, nothing to reuse, 74.3 s, of which 0.2 s or
0.3 % manage the tree. Here the real scheduler, manager, cache and planner serve ShareGPT-like requests (lengths drawn
log-normal with the means of the vLLM paper, 2309.06180: 161 tokens in, 338 out) in virtual time at the step times of
their setting, Llama-7B on an A10G, and what they take of this machine's CPU is measured, three times, of which the
least counts. Expected: at most 0.3 % of the run, with hits and without; more on a GPU whose steps are much shorter.

    python -m experiments.overhead              one to two minutes
    python -m experiments.overhead --smoke
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from radixkv_kernels import TreePlans

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, parser, print_table
from experiments.lab.plots import Figure, draw_stacks, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.scheduler import Scheduler
from radixkv.simulate import ClosedLoop, Roofline, Simulator, run, summarize
from radixkv.simulate.model_shapes import Attention
from radixkv.traces import TraceRequest

ENTRY = Entry("index", seconds=15, place=3, report=("--repeats", "1"))

CACHE_METHODS = ("peek", "acquire", "advance", "insert", "unpin_partial", "release", "cancel", "commit", "evict")


@dataclass(frozen=True)
class Config:
    """Traffic and machines; `num_open` requests at once, turns of a conversation one after the other."""

    num_requests: int = 100
    num_turns: int = 5
    num_open: tuple[int, ...] = (16, 100)
    mean_input_tokens: float = 161.0
    mean_output_tokens: float = 338.0
    sigma: float = 1.0
    machines: tuple[tuple[str, str], ...] = (("llama-2-7b", "a10g"), ("llama-3-8b", "h100-sxm"))
    block_sizes: tuple[int, ...] = (1, 16)
    num_repeats: int = 3
    seed: int = 0


def sharegpt(config: Config, num_turns: int) -> list[TraceRequest]:
    """Returns requests without a shared token, or conversations of several turns whose histories are shared."""
    rng = np.random.default_rng(config.seed)

    def drawn(mean: float) -> bytes:
        count = int(np.clip(rng.lognormal(np.log(mean) - config.sigma**2 / 2, config.sigma), 4, 1500))
        return rng.integers(0, 32_000, count, dtype=np.int32).tobytes()

    requests = []
    for i in range(config.num_requests // num_turns):
        history = b""
        for turn in range(num_turns):
            prompt, output = history + drawn(config.mean_input_tokens), drawn(config.mean_output_tokens)
            requests.append(TraceRequest(f"{i}/{turn}", prompt, output, session=str(i)))
            history = prompt + output
    return requests


class Timed:
    """Calls through to a cache, and adds up the time that they take, but for reading the clock itself."""

    def __init__(self, cache: Any, clock: Callable[[], float]) -> None:
        self._cache = cache
        self.spent_s = 0.0
        self._reading_s = min(-clock() + clock() for _ in range(1000))
        for name in CACHE_METHODS:
            setattr(self, name, self._timed(getattr(cache, name), clock))

    def _timed(self, call: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = clock()
            try:
                return call(*args)
            finally:
                self.spent_s += clock() - started - self._reading_s

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Planning:
    """Makes each batch's plan of tree attention, as a runner does, and adds up the time that it takes."""

    def __init__(self, cost: Roofline, block_size: int, clock: Callable[[], float]) -> None:
        layer = cost.shape.mixers[0]
        assert isinstance(layer, Attention)
        self._plans = TreePlans(
            [None],
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=128,
            block_size=block_size,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            mode="auto",
        )
        self._clock = clock
        self.spent_s = 0.0

    def __call__(self, batch: ScheduledBatch) -> None:
        # A runner has these two for attention anyway.
        lens = np.array([item.end for item in batch.sequences], np.int64)
        counts = np.array([item.num_tokens for item in batch.sequences], np.int64)
        ends = np.concatenate([[0], np.cumsum(counts)])
        started = self._clock()
        sequences = batch.sequences
        self._plans.of([s.sequence_id for s in sequences], [s.block_table for s in sequences], lens, ends)
        self.spent_s += self._clock() - started

    @property
    def num_planned_steps(self) -> int:
        return self._plans.num_planned_steps


def measure(config: Config, requests: Sequence[TraceRequest], machine: tuple[str, str], size: int, at_once: int) -> Row:
    """Serves requests in virtual time, the same steps each time; returns the least that was spent on this CPU."""
    clock = time.thread_time
    spent: dict[str, float] = {}
    for _ in range(config.num_repeats):
        for is_timed in (False, True):  # the clocks around the tree would count as the scheduler's
            cost = Roofline.of(*machine, tree_attention=True)
            cache = RadixCache(size)
            timed = Timed(cache, clock)
            planning = Planning(cost, size, clock)
            scheduler = Scheduler(KVManager(timed if is_timed else cache, cost.num_blocks(size)))
            simulator = Simulator(scheduler, cost, on_batch=planning, clock=clock)
            row = summarize(run(simulator, ClosedLoop(requests, at_once)).served)
            found = {"plan": planning.spent_s}
            found |= {"tree": timed.spent_s} if is_timed else {"all": simulator.schedule_s}
            spent |= {name: min(seconds, spent.get(name, seconds)) for name, seconds in found.items()}
    spent["scheduler"] = spent.pop("all") - spent["tree"]
    return {
        "machine": ", ".join(machine),
        "block_size": size,
        "num_open": at_once,
        "hit_rate": row["hit_rate"],
        "duration_s": row["duration_s"],
        "num_preemptions": row["num_preemptions"],
        "num_steps": simulator.num_steps,
        "num_planned_steps": planning.num_planned_steps,
        "step_ms": 1e3 * simulator.busy_s / simulator.num_steps,
        **{f"{name}_s": seconds for name, seconds in spent.items()},
        "share": sum(spent.values()) / row["duration_s"],
        "host_us_per_step": 1e6 * sum(spent.values()) / simulator.num_steps,
    }


def cells(config: Config) -> Iterator[Cell]:
    """Yields a cell for each machine, block size and number of open requests, without hits and with."""
    for machine in config.machines:
        for size in config.block_sizes:
            for at_once in config.num_open:
                for traffic, num_turns in (("zero hits", 1), ("conversations", config.num_turns)):
                    name = f"{', '.join(machine)}, {size}, {at_once}, {traffic}"
                    yield name, partial(_cell, config, traffic, num_turns, machine, size, at_once)


def _cell(config: Config, traffic: str, num_turns: int, machine: tuple[str, str], size: int, at_once: int) -> list[Row]:
    requests = sharegpt(config, num_turns)
    few = replace(config, num_repeats=1)
    measure(few, requests[:5], machine, size, 5)  # first calls of everything
    return [{"traffic": traffic, **measure(config, requests, machine, size, at_once)}]


COLUMNS = {
    "machine": "{machine}",
    "traffic": "{traffic}",
    "block": "{block_size}",
    "open": "{num_open}",
    "hits": "{hit_rate:.0%}",
    "run s": "{duration_s:.1f}",
    "steps": "{num_steps:,}",
    "ms a step": "{step_ms:.1f}",
    "tree s": "{tree_s:.3f}",
    "scheduler s": "{scheduler_s:.3f}",
    "plan s": "{plan_s:.3f}",
    "share": "{share:.2%}",
}


def show(data: Data) -> None:
    """Prints a line a cell."""
    print_table("Host time of ShareGPT-like requests at simulated step times", COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the shares of each run, in percent, stacked."""
    rows = data["rows"]
    figure, axis = pyplot().subplots(figsize=(9, 0.4 * len(rows) + 1.2))
    labels = [f"{r['machine']}, {r['traffic']}, block {r['block_size']}, {r['num_open']} open" for r in rows]
    parts = ("tree", "scheduler", "plan")
    draw_stacks(axis, labels, {name: [100 * row[f"{name}_s"] / row["duration_s"] for row in rows] for name in parts})
    axis.axvline(0.3, color="gray", linewidth=0.8, linestyle="--")
    axis.set_xlabel("% of the run (the paper: 0.3)")
    axis.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence, of the paper's setting."""
    rows = [row for row in data["rows"] if row["machine"].endswith("a10g") and row["traffic"] == "zero hits"]
    row = max(rows, key=lambda row: row["share"])
    return (
        f"At the paper's step times and with zero hits, tree, scheduler and plan take {row['share']:.2%} of a run of "
        f"{row['duration_s']:.0f} s at most, the tree alone {row['tree_s'] / row['duration_s']:.2%}."
    )


def costs(data: Data) -> Iterator[str]:
    """Host time on a GPU with short steps."""
    shares = [row["share"] for row in data["rows"] if row["machine"].endswith("h100-sxm")]
    if shares:
        yield (
            f"Tree, scheduler and plan together take {min(shares):.1%} to {max(shares):.1%} of a run at an H100's "
            "step times (simulated)."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("overhead", __doc__)
    options.add_argument("--repeats", type=int, default=Config.num_repeats, help="of each run, the quickest counts (3)")
    given = options.parse_args(arguments)
    config = Config(num_repeats=given.repeats)
    if given.smoke:
        config = replace(config, num_requests=10, num_open=(5,), block_sizes=(16,), num_repeats=1)
    run_experiment("overhead", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

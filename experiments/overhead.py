"""How much of a serving run goes into the tree, the scheduler and the plan of tree attention?

The RadixAttention paper (2312.07104, section 6.3): 100 ShareGPT requests, nothing to reuse, 74.3 s, of which 0.2 s or
0.3 % manage the tree. Here the real scheduler, manager, cache and planner serve ShareGPT-like requests (lengths drawn
log-normal with the means of the vLLM paper, 2309.06180: 161 tokens in, 338 out) in virtual time at the step times of
their setting, Llama-7B on an A10G, and what they take of this machine's CPU is measured, three times, of which the
least counts. Expected: at most 0.3 % of the run, with hits and without; more on a GPU whose steps are much shorter.

    python -m experiments.overhead              one to two minutes
    python -m experiments.overhead --smoke
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.harness import Row, console, parser, print_table, progress, pyplot, save
from radixkv.batch import ScheduledBatch
from radixkv.cache.radix import RadixCache
from radixkv.kv_manager import KVManager
from radixkv.model.presets import TINY_GPT
from radixkv.scheduler import Scheduler
from radixkv.simulate import ClosedLoop, Roofline, Simulator, run, summarize
from radixkv.tree_plans import TreePlans
from radixkv.workloads import TraceRequest

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
    """Calls through to a cache, and adds up the time that they take."""

    def __init__(self, cache: Any, clock: Callable[[], float]) -> None:
        self._cache = cache
        self.spent_s = 0.0
        for name in CACHE_METHODS:
            setattr(self, name, self._timed(getattr(cache, name), clock))

    def _timed(self, call: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = clock()
            try:
                return call(*args)
            finally:
                self.spent_s += clock() - started

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Planning:
    """Makes each batch's plan of tree attention, as a runner does, and adds up the time that it takes."""

    def __init__(self, cost: Roofline, block_size: int, clock: Callable[[], float]) -> None:
        shape = cost.shape
        # Plans depend on heads and windows alone.
        config = replace(TINY_GPT, num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, head_dim=128)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "mode": "auto"}
        self._plans = TreePlans(config, block_size=block_size, **options)
        self._clock = clock
        self.spent_s = 0.0

    def __call__(self, batch: ScheduledBatch) -> None:
        # A runner has these two for attention anyway.
        lens = np.array([item.end for item in batch.sequences], np.int64)
        counts = np.array([item.num_tokens for item in batch.sequences], np.int64)
        ends = np.concatenate([[0], np.cumsum(counts)])
        started = self._clock()
        self._plans.of(batch.sequences, lens, ends)
        self.spent_s += self._clock() - started

    @property
    def num_planned_steps(self) -> int:
        return self._plans.num_planned_steps


def measure(config: Config, requests: Sequence[TraceRequest], machine: tuple[str, str], size: int, at_once: int) -> Row:
    """Serves requests in virtual time, the same steps each time; returns the least that was spent on this CPU."""
    clock = time.thread_time
    spent: dict[str, float] = {}
    for _ in range(config.num_repeats):
        cost = Roofline.of(*machine, tree_attention=True)
        cache = Timed(RadixCache(size), clock)
        planning = Planning(cost, size, clock)
        scheduler = Scheduler(KVManager(cache, cost.num_blocks(size)))
        simulator = Simulator(scheduler, cost, on_batch=planning, clock=clock)
        row = summarize(run(simulator, ClosedLoop(requests, at_once)).served)
        found = {"tree": cache.spent_s, "scheduler": simulator.schedule_s - cache.spent_s, "plan": planning.spent_s}
        spent = {name: min(seconds, spent.get(name, seconds)) for name, seconds in found.items()}
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


def measure_all(config: Config) -> list[Row]:
    """Returns a row for each machine, block size, number of open requests, with hits and without."""
    rows = []
    traffic = {"zero hits": sharegpt(config, 1), "conversations": sharegpt(config, config.num_turns)}
    with progress("overhead", len(config.machines) * len(config.block_sizes) * len(config.num_open) * 2) as bar:
        for machine in config.machines:
            for size in config.block_sizes:
                for at_once in config.num_open:
                    for name, requests in traffic.items():
                        rows.append({"traffic": name, **measure(config, requests, machine, size, at_once)})
                        bar.advance(bar.task_ids[0])
    return rows


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


def plot(rows: Sequence[Row], path: Path) -> None:
    """Shares of each run, in percent, stacked."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(rows) + 1.2))
    labels = [f"{r['machine']}, {r['traffic']}, block {r['block_size']}, {r['num_open']} open" for r in rows]
    left = np.zeros(len(rows))
    for name in ("tree", "scheduler", "plan"):
        width = np.array([100 * row[f"{name}_s"] / row["duration_s"] for row in rows])
        axes.barh(labels, width, left=left, label=name)
        left += width
    axes.axvline(0.3, color="gray", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel("% of the run (the paper: 0.3)")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("overhead", __doc__, "overhead.json and overhead.png")
    options.add_argument("--smoke", action="store_true", help="a few seconds, too short to quote")
    given = options.parse_args(arguments)
    config = Config()
    if given.smoke:
        config = replace(config, num_requests=10, num_open=(5,), block_sizes=(16,), num_repeats=1)
    measure(
        config, sharegpt(replace(config, num_requests=5), 1), config.machines[0], 16, 5
    )  # first calls of everything
    rows = measure_all(config)
    print_table("Host time of ShareGPT-like requests at simulated step times", COLUMNS, rows)
    path = save(given.out, "overhead", asdict(config), rows)
    plot(rows, given.out / "overhead.png")
    console.print(path, highlight=False)


if __name__ == "__main__":
    main()

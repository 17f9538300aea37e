"""When blocks run short, what gives way first: cached prefixes that no request uses now, or a running request?

A cached prefix costs its recomputation, and only if it is wanted again; a preempted request costs it for certain, and
its caller waits. Expected: evicting first computes fewer tokens and preempts far less, at every size of pool.

    python -m experiments.evict_or_preempt
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from experiments.dry_run import dry_run
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.scheduling.sequence import RunningSequence

ENTRY = Entry("serving", seconds=2, place=5)


@dataclass(frozen=True)
class Config:
    """Chats under a few system prompts, with outputs long enough to outgrow what admission saw."""

    num_requests: int = 120
    num_systems: int = 6
    system_tokens: int = 256
    question_tokens: int = 64
    max_tokens: int = 160
    num_per_step: int = 2
    num_blocks: tuple[int, ...] = (150, 250, 400, 800)
    seed: int = 7


class PreemptFirst(Scheduler):
    """The same scheduler with the other rule: it evicts only what no preemption could spare."""

    def grow(self, running: RunningSequence, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(running.blocks.block_table)
        while missing > self.manager.allocator.num_free:
            victim = self.victim(running)
            if victim is None:
                break
            self.preempt(victim)
        return super().grow(running, num_tokens)


SCHEDULERS = {"preempt first": PreemptFirst, "evict first": Scheduler}


def cells(config: Config) -> Iterator[Cell]:
    """A cell a pool and rule."""
    for num_blocks in config.num_blocks:
        for name in SCHEDULERS:
            yield f"{num_blocks} {name}", partial(measure, config, num_blocks, name)


def measure(config: Config, num_blocks: int, name: str) -> list[Row]:
    """Serves the requests with one scheduler in one pool."""
    rng = np.random.default_rng(config.seed)
    systems = rng.integers(0, 32_000, (config.num_systems, config.system_tokens))
    requests = []
    for i in range(config.num_requests):
        question = rng.integers(0, 32_000, config.question_tokens)
        prompt = (*systems[rng.integers(config.num_systems)].tolist(), *question.tolist())
        requests.append(Request(str(i), prompt, SamplingParams(max_tokens=config.max_tokens)))
    made = SCHEDULERS[name](KVManager(RadixCache(16), num_blocks), SchedulerConfig(order="fcfs"))
    found = dry_run(made, requests, num_per_step=config.num_per_step)
    return [{"num_blocks": num_blocks, "rule": name, **asdict(found), "hit_rate": found.hit_rate}]


COLUMNS = {
    "pool": "{num_blocks}",
    "rule": "{rule}",
    "preemptions": "{num_preemptions:,}",
    "evicted": "{num_evicted_blocks:,}",
    "tokens computed": "{num_computed_tokens:,}",
    "hit rate": "{hit_rate:.1%}",
    "steps": "{num_steps:,}",
}


def show(data: Data) -> None:
    """Prints a line a pool and rule."""
    print_table(f"{data['config']['num_requests']} chats in pools of blocks of 16", COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the tokens computed in each pool."""
    return bars(data["rows"], "num_blocks", "rule", "num_computed_tokens", "tokens computed", "What gives way first")


def answer(data: Data) -> str:
    """One sentence, of the smallest pool."""
    smallest = min(row["num_blocks"] for row in data["rows"])
    evict, preempt = (
        next(row for row in data["rows"] if (row["num_blocks"], row["rule"]) == (smallest, rule))
        for rule in ("evict first", "preempt first")
    )
    fewer = 1 - evict["num_computed_tokens"] / preempt["num_computed_tokens"]
    return (
        f"Cached prefixes: in a pool of {smallest} blocks that computes {fewer:.0%} fewer tokens than preempting "
        f"first, with {evict['num_preemptions']} preemptions for {preempt['num_preemptions']}."
    )


main = command(__name__, Config(), Config(num_blocks=Config.num_blocks[:2]))


if __name__ == "__main__":
    main()

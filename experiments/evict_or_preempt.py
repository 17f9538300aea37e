"""When blocks run short, who gives way first: cached prefixes that nobody uses now, or a running request?

A cached prefix costs its recomputation, and only if it is wanted again; a preempted request costs it for certain, and
its caller waits. Expected: evicting first computes fewer tokens and preempts far less, at every size of pool.

    python -m experiments.evict_or_preempt
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from experiments.dry_run import dry_run
from experiments.harness import Row, console, parser, print_table, save
from radixkv.cache.radix import RadixCache
from radixkv.kv_manager import KVManager
from radixkv.request import Request, SamplingParams
from radixkv.running import RunningSequences
from radixkv.scheduler import Scheduler, SchedulerConfig
from radixkv.sequence import Sequence as Running


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


class Preempting(RunningSequences):
    """Evicts only what no preemption could spare."""

    def grow(self, sequence: Running, num_tokens: int) -> bool:
        assert sequence.blocks is not None
        missing = -(-num_tokens // self.block_size) - len(sequence.blocks.block_table)
        while missing > self.manager.allocator.num_free:
            victim = self.victim(sequence)
            if victim is None:
                break
            self.preempt(victim)
        return super().grow(sequence, num_tokens)


class PreemptFirst(Scheduler):
    """The same scheduler with the other rule."""

    def _make_running(self) -> RunningSequences:
        return Preempting(self.manager, self.waiting.add)


def run(config: Config) -> list[Row]:
    """Serves the same requests with each scheduler in each pool."""
    rng = np.random.default_rng(config.seed)
    systems = rng.integers(0, 32_000, (config.num_systems, config.system_tokens))
    requests = []
    for i in range(config.num_requests):
        question = rng.integers(0, 32_000, config.question_tokens)
        prompt = (*systems[rng.integers(config.num_systems)].tolist(), *question.tolist())
        requests.append(Request(str(i), prompt, SamplingParams(max_tokens=config.max_tokens)))
    rows = []
    for num_blocks in config.num_blocks:
        for name, scheduler in (("preempt first", PreemptFirst), ("evict first", Scheduler)):
            made = scheduler(KVManager(RadixCache(16), num_blocks), SchedulerConfig(order="fcfs"))
            found = dry_run(made, requests, num_per_step=config.num_per_step)
            rows.append({"num_blocks": num_blocks, "rule": name, **asdict(found), "hit_rate": found.hit_rate})
    return rows


COLUMNS = {
    "pool": "{num_blocks}",
    "rule": "{rule}",
    "preemptions": "{num_preemptions:,}",
    "evicted": "{num_evicted_blocks:,}",
    "tokens computed": "{num_computed_tokens:,}",
    "hit rate": "{hit_rate:.1%}",
    "steps": "{num_steps:,}",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("evict_or_preempt", __doc__, "evict_or_preempt.json")
    given = options.parse_args(arguments)
    config = Config()
    rows = run(config)
    print_table(f"{config.num_requests} chats in pools of blocks of 16", COLUMNS, rows)
    console.print(save(given.out, "evict_or_preempt", asdict(config), rows), highlight=False)


if __name__ == "__main__":
    main()

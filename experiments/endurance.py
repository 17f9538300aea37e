"""Is anything lost or kept that should not be, over 100,000 requests?

The whole engine, without a model: tenants that come once, prompts that share, preemption, failing steps, aborts and
resets, on a pool that is always full. Expected: after every request has ended no block is private or pinned; memory is
flat from the first tenth on; what tracemalloc finds allocated after the last tenth and not before it is nothing that
grows.

    python -m experiments.endurance            100,000 requests, a few minutes
    python -m experiments.endurance --smoke    1,500
"""

import gc
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table, resident_bytes
from experiments.lab.plots import Figure, draw_lines, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import BlockCopy, KVManager
from radixkv.cache.namespace import Salt
from radixkv.engine.engine import Engine
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig

ENTRY = Entry("growth", seconds=7, place=2, report=("--smoke",))

VOCABULARY = 1000


class NoModel:
    """Stands for the runner: every request gets the same token, and each 50th forward pass fails."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_positions=100_000)
        self.num_calls = 0
        self.owner: object = None

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 50 == 0:
            raise MemoryError("planted")
        logits = torch.zeros(sum(item.needs_logits for item in batch.sequences), VOCABULARY)
        logits[:, 7] = 1.0
        return logits

    def copy(self, copies: list[BlockCopy]) -> None:
        pass


class Traffic:
    """Adds requests and steps, so that about 24 are always under way."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.shared = self.rng.integers(0, VOCABULARY, (40, 96)).tolist()
        self.num_added = 0

    def serve(self, count: int) -> None:
        """Serves so many requests to their ends."""
        for _ in range(count):
            number, (group, length, own, kind) = (
                self.num_added,
                self.rng.integers(0, (40, 96, VOCABULARY, 100)).tolist(),
            )
            namespace = Salt(f"tenant {number}") if kind < 30 else None
            params = SamplingParams(max_tokens=1 + number % 30, n=1 + 2 * (kind == 99))
            name = self.engine.add_request(
                [*self.shared[group][:length], own, number % 997], params, namespace=namespace
            )
            self.num_added += 1
            if kind == 50:
                self.engine.abort(name)
            if number % 9973 == 9972:
                self.engine.reset_cache(namespace)
            while len(self.engine.generations) >= 24:
                self.engine.step()
        while self.engine.has_unfinished_requests:
            self.engine.step()


CACHES = ("radix:16", "radix:1", "flat_hash:16")


@dataclass(frozen=True)
class Config:
    num_requests: int = 100_000
    num_samples: int = 10  # of memory, over the run
    num_blocks: int = 60
    seed: int = 7
    caches: tuple[str, ...] = CACHES


def cells(config: Config) -> Iterator[Cell]:
    """A cell a cache."""
    for name in config.caches:
        yield name, partial(measure, config, name)


def measure(config: Config, name: str) -> list[Row]:
    """Serves the requests; a row a sample of memory, the last with what was kept."""
    cache, _, block_size = name.partition(":")
    rows, kept = run(cache, int(block_size), config)
    rows[-1]["kept"] = kept
    return rows


def run(cache: str, block_size: int, config: Config) -> tuple[list[Row], list[str]]:
    """Serves the requests; returns memory over time, and what tracemalloc found kept by the last tenth."""
    num_blocks = config.num_blocks * 16 // block_size
    manager = KVManager(CacheConfig(cache, block_size).make(), num_blocks)
    scheduler = Scheduler(manager, SchedulerConfig(512, 32, max_overtakes=64))
    runner: Any = NoModel(num_blocks, block_size)
    engine = Engine(runner, scheduler)
    traffic = Traffic(engine, config.seed)
    rows: list[Row] = []
    part = config.num_requests // config.num_samples
    before = None
    for index in range(config.num_samples):
        is_last = index == config.num_samples - 1
        if is_last:  # the same state before and after: nothing cached
            tracemalloc.start()
            traffic.serve(part // 4)
            before = snapshot(engine)
        began = time.process_time()
        traffic.serve(part - part // 4 if is_last else part)
        sizes = manager.sizes
        manager.check()
        assert sizes.private == sizes.pinned == 0 and not engine.generations
        rows.append(
            {
                "cache": f"{cache} {block_size}",
                "requests": traffic.num_added,
                "resident_mib": resident_bytes() / 2**20,
                "num_objects": len(gc.get_objects()),
                "seconds": time.process_time() - began,
                "hit_rate": engine.metrics.num_hit_tokens / engine.metrics.num_prompt_tokens,
                "num_preemptions": engine.metrics.num_preemptions,
                "num_failed_steps": engine.metrics.num_failed_steps,
            }
        )
    assert before is not None
    grown = [d for d in snapshot(engine).compare_to(before, "lineno") if d.size_diff > 0]
    tracemalloc.stop()
    kept = sum(difference.size_diff for difference in grown)
    per_request = kept / (part - part // 4)
    return rows, [
        f"{kept:,} bytes in all, {per_request:.2f} a request",
        *(str(line).replace(f"{Path(__file__).parents[1]}/", "") for line in grown[:5]),
    ]


def snapshot(engine: Engine) -> tracemalloc.Snapshot:
    """What this package has allocated, with nothing cached."""
    engine.reset_cache()
    gc.collect()
    return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/radixkv/*")])


def plot(data: Data) -> Figure:
    """Draws resident memory against requests served."""
    figure, axis = pyplot().subplots()
    draw_lines(axis, grouped(data["rows"], "cache"), "requests", "resident_mib")
    axis.set(xlabel="requests served", ylabel="resident memory, MiB", ylim=(0, None))
    return figure


COLUMNS = {
    "cache": "{cache}",
    "requests": "{requests:,}",
    "resident MiB": "{resident_mib:.1f}",
    "objects": "{num_objects:,}",
    "CPU s": "{seconds:.1f}",
    "hit rate": "{hit_rate:.1%}",
    "preemptions": "{num_preemptions:,}",
    "failed steps": "{num_failed_steps:,}",
}


def show(data: Data) -> None:
    """Prints a line a sample, and what the last requests kept."""
    notes = [
        f"{row['cache']}: kept by the last requests: {'; '.join(row['kept'])}" for row in data["rows"] if "kept" in row
    ]
    print_table(f"{data['config']['num_requests']:,} requests a cache, none lost", COLUMNS, data["rows"], notes)


def answer(data: Data) -> str:
    """One sentence: how much memory grew between the middle of the run and its end."""
    told = []
    for name, rows in grouped(data["rows"], "cache").items():
        some = [row["resident_mib"] for row in rows]
        told.append(f"{name} {some[len(some) // 2]:.1f} to {some[-1]:.1f} MiB")
    return f"No block was lost; resident memory from the middle of the run to its end: {', '.join(told)}."


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("endurance", __doc__)
    options.add_argument("--caches", nargs="+", default=CACHES, metavar="CACHE:BLOCK_SIZE", help=f"{', '.join(CACHES)}")
    given = options.parse_args(arguments)
    config = Config(1500, 3) if given.smoke else Config()
    config = replace(config, caches=tuple(given.caches))
    run_experiment("endurance", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

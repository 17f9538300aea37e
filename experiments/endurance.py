"""Is anything lost or kept that should not be, over 100,000 requests?

The whole engine, without a model: tenants that come once, prompts that share, preemption, failing steps, aborts and
resets, on a pool that is always full. Expected: after every request has ended no block is private or pinned; memory is
flat from the first tenth on; what tracemalloc finds allocated after the last tenth and not before it is nothing that
grows.

    python -m experiments.endurance            100,000 requests, a few minutes
    python -m experiments.endurance --smoke    1,500
"""

import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.endurance_traffic import NoModel, Traffic
from experiments.lab.harness import Row, parser, print_table, resident_bytes
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Cell, Data, conduct
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.engine.engine import Engine
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig

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
    manager = KVManager(CacheConfig(cache, block_size).make(), config.num_blocks * 16 // block_size)
    scheduler = Scheduler(manager, SchedulerConfig(512, 32, max_overtakes=64))
    runner: Any = NoModel()
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


def plot(path: Path) -> Path:
    """Draws resident memory against requests served, from the JSON alone."""
    rows = json.loads(path.read_text())["rows"]
    figure, axis = pyplot().subplots()
    for name in dict.fromkeys(row["cache"] for row in rows):
        some = [row for row in rows if row["cache"] == name]
        axis.plot([row["requests"] for row in some], [row["resident_mib"] for row in some], "o-", label=name)
    axis.set(xlabel="requests served", ylabel="resident memory, MiB", ylim=(0, None))
    axis.legend()
    return finish(figure, path)


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
    for name in dict.fromkeys(row["cache"] for row in data["rows"]):
        some = [row["resident_mib"] for row in data["rows"] if row["cache"] == name]
        told.append(f"{name} {some[len(some) // 2]:.1f} to {some[-1]:.1f} MiB")
    return f"No block was lost; resident memory from the middle of the run to its end: {', '.join(told)}."


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("endurance", __doc__)
    options.add_argument("--caches", nargs="+", default=CACHES, metavar="CACHE:BLOCK_SIZE", help=f"{', '.join(CACHES)}")
    given = options.parse_args(arguments)
    config = Config(1500, 3) if given.smoke else Config()
    config = replace(config, caches=tuple(given.caches))
    conduct("endurance", given.out, config, cells(config), sys.modules[__name__])


if __name__ == "__main__":
    main()

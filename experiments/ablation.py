"""Which part of the design earns what, from no cache to all of it?

After figure 8 (c) of the RadixAttention paper (2312.07104), with our additions: no cache; the flat hash (no tree);
radix first come first served, random, and longest prefix first; then with ageing (`max_overtakes`), with queue-aware
eviction, with in-batch sharing (published when scheduled and not when computed, and waited for), with tree attention.
Simulated for Llama-3-8B on an H100, in a pool of max(25 % of the unique tokens, twice the longest request), and
measured with tiny_gpt on this CPU in CPU time, where all variants must generate the same tokens. Expected: each part
serves more than the one before or as much, but ageing, which pays for its bound on the longest wait.

    python -m experiments.ablation              about two minutes
    python -m experiments.ablation --smoke
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import pool_blocks
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager, SequenceBlocks
from radixkv.blocks.replay import Replay
from radixkv.cache.tokens import TokenIds, pack, unpack
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.scheduling.sequence import Sequence as Waiting
from radixkv.simulate import ClosedLoop, Roofline, Simulator, run, summarize
from radixkv.traces import TraceRequest, open_workload

ENTRY = Entry("policies", seconds=34, place=3)


class PublishAtCommit(KVManager):
    """The same manager, but what a step computes can be matched when it has run and not before."""

    def __init__(self, cache: Any, num_blocks: int) -> None:
        super().__init__(cache, num_blocks)
        self._held: list[tuple[SequenceBlocks, bytes, int, bool]] = []

    def publish(self, sequence: SequenceBlocks, token_ids: TokenIds, *, start: int = 0, keep_own: bool = False) -> int:
        self._held.append((sequence, pack(token_ids), start, keep_own))
        return 0

    def commit(self) -> None:
        super().commit()
        for sequence, tokens, start, keep_own in self._held:
            super().publish(sequence, tokens, start=start, keep_own=keep_own)
        self._held.clear()
        super().commit()

    def withdraw(self) -> None:
        self._held.clear()
        super().withdraw()


class ApartScheduler(Scheduler):
    """A scheduler without in-batch sharing, over a manager that publishes at commit: no sequence waits for another."""

    def computes_for(self, sequence: Waiting) -> bool:
        return False


NEVER = 10**9


@dataclass(frozen=True)
class Variant:
    """What is switched on."""

    name: str
    cache: str = "radix"
    order: str = "longest_prefix"
    max_overtakes: int = NEVER
    queue_aware: bool = False
    in_batch: bool = False
    tree_attention: bool = False


VARIANTS = (
    Variant("no cache", cache="null", order="fcfs"),
    Variant("flat hash (no tree)", cache="flat_hash", order="fcfs"),
    Variant("radix, first come", order="fcfs"),
    Variant("radix, random", order="random"),
    Variant("radix, longest prefix"),
    Variant("+ ageing", max_overtakes=64),
    Variant("+ queue-aware eviction", max_overtakes=64, queue_aware=True),
    Variant("+ in-batch sharing", max_overtakes=64, queue_aware=True, in_batch=True),
    Variant("+ tree attention", max_overtakes=64, queue_aware=True, in_batch=True, tree_attention=True),
)


@dataclass(frozen=True)
class Config:
    """Workloads with their sizes; `num_open` sessions at once; requests without sessions are all queued at once.

    The bound on overtaking is 64 and not the scheduler's 256, which fewer requests than that would never meet.
    """

    model: str = "llama-3-8b"
    gpu: str = "h100-sxm"
    workloads: tuple[tuple[str, int], ...] = (
        ("few_shot", 400),
        ("tree_of_thought", 800),
        ("multi_turn", 400),
        ("agent", 240),
        ("document_qa", 200),
    )
    num_open: int = 64
    block_size: int = 16
    num_measured: int = 24
    measured_blocks: int = 160
    seed: int = 0


def make_scheduler(variant: Variant, config: Config, num_blocks: int, **limits: int) -> Scheduler:
    """Returns the scheduler of a variant over its manager and cache."""
    cache = CacheConfig(variant.cache, config.block_size, hash_algorithm="xxhash").make()
    options = SchedulerConfig(
        order=variant.order,
        max_overtakes=variant.max_overtakes,
        queue_aware=variant.queue_aware and variant.cache == "radix",
        seed=config.seed,
        **limits,
    )
    if variant.in_batch:
        return Scheduler(KVManager(cache, num_blocks), options)
    return ApartScheduler(PublishAtCommit(cache, num_blocks), options)


def workload(name: str, count: int, config: Config, **sizes: Any) -> list[TraceRequest]:
    """Returns the first requests of a workload; only those that grow by what was answered are in sessions."""
    made = open_workload(name, seed=config.seed, limit=count, **sizes)
    grows = name in ("multi_turn", "agent")
    return [request if grows else replace(request, session=None) for request in made]


def simulate(config: Config, name: str, count: int) -> list[Row]:
    """Serves a workload with every variant in virtual time."""
    requests = workload(name, count, config)
    replay = Replay(CacheConfig("radix", 1), cache_outputs=True)
    for request in requests:
        replay.feed(request.prompt, request.output)
    num_blocks = pool_blocks(requests, replay.peak_blocks, config.block_size)
    num_open = config.num_open if requests[0].session else len(requests)
    rows = []
    for variant in VARIANTS:
        cost = Roofline.of(config.model, config.gpu, tree_attention=variant.tree_attention)
        simulator = Simulator(make_scheduler(variant, config, num_blocks), cost)
        row = summarize(run(simulator, ClosedLoop(requests, num_open)).served)
        shared = simulator.num_kv_tokens / max(simulator.num_unique_kv_tokens, 1)
        named = {"part": "simulated", "workload": name, "variant": variant.name}
        rows.append({**named, "num_blocks": num_blocks, "kv_shared": shared, **row})
    for row in rows:
        row["speedup"] = row["request_throughput"] / rows[0]["request_throughput"]
    return rows


def measure(config: Config) -> list[Row]:
    """Serves a small workload on tiny_gpt with every variant; in CPU time of its thread.

    Raises:
        AssertionError: two variants generated different tokens.
    """
    import torch

    from radixkv.engine.engine import Engine
    from radixkv.engine.model.checkpoint import load_checkpoint
    from radixkv.engine.runner import Runner
    from radixkv.scheduling.request import SamplingParams

    torch.set_num_threads(1)
    sizes = {"num_tasks": 3, "vocab_size": 250, "output_tokens": 8}
    requests = workload("few_shot", config.num_measured, config, **sizes)
    rows: list[Row] = []
    answers = []
    model = load_checkpoint("tiny_gpt").model
    for variant in VARIANTS:
        runner = Runner(
            model,
            num_blocks=config.measured_blocks,
            block_size=config.block_size,
            deterministic=True,
            tree_attention="on" if variant.tree_attention else "off",
        )
        scheduler = make_scheduler(variant, config, config.measured_blocks, max_num_batched_tokens=512)
        engine = Engine(runner, scheduler)
        started = time.thread_time()
        outputs = engine.generate(
            [unpack(request.prompt).tolist() for request in requests], SamplingParams(max_tokens=8, ignore_eos=True)
        )
        seconds = time.thread_time() - started
        num_prompt = sum(request.num_prompt_tokens for request in requests)
        hits = sum(output.num_cached_tokens for output in outputs) / num_prompt
        rows.append({"part": "measured", "variant": variant.name, "cpu_s": seconds, "hit_rate": hits})
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert all(answer == answers[0] for answer in answers), "the variants generated different tokens"
    for row in rows:
        row["speedup"] = rows[0]["cpu_s"] / row["cpu_s"]
    return rows


def cells(config: Config) -> Iterator[Cell]:
    """Yields a cell for each workload that is simulated, and one for what is measured."""
    for name, count in config.workloads:
        yield name, partial(simulate, config, name, count)
    yield "measured", partial(measure, config)


COLUMNS = {
    "workload": "{workload}",
    "variant": "{variant}",
    "hit rate": "{hit_rate:.1%}",
    "requests/s": "{request_throughput:.1f}",
    "over no cache": "{speedup:.2f}",
    "TTFT p50 ms": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
    "KV shared": "{kv_shared:.2f}",
    "preempted": "{num_preemptions}",
}
MEASURED = {
    "variant": "{variant}",
    "hit rate": "{hit_rate:.1%}",
    "CPU s": "{cpu_s:.2f}",
    "over no cache": "{speedup:.2f}",
}


def show(data: Data) -> None:
    """Prints a line for each workload and variant, and one for each variant that was measured."""
    config = data["config"]
    simulated, measured = _parts(data)
    print_table(f"{config['model']} on {config['gpu']}, simulated", COLUMNS, simulated)
    title = f"tiny_gpt on this CPU, {config['num_measured']} few-shot requests, the same tokens"
    print_table(title, MEASURED, measured)


def _parts(data: Data) -> tuple[list[Row], list[Row]]:
    rows = data["rows"]
    return [r for r in rows if r["part"] == "simulated"], [r for r in rows if r["part"] == "measured"]


def plot(data: Data) -> Figure:
    """Draws throughput of each variant over that without a cache: each workload's, and what was measured."""
    simulated, measured = _parts(data)
    figure, axis = pyplot().subplots(figsize=(10, 4.6))
    rows = [*simulated, *(row | {"workload": "tiny_gpt, measured"} for row in measured)]
    variants = grouped(rows, "variant").items()
    draw_bars(axis, {name: {row["workload"]: row["speedup"] for row in some} for name, some in variants})
    axis.set(ylabel="throughput over no cache")
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def answer(data: Data) -> str:
    """One sentence: geometric means over the workloads."""
    simulated, _ = _parts(data)

    def mean(variant: str) -> float:
        return float(np.exp(np.mean([np.log(row["speedup"]) for row in simulated if row["variant"] == variant])))

    names = ("flat hash (no tree)", "radix, first come", "radix, longest prefix", "+ ageing", "+ tree attention")
    told = ", ".join(f"{mean(name):.2f} with {name.removeprefix('+ ')}" for name in names)
    return f"Throughput over no cache, geometric mean of the workloads: {told} and all before."


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser("ablation", __doc__).parse_args(arguments)
    config = Config()
    if given.smoke:
        config = replace(config, workloads=(("few_shot", 30), ("multi_turn", 20)), num_open=8, num_measured=2)
    run_experiment("ablation", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

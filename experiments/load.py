"""Does anything grow faster than it should?

Queues, trees, prompts and batches of ever larger size, without a model. Expected: the time per request does not depend
on how many wait; matching, publishing and evicting not on how many nodes the tree has; publishing a prompt in chunks is
linear in its length; a step of n decodes is linear in n. Each curve is fitted with time = a * size ** exponent: 1 is
linear in what was done. CPU time, of the scheduler and the cache alone.

    python -m experiments.load            10,000 requests, 1,000,000 nodes, 1,048,576 tokens, 1,024 decodes: minutes
    python -m experiments.load --smoke    a hundredth of it
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.dry_run import dry_run
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table, resident_bytes
from experiments.lab.plots import Figure, draw_lines, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig

ENTRY = Entry("growth", seconds=13, place=1, report=("--nodes", "250000"))


@dataclass(frozen=True)
class Config:
    """The largest sizes; each is reached in num_sizes steps of a factor of 2 (trees: of 4)."""

    num_requests: int = 10_000
    num_nodes: int = 1_000_000
    num_prompt_tokens: int = 2**20
    num_decodes: int = 1024
    num_sizes: int = 5
    seed: int = 7


def queue(num_requests: int, seed: int) -> float:
    """All requests arrive at once, in 50 groups that share 128 tokens, with 64 of their own; returns seconds in all."""
    rng = np.random.default_rng(seed)
    shared, own = rng.integers(0, 32_000, (50, 128)), rng.integers(0, 32_000, (num_requests, 64))
    scheduler = Scheduler(KVManager(RadixCache(16), 16_384), SchedulerConfig(max_num_batched_tokens=8192))
    params = SamplingParams(max_tokens=1)
    requests = [Request(str(i), tuple(shared[i % 50].tolist() + own[i].tolist()), params) for i in range(num_requests)]
    began = time.process_time()
    dry_run(scheduler, requests)
    return time.process_time() - began


def prompt(num_tokens: int, seed: int) -> float:
    """One prompt in chunks of 8,192; returns seconds of scheduling and publishing it."""
    tokens = tuple(np.random.default_rng(seed).integers(0, 32_000, num_tokens).tolist())
    scheduler = Scheduler(KVManager(RadixCache(16), num_tokens // 16 + 8), SchedulerConfig(8192))
    scheduler.add(Request("one", tokens, SamplingParams(max_tokens=1)))
    began = time.process_time()
    num_computed = 0
    while num_computed < num_tokens:
        num_computed += scheduler.schedule().num_tokens
        scheduler.commit()
    return time.process_time() - began


def decodes(num_sequences: int, seed: int) -> float:
    """Returns seconds of a step in which so many sequences, of 64 tokens and more, decode; the mean of 64 steps."""
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(KVManager(RadixCache(16), num_sequences * 16), SchedulerConfig(2**20, num_sequences))
    for i, tokens in enumerate(rng.integers(0, 32_000, (num_sequences, 64)).tolist()):
        scheduler.add(Request(str(i), tuple(tokens), SamplingParams(max_tokens=130)))
    began = 0.0
    for step in range(65):
        if step == 1:
            began = time.process_time()
        scheduler.schedule()
        sequences = scheduler.commit()
        for sequence in sequences:
            scheduler.append_token(sequence, step)
    assert len(sequences) == num_sequences
    return (time.process_time() - began) / 64


def trees(sizes: Sequence[int], seed: int) -> Iterator[tuple[int, dict[str, float], float]]:
    """Grows one tree; at each size yields seconds of 2,000 operations of each kind, and bytes of memory a node."""
    rng, cache = np.random.default_rng(seed), RadixCache(4)
    started_bytes, num_nodes, next_block = resident_bytes(), 0, 0

    def publish(count: int) -> None:  # each request a node: a block of its own behind one of 1,000 common ones
        nonlocal next_block
        for first, *rest in rng.integers(0, 2**31 - 1, (count, 5)).tolist():
            key = [first % 1000, 0, 0, 0, *rest[:3], first]
            lease = cache.acquire(key)
            num_new = (len(key) - lease.num_tokens) // 4
            cache.insert(lease, key[lease.num_tokens :], range(next_block, next_block + num_new))
            next_block += num_new
            cache.commit()
            cache.release(lease)

    def match(count: int) -> None:
        for first, *rest in rng.integers(0, 2**31 - 1, (count, 5)).tolist():
            cache.release(cache.acquire([first % 1000, 0, 0, 0, *rest]))

    for size in sizes:
        publish(size - num_nodes)
        num_nodes = size
        node_bytes = (resident_bytes() - started_bytes) / size
        timed: dict[str, float] = {}
        for name, operation in {
            "match": match,
            "publish": publish,
            "evict": lambda count: [cache.evict(1) for _ in range(count)],
        }.items():
            began = time.process_time()
            operation(2000)
            timed[name] = time.process_time() - began
        yield size, timed, node_bytes


def cells(config: Config) -> Iterator[Cell]:
    """A cell a kind and size; the trees, each of which grows out of the last, are one."""
    kinds: dict[str, tuple[Callable[[int, int], float], int]] = {
        "queue": (queue, config.num_requests),
        "prompt": (prompt, config.num_prompt_tokens),
        "decodes": (decodes, config.num_decodes),
    }
    for name, (measure, largest) in kinds.items():
        for size in (largest >> shift for shift in reversed(range(config.num_sizes))):
            yield f"{name} {size}", partial(measure_one, name, measure, size, config.seed)
    yield "trees", partial(measure_trees, config)


def measure_one(name: str, measure: Callable[[int, int], float], size: int, seed: int) -> list[Row]:
    """One size of one kind."""
    return [{"what": name, "size": size, "seconds": measure(size, seed)}]


def measure_trees(config: Config) -> list[Row]:
    """The three operations at every size of tree."""
    sizes = [config.num_nodes >> 2 * shift for shift in reversed(range(config.num_sizes))]
    return [
        {"what": f"tree: {name}", "size": size, "seconds": seconds, "node_bytes": node_bytes}
        for size, timed, node_bytes in trees(sizes, config.seed)
        for name, seconds in timed.items()
    ]


def exponents(rows: Sequence[Row]) -> list[Row]:
    """Fits seconds = a * size ** exponent to each kind, in logarithms."""
    fits = []
    for what, some in grouped(rows, "what").items():
        size, seconds = np.log([row["size"] for row in some]), np.log([row["seconds"] for row in some])
        exponent = float(np.polyfit(size, seconds, 1)[0])
        fits.append({"what": what, "exponent": exponent, **{k: some[-1][k] for k in ("size", "seconds")}})
    return fits


def show(data: Data) -> None:
    """Prints a line a kind: its largest size, its time there, and how it grows."""
    columns = {"part": "{what}", "largest": "{size:,}", "CPU s": "{seconds:.3f}", "exponent": "{exponent:.2f}"}
    last = [row for row in data["rows"] if "node_bytes" in row][-1]
    notes = [f"{last['size']:,} nodes: {last['node_bytes']:,.0f} bytes of memory each"]
    print_table("seconds = a * size ** exponent", columns, exponents(data["rows"]), notes)


def plot(data: Data) -> Figure:
    """Draws time against size."""
    rows = data["rows"]
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5))
    lines = grouped(rows, "what")
    for fit in exponents(rows):
        label = f"{fit['what'].removeprefix('tree: ')}: exponent {fit['exponent']:.2f}"
        draw_lines(axes[int(fit["what"].startswith("tree"))], {label: lines[fit["what"]]}, "size", "seconds")
    for axis, title in zip(axes, ("requests, prompt tokens, decodes", "nodes; 2,000 operations"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=title, ylabel="CPU seconds")
    return figure


def answer(data: Data) -> str:
    """One sentence."""
    told = [f"{f['what']} {f['exponent']:.2f} up to {f['size']:,}" for f in exponents(data["rows"])]
    return f"Fitted exponents of time against size: {', '.join(told)}."


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("load", __doc__)
    options.add_argument("--nodes", type=int, default=Config.num_nodes, help="of the largest tree (1,000,000)")
    given = options.parse_args(arguments)
    config = Config(200, 10_000, 2**15, 32, 3) if given.smoke else Config(num_nodes=given.nodes)
    run_experiment("load", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

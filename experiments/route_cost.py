"""What does choosing a replica cost, and does it grow with the replicas and with what they have cached?

Conversations (4,000 tokens, the first 1,024 one of 20 system prompts) lie in the caches of the replicas, known block by
block from their events. Each measured request continues one of them. `match` is the index alone; `route` is all of a
decision: the index, what is in flight, costs, bookkeeping. CPU time of this thread, p50 and p99; memory is what the
process grew by. Expected: at most 50 us for a match at 64 replicas and a million blocks, and nothing that grows with
the number of blocks.

    python -m experiments.route_cost
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, print_table, resident_bytes
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, command
from radixkv.cache.events import BlockStored
from radixkv.cache.tokens import pack, unpack
from radixkv.fleet.routing.policies import CacheAware

ENTRY = Entry("fleet", seconds=3, place=2)

BLOCK_SIZE = 16
NUM_TOKENS, NUM_SYSTEM_TOKENS, NUM_SYSTEMS = 4000, 1024, 20
COLUMNS = {
    "replicas": "{num_replicas}",
    "blocks": "{num_blocks:,}",
    "match p50, us": "{match_p50_us:.1f}",
    "p99": "{match_p99_us:.1f}",
    "route p50, us": "{route_p50_us:.1f}",
    "p99 ": "{route_p99_us:.1f}",
    "event us/block": "{event_us_per_block:.2f}",
    "B/block": "{bytes_per_block:.0f}",
}


@dataclass(frozen=True)
class Config:
    """Blocks cached in all, on so many replicas."""

    num_blocks: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    num_replicas: tuple[int, ...] = (8, 64)
    num_requests: int = 2000
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a size."""
    for num_replicas in config.num_replicas:
        for num_blocks in config.num_blocks:
            yield f"{num_replicas} {num_blocks}", partial(measure, config, num_replicas, num_blocks)


def measure(config: Config, num_replicas: int, num_blocks: int) -> list[Row]:
    """Fills a router's index, and measures requests that continue what is in it; one row."""
    num_requests, rng = config.num_requests, np.random.default_rng(config.seed)
    random_bytes = random.Random(config.seed).randbytes
    systems = rng.integers(0, 150_000, (NUM_SYSTEMS, NUM_SYSTEM_TOKENS), np.int32)
    names = [f"replica{i}" for i in range(num_replicas)]
    router = CacheAware(names, block_size=BLOCK_SIZE)
    before, event_s = resident_bytes(), 0.0
    # By replica and system prompt, the hash of its last block.
    ends: dict[tuple[str, int], bytes] = {}
    texts, total, num_stored = [], 0, 0
    while total < num_blocks:
        name, which = names[num_stored % num_replicas], int(rng.integers(NUM_SYSTEMS))
        own = rng.integers(0, 150_000, NUM_TOKENS - NUM_SYSTEM_TOKENS, np.int32)
        text = np.concatenate([systems[which], own])
        parent = ends.get((name, which))
        tokens = pack(text if parent is None else own)
        hashes = tuple(random_bytes(32) for _ in range(len(tokens) // 4 // BLOCK_SIZE))
        event = BlockStored(hashes, parent, tokens, BLOCK_SIZE)
        started = time.thread_time()
        router.apply(name, event)
        event_s += time.thread_time() - started
        if parent is None:
            ends[name, which] = hashes[NUM_SYSTEM_TOKENS // BLOCK_SIZE - 1]
        if num_stored % max(num_blocks // 60_000, 1) == 0:
            texts.append(text)
        total += len(hashes)
        num_stored += 1
    grown = resident_bytes() - before
    prompts = [
        pack(np.concatenate([texts[at], rng.integers(0, 150_000, 200, np.int32)]))
        for at in rng.integers(0, len(texts), num_requests)
    ]
    held = router.held
    assert held is not None
    matched = sum(held.match(prompt)[-1][0] for prompt in prompts)
    assert matched == NUM_TOKENS * num_requests, "a time of a wrong answer"
    match_us = _times_us(lambda prompt: held.match(prompt), prompts)
    live: list = []

    def route(prompt: bytes) -> None:
        live.append(router.route(prompt))
        if len(live) > 4 * num_replicas:
            router.finish(live.pop(0))

    route_us = _times_us(route, prompts)
    row = {
        "num_replicas": num_replicas,
        "num_blocks": total,
        "num_requests": num_requests,
        "num_prompt_tokens": len(unpack(prompts[0])),
        "match_p50_us": float(np.percentile(match_us, 50)),
        "match_p99_us": float(np.percentile(match_us, 99)),
        "route_p50_us": float(np.percentile(route_us, 50)),
        "route_p99_us": float(np.percentile(route_us, 99)),
        "event_us_per_block": event_s * 1e6 / total,
        "bytes_per_block": grown / total,
    }
    return [row]


def _times_us(call: Callable[[bytes], object], prompts: Sequence[bytes]) -> list[float]:
    times = []
    for prompt in prompts:
        started = time.thread_time_ns()
        call(prompt)
        times.append((time.thread_time_ns() - started) / 1e3)
    return times


def show(data: Data) -> None:
    """Prints a line a size."""
    title = f"A decision for a prompt of {NUM_TOKENS + 200:,} tokens, blocks of {BLOCK_SIZE}"
    print_table(title, COLUMNS, data["rows"])


def answer(data: Data) -> str:
    """One sentence, of the largest size."""
    row = max(data["rows"], key=lambda row: (row["num_replicas"], row["num_blocks"]))
    return (
        f"With {row['num_blocks']:,} blocks cached on {row['num_replicas']} replicas a match takes "
        f"{row['match_p50_us']:.1f} us and the whole decision {row['route_p50_us']:.0f} us in the median."
    )


def plot(data: Data) -> Figure:
    """Draws the times against what is cached."""
    figure, axes = pyplot().subplots()
    for count, mine in grouped(data["rows"], "num_replicas").items():
        blocks = [row["num_blocks"] for row in mine]
        (line,) = axes.plot(blocks, [row["route_p50_us"] for row in mine], marker="o", label=f"route, {count} replicas")
        matches = [row["match_p50_us"] for row in mine]
        axes.plot(blocks, matches, marker="s", ls="--", color=line.get_color(), label=f"match, {count} replicas")
    axes.set(
        xscale="log", xlabel="cached blocks", ylabel="CPU time, p50 (us)", title="Choosing a replica", ylim=(0, None)
    )
    axes.legend()
    return figure


main = command(__name__, Config(), Config((10_000, 30_000), num_requests=300))


if __name__ == "__main__":
    main()

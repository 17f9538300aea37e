"""What does the index itself cost: to admit a request, to publish one, to evict, along a deep path, in memory?

Times every cache on three workloads: chats that grow under a few system prompts (admit, insert), a conversation of 500
turns (deep_admit), unrelated leaves (evict64, at 1,000 to 50,000 of them); then one admission of 8,192 cached tokens
and the four hash algorithms. An admission is match + pin + block ids + unpin; an insert is acquire + insert + release.
All get packed tokens; what packing a list costs is a row of its own. Expected: radix costs about a memcmp, whatever the
path and the number of leaves; the flat hash costs a hash and a lookup for each block.

    python -m experiments.index_cost                                  about three minutes
    python -m experiments.index_cost --smoke                          a few seconds, too few to quote
    python -m experiments.index_cost --cache radix --block-size 1 16
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, console, fail, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import index_bytes
from radixkv.cache.contract import PrefixCache, take_over
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.hashing import ALGORITHMS
from radixkv.cache.tokens import TOKEN_BYTES, pack

ENTRY = Entry("index", seconds=18, place=1)


def chats(num_conversations: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields ([n] prompt, [m] prompt and output) int32: conversations of 2,000 to 8,000 tokens in four turns."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 32_000, 512, dtype=np.int32) for _ in range(8)]
    texts = []
    for i in range(num_conversations):
        length = int(rng.integers(2_000, 8_001))
        texts.append(np.concatenate([systems[i % 8], rng.integers(0, 32_000, length - 512, dtype=np.int32)]))
    for turn in range(4):
        for text in texts:
            before, end = (512 + (len(text) - 512) * share // 4 for share in (turn, turn + 1))
            yield text[: end - min(200, end - before - 1)], text[:end]


def leaf(index: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Returns [length] int32 tokens, the first of them in no other leaf."""
    tokens = rng.integers(0, 32_000, length, dtype=np.int32)
    tokens[0] = 32_000 + index
    return tokens


def make(cache: str, block_size: int) -> Any:
    """Returns a cache as an engine has it: its owner answers for block ids."""
    if cache.startswith("radix"):
        made = CacheConfig("radix", block_size, partial_blocks=cache == "radix").make()
    else:
        made = CacheConfig(cache, block_size).make()
    take_over(made, "cache", made)
    return made


def admit(cache: PrefixCache, key: bytes) -> int:
    lease = cache.acquire(key)
    matched = len(lease.block_ids) * cache.block_size
    cache.release(lease)
    return matched


def insert(cache: PrefixCache, key: bytes, blocks: np.ndarray) -> None:
    lease = cache.acquire(key)
    done = lease.num_tokens
    cache.insert(lease, key[done * TOKEN_BYTES :], blocks[done // cache.block_size :])
    cache.commit()
    cache.release(lease)


class Blocks:
    """Hands out block ids that were never used."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, num_blocks: int) -> np.ndarray:
        self.next += num_blocks
        return np.arange(self.next - num_blocks, self.next, dtype=np.int32)


CACHES = ("radix", "radix whole blocks", "flat_hash")
LEAF_TOKENS = 128
EVICTED_TOKENS = 64
LONG_TOKENS = 8192


@dataclass(frozen=True)
class Config:
    """Sizes of the workloads; goes into the JSON as it is."""

    cache: tuple[str, ...] = CACHES
    block_size: tuple[int, ...] = (1, 16)
    num_conversations: int = 1000
    num_turns: int = 500
    num_leaves: tuple[int, ...] = (1_000, 10_000, 50_000)
    num_evictions: int = 200
    num_repeats: int = 200
    seed: int = 0


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter_ns()
    result = call(*arguments)
    return (time.perf_counter_ns() - started) / 1e3, result


def row(cache: str, block_size: int, operation: str, times_us: Sequence[float], **more: Any) -> Row:
    found = {"cache": cache, "block_size": block_size, "operation": operation, "num_leaves": None}
    found |= {"mean_us": float(np.mean(times_us)), "num_freed_tokens": None, "hash_us": 0.0}
    return found | {f"p{q}_us": float(np.percentile(times_us, q)) for q in (50, 99)} | more


def run_chat(name: str, block_size: int, config: Config) -> list[Row]:
    cache, blocks = make(name, block_size), Blocks()
    admits, inserts, hits, total = [], [], 0, 0
    hashed = [0.0, 0.0]
    for prompt, full in chats(config.num_conversations, config.seed):
        key, full_key = prompt.tobytes(), full.tobytes()
        before = getattr(cache, "hash_ns", 0)
        spent, matched = timed(admit, cache, key)
        between = getattr(cache, "hash_ns", 0)
        admits.append(spent)
        hits, total = hits + matched, total + len(prompt)
        ids = blocks.take(len(full) // block_size)
        inserts.append(timed(insert, cache, full_key, ids)[0])
        hashed = [hashed[0] + between - before, hashed[1] + getattr(cache, "hash_ns", 0) - between]
    cached = sum(cache.sizes) * block_size
    more = {"hit_rate": hits / total, "index_bytes_per_token": index_bytes(cache) / cached}
    return [
        row(name, block_size, "admit", admits, hash_us=hashed[0] / 1e3 / len(admits), **more),
        row(name, block_size, "insert", inserts, hash_us=hashed[1] / 1e3 / len(inserts), **more),
    ]


def run_deep(name: str, block_size: int, config: Config) -> list[Row]:
    cache, blocks, times = make(name, block_size), Blocks(), []
    text = np.random.default_rng(config.seed).integers(0, 32_000, config.num_turns * 50, dtype=np.int32)
    for end in range(50, len(text) + 1, 50):
        key = text[:end].tobytes()
        times.append(timed(admit, cache, key)[0])
        insert(cache, key, blocks.take(end // block_size))
    return [row(name, block_size, "deep_admit", times[-50:])]


def run_evict(name: str, block_size: int, num_leaves: int, config: Config) -> list[Row]:
    cache, blocks, times, freed = make(name, block_size), Blocks(), [], 0
    rng = np.random.default_rng(config.seed)
    for i in range(num_leaves):
        insert(cache, leaf(i, LEAF_TOKENS, rng).tobytes(), blocks.take(LEAF_TOKENS // block_size))
    more = {"num_leaves": num_leaves, "index_bytes_per_token": index_bytes(cache) / (num_leaves * LEAF_TOKENS)}
    for i in range(config.num_evictions):
        spent, evicted = timed(cache.evict, EVICTED_TOKENS // block_size)
        times.append(spent)
        freed += len(evicted) * block_size
        filler = leaf(num_leaves + i, EVICTED_TOKENS, rng)  # so that the number of leaves stays
        insert(cache, filler.tobytes(), blocks.take(EVICTED_TOKENS // block_size))
    return [row(name, block_size, "evict64", times, num_freed_tokens=freed / config.num_evictions, **more)]


def run_long(config: Config) -> list[Row]:
    """One admission of 8,192 cached tokens at block size 16, hashing counted apart, the caches in turn."""
    text = np.random.default_rng(config.seed).integers(0, 32_000, LONG_TOKENS, dtype=np.int32)
    key, names = text.tobytes(), [name for name in CACHES if name in config.cache]
    caches = {name: make(name, 16) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for cache in caches.values():
        insert(cache, key, np.arange(LONG_TOKENS // 16, dtype=np.int32))
    for _ in range(config.num_repeats):
        for name, cache in caches.items():
            times[name].append(timed(admit, cache, key)[0])
    rows = []
    for name, cache in caches.items():
        hash_us = getattr(cache, "hash_ns", 0) / 1e3 / (config.num_repeats + 1)
        rows.append(row(name, 16, "admit_8192", times[name], hash_us=hash_us))
    token_ids = text.tolist()
    packing = [timed(pack, token_ids)[0] for _ in range(config.num_repeats)]
    return [*rows, row("any", 16, "pack_list_8192", packing)]


def run_hashes(config: Config) -> list[Row]:
    """Hashing 8,192 tokens by each algorithm that is installed."""
    text = np.random.default_rng(config.seed).integers(0, 32_000, LONG_TOKENS, dtype=np.int32)
    rows = []
    for algorithm in ALGORITHMS:
        try:
            cache = FlatHashCache(16, hash_algorithm=algorithm, accept_collisions=True)
        except ImportError as error:
            console.print(f"{algorithm} left out: {error}")
            continue
        insert(cache, text.tobytes(), np.arange(LONG_TOKENS // 16, dtype=np.int32))
        times = []
        for _ in range(max(config.num_repeats // 4, 3)):
            before = cache.hash_ns
            cache.peek(text.tobytes())
            times.append((cache.hash_ns - before) / 1e3)
        rows.append(row(f"flat_hash {algorithm}", 16, "hash_8192", times))
    return rows


def cells(config: Config) -> Iterator[Cell]:
    """A cell a cache, block size and operation."""
    for block_size in config.block_size:
        # Hashing every single token would take the longest and tell the least.
        for name in [name for name in config.cache if not (block_size == 1 and name != "radix")]:
            yield f"chat {name} {block_size}", partial(alone, run_chat, name, block_size, config)
            yield f"deep {name} {block_size}", partial(alone, run_deep, name, block_size, config)
            for count in config.num_leaves:
                yield f"evict {name} {block_size} {count}", partial(alone, run_evict, name, block_size, count, config)
    yield "long", partial(alone, run_long, config)
    yield "hashes", partial(alone, run_hashes, config)


def alone(job: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """Runs a job with the garbage collector off: a collection would be charged to the cache whose turn it is."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return job(*arguments)
    finally:
        gc.enable()
        gc.unfreeze()


COLUMNS = {
    "cache": "{cache}",
    "block": "{block_size}",
    "operation": "{operation}",
    "leaves": "{leaves}",
    "mean us": "{mean_us:,.1f}",
    "p50": "{p50_us:,.1f}",
    "p99": "{p99_us:,.1f}",
    "of it hash": "{hash_us:,.1f}",
    "freed": "{freed}",
    "B/token": "{memory}",
}


def show(data: Data) -> None:
    """Prints a line an operation."""
    rows = data["rows"]
    shown = [
        each
        | {
            "leaves": f"{each['num_leaves'] or '':,}" if each["num_leaves"] else "",
            "freed": f"{each['num_freed_tokens']:.0f}" if each["num_freed_tokens"] else "",
            "memory": f"{each['index_bytes_per_token']:.1f}" if "index_bytes_per_token" in each else "",
        }
        for each in rows
    ]
    print_table("Index operations, in us", COLUMNS, shown)


def plot(data: Data) -> Figure:
    """Draws the median time of each operation, a bar a cache."""
    rows = data["rows"]
    largest = max((each["num_leaves"] or 0 for each in rows), default=0)
    mine = [each for each in rows if each["num_leaves"] in (None, largest) and each["cache"] != "any"]
    mine = [each for each in mine if each["operation"] != "hash_8192"]
    heights = {
        f"{cache} {block_size}": {each["operation"]: each["p50_us"] for each in some}
        for (cache, block_size), some in grouped(mine, "cache", "block_size").items()
    }
    figure, axis = pyplot().subplots()
    draw_bars(axis, heights)
    axis.set(yscale="log", ylabel="median, us", title=f"Index operations (evict64 at {largest:,} leaves)")
    axis.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence, at block size 16."""
    times = {(r["cache"], r["operation"]): r["p50_us"] for r in data["rows"] if r["block_size"] == 16}
    if ("flat_hash", "admit") not in times or ("radix", "admit") not in times:
        return "Nothing to compare: it needs radix and flat_hash at block size 16."
    over = {name: times["flat_hash", name] / times["radix", name] for name in ("admit", "insert", "admit_8192")}
    return (
        f"{times['radix', 'admit']:.1f} us for an admission (median), 1/{over['admit']:.0f} of the flat hash with "
        f"sha256 (1/{over['admit_8192']:.0f} at 8,192 cached tokens), {times['radix', 'insert']:.1f} us to publish, "
        f"1/{over['insert']:.0f} of it."
    )


def costs(data: Data) -> Iterator[str]:
    """Time and memory of the index at blocks of 16."""
    found = {(r["cache"], r["operation"]): r for r in data["rows"] if r["block_size"] == 16}
    flat, tree = (found.get((cache, "admit")) for cache in ("flat_hash", "radix"))
    if flat and tree:
        yield (
            f"Time: an admission takes {tree['p50_us']:.0f} us in the tree and {flat['p50_us']:.0f} us in the flat "
            f"hash, most of it sha256. Memory of the index: {tree['index_bytes_per_token']:.1f} bytes a cached "
            f"token, {flat['index_bytes_per_token']:.1f} in the flat hash."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("index_cost", __doc__)
    add = options.add_argument
    add("--cache", nargs="+", choices=CACHES, default=list(CACHES), help="default: all")
    add("--block-size", nargs="+", type=int, default=[1, 16], metavar="N", help="1 (radix alone) and 16")
    add("--seed", type=int, default=0)
    given = options.parse_args(arguments)
    config = Config(cache=tuple(given.cache), block_size=tuple(given.block_size), seed=given.seed)
    if given.smoke:
        sizes = {"num_conversations": 20, "num_turns": 20, "num_leaves": (100, 500), "num_evictions": 20}
        config = Config(**asdict(config) | sizes | {"num_repeats": 5})
    if any(size < 1 or EVICTED_TOKENS % size for size in config.block_size):
        fail(f"--block-size: expected divisors of {EVICTED_TOKENS}, got {given.block_size}")
    run_experiment("index_cost", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

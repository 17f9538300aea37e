"""Which hash should a flat map of blocks use, and what does a shortened digest give away?

Each algorithm hashes the same tokens; then unrelated prompts are looked up under digests cut to a few bits. Expected:
hashing costs the same for every token, cryptographic or not within a factor of two; with b bits and n blocks cached a
block of another prompt is handed over with probability about n / 2**b for each lookup, and never once the tokens
themselves are compared, which is what a radix tree does anyway.

    python -m experiments.hash_choice
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, console, grouped, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, command
from radixkv.cache.contract import PrefixCache
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.hashing import ALGORITHMS
from radixkv.cache.radix.cache import RadixCache

ENTRY = Entry("index", seconds=2, place=2)


@dataclass(frozen=True)
class Config:
    """Sizes; the digests are cut so short that something happens."""

    block_size: int = 16
    num_tokens: int = 8192
    num_repeats: int = 25
    digest_bits: tuple[int, ...] = (8, 10, 12, 14, 16, 20)
    num_cached_blocks: int = 256
    num_lookups: int = 4000
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell an algorithm, and one a length of digest."""
    for algorithm in ALGORITHMS:
        yield algorithm, partial(measure_cost, config, algorithm)
    for bits in config.digest_bits:
        yield f"{bits} bits", partial(measure_foreign, config, bits)


def measure_cost(config: Config, algorithm: str) -> list[Row]:
    """Hashes a prompt; no row where the algorithm's library is not installed."""
    try:
        cache = FlatHashCache(config.block_size, hash_algorithm=algorithm, accept_collisions=True)
    except ImportError as error:
        console.print(f"{algorithm} left out: {error}")
        return []
    tokens = np.random.default_rng(config.seed).integers(0, 32_000, config.num_tokens, dtype=np.int32)
    cache.insert(cache.acquire(tokens), tokens, np.arange(config.num_tokens // config.block_size, dtype=np.int32))
    times = []
    for _ in range(config.num_repeats):
        before = cache.hash_ns
        cache.peek(tokens)
        times.append((cache.hash_ns - before) / config.num_tokens)
    return [{"part": "cost", "cache": algorithm, "ns_per_token": median(times)}]


def measure_foreign(config: Config, bits: int) -> list[Row]:
    """Looks unrelated prompts of one block up: whatever is found is another prompt's KV."""
    rng = np.random.default_rng(config.seed)
    caches: dict[str, PrefixCache] = {
        "flat hash": FlatHashCache(config.block_size, digest_bits=bits, accept_collisions=True),
        "flat hash, verified": FlatHashCache(config.block_size, digest_bits=bits, verify=True),
        "radix": RadixCache(config.block_size, partial_blocks=False),
    }
    for block in range(config.num_cached_blocks):
        tokens = rng.integers(0, 32_000, config.block_size, dtype=np.int32)
        for cache in caches.values():
            lease = cache.acquire(tokens)
            if not lease.num_tokens:  # else it was taken for one that is there
                cache.insert(lease, tokens, [block])
            cache.commit()
            cache.release(lease)
    found = dict.fromkeys(caches, 0)
    for _ in range(config.num_lookups):
        tokens = rng.integers(0, 32_000, config.block_size, dtype=np.int32)
        for name, cache in caches.items():
            found[name] += cache.peek(tokens) > 0
    expected = 1 - (1 - 2.0**-bits) ** config.num_cached_blocks
    return [
        {"part": "foreign", "cache": name, "digest_bits": bits, "num_foreign": count, "of": config.num_lookups}
        | {"expected": expected if name == "flat hash" else 0.0}
        for name, count in found.items()
    ]


def show(data: Data) -> None:
    """Prints the cost of each algorithm, and how many lookups got another prompt's KV."""
    cost = [row for row in data["rows"] if row["part"] == "cost"]
    print_table("Hashing, chained blocks of 16", {"cache": "{cache}", "ns a token": "{ns_per_token:.0f}"}, cost)
    foreign = [row for row in data["rows"] if row["part"] == "foreign"]
    columns = {"bits": "{digest_bits}", "cache": "{cache}", "another's KV": "{num_foreign} of {of}"}
    columns["expected"] = "{expected:.2%}"
    print_table(f"Unrelated prompts, {data['config']['num_cached_blocks']} blocks cached", columns, foreign)


def plot(data: Data) -> Figure:
    """Draws the cost a token, and the share of lookups that got another prompt's KV."""
    rows = data["rows"]
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    cost = [row for row in rows if row["part"] == "cost"]
    left.barh([row["cache"] for row in cost], [row["ns_per_token"] for row in cost])
    left.set(xlabel="ns a token", title="Hashing")
    foreign = [row for row in rows if row["part"] == "foreign"]
    for name, line in grouped(foreign, "cache").items():
        bits = [row["digest_bits"] for row in line]
        right.plot(bits, [row["num_foreign"] / row["of"] for row in line], "o-", label=name)
        if name == "flat hash":
            right.plot(bits, [row["expected"] for row in line], ":", label="expected", color="gray")
    right.set(xlabel="bits of the digest", ylabel="share of lookups", title="Another prompt's KV handed over")
    right.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence."""
    cost = {row["cache"]: row["ns_per_token"] for row in data["rows"] if row["part"] == "cost"}
    foreign = [row for row in data["rows"] if row["part"] == "foreign"]
    shortest = min(row["digest_bits"] for row in foreign)
    counts = {row["cache"]: row["num_foreign"] for row in foreign if row["digest_bits"] == shortest}
    never = sum(row["num_foreign"] for row in foreign if row["cache"] != "flat hash")
    told = ", ".join(f"{name} {ns:.0f}" for name, ns in cost.items())
    return (
        f"In ns a token: {told}. Cut to {shortest} bits the hash alone hands over another prompt's KV in "
        f"{counts['flat hash']:,} of {foreign[0]['of']:,} lookups; where tokens are compared, in {never}."
    )


main = command(__name__, Config(), Config(digest_bits=(8, 16), num_lookups=500, num_repeats=5))


if __name__ == "__main__":
    main()

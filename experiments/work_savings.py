"""How much prefill does a shared prefix save?

The lesson's worked example, on the real caches: eight requests share 512 tokens and have suffixes of 24 40 8 32 16 48
12 20 of their own. Expected: 4,296 tokens computed without a cache, 712 with one (83.4 % fewer), for blocks of 16 and
for the tree alike, as 512 is whole blocks; with a prefix of 520 the flat hash computes 8 tokens more for each hit, and
the tree none.

    python -m experiments.work_savings
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.config import CACHES, CacheConfig
from radixkv.blocks.replay import Replay

ENTRY = Entry("prefixes", seconds=1, place=2)


@dataclass(frozen=True)
class Config:
    """The example, and the same with a prefix that does not end with a block."""

    prefixes: tuple[int, ...] = (512, 520, 600)
    suffixes: tuple[int, ...] = (24, 40, 8, 32, 16, 48, 12, 20)
    block_size: int = 16
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a prefix and cache."""
    for length in config.prefixes:
        for cache in CACHES:
            yield f"{length} {cache}", partial(measure, config, length, cache)


def measure(config: Config, length: int, cache: str) -> list[Row]:
    """Replays the requests with a prefix of one length through one cache."""
    rng = np.random.default_rng(config.seed)
    prefix = rng.integers(0, 32_000, length, dtype=np.int32)
    replay = Replay(CacheConfig(cache, config.block_size))
    for suffix in config.suffixes:
        own = rng.integers(0, 32_000, suffix, dtype=np.int32)
        own[0] = 32_000 + suffix  # no other request's
        replay.feed(np.concatenate([prefix, own]))
    computed = replay.num_prompt_tokens - replay.num_cached_tokens
    row = {"prefix_tokens": length, "cache": cache, "num_prompt_tokens": replay.num_prompt_tokens}
    return [row | {"num_computed_tokens": computed, "saved": 1 - computed / replay.num_prompt_tokens}]


COLUMNS = {
    "prefix": "{prefix_tokens}",
    "cache": "{cache}",
    "prompt tokens": "{num_prompt_tokens:,}",
    "computed": "{num_computed_tokens:,}",
    "saved": "{saved:.1%}",
}


def show(data: Data) -> None:
    """Prints a line a prefix and cache."""
    sizes = data["config"]
    print_table(f"Prefill of {len(sizes['suffixes'])} requests, blocks of {sizes['block_size']}", COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the tokens computed."""
    return bars(
        data["rows"], "prefix_tokens", "cache", "num_computed_tokens", "tokens computed", "Prefill of 8 requests"
    )


def answer(data: Data) -> str:
    """One sentence."""
    computed = {(row["prefix_tokens"], row["cache"]): row["num_computed_tokens"] for row in data["rows"]}
    saved = 1 - computed[512, "radix"] / computed[512, "null"]
    more = computed[520, "flat_hash"] - computed[520, "radix"]
    return (
        f"It saves {saved:.1%} ({computed[512, 'radix']:,} tokens for {computed[512, 'null']:,}); where the prefix "
        f"does not end with a block, as at 520 tokens, the flat hash computes {more} tokens more than the tree."
    )


main = command(__name__, Config())


if __name__ == "__main__":
    main()

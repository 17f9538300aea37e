"""How much prefill does a shared prefix save? The lesson's worked example, on the real caches.

Eight requests share 512 tokens and have suffixes of 24 40 8 32 16 48 12 20 of their own. Expected: 4,296 tokens
computed without a cache, 712 with one (83.4 % fewer), for blocks of 16 and for the tree alike, as 512 is whole blocks;
with a prefix of 520 the flat hash computes 8 tokens more for each hit, and the tree none.

    python -m experiments.work_savings
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from experiments.harness import Row, console, parser, print_table, save
from radixkv.replay import CACHES, CacheConfig, Replay


@dataclass(frozen=True)
class Config:
    """The example, and the same with a prefix that does not end with a block."""

    prefixes: tuple[int, ...] = (512, 520, 600)
    suffixes: tuple[int, ...] = (24, 40, 8, 32, 16, 48, 12, 20)
    block_size: int = 16
    seed: int = 0


def run(config: Config) -> list[Row]:
    """Replays the requests of each prefix length through every cache."""
    rows = []
    for length in config.prefixes:
        for cache in CACHES:
            rng = np.random.default_rng(config.seed)
            prefix = rng.integers(0, 32_000, length, dtype=np.int32)
            replay = Replay(CacheConfig(cache, config.block_size))
            for suffix in config.suffixes:
                own = rng.integers(0, 32_000, suffix, dtype=np.int32)
                own[0] = 32_000 + suffix  # nobody else's
                replay.feed(np.concatenate([prefix, own]))
            computed = replay.num_prompt_tokens - replay.num_cached_tokens
            row = {"prefix_tokens": length, "cache": cache, "num_prompt_tokens": replay.num_prompt_tokens}
            rows.append(row | {"num_computed_tokens": computed, "saved": 1 - computed / replay.num_prompt_tokens})
    return rows


COLUMNS = {
    "prefix": "{prefix_tokens}",
    "cache": "{cache}",
    "prompt tokens": "{num_prompt_tokens:,}",
    "computed": "{num_computed_tokens:,}",
    "saved": "{saved:.1%}",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("work_savings", __doc__, "work_savings.json")
    given = options.parse_args(arguments)
    config = Config()
    rows = run(config)
    print_table("Prefill of 8 requests, blocks of 16", COLUMNS, rows)
    console.print(save(given.out, "work_savings", asdict(config), rows), highlight=False)


if __name__ == "__main__":
    main()

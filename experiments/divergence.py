"""What is a partial block worth to requests that share d tokens and then differ?

Expected, of a request that comes after the first: the flat hash computes d mod block_size tokens again that were
computed before, so does radix without partial blocks, and radix with partial blocks none, at any block size. All hold
the same blocks while requests run, since what is copied stands in a block of the request's own; what differs is the
slots that large blocks leave empty. Then the same on real traces, each with a real vocabulary: where a trace's requests
part is up to it, and large blocks lose what they round down.

    python -m experiments.divergence                                 about a minute
    python -m experiments.divergence --trace my.jsonl --tokenizer qwen3
    python -m experiments.divergence --smoke
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from experiments.divergence_report import answer, plot, show
from experiments.lab.harness import Row, parser, shared_traces
from experiments.lab.run import Cell, conduct
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.traces import open_trace

__all__ = ["answer", "plot", "show"]  # what shows the rows

TRACES = ("tot_game24.requests.jsonl", "mtbench101.conversations.jsonl")


@dataclass(frozen=True)
class Config:
    """Lengths of the synthetic part; `near` on either side of multiples of `every`, and all up to `all_below`."""

    block_sizes: tuple[int, ...] = (1, 16, 64, 512)
    num_requests: int = 8
    own_tokens: int = 600
    longest: int = 4096
    every: int = 64
    near: int = 2
    all_below: int = 130
    trace: tuple[str, ...] = ()
    tokenizer: str = "qwen3"
    limit: int | None = None
    seed: int = 0

    def distances(self) -> list[int]:
        """Returns every d, in order."""
        near = {
            border + offset
            for border in range(0, self.longest + 1, self.every)
            for offset in range(-self.near, self.near + 1)
        }
        return sorted(d for d in near | set(range(self.all_below)) if 0 <= d <= self.longest)


def caches(block_size: int) -> dict[str, CacheConfig]:
    """Returns the three that are compared."""
    return {
        "flat hash": CacheConfig("flat_hash", block_size, hash_algorithm="xxhash"),
        "radix": CacheConfig("radix", block_size, partial_blocks=False),
        "radix, partial blocks": CacheConfig("radix", block_size, partial_blocks=block_size > 1),
    }


def diverging(config: Config, shared_tokens: int) -> list[np.ndarray]:
    """Returns prompts of which any two share exactly so many tokens."""
    rng = np.random.default_rng(config.seed)
    shared = rng.integers(0, 1000, shared_tokens)
    prompts = []
    for i in range(config.num_requests):
        own = rng.integers(0, 1000, config.own_tokens)
        own[0] = 1000 + i
        prompts.append(np.concatenate([shared, own]))
    return prompts


def serve_together(prompts: Sequence[np.ndarray], cache: CacheConfig) -> tuple[int, int]:
    """Admits one request after the other, none of which ends before all run.

    Returns:
        Tokens computed by all but the first, and blocks held when all run.
    """
    manager = KVManager(cache.make())
    computed = []
    for prompt in prompts:
        sequence = manager.begin(prompt)
        manager.grow(sequence, len(prompt))
        manager.publish(sequence, prompt)
        manager.commit()
        computed.append(len(prompt) - sequence.num_cached_tokens)
    return sum(computed[1:]), manager.allocator.num_used


def run_distances(config: Config) -> list[Row]:
    """Returns a row for each d, block size and cache."""
    rows = []
    for d in config.distances():
        prompts = diverging(config, d)
        for block_size in config.block_sizes:
            for name, cache in caches(block_size).items():
                computed, held = serve_together(prompts, cache)
                followers = config.num_requests - 1
                rows.append(
                    {
                        "part": "distances",
                        "shared_tokens": d,
                        "block_size": block_size,
                        "cache": name,
                        "computed_per_request": computed / followers,
                        "again_per_request": computed / followers - config.own_tokens,
                        "held_blocks": held,
                        "held_tokens": held * block_size,
                        "unique_tokens": d + config.num_requests * config.own_tokens,
                    }
                )
    return rows


def run_trace(path: str, config: Config) -> list[Row]:
    """Replays a trace, outputs cached as an engine does, through every cache at once."""
    trace = open_trace(path, tokenizer=config.tokenizer, limit=config.limit)
    replays = {
        (size, name): Replay(cache, cache_outputs=True)
        for size in config.block_sizes
        for name, cache in caches(size).items()
    }
    for request in trace:
        for replay in replays.values():
            replay.feed(request.prompt, request.output, request.namespace)
    least = min(replay.num_prompt_tokens - replay.num_cached_tokens for replay in replays.values())
    rows = []
    for (size, name), replay in replays.items():
        computed = replay.num_prompt_tokens - replay.num_cached_tokens
        rows.append(
            {
                "part": "traces",
                "trace": trace.name,
                "block_size": size,
                "cache": name,
                "num_prompt_tokens": replay.num_prompt_tokens,
                "hit_rate": replay.hit_rate,
                "num_computed_tokens": computed,
                "over_least": computed / least if least else 1.0,
                "held_blocks": replay.peak_blocks,
                "held_tokens": replay.peak_blocks * size,
            }
        )
    return rows


def cells(config: Config) -> Iterator[Cell]:
    """Yields a cell for all d, and one for each trace."""
    yield "distances", partial(run_distances, config)
    for path in config.trace:
        yield path, partial(run_trace, path, config)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("divergence", __doc__)
    options.add_argument("--trace", nargs="*", help="trace files (game of 24 and mtbench101, where they are)")
    options.add_argument("--tokenizer", default=Config.tokenizer, help="of traces of text (qwen3)")
    given = options.parse_args(arguments)
    traces = shared_traces(*TRACES) if given.trace is None else given.trace
    config = Config(trace=tuple(map(str, traces)), tokenizer=given.tokenizer)
    if given.smoke:
        config = replace(config, longest=600, every=256, all_below=20, num_requests=3, limit=200)
    conduct("divergence", given.out, config, cells(config), sys.modules[__name__], at_once=True)


if __name__ == "__main__":
    main()

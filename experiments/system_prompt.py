"""A chat API sends a 600-token system prompt with every request: what does caching save, and what would destroy it?

The lesson's exercise. Expected: each request after the first computes its own turn and, in the flat hash, the 8 tokens
of the prompt that do not fill a block of 16; a time of day in front of the prompt, another order of tools or one
tenant's salt in front leaves nothing, with no error anywhere; the same at the prompt's end costs what stands after it.

    python -m experiments.system_prompt
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.namespace import Namespace, Salt

ENTRY = Entry("prefixes", seconds=1, place=3)

CACHES = ("flat_hash", "radix")
BREAKERS = ("nothing", "time in front", "tools reordered", "salt a user", "time at the end", "salt after the prompt")


@dataclass(frozen=True)
class Config:
    """Sizes in tokens."""

    system_tokens: int = 600
    tool_tokens: int = 100  # of the system prompt, at its start
    turn_tokens: tuple[int, int] = (20, 120)
    num_requests: int = 200
    block_size: int = 16
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a way to break it."""
    for breaker in BREAKERS:
        yield breaker, partial(measure, config, breaker)


def measure(config: Config, breaker: str) -> list[Row]:
    """Replays the requests with one thing done to each."""
    rows = []
    for cache in CACHES:
        rng = np.random.default_rng(config.seed)
        system = rng.integers(0, 32_000, config.system_tokens, dtype=np.int32)
        replay = Replay(CacheConfig(cache, config.block_size))
        for i in range(config.num_requests):
            turn = rng.integers(0, 32_000, rng.integers(*config.turn_tokens), dtype=np.int32)
            now = np.array([40_000 + i], np.int32)
            prompt, namespace = np.concatenate([system, turn]), None
            if breaker == "time in front":
                prompt = np.concatenate([now, prompt])
            elif breaker == "time at the end":
                prompt = np.concatenate([system, now, turn])
            elif breaker == "tools reordered":
                tools = rng.permutation(system[: config.tool_tokens].reshape(10, -1)).reshape(-1)
                prompt = np.concatenate([tools, system[config.tool_tokens :], turn])
            namespace = _salt(breaker, i, config)
            replay.feed(prompt, namespace=namespace)
        rows.append(
            {"part": breaker, "cache": cache, "num_prompt_tokens": replay.num_prompt_tokens}
            | {"num_computed_tokens": replay.num_prompt_tokens - replay.num_cached_tokens}
            | {"saved": replay.hit_rate}
        )
    return rows


def _salt(breaker: str, user: int, config: Config) -> Namespace | None:
    if breaker == "salt a user":
        return Salt(f"user {user}")
    if breaker == "salt after the prompt":
        return Salt(f"user {user}", start=config.system_tokens)
    return None


COLUMNS = {
    "part": "{part}",
    "cache": "{cache}",
    "prompt tokens": "{num_prompt_tokens:,}",
    "computed": "{num_computed_tokens:,}",
    "saved": "{saved:.1%}",
}


def show(data: Data) -> None:
    """Prints a line a way to break it and cache."""
    sizes = data["config"]
    title = f"{sizes['num_requests']} requests with a system prompt of {sizes['system_tokens']} tokens"
    print_table(title, COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws what is saved."""
    return bars(
        data["rows"], "part", "cache", "saved", "share of the prompt tokens not computed", "What breaks a prefix"
    )


def answer(data: Data) -> str:
    """One sentence."""
    saved = {(row["part"], row["cache"]): row["saved"] for row in data["rows"]}
    broken = max(saved[part, "radix"] for part in ("time in front", "salt a user"))
    return (
        f"{saved['nothing', 'flat_hash']:.1%} of the prefill with the flat hash and {saved['nothing', 'radix']:.1%} "
        f"with the tree; a time of day or a user's salt in front leaves {broken:.1%}, tools in another order "
        f"{saved['tools reordered', 'radix']:.1%}."
    )


main = command(__name__, Config(), Config(num_requests=40))


if __name__ == "__main__":
    main()

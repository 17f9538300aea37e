"""What does one changed token cost, and does it matter where the variable part stands?

A prompt of 600 tokens is cached; it is asked for again with a token changed at each position in turn. Then 50 requests
of a system prompt and a variable part, which stands first or last. Expected: a change at position p leaves p tokens to
hit (the flat hash: whole blocks before p); a variable part that stands first leaves nothing.

    python -m experiments.break_prefix
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean as mean_of

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, print_table
from experiments.lab.plots import Figure, draw_lines, pyplot
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay

ENTRY = Entry("prefixes", seconds=1, place=4)

CACHES = ("flat_hash", "radix")
SMOKE_TOKENS = 300


@dataclass(frozen=True)
class Config:
    """Sizes in tokens."""

    prompt_tokens: int = 600
    variable_tokens: int = 20
    num_requests: int = 50
    caches: tuple[tuple[str, int], ...] = (("flat_hash", 16), ("flat_hash", 128), ("radix", 16), ("radix", 128))
    seed: int = 7


def cells(config: Config) -> Iterator[Cell]:
    """A cell a cache."""
    for cache, block_size in config.caches:
        yield f"{cache} {block_size}", partial(measure, config, cache, block_size)


def measure(config: Config, cache: str, block_size: int) -> list[Row]:
    """Changes a token at each position; then puts the variable part first and last."""
    rows: list[Row] = []
    rng = np.random.default_rng(config.seed)
    prompt = rng.integers(0, 32_000, config.prompt_tokens, dtype=np.int32)
    for position in range(config.prompt_tokens):
        replay = Replay(CacheConfig(cache, block_size))
        replay.feed(prompt)
        changed = prompt.copy()
        changed[position] = 32_000
        hit = replay.feed(changed)
        row = {"part": "changed token", "cache": cache, "block_size": block_size, "position": position}
        rows.append(row | {"num_hit_tokens": hit, "hit_rate": hit / config.prompt_tokens})
    for place in ("first", "last"):
        replay = Replay(CacheConfig(cache, block_size))
        for _ in range(config.num_requests):
            variable = rng.integers(0, 32_000, config.variable_tokens, dtype=np.int32)
            replay.feed(np.concatenate([variable, prompt] if place == "first" else [prompt, variable]))
        row = {"part": f"variable part {place}", "cache": cache, "block_size": block_size, "position": None}
        rows.append(row | {"num_hit_tokens": replay.num_cached_tokens, "hit_rate": replay.hit_rate})
    return rows


COLUMNS = {"part": "{part}", "cache": "{cache}", "block": "{block_size}", "hit rate": "{hit_rate:.1%}"}


def plot(data: Data) -> Figure:
    """Draws the tokens hit against the position of the changed one."""
    rows = data["rows"]
    figure, axis = pyplot().subplots()
    changed = grouped(rows, "part")["changed token"]
    for (cache, size), line in grouped(changed, "cache", "block_size").items():
        style = "--" if cache == "flat_hash" else "-"
        draw_lines(axis, {f"{cache} {size}": line}, "position", "num_hit_tokens", style)
    axis.set(xlabel="position of the changed token", ylabel="tokens still hit", title="One changed token")
    return figure


def show(data: Data) -> None:
    """Prints some positions, and where the variable part stands."""
    shown = [row for row in data["rows"] if row["position"] in (None, 0, 100, 300, 500)]
    named = [r | {"part": f"token {r['position']} changed"} if r["position"] is not None else r for r in shown]
    print_table(f"A prompt of {data['config']['prompt_tokens']} tokens, asked for again", COLUMNS, named)


def answer(data: Data) -> str:
    """One sentence."""
    rates = {(row["cache"], row["block_size"], row["part"]): row["hit_rate"] for row in data["rows"]}
    last, first = (rates[("radix", 16, f"variable part {place}")] for place in ("last", "first"))
    changed = [row for row in data["rows"] if row["part"] == "changed token" and row["block_size"] == 128]
    mean = {cache: mean_of(row["num_hit_tokens"] for row in changed if row["cache"] == cache) for cache in CACHES}
    lost = mean["radix"] - mean["flat_hash"]
    return (
        f"Everything after a changed token is lost, and at blocks of 128 the flat hash loses {lost:.0f} tokens more on "
        f"average; with the variable part last {last:.0%} of the prompt tokens hit, with it first {first:.0%}."
    )


main = command(__name__, Config(), Config(prompt_tokens=SMOKE_TOKENS))


if __name__ == "__main__":
    main()

"""For which traffic is a prefix cache worth anything, from agents with tools to batches that share nothing?

Every synthetic workload at its default size through the flat hash and the tree, without a bound. Expected: an agent's
steps share all that came before and hit nine tenths and more; a batch of unrelated prompts hits nothing, and pays for
the index all the same, which should be next to nothing.

    python -m experiments.workload_worth
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from experiments.lab.catalog import Entry
from experiments.lab.harness import Cells, Row, grouped, print_table
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, command
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.traces import open_workload

ENTRY = Entry("prefixes", seconds=6, place=6)

# (cache, block size); a batch of unrelated prompts is "uniform"
CACHES = (("flat_hash", 16), ("radix", 16), ("flat_hash", 128), ("radix", 128))
WORKLOADS = (
    "agent",
    "tree_of_thought",
    "self_consistency",
    "multi_turn",
    "few_shot",
    "document_qa",
    "chat",
    "embedded",
    "uniform",
)


@dataclass(frozen=True)
class Config:
    """How much of each workload."""

    limit: int | None = 1000
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a workload."""
    for name in WORKLOADS:
        yield name, partial(measure, config, name)


def measure(config: Config, name: str) -> list[Row]:
    """Replays one workload through every cache side by side."""
    replays = [Replay(CacheConfig(cache, block_size), cache_outputs=True) for cache, block_size in CACHES]
    for request in open_workload(name, seed=config.seed, limit=config.limit):
        for replay in replays:
            replay.feed(request.prompt, request.output, request.namespace)
    return [
        {
            "workload": name,
            "cache": replay.config.cache,
            "block_size": replay.config.block_size,
            "num_requests": replay.num_requests,
            "num_prompt_tokens": replay.num_prompt_tokens,
            "hit_rate": replay.hit_rate,
            "index_ns_per_token": replay.index_ns / replay.num_prompt_tokens,
        }
        for replay in replays
    ]


COLUMNS = {
    "workload": "{workload}",
    "requests": "{num_requests:,}",
    "prompt tokens": "{num_prompt_tokens:,}",
    "cache": "{cache}",
    "block": "{block_size}",
    "hit rate": "{hit_rate:.1%}",
    "index ns/token": "{index_ns_per_token:.0f}",
}


def show(data: Data) -> None:
    """Prints a line a workload and cache."""
    print_table("Prompt tokens found, outputs cached too", COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the hit rate of each workload."""
    rows = data["rows"]
    figure, axis = pyplot().subplots()
    caches = grouped(rows, "cache", "block_size").items()
    rates = {f"{name} {size}": {row["workload"]: row["hit_rate"] for row in some} for (name, size), some in caches}
    draw_bars(axis, rates, rotation=30, ha="right")
    axis.set(ylabel="hit rate", ylim=(0, 1.2), title="What traffic is worth to a prefix cache")
    axis.legend(loc="upper center", ncols=len(rates), fontsize=8)
    return figure


def answer(data: Data) -> str:
    """One sentence, of the tree at blocks of 16."""
    mine = {row["workload"]: row for row in data["rows"] if (row["cache"], row["block_size"]) == ("radix", 16)}
    flat = {row["workload"]: row for row in data["rows"] if (row["cache"], row["block_size"]) == ("flat_hash", 16)}
    costs = [rows["uniform"]["index_ns_per_token"] for rows in (mine, flat)]
    return (
        f"Agents with tools find {mine['agent']['hit_rate']:.0%} of their prompt tokens, unrelated prompts "
        f"{mine['uniform']['hit_rate']:.1%}; for nothing, those pay {costs[0]:.0f} ns a token for the tree and "
        f"{costs[1]:.0f} for the flat hash with sha256."
    )


def worth(data: Data) -> Iterator[Cells]:
    """A line for each workload: what is found, and how many tokens the flat hash computes for one of the tree's."""
    rows = data["rows"]
    sizes = sorted(grouped(rows, "block_size"))
    lines = []
    for name, some in grouped(rows, "workload").items():
        rates = {(row["cache"], row["block_size"]): row["hit_rate"] for row in some}
        cells = []
        for flat, tree in ((rates["flat_hash", size], rates["radix", size]) for size in sizes):
            cells += [f"{flat:.1%}", f"{tree:.1%}", f"{(1 - flat) / (1 - tree):.2f}"]
        lines.append((name, *cells))
    headings = [text for size in sizes for text in (f"flat hash {size}", f"radix {size}", f"computes, {size}")]
    note = "computes: prompt tokens that the flat hash computes for each one that the tree does, at that size of block"
    yield Cells("Prompt tokens found in the cache", ("workload", *headings), tuple(lines), (note,))


main = command(__name__, Config(), Config(limit=60))


if __name__ == "__main__":
    main()

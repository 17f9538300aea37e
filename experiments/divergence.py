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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import FILES, shared_traces
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.traces import open_trace

ENTRY = Entry("prefixes", seconds=20, place=5)

TRACES = ("tot_game24", "mtbench101")


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


COLUMNS = {
    "trace": "{trace}",
    "block": "{block_size}",
    "cache": "{cache}",
    "hit rate": "{hit_rate:.2%}",
    "computed": "{num_computed_tokens:,}",
    "over the least": "{over_least:.2f}",
    "blocks held": "{held_blocks:,}",
    "as tokens": "{held_tokens:,}",
}
SUMMARY = {
    "block": "{block_size}",
    "cache": "{cache}",
    "computed again, mean": "{mean:.1f}",
    "most": "{most:.0f}",
    "slots held / tokens": "{held:.3f}",
}


def part(data: Data, name: str) -> list[Row]:
    """Returns the rows of one part."""
    return [row for row in data["rows"] if row["part"] == name]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Returns means over d for each block size and cache."""
    found = []
    for (size, name), some in grouped(rows, "block_size", "cache").items():
        again = [row["again_per_request"] for row in some]
        held = [row["held_tokens"] / row["unique_tokens"] for row in some]
        numbers = {"mean": np.mean(again), "most": max(again), "held": np.mean(held)}
        found.append({"block_size": size, "cache": name, **numbers})
    return found


def show(data: Data) -> None:
    """Prints means over d, and a line for each trace, block size and cache."""
    config = data["config"]
    print_table(f"{config['num_requests']} requests that share d tokens", SUMMARY, summary(part(data, "distances")))
    if rows := part(data, "traces"):
        print_table(f"Traces without a bound, vocabulary {config['tokenizer']}", COLUMNS, rows)


def answer(data: Data) -> str:
    """One sentence, of blocks of 16."""
    found = {row["cache"]: row for row in summary(part(data, "distances")) if row["block_size"] == 16}
    flat, partial = found["flat hash"], found["radix, partial blocks"]
    text = (
        f"{flat['mean']:.1f} tokens are computed again where requests part inside a block of 16 (mean; "
        f"{flat['most']:.0f} at most), {partial['most']:.0f} with partial blocks"
    )
    worth = [
        f"{row['over_least']:.2f} times as many on {row['trace']}"
        for row in part(data, "traces")
        if row["block_size"] == 16 and row["cache"] == "flat hash"
    ]
    return f"{text}; without them real traces compute {' and '.join(worth)}." if worth else f"{text}."


def buys(data: Data) -> Iterator[str]:
    """Tokens that are not computed again."""
    flat = grouped((row for row in part(data, "distances") if row["cache"] == "flat hash"), "block_size")
    most = {size: max(row["again_per_request"] for row in rows) for size, rows in flat.items()}
    lost = ", ".join(f"{tokens:,.0f} at blocks of {size}" for size, tokens in most.items() if tokens)
    yield (
        "Where two prompts part inside a block, the flat hash computes the block's common tokens again, at most "
        f"{lost}; the tree copies their rows and computes none."
    )
    if told := _of_traces(data, lambda flat, tree: f"{flat['over_least']:.2f}"):
        yield f"For one prompt token that the tree computes, the flat hash computes {told} (public traces)."


def costs(data: Data) -> Iterator[str]:
    """Blocks held."""
    if told := _of_traces(data, lambda flat, tree: f"{tree['held_blocks'] / flat['held_blocks'] - 1:.0%} more"):
        yield f"Memory: each request's partly filled last block stays cached, as long as there is room: {told}."


def _of_traces(data: Data, tell: Callable[[Row, Row], str]) -> str:
    """What is to be told of the flat hash's row and the tree's, for each real trace at blocks of 16 and 64."""
    told: dict[str, list[str]] = {}
    for (trace, size), rows in grouped(part(data, "traces"), "trace", "block_size").items():
        of = {row["cache"]: row for row in rows}
        if size in (16, 64) and {"flat hash", "radix, partial blocks"} <= of.keys():
            told.setdefault(trace, []).append(
                f"{tell(of['flat hash'], of['radix, partial blocks'])} at blocks of {size}"
            )
    return "; ".join(f"on {trace} {' and '.join(each)}" for trace, each in told.items())


def plot(data: Data) -> Figure:
    """Draws tokens computed again over d, and tokens that a trace computes over the least that it could."""
    rows, trace_rows = part(data, "distances"), part(data, "traces")
    plt = pyplot()
    names = list(dict.fromkeys(row["trace"] for row in trace_rows))
    figure, all_axes = plt.subplots(1, 1 + len(names), figsize=(6 + 3.2 * len(names), 4.2), squeeze=False)
    axes = all_axes[0, 0]
    sizes = list(dict.fromkeys(row["block_size"] for row in rows))
    for size in sizes[::-1]:
        for name, style in (("flat hash", "-"), ("radix, partial blocks", "--")):
            some = [row for row in rows if row["block_size"] == size and row["cache"] == name]
            if name == "flat hash" or size == sizes[-1]:
                label = f"flat hash, blocks of {size}" if name == "flat hash" else "radix, partial blocks, any size"
                points = ([row["shared_tokens"] for row in some], [row["again_per_request"] for row in some])
                axes.plot(*points, style, marker=".", markersize=2, linewidth=0.8, label=label)
    axes.set(xlabel="tokens shared", ylabel="tokens computed again, of each request", xlim=(0, None))
    axes.set_ylim(-10, 760)  # room for the legend
    axes.legend(fontsize=8, ncols=2, loc="upper left")
    for axes, trace in zip(all_axes[0, 1:], names, strict=True):
        of_trace = grouped((row for row in trace_rows if row["trace"] == trace), "cache").items()
        draw_bars(axes, {name: {row["block_size"]: row["over_least"] for row in some} for name, some in of_trace})
        axes.set(title=trace, xlabel="block size", ylabel="prompt tokens computed / least", yscale="log")
        axes.legend(fontsize=8)
    figure.tight_layout()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("divergence", __doc__)
    options.add_argument("--trace", nargs="*", help="trace files (game of 24 and mtbench101, where they are)")
    options.add_argument("--tokenizer", default=Config.tokenizer, help="of traces of text (qwen3)")
    given = options.parse_args(arguments)
    traces = shared_traces(*(FILES[name] for name in TRACES)) if given.trace is None else given.trace
    config = Config(trace=tuple(map(str, traces)), tokenizer=given.tokenizer)
    if given.smoke:
        config = replace(config, longest=600, every=256, all_below=20, num_requests=3, limit=200)
    run_experiment("divergence", given.out, config, sys.modules[__name__], at_once=True)


if __name__ == "__main__":
    main()

"""How much of what could be hit does each eviction policy hit, and how far is the best from knowing the future?

Replays traces in their order, one request at a time, whole blocks, through the real manager and caches at several
capacities; beside them the bound of `radixkv.blocks.bounds` (furthest next use first). A request is replayed as the ids
of its blocks, which gives the same hits as its tokens do. `queue_aware` is lru that evicts last what the next 256
requests match; of a conversation only the next turn waits. Expected: lru is far from the bound where traffic goes
round; a policy that knows history alone gains little and must not lose; the queue closes a good part of the gap.

    python -m experiments.eviction
    python -m experiments.eviction --smoke              the embedded workload alone, seconds
    python -m experiments.eviction --trace mooncake --num-blocks 1000 10000
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.block_replay import HISTORY, NAMES, replay
from experiments.lab.harness import Row, fail, parser, print_table, progress
from experiments.lab.plots import finish, pyplot
from experiments.lab.run import Cell, Data, conduct
from experiments.trace_sets import EMBEDDED, available, is_conversation, requests_of
from radixkv.blocks.bounds import BlockPaths

QUEUE = "queue_aware"
CLOSES = " closes"  # after a policy's name: the column with its share of the gap between lru and the bound


@dataclass(frozen=True)
class Config:
    """Traces and pools. Text has bytes as tokens: 64 of them are about 16 of a vocabulary's."""

    trace: tuple[str, ...] = ()
    num_blocks: tuple[int, ...] = ()
    shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.25, 0.5)  # of the unique blocks; at least twice the longest request
    mooncake_blocks: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
    text_block_size: int = 64
    mooncake_block_size: int = 512
    num_waiting: int = 256
    limit: int | None = None


def load(name: str, config: Config) -> tuple[BlockPaths, list[str | None]]:
    """Returns a trace as paths of blocks, and the session of each request. Mooncake's outputs are nobody else's."""
    is_mooncake = name == "mooncake"
    sessions: list[str | None] = []

    def pairs() -> Iterator[tuple[bytes, bytes]]:
        for number, request in enumerate(requests_of(name, config.limit)):
            sessions.append(request.session if is_conversation(name) and request.session else str(number))
            yield request.prompt, b"" if is_mooncake else request.output

    paths = BlockPaths(pairs(), config.mooncake_block_size if is_mooncake else config.text_block_size)
    return paths, sessions


def pools(name: str, paths: BlockPaths, config: Config) -> list[int]:
    if config.num_blocks:
        return list(config.num_blocks)
    if name == "mooncake":
        return list(config.mooncake_blocks)
    return sorted({paths.pool_blocks(share) for share in config.shares})


def cells(config: Config) -> Iterator[Cell]:
    """A cell a trace."""
    for trace in config.trace or available():
        yield trace, partial(measure, config, trace)


def measure(config: Config, trace: str) -> list[Row]:
    """Replays a trace through every pool and policy; returns a row for each pool."""
    paths, sessions = load(trace, config)
    sizes = pools(trace, paths, config)
    total = paths.num_prompt_tokens
    rows = []
    with progress(trace, len(sizes) * len(NAMES)) as bar:
        for num_blocks in sizes:
            row: Row = {"trace": trace, "num_requests": len(sessions), "num_unique_blocks": len(paths.depths)}
            row |= {"block_size": paths.block_size, "num_blocks": num_blocks}
            row |= {"infinite": paths.infinite_hits() / total, "bound": paths.eviction_bound(num_blocks) / total}
            for name in NAMES:
                row[name] = replay(name, paths, sessions, num_blocks, config.num_waiting) / total
                bar.advance(bar.task_ids[0])
            row["gap"] = row["bound"] - row["lru"]
            for name in (*HISTORY, QUEUE):
                row[f"{name}{CLOSES}"] = (row[name] - row["lru"]) / row["gap"] if row["gap"] > 1e-9 else 0.0
            rows.append(row)
    return rows


def measured(rows: Sequence[Row]) -> list[str]:
    """Returns the policies of history alone that all rows have: those of the version that measured them."""
    names = [key.removesuffix(CLOSES) for key in rows[0] if key.endswith(CLOSES)] if rows else []
    return [name for name in names if name != QUEUE and all(name in row for row in rows)]


def verdict(rows: Sequence[Row]) -> Row:
    """Where the gap is at least .02: the best policy of history alone that is nowhere far below lru, and the queue."""
    wide = [row for row in rows if row["gap"] >= 0.02]
    found: Row = {"num_wide": len(wide), "num_rows": len(rows)}
    policies = measured(rows)
    for name in policies:
        found[f"{name} worst"] = min((row[name] - row["lru"] for row in wide), default=0.0)
        found[f"{name} mean"] = sum(row[name] - row["lru"] for row in wide) / max(len(wide), 1)
    safe = [name for name in policies if found[f"{name} worst"] >= -0.005]
    found["best_history"] = max(safe, key=lambda name: found[f"{name} mean"])
    traces = {row["trace"] for row in wide}
    means = {t: [row["queue_aware closes"] for row in wide if row["trace"] == t] for t in traces}
    found["queue_aware closes"] = {trace: sum(each) / len(each) for trace, each in sorted(means.items())}
    found["num_traces_closed"] = sum(share >= 0.25 for share in found["queue_aware closes"].values())
    return found


STYLES = {"bound": "--", QUEUE: "-"}
BEFORE = {"trace": "{trace}", "blocks": "{num_blocks:,}", "bound": "{bound:.3f}"}
BEHIND = {"queue_aware": "{queue_aware:.3f}", "closes": "{queue_aware closes:.0%}"}
BEHIND |= {"flat": "{flat_hash:.3f}", "flat, queue": "{flat_hash queue_aware:.3f}"}


def show(data: Data) -> None:
    """Prints a line a trace and pool."""
    policies = {name: f"{{{name}:.3f}}" for name in measured(data["rows"])}
    print_table("Hit rates, one request at a time", BEFORE | policies | BEHIND, data["rows"])


def plot(path: Path) -> Path:
    """Draws hit rate against capacity for each trace, from the JSON alone."""
    rows = json.loads(path.read_text())["rows"]
    policies = measured(rows)
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    plt = pyplot()
    figure, axes = plt.subplots(
        -(-len(traces) // 3), min(len(traces), 3), squeeze=False, figsize=(13, 3.4 * -(-len(traces) // 3))
    )
    for axis, trace in zip(axes.flat, traces, strict=False):
        of_trace = [row for row in rows if row["trace"] == trace]
        for name in ("bound", QUEUE, *policies):
            # What knows the future is drawn in ink, the bound dashed; the policies in colours.
            style = {} if name in policies else {"color": plt.rcParams["text.color"], "linestyle": STYLES[name]}
            axis.plot([r["num_blocks"] for r in of_trace], [r[name] for r in of_trace], marker=".", label=name, **style)
        axis.set(title=trace, xscale="log", xlabel="blocks", ylabel="hit rate")
        axis.xaxis.set_minor_formatter(plt.NullFormatter())
        sizes = [row["num_blocks"] for row in of_trace]
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7, rotation=30, ha="right")
    for axis in list(axes.flat)[len(traces) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return finish(figure, path)


def answer(data: Data) -> str:
    """What the queue is worth, and what the best policy of history alone."""
    found = verdict(data["rows"])
    best, closes = found["best_history"], found["queue_aware closes"]
    if not closes:
        return f"lru is within .02 of the offline bound in all {found['num_rows']} pools."
    shares = ", ".join(f"{share:.0%} on {trace}" for trace, share in closes.items())
    return (
        f"Of what lru misses against an eviction that knows the future, knowing {data['config']['num_waiting']} "
        f"waiting requests wins back {shares}; the best policy that knows only the past, {best}, changes the hit rate "
        f"by {found[best + ' mean']:+.3f} on average ({found[best + ' worst']:+.3f} at worst)."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("eviction", __doc__)
    options.add_argument("--trace", nargs="+", default=[], help="default: all that are here, and the embedded one")
    options.add_argument("--num-blocks", nargs="+", type=int, default=[], metavar="N")
    options.add_argument("--limit", type=int, help="read at most so many requests of each trace")
    given = options.parse_args(arguments)
    traces = (EMBEDDED,) if given.smoke else tuple(given.trace)
    config = Config(traces, tuple(given.num_blocks), limit=600 if given.smoke else given.limit)
    try:
        conduct("eviction", given.out, config, cells(config), sys.modules[__name__], at_once=True)
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()

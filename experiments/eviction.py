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

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, grouped, parser, print_table, progress
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import EMBEDDED, available, is_conversation, requests_of
from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.bounds import BlockPaths
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.contract import PrefixCache, Watch
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES
from radixkv.cache.radix.policies.cost import Cost
from radixkv.cache.tokens import pack

ENTRY = Entry("policies", seconds=90, place=2)

HISTORY = tuple(POLICIES)
NAMES = (*HISTORY, "flat_hash", "queue_aware", "flat_hash queue_aware")


def make_cache(name: str, block_size: int) -> PrefixCache:
    """Returns a cache of blocks of one token: each stands for a block of the trace."""
    if name.startswith("flat_hash"):
        return FlatHashCache(1, hash_algorithm="sha256")
    if name == "cost":  # its positions are blocks here
        return RadixCache(1, policy=Cost(max(30_000 // block_size, 1)))
    return RadixCache(1, policy="lru" if name == "queue_aware" else name)


class Queue:
    """The requests that wait: the next so many, but of a session only the first of them."""

    def __init__(self, cache: PrefixCache, keys: Sequence[bytes], sessions: Sequence[str | None], length: int) -> None:
        self._cache, self._keys, self._sessions = cache, keys, sessions
        self._watches: dict[int, Watch] = {}
        self._behind: dict[str | None, deque[int]] = {}
        for number in range(min(length, len(keys))):
            self._enter(number)
        self._next = length

    def _enter(self, number: int) -> None:
        line = self._behind.setdefault(self._sessions[number], deque())
        line.append(number)
        if len(line) == 1:
            self._watch(number)

    def _watch(self, number: int) -> None:
        self._watches[number] = self._cache.watch(self._keys[number], rank=(0, -number))

    def start(self, number: int) -> None:
        """A request leaves the queue; another comes in, and the next of its session."""
        self._cache.unwatch(self._watches.pop(number))
        line = self._behind[self._sessions[number]]
        line.popleft()
        if line:
            self._watch(line[0])
        if self._next < len(self._keys):
            self._enter(self._next)
            self._next += 1


def replay(name: str, paths: BlockPaths, sessions: Sequence[str | None], num_blocks: int, num_waiting: int) -> int:
    """Returns the tokens hit."""
    cache = make_cache(name, paths.block_size)
    manager = KVManager(cache, num_blocks)
    # What may be matched, and one token that is computed in any case.
    prompts = [pack([*path[:most], 0]) for path, most in zip(paths.paths, paths.num_matchable, strict=True)]
    queue = Queue(cache, prompts, sessions, num_waiting) if name.endswith("queue_aware") else None
    hits = 0
    for number, path in enumerate(paths.paths):
        if queue is not None:
            queue.start(number)
        sequence = manager.begin(prompts[number])
        try:
            manager.grow(sequence, paths.num_blocks[number])
        except OutOfBlocks:
            manager.cancel(sequence)
            continue
        hits += sequence.num_cached_tokens * paths.block_size
        manager.publish(sequence, pack(path))
        manager.commit()
        manager.end(sequence)
    return hits


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
    """Returns a trace as paths of blocks, and each request's session. Mooncake's outputs are shared by no request."""
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
            for name in (*HISTORY, "queue_aware"):
                row[f"{name} closes"] = (row[name] - row["lru"]) / row["gap"] if row["gap"] > 1e-9 else 0.0
            rows.append(row)
    return rows


def history_of(rows: Sequence[Row]) -> list[str]:
    """The policies of history alone that the rows have; today's may be others."""
    closes = [{name.removesuffix(" closes") for name in row if name.endswith(" closes")} for row in rows]
    return [name for name in rows[0] if name != "queue_aware" and all(name in each for each in closes)]


def verdict(rows: Sequence[Row]) -> Row:
    """Where the gap is at least .02: the best policy of history alone that is nowhere far below lru, and the queue."""
    wide = [row for row in rows if row["gap"] >= 0.02]
    found: Row = {"num_wide": len(wide), "num_rows": len(rows)}
    history = history_of(rows)
    for name in history:
        found[f"{name} worst"] = min((row[name] - row["lru"] for row in wide), default=0.0)
        found[f"{name} mean"] = sum(row[name] - row["lru"] for row in wide) / max(len(wide), 1)
    safe = [name for name in history if found[f"{name} worst"] >= -0.005]
    found["best_history"] = max(safe, key=lambda name: found[f"{name} mean"])
    traces = {row["trace"] for row in wide}
    means = {t: [row["queue_aware closes"] for row in wide if row["trace"] == t] for t in traces}
    found["queue_aware closes"] = {trace: sum(each) / len(each) for trace, each in sorted(means.items())}
    found["num_traces_closed"] = sum(share >= 0.25 for share in found["queue_aware closes"].values())
    return found


STYLES = {"bound": "--", "queue_aware": "-"}


def show(data: Data) -> None:
    """Prints a line a trace and pool."""
    columns = {"trace": "{trace}", "blocks": "{num_blocks:,}", "bound": "{bound:.3f}"}
    columns |= {name: f"{{{name}:.3f}}" for name in history_of(data["rows"])}
    columns |= {"queue_aware": "{queue_aware:.3f}", "closes": "{queue_aware closes:.0%}"}
    columns |= {"flat": "{flat_hash:.3f}", "flat, queue": "{flat_hash queue_aware:.3f}"}
    print_table("Hit rates, one request at a time", columns, data["rows"])


def plot(data: Data) -> Figure:
    """Draws hit rate against capacity for each trace."""
    rows = data["rows"]
    history, traces = history_of(rows), grouped(rows, "trace")
    plt = pyplot()
    figure, axes = plt.subplots(
        -(-len(traces) // 3), min(len(traces), 3), squeeze=False, figsize=(13, 3.4 * -(-len(traces) // 3))
    )
    for axis, (trace, of_trace) in zip(axes.flat, traces.items(), strict=False):
        for name in ("bound", "queue_aware", *history):
            # What knows the future is drawn in ink, the bound dashed; the policies in colours.
            style = {} if name in history else {"color": plt.rcParams["text.color"], "linestyle": STYLES[name]}
            axis.plot([r["num_blocks"] for r in of_trace], [r[name] for r in of_trace], marker=".", label=name, **style)
        axis.set(title=trace, xscale="log", xlabel="blocks", ylabel="hit rate")
        axis.xaxis.set_minor_formatter(plt.NullFormatter())
        sizes = [row["num_blocks"] for row in of_trace]
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7, rotation=30, ha="right")
    for axis in list(axes.flat)[len(traces) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


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
        run_experiment("eviction", given.out, config, sys.modules[__name__], at_once=True)
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()

"""What would a radix tree of token spans save over the flat hash of blocks, on this trace?

Replays a trace through the real managers and caches, request by request, all of them side by side. Expected: on text
that diverges inside blocks (chats, few-shot, trees of thought) radix hits more at every block size and capacity,
with fewer blocks, and its index costs less; on text that shares nothing all are the same.

    python -m experiments.compare                                         the embedded workload, under a minute
    python -m experiments.compare --trace my.jsonl --tokenizer qwen3      your own: chats, requests, Mooncake, CSV
    python -m experiments.compare --trace my.jsonl --num-blocks 1000 10000 unbounded --block-size 16 64
    python -m experiments.compare --workload few_shot --cache-outputs on
"""

import argparse
import gc
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.harness import Row, console, fail, print_table, progress, pyplot, save
from radixkv.cache.base import check_block_size
from radixkv.cache.eviction import POLICIES
from radixkv.cache.hashing import ALGORITHMS
from radixkv.model_shapes import MODEL_SHAPES
from radixkv.replay import CACHES, CacheConfig, Replay
from radixkv.workloads import FORMATS, WORKLOADS, open_trace, open_workload

EMBEDDED = "embedded"
# Where nothing else is asked for, so that there is something to see: pools in tokens, at two sizes of block.
EMBEDDED_BLOCK_SIZES = (16, 128)
EMBEDDED_POOLS = (16_384, 65_536, 262_144)


@dataclass(frozen=True)
class Config:
    """What was asked for; goes into the JSON as it is."""

    trace: tuple[str, ...] = ()
    join: bool = False
    format: str | None = None
    workload: str | None = None
    tokenizer: str = "bytes"
    cache: tuple[str, ...] = CACHES
    block_size: tuple[int, ...] = (16,)
    partial_blocks: tuple[bool, ...] = (True,)
    num_blocks: tuple[int | None, ...] = (None,)
    pool_tokens: tuple[int, ...] = ()
    policy: tuple[str, ...] = ("lru",)
    hash_algorithm: str = "sha256"
    cache_outputs: bool = False
    seed: int = 0
    limit: int | None = None
    skip_bad: bool = False
    model_shape: str = "llama-3-8b"

    def caches(self) -> list[CacheConfig]:
        """Returns every cache asked for; what an option does not concern is not repeated for it."""
        configs = [
            CacheConfig(
                cache,
                block_size,
                partial_blocks=cache == "radix" and partial and block_size > 1,
                num_blocks=num_blocks if cache != "null" else None,
                policy=policy if cache == "radix" else "lru",
                hash_algorithm=self.hash_algorithm,
            )
            for block_size in self.block_size
            for cache in self.cache
            for partial in self.partial_blocks
            for policy in self.policy
            for num_blocks in (*(tokens // block_size for tokens in self.pool_tokens), *self.num_blocks)
        ]
        return list(dict.fromkeys(configs))


def run(config: Config) -> list[Row]:
    """Replays every trace of the config through every cache of it.

    Raises:
        TraceError: a file can't be read.
        ValueError: an option has no such value.
    """
    rows: list[Row] = []
    for trace in _traces(config):
        rows += replay(trace, config)
        if trace.counts.num_bad:
            console.print(f"{trace.name}: {trace.counts.num_bad} records could not be read, such as")
            console.print(*(f"  {error}" for error in trace.counts.examples), sep="\n", markup=False)
        if trace.counts.num_without_output:
            console.print(f"{trace.name}: {trace.counts.num_without_output} conversations without an answer left out")
        if not trace.sharing_known:
            console.print(f"{trace.name}: gives lengths alone, so nothing is shared and hits mean nothing.")
    return rows


def _traces(config: Config) -> Iterable[Any]:
    if config.workload or not config.trace:
        name = config.workload or EMBEDDED
        if name != EMBEDDED and config.tokenizer != "bytes":
            raise ValueError(f"--tokenizer: the tokens of {name} are random numbers, got {config.tokenizer!r}")
        more = {"tokenizer": config.tokenizer} if name == EMBEDDED else {}
        yield open_workload(name, seed=config.seed, limit=config.limit, **more)
    groups = [list(config.trace)] if config.join else [[path] for path in config.trace]
    for paths in filter(None, groups):
        yield open_trace(
            paths, tokenizer=config.tokenizer, format=config.format, limit=config.limit, skip_bad=config.skip_bad
        )


def replay(trace: Any, config: Config) -> list[Row]:
    """Feeds a trace to every cache, each request to all before the next, so that they share the machine's moods."""
    # An unbounded tree that shares to the token hits all there is to hit: the optimum that the others are held against.
    best = CacheConfig("radix", max(config.block_size), partial_blocks=max(config.block_size) > 1)
    replays = {cache: Replay(cache, cache_outputs=config.cache_outputs) for cache in (*config.caches(), best)}
    gc.collect()
    gc.disable()  # a collection in the middle of one cache's turn would be charged to it
    try:
        with progress(trace.name, None) as bar:
            for request in trace:
                for each in replays.values():
                    each.feed(request.prompt, request.output, request.namespace)
                bar.advance(bar.task_ids[0])
    finally:
        gc.enable()
    optimum = replays[best].num_cached_tokens
    return [_row(trace.name, replays[cache], optimum, config) for cache in config.caches()]


def _row(trace: str, replayed: Replay, optimum: int, config: Config) -> Row:
    cache = replayed.config
    num_requests = max(replayed.num_requests, 1)
    kv_bytes = MODEL_SHAPES[config.model_shape].kv_bytes_per_token
    return {
        "trace": trace,
        "cache": cache.cache,
        "block_size": cache.block_size,
        "partial_blocks": cache.partial_blocks,
        "num_blocks": cache.num_blocks,
        "policy": cache.policy,
        "cache_outputs": config.cache_outputs,
        "num_requests": replayed.num_requests,
        "num_refused_requests": replayed.num_refused_requests,
        "num_prompt_tokens": replayed.num_prompt_tokens,
        "num_cached_tokens": replayed.num_cached_tokens,
        "num_computed_tokens": replayed.num_prompt_tokens - replayed.num_cached_tokens,
        "hit_rate": replayed.hit_rate,
        "share_of_optimum": replayed.num_cached_tokens / optimum if optimum else 1.0,
        "num_evicted_blocks": replayed.num_evicted_blocks,
        "peak_blocks": replayed.peak_blocks,
        "peak_kv_bytes": replayed.peak_blocks * cache.block_size * kv_bytes,
        "model_shape": config.model_shape,
        "index_us_per_request": (replayed.index_ns - replayed.hash_ns) / 1e3 / num_requests,
        "hash_us_per_request": replayed.hash_ns / 1e3 / num_requests,
        "index_bytes_per_token": replayed.index_bytes_per_token(),
    }


COLUMNS = {
    "cache": "{label}",
    "pool": "{pool}",
    "hit rate": "{hit_rate:.2%}",
    "of optimum": "{share_of_optimum:.2%}",
    "computed": "{computed_k:,.0f}k",
    "blocks": "{peak_blocks:,}",
    "KV GiB": "{kv_gib:.1f}",
    "evicted": "{num_evicted_blocks:,}",
    "index us": "{index_us_per_request:,.0f}",
    "hash us": "{hash_us_per_request:,.0f}",
    "B/token": "{index_bytes_per_token:.1f}",
}


def label(row: Row) -> str:
    """Names the cache of a row as the table and the plot do."""
    name = f"{row['cache']} {row['block_size']}"
    if row["cache"] == "radix" and row["block_size"] > 1 and not row["partial_blocks"]:
        name += " whole"
    return name if row["policy"] == "lru" else f"{name} {row['policy']}"


def print_rows(rows: Sequence[Row]) -> None:
    """Prints a table for each trace; times are us a request, B/token the index's bytes a cached token."""
    for trace in dict.fromkeys(row["trace"] for row in rows):
        mine = [row for row in rows if row["trace"] == trace]
        shown = [
            row
            | {
                "label": label(row),
                "pool": "unbounded" if row["num_blocks"] is None else f"{row['num_blocks']:,}",
                "computed_k": row["num_computed_tokens"] / 1000,
                "kv_gib": row["peak_kv_bytes"] / 2**30,
            }
            for row in mine
        ]
        first = mine[0]
        size = f"{first['num_requests']:,} requests, {first['num_prompt_tokens']:,} prompt tokens"
        print_table(f"{trace}: {size}; KV of {first['model_shape']}", COLUMNS, shown)


def plot(path: Path) -> Path:
    """Draws hit rate against capacity, a line a cache, from the JSON alone; an unbounded pool stands at its peak."""
    rows = json.loads(path.read_text())["rows"]
    plt = pyplot()
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure, axes = plt.subplots(1, len(traces), figsize=(1.5 + 5.5 * len(traces), 4.2), squeeze=False, sharey=True)
    for axis, trace in zip(axes[0], traces, strict=True):
        mine = [row for row in rows if row["trace"] == trace and row["cache"] != "null"]
        for name in dict.fromkeys(map(label, mine)):
            line = [row for row in mine if label(row) == name]
            points = sorted(((r["num_blocks"] or r["peak_blocks"]) * r["block_size"], r["hit_rate"]) for r in line)
            style = "o--" if line[0]["cache"] == "flat_hash" else "o-"
            axis.plot(*zip(*points, strict=True), style, label=name, markersize=4)
        axis.set(title=trace, xlabel="pool, tokens (the last point: as much as it takes)", xscale="log")
        axis.xaxis.set_major_formatter(plt.FuncFormatter(lambda tokens, _: f"{tokens / 1000:,.0f}k"))
        axis.xaxis.set_minor_formatter(plt.NullFormatter())
        axis.set_ylim(0, 1)
        axis.legend()
    axes[0][0].set_ylabel("hit rate, share of prompt tokens")
    picture = path.with_suffix(".png")
    figure.savefig(picture)
    plt.close(figure)
    return picture


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--trace", nargs="+", default=[], metavar="FILE", help="trace files, each a trace of its own; format recognised"
    )
    add("--join", action="store_true", help="the files are one trace, one after the other")
    add("--format", choices=FORMATS, help="where the format is not to be recognised from the content")
    add("--workload", choices=sorted(WORKLOADS), help=f"a synthetic workload (default without --trace: {EMBEDDED})")
    add("--tokenizer", default="bytes", metavar="bytes|NAME|PATH", help="a vocabulary's name, or a tokenizer.json")
    add("--cache", nargs="+", choices=CACHES, default=CACHES, help="default: all")
    add("--block-size", nargs="+", type=_block_size, metavar="N", help="tokens in a block, 1 to 1024 (16)")
    add("--partial-blocks", nargs="+", choices=("on", "off"), default=["on"], help="radix shares to the token (on)")
    add("--num-blocks", nargs="+", type=_num_blocks, metavar="N|unbounded", help="blocks in the pool (unbounded)")
    add("--policy", nargs="+", choices=sorted(POLICIES), default=["lru"], help="eviction of radix (lru)")
    add("--hash-algorithm", choices=ALGORITHMS, default="sha256", help="of the flat hash (sha256)")
    add("--cache-outputs", choices=("on", "off"), default="off", help="publish outputs too, as an engine does (off)")
    add("--seed", type=int, default=0, help="of synthetic workloads")
    add("--limit", type=int, help="read at most so many requests of each trace")
    add("--skip-bad", action="store_true", help="count lines that can't be read, and go on")
    add("--model-shape", choices=sorted(MODEL_SHAPES), default="llama-3-8b", help="whose KV bytes to report")
    add("--out", type=Path, default=Path("results"), metavar="DIR", help="gets compare.json and compare.png (results)")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    out = given.pop("out")
    is_embedded = given["workload"] in (None, EMBEDDED) and not given["trace"]
    given["pool_tokens"] = EMBEDDED_POOLS if is_embedded and given["num_blocks"] is None else ()
    given["num_blocks"] = given["num_blocks"] or (None,)
    given["block_size"] = given["block_size"] or (EMBEDDED_BLOCK_SIZES if is_embedded else (16,))
    given["partial_blocks"] = [choice == "on" for choice in given["partial_blocks"]]
    given["cache_outputs"] = given["cache_outputs"] == "on"
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    config = Config(**options)
    try:
        rows = run(config)
    except (ValueError, ImportError) as error:
        fail(str(error))
    if not any(row["num_requests"] for row in rows):
        fail("there was no request to replay")
    print_rows(rows)
    path = save(out, "compare", asdict(config), rows)
    console.print(f"{path}\n{plot(path)}", highlight=False)


def _block_size(text: str) -> int:
    try:
        return check_block_size(int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _num_blocks(text: str) -> int | None:
    if text == "unbounded":
        return None
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of blocks or 'unbounded', got {text!r}")
    return int(text)


if __name__ == "__main__":
    main()

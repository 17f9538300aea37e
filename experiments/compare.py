"""What would a radix tree of token spans save over the flat hash of blocks, on this trace?

Replays a trace through the real managers and caches, one request at a time, all caches side by side. Expected: without
a bound radix hits at least as much, at every block size what an infinite cache that shares to the token would hit. It
holds more blocks for it (each request's partly filled last one), so where nothing diverges inside blocks it can lose a
little in a tight pool. Its index costs less than the flat hash with hashing counted. With a `--model` that mixes kinds
of layers the rows are those of `experiments.hybrid_gain`: vLLM's blocks for that model against the tree.

    python -m experiments.compare                                         the embedded workload, under a minute
    python -m experiments.compare --trace my.jsonl --tokenizer qwen3      your own: chats, requests, Mooncake, CSV
    python -m experiments.compare --trace my.jsonl --num-blocks 1000 10000 unbounded --block-size 16 64
    python -m experiments.compare --workload few_shot --cache-outputs on
    python -m experiments.compare --trace my.jsonl --model qwen3.5-35b-a3b --pool-gib 20 unbounded
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments import hybrid_gain, serving
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, console, fail, grouped, parser, print_table, progress, save
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Data, draw
from radixkv.blocks.config import CACHES, CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.contract import check_block_size
from radixkv.cache.hashing import ALGORITHMS
from radixkv.cache.radix.policies import POLICIES
from radixkv.cache.tokens import unpack
from radixkv.simulate.cost_model import Roofline
from radixkv.simulate.gpus import GPUS
from radixkv.simulate.model_shapes import MODEL_SHAPES
from radixkv.traces import FORMATS, WORKLOADS, open_trace, open_workload

ENTRY = Entry("prefixes", seconds=15, place=1)
HYBRID_MODELS = hybrid_gain.HYBRID_MODELS

EMBEDDED = "embedded"
SMOKE_REQUESTS = 200
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
    model: str = "llama-3-8b"
    serve: bool = False
    pool_gib: tuple[str, ...] = ()
    gpu: str = hybrid_gain.Config.gpu
    num_gpus: int = hybrid_gain.Config.num_gpus

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


def read_options(description: str | None, arguments: Sequence[str] | None) -> tuple[Path, Config]:
    """Returns the folder for results, and the config."""
    options = parser("compare", description, "compare.json and compare.png")
    add = options.add_argument
    source = options.add_mutually_exclusive_group()
    source.add_argument(
        "--trace", nargs="+", default=[], metavar="FILE", help="trace files, each a trace of its own; format recognised"
    )
    add("--join", action="store_true", help="the files are one trace, one after the other")
    add("--format", choices=FORMATS, help="where the format is not to be recognised from the content")
    source.add_argument(
        "--workload", choices=sorted(WORKLOADS), help=f"a synthetic workload (default without --trace: {EMBEDDED})"
    )
    add(
        "--tokenizer",
        default="bytes",
        metavar="bytes|NAME|PATH",
        help="of text: UTF-8 bytes (default), qwen3, o200k, cl100k, llama3, or a tokenizer.json; chats become ChatML",
    )
    add("--cache", nargs="+", choices=CACHES, default=CACHES, help="default: all")
    add("--block-size", nargs="+", type=_block_size, metavar="N", help="tokens in a block, 1 to 1024 (16)")
    add("--partial-blocks", nargs="+", choices=("on", "off"), default=["on"], help="radix shares to the token (on)")
    add("--num-blocks", nargs="+", type=_num_blocks, metavar="N|unbounded", help="blocks in the pool (unbounded)")
    add("--policy", nargs="+", choices=sorted(POLICIES), default=["lru"], help="eviction of radix (lru)")
    add("--hash-algorithm", choices=ALGORITHMS, default="sha256", help="of the flat hash (sha256)")
    add(
        "--cache-outputs",
        choices=("on", "off"),
        default="off",
        help="cache outputs too, as an engine does; off (default): what prompts share with prompts",
    )
    add("--seed", type=int, default=0, help="of synthetic workloads")
    add("--limit", type=int, help="read at most so many requests of each trace")
    add("--skip-bad", action="store_true", help="count lines that can't be read, and go on")
    add(
        "--model",
        choices=sorted(MODEL_SHAPES),
        default=Config.model,
        metavar="NAME",
        help=f"whose bytes to count (llama-3-8b): one of {', '.join(sorted(MODEL_SHAPES))}",
    )
    add("--pool-gib", nargs="+", default=[], metavar="GIB|unbounded", help="pools of models with states or windows")
    add("--gpu", choices=sorted(GPUS), default=Config.gpu, help="whose seconds of prefill are told of such models")
    add("--num-gpus", type=int, default=Config.num_gpus, help="how many of them")
    add(
        "--serve", choices=("on", "off"), default="on", help="then serve part of the embedded workload on tiny_gpt (on)"
    )
    given: dict[str, Any] = vars(options.parse_args(arguments))
    out = given.pop("out")
    given.pop("full")
    if given.pop("smoke"):
        given["limit"], given["serve"] = given["limit"] or SMOKE_REQUESTS, "off"
    is_embedded = given["workload"] in (None, EMBEDDED) and not given["trace"]
    given["pool_tokens"] = EMBEDDED_POOLS if is_embedded and given["num_blocks"] is None else ()
    given["num_blocks"] = given["num_blocks"] or (None,)
    given["block_size"] = given["block_size"] or (EMBEDDED_BLOCK_SIZES if is_embedded else (16,))
    given["partial_blocks"] = [choice == "on" for choice in given["partial_blocks"]]
    given["cache_outputs"] = given["cache_outputs"] == "on"
    given["serve"] = given["serve"] == "on" and is_embedded and given["model"] not in HYBRID_MODELS
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return out, Config(**given)


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


def run(config: Config) -> Iterator[list[Row]]:
    """Replays each trace of the config through every cache of it; yields a trace's rows when it has ended.

    Raises:
        ValueError: a file can't be read, or an option has no such value, or concerns nothing that is asked for.
    """
    _check(config)
    traces = _traces(config)  # all of them opened before the first is read
    names = _names([trace.name for trace in traces], config)
    for trace, name in zip(traces, names, strict=True):
        rows = replay(trace, name, config)
        if rows[0]["num_requests"]:
            yield rows
        else:
            console.print(f"{name}: no request in it", *trace.counts.remarks(), sep="\n", markup=False)


def _check(config: Config) -> None:
    default = Config()
    if config.model in HYBRID_MODELS:
        given = asdict(config)
        embedded = {"block_size": (EMBEDDED_BLOCK_SIZES,)}  # where nothing was asked for
        options = ("block_size", "partial_blocks", "num_blocks", "policy", "hash_algorithm", "cache", "cache_outputs")
        for name in options:
            if given[name] not in (getattr(default, name), *embedded.get(name, ())):
                raise ValueError(f"--{name.replace('_', '-')}: concerns nothing that is asked for with {config.model}")
        return
    for name in ("pool_gib", "gpu", "num_gpus"):
        if getattr(config, name) != getattr(default, name):
            raise ValueError(f"--{name.replace('_', '-')}: concerns models with states or windows, got {config.model}")
    idle = {"policy", "partial_blocks"} if "radix" not in config.cache else set()
    if "flat_hash" not in config.cache:
        idle.add("hash_algorithm")
    if config.trace:
        idle.add("seed")
    else:
        idle |= {"format", "join", "skip_bad"}
    for name in sorted(idle):
        if getattr(config, name) != getattr(default, name):
            raise ValueError(f"--{name.replace('_', '-')}: concerns nothing that is asked for")


def _traces(config: Config) -> list[Any]:
    if not config.trace:
        name = config.workload or EMBEDDED
        if name != EMBEDDED and config.tokenizer != "bytes":
            raise ValueError(f"--tokenizer: the tokens of {name} are random numbers, got {config.tokenizer!r}")
        more = {"tokenizer": config.tokenizer} if name == EMBEDDED else {}
        return [open_workload(name, seed=config.seed, limit=config.limit, **more)]
    groups = [list(config.trace)] if config.join else [[path] for path in config.trace]
    return [
        open_trace(
            paths, tokenizer=config.tokenizer, format=config.format, limit=config.limit, skip_bad=config.skip_bad
        )
        for paths in groups
    ]


def _names(names: Sequence[str], config: Config) -> list[str]:
    """Names of traces, their whole paths where they would be the same."""
    return list(names) if len(set(names)) == len(names) else [str(path) for path in config.trace]


SERVED_PROMPT_BYTES = 1000


def replay(trace: Any, name: str, config: Config) -> list[Row]:
    """Feeds a trace to every cache, each request to all before the next, so that they share the machine's noise."""
    # An unbounded tree that shares to the token hits all there is to hit: the optimum that the others are held against.
    best = CacheConfig("radix", max(config.block_size), partial_blocks=max(config.block_size) > 1)
    replays = {cache: Replay(cache, cache_outputs=config.cache_outputs) for cache in (*config.caches(), best)}
    gc.collect()
    gc.disable()  # a collection in the middle of one cache's turn would be charged to it
    try:
        with progress(name, None) as bar:
            for request in trace:
                for each in replays.values():
                    each.feed(request.prompt, request.output, request.namespace)
                bar.advance(bar.task_ids[0])
    finally:
        gc.enable()
    optimum = replays[best].num_cached_tokens
    formats = ", ".join(dict.fromkeys(trace.formats))
    more = {"tokens": trace.tokens, "format": formats, "caveats": trace.caveats, "remarks": trace.counts.remarks()}
    return [_row(name, replays[cache], optimum, config) | more for cache in config.caches()]


def _row(trace: str, replayed: Replay, optimum: int, config: Config) -> Row:
    cache = replayed.config
    num_requests = max(replayed.num_requests, 1)
    kv_bytes = MODEL_SHAPES[config.model].kv_bytes_per_token
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
        "model": config.model,
        "index_us_per_request": (replayed.index_ns - replayed.hash_ns) / 1e3 / num_requests,
        "hash_us_per_request": replayed.hash_ns / 1e3 / num_requests,
        "index_bytes_per_token": replayed.index_bytes_per_token(),
    }


def serve_embedded(config: Config) -> list[Row]:
    """Serves short requests of the embedded workload on tiny_gpt, all at once, with each cache; prints a table.

    Raises:
        AssertionError: two caches gave different tokens.
    """
    # This loads torch, which a trace's comparison does without.
    from radixkv.engine.engine import Engine

    arrivals: list[serving.Arrival] = []
    for request in open_workload(EMBEDDED, seed=config.seed):
        if 0 < request.num_prompt_tokens <= SERVED_PROMPT_BYTES and len(arrivals) < SERVED_REQUESTS:
            arrivals.append(serving.Arrival(0.0, tuple(unpack(request.prompt).tolist()), 16))
    rows, answers = [], []
    with progress("serving on tiny_gpt", len(config.cache)) as bar:
        for cache in config.cache:
            engine = Engine.from_pretrained("tiny_gpt", cache=CacheConfig(cache, num_blocks=4096))
            serving.warm_up(engine)
            outputs = serving.serve(engine, arrivals)
            rows.append({"cache": cache, **serving.summarize(outputs)})
            answers.append([output.outputs[0].token_ids for output in outputs])
            bar.advance(bar.task_ids[0])
    assert all(answer == answers[0] for answer in answers), "the caches gave different tokens"
    print_table(SERVING_TITLE, serving.COLUMNS, rows)
    return rows


SERVED_REQUESTS = 16
SERVING_TITLE = f"The engine on tiny_gpt: {SERVED_REQUESTS} of these requests at once, the same tokens from each; in ms"
COLUMNS = {
    "cache": "{label}",
    "pool": "{pool}",
    "hit rate": "{hit_rate:.2%}",
    "of optimum": "{optimum}",
    "computed": "{computed}",
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


def pool(row: Row) -> str:
    return "unbounded" if row["num_blocks"] is None else f"{row['num_blocks']:,}"


def print_rows(rows: Sequence[Row]) -> None:
    """Prints a table for each trace, and under it what radix saves over the flat hash in words."""
    for trace, mine in grouped(rows, "trace").items():
        first = mine[0]
        shared = any(row["num_cached_tokens"] for row in mine)
        shown = [
            row
            | {
                "label": label(row),
                "pool": pool(row),
                "optimum": f"{row['share_of_optimum']:.2%}" if shared else "-",
                "computed": _count(row["num_computed_tokens"]),
                "kv_gib": row["peak_kv_bytes"] / 2**30,
            }
            for row in mine
        ]
        outputs = "prompts and outputs cached" if first["cache_outputs"] else "prompts cached"
        read = f"read as {first['format']}; " if first.get("format") else ""
        size = f"{first['num_requests']:,} requests, {first['num_prompt_tokens']:,} prompt tokens ({first['tokens']})"
        title = f"{trace}: {read}{size}; {outputs}; KV of {first['model']}"
        print_table(title, COLUMNS, shown, [*_verdicts(mine), *_remarks(mine), *_warnings(first), ""])


def _count(number: int) -> str:
    return f"{number:,}" if number < 100_000 else f"{number / 1000:,.0f}k"


def _verdicts(rows: Sequence[Row]) -> list[str]:
    flat = {(r["block_size"], r["num_blocks"]): r for r in rows if r["cache"] == "flat_hash"}
    lines = []
    for row in rows:
        other = flat.get((row["block_size"], row["num_blocks"]))
        if row["cache"] != "radix" or other is None:
            continue
        saved = other["num_computed_tokens"] - row["num_computed_tokens"]
        share = saved / other["num_computed_tokens"] if other["num_computed_tokens"] else 0.0
        blocks = f"{row['peak_blocks'] / other['peak_blocks'] - 1:+.0%} blocks, " if other["peak_blocks"] else ""
        times = [r["index_us_per_request"] + r["hash_us_per_request"] for r in (row, other)]
        lines.append(
            f"{label(row)} against {label(other)}, pool {pool(row)}: {saved:,} fewer tokens computed ({share:.1%}), "
            f"{blocks}{times[0]:.0f} us a request in index and hashing for {times[1]:.0f}"
        )
    return lines


def _remarks(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"{label(row)}, pool {pool(row)}: {row['num_refused_requests']:,} of {row['num_requests']:,} requests did not "
        "fit into the pool and went past the cache"
        for row in rows
        if row["num_refused_requests"]
    ]
    return [*lines, *_tokens_told(rows[0])]


def _tokens_told(row: Row) -> list[str]:
    lines = []
    if row["tokens"] == "bytes":
        lines.append("tokens are UTF-8 bytes, three to four for each of a model's: --tokenizer qwen3 counts those")
    return [*lines, *row.get("caveats", ())]


def _warnings(row: Row) -> list[str]:
    """What was odd about the trace, and what of it was not read: figures of it are to be read with that in mind."""
    return [f"Warning: {line}" if not line.startswith(" ") else line for line in row.get("remarks", ())]


def show(data: Data) -> None:
    """Prints a table a trace, and what the engine took where it served."""
    print_rows(data["rows"])
    if data.get("serving"):
        print_table(SERVING_TITLE, serving.COLUMNS, data["serving"])


def answer(data: Data) -> str:
    """One sentence: what radix computes less than the flat hash, from the least to the most over traces and pools."""
    by = {(row["trace"], row["cache"], row["block_size"], row["num_blocks"]): row for row in data["rows"]}
    told = []
    for size in dict.fromkeys(row["block_size"] for row in data["rows"]):
        saved = [
            1 - by[trace, "radix", size, blocks]["num_computed_tokens"] / row["num_computed_tokens"]
            for (trace, cache, block_size, blocks), row in by.items()
            if (cache, block_size) == ("flat_hash", size) and (trace, "radix", size, blocks) in by
            if row["num_computed_tokens"]
        ]
        if saved:
            least, most = f"{min(saved):.1%}", f"{max(saved):.1%}"
            told.append((least if least == most else f"{least} to {most}", size))
    if not told:
        return "Nothing to compare: it needs radix and flat_hash at one block size."
    traces = ", ".join(dict.fromkeys(row["trace"] for row in data["rows"]))
    (share, size), *rest = told
    more = "".join(f", {each} fewer at blocks of {of}" for each, of in rest)
    return (
        f"A radix tree computes {share} fewer prompt tokens than the flat hash at blocks of {size}{more} "
        f"({traces}; least to most over the pools)."
    )


def buys(data: Data) -> Iterator[str]:
    """What radix computes less."""
    yield answer(data)


def plot(data: Data) -> Figure:
    """Draws each trace: hit rate against capacity, or for a single capacity tokens computed."""
    rows: list[dict[str, Any]] = data["rows"]
    plt = pyplot()
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    columns = min(len(traces), 3)
    lines = -(-len(traces) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2 + 5 * columns, 4.2 * lines), squeeze=False)
    for axis, trace in zip(axes.flat, traces, strict=False):
        mine = [row for row in rows if row["trace"] == trace and row["cache"] != "null"]
        if len({row["num_blocks"] for row in mine}) > 1:
            _draw_capacity(plt, axis, mine)
        else:
            _draw_computed(axis, mine or rows)
        axis.set_title(trace)
    for axis in axes.flat[len(traces) :]:
        axis.set_visible(False)
    figure.tight_layout()
    return figure


def _draw_capacity(plt: Any, axis: Any, rows: Sequence[Row]) -> None:
    sizes = list(dict.fromkeys(row["block_size"] for row in rows))
    for name, line in grouped((row | {"label": label(row)} for row in rows), "label").items():
        points = sorted(((r["num_blocks"] or r["peak_blocks"]) * r["block_size"], r["hit_rate"]) for r in line)
        color = f"C{sizes.index(line[0]['block_size'])}"
        style = {"flat_hash": "s--"}.get(line[0]["cache"], "o-")
        axis.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=4, alpha=0.85)
    ticks = sorted({row["num_blocks"] * row["block_size"] for row in rows if row["num_blocks"]})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick / 1000:,.0f}k" for tick in ticks])
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set(xlabel="pool, tokens (last point: without bound)", ylabel="hit rate, share of prompt tokens")
    axis.legend()


def _draw_computed(axis: Any, rows: Sequence[Row]) -> None:
    sizes = list(dict.fromkeys(row["block_size"] for row in rows))
    names = list(dict.fromkeys(map(label, rows)))
    computed = [next(row for row in rows if label(row) == name)["num_computed_tokens"] for name in names]
    colors = [f"C{sizes.index(next(r['block_size'] for r in rows if label(r) == name))}" for name in names]
    bars = axis.barh(names[::-1], computed[::-1], color=colors[::-1])
    axis.bar_label(bars, [_count(count) for count in computed[::-1]], padding=3)
    axis.margins(x=0.15)
    axis.set(xlabel="prompt tokens still to be computed")


def run_hybrid(config: Config) -> Iterator[list[Row]]:
    """As `run`, of a model with states or windows: rows of `hybrid_gain`."""
    _check(config)
    pools = [None if gib is None else gib * hybrid_gain.GIB for gib in hybrid_gain.pools_of(config.pool_gib)] or [None]
    cost = Roofline.of(config.model, config.gpu, config.num_gpus)
    traces = _traces(config)
    for trace, name in zip(traces, _names([trace.name for trace in traces], config), strict=True):
        rows = hybrid_gain.replay_all(trace, config.model, pools, cost, name)
        read = {"tokens": trace.tokens, "caveats": trace.caveats, "remarks": trace.counts.remarks()}
        yield [{"trace": name} | row | read for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    out, config = read_options(__doc__, arguments)
    is_hybrid = config.model in HYBRID_MODELS
    rows: list[Row] = []
    stopped = ""
    try:
        out.mkdir(parents=True, exist_ok=True)  # before all the work, not after it
        for of_trace in run_hybrid(config) if is_hybrid else run(config):
            rows += of_trace
            if is_hybrid:
                hybrid_gain.print_rows(of_trace, [*_tokens_told(of_trace[0]), *_warnings(of_trace[0])])
            else:
                print_rows(of_trace)
    except (ValueError, ImportError, OSError) as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    if not rows:
        fail(stopped or "there was no request to replay")
    served = serve_embedded(config) if config.serve and not stopped else []
    path = save(out, "compare_hybrid" if is_hybrid else "compare", asdict(config), rows, serving=served)
    console.print(f"{path}\n{draw(path, hybrid_gain if is_hybrid else sys.modules[__name__])}", highlight=False)
    if stopped:  # what had ended by then is kept
        fail(stopped)


if __name__ == "__main__":
    main()

"""What does a radix tree compute less than vLLM's flat hash on models that mix kinds of layers?

Layers with states or windows can go on only where those were kept. vLLM makes blocks as large as a state and keeps one
for each prompt; the tree keeps checkpoints where requests part and end, to the token, in a pool of small pages. Each
trace is replayed one request at a time by both, without bound and then in pools of the same bytes, all that runs
counted. Expected: the tree computes as good as what full attention would; the flat hash computes several times that
where prefixes are shorter than its blocks, and with `prefix_match_unit` 16 where prompts are short. In small pools the
tree stays ahead, but for a few long documents in turn that just do not fit.

    python -m experiments.hybrid_gain                                    the embedded workload, about two minutes
    python -m experiments.hybrid_gain --trace my.jsonl --tokenizer qwen3 --model qwen3.5-35b-a3b gpt-oss-20b
    python -m experiments.hybrid_gain --trace my.jsonl --pool-gib 10 20 unbounded
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, grouped, parser, print_table, progress
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import EMBEDDED
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.grouped_replay import GroupedReplay
from radixkv.blocks.hybrid_replay import HybridReplay
from radixkv.blocks.replay import Replay
from radixkv.cache.flat_hash.groups import KERNEL_BLOCK_SIZE, GroupLayout
from radixkv.cache.hybrid.cache import HybridCache
from radixkv.cache.layers import needs_checkpoints
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.simulate.cost_model import Roofline
from radixkv.simulate.gpus import GPUS
from radixkv.simulate.model_shapes import MODEL_SHAPES
from radixkv.simulate.step_load import StepLoad
from radixkv.traces import open_trace, open_workload

ENTRY = Entry("prefixes", seconds=150, place=0)
GIB = 2**30
BATCH_TOKENS = 8192  # of a step of a busy server
HYBRID_MODELS = tuple(name for name, shape in MODEL_SHAPES.items() if needs_checkpoints(shape.layers))


@dataclass(frozen=True)
class Config:
    """Traces (files; none: the embedded workload), models, and pools in bytes.

    Attributes:
        pools_gib: None: without bound.
        shares: pools besides, as shares of what the flat hash takes without bound.
        gpu, num_gpus: whose seconds of prefill are told.
    """

    trace: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    models: tuple[str, ...] = ("qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "gpt-oss-20b")
    pools_gib: tuple[float | None, ...] = (None,)
    shares: tuple[float, ...] = (0.1, 0.25)
    gpu: str = "h100-sxm"
    num_gpus: int = 4
    limit: int | None = None


@dataclass
class Hybrid:
    """One cache of a model under a trace, in one pool.

    Attributes:
        label: what tables call it.
        pool_bytes: of the pool; None: without bound.
        prefill_s: seconds so far, by the roofline, where chunks of prompts come in full batches.
    """

    cache: str
    label: str
    replay: GroupedReplay | HybridReplay
    pool_bytes: float | None
    cost: Roofline
    prefill_s: float = 0.0
    _load: StepLoad = field(default_factory=StepLoad)
    _passes: int = 0

    def feed(self, prompt: bytes, namespace: Namespace | None) -> None:
        """Serves one request."""
        start, end = self.replay.feed(prompt, namespace=namespace), len(prompt) // TOKEN_BYTES
        load = self._load
        self._load = StepLoad(
            load.num_prefill_tokens + end - start,
            num_logits=load.num_logits + (end > 0),
            num_prefill_seqs=load.num_prefill_seqs + self.replay.num_passes - self._passes,
            num_prefill_pairs=load.num_prefill_pairs + (end * (end + 1) - start * (start + 1)) // 2,
        )
        self._passes = self.replay.num_passes
        if self._load.num_prefill_tokens >= BATCH_TOKENS:
            self._run()

    def _run(self) -> None:
        """Counts the batch; one that is too large as several of its share."""
        num_steps = -(-self._load.num_prefill_tokens // BATCH_TOKENS)
        share = StepLoad(*(-(-count // num_steps) for count in self._load))
        self.prefill_s += num_steps * self.cost.step_s(share)
        self._load = StepLoad()

    def row(self) -> Row:
        """Returns what came of it. The last batch is run as it is."""
        replay = self.replay
        if self._load.num_prefill_tokens:
            self._run()
        row: Row = {
            "cache": self.cache,
            "label": self.label,
            "pool_gib": None if self.pool_bytes is None else self.pool_bytes / GIB,
            "num_requests": replay.num_requests,
            "num_refused_requests": replay.num_refused_requests,
            "num_prompt_tokens": replay.num_prompt_tokens,
            "num_cached_tokens": replay.num_cached_tokens,
            "num_computed_tokens": replay.num_prompt_tokens - replay.num_cached_tokens,
            "hit_rate": replay.hit_rate,
            "num_passes": replay.num_passes,
            "prefill_s": self.prefill_s,
        }
        if isinstance(replay, GroupedReplay):
            return row | {"peak_bytes": replay.peak_blocks * replay.cache.layout.block_bytes, "num_checkpoints": None}
        held = replay.manager.bytes_by_kind()
        kinds = {"kv_bytes": held.kv, "window_bytes": held.windows, "state_bytes": held.states, "row_bytes": held.rows}
        return row | {"peak_bytes": replay.peak_bytes, "num_checkpoints": replay.cache.num_made, **kinds}


def caches(model: str, pool_bytes: float | None, cost: Roofline) -> list[Hybrid]:
    """Returns the caches of a model in a pool of so many bytes (None: without bound): vLLM's ways, and the tree.

    Raises:
        ValueError: the pool holds no block.
    """
    layers = MODEL_SHAPES[model].layers
    layout = GroupLayout.of(layers)
    layouts = {f"flat_hash {layout.block_size}": layout}
    fine = GroupLayout.of(layers, match_unit=KERNEL_BLOCK_SIZE)
    if fine.match_unit != layout.match_unit:
        layouts[f"flat_hash {layout.block_size}, unit {fine.match_unit}"] = fine
    made = []
    for label, each in layouts.items():
        num_blocks = None if pool_bytes is None else int(pool_bytes // each.block_bytes) - 1  # one is vLLM's null block
        if pool_bytes is not None and num_blocks is not None and num_blocks < 1:
            raise ValueError(
                f"--pool-gib: expected at least two blocks of {model}, {2 * each.block_bytes / GIB:.2f} GiB, "
                f"got {pool_bytes / GIB:.2f}"
            )
        made.append(Hybrid("flat_hash", label, GroupedReplay(each, num_blocks), pool_bytes, cost))
    num_bytes = None if pool_bytes is None else int(pool_bytes)
    return [*made, Hybrid("radix", "radix", HybridReplay(HybridCache(layers), num_bytes), pool_bytes, cost)]


def replay_all(
    requests: Iterable[Any], model: str, pools: Sequence[float | None], cost: Roofline, title: str
) -> list[Row]:
    """Feeds requests (`prompt`, `namespace`) to every cache of a model in each pool, each to all before the next.

    Raises:
        ValueError: a pool holds no block.
    """
    best = Replay(CacheConfig("radix", 16))  # full attention, to the token, without bound: the optimum
    made = [each for pool in pools for each in caches(model, pool, cost)]
    with progress(title, None) as bar:
        for request in requests:
            best.feed(request.prompt, namespace=request.namespace)
            for each in made:
                each.feed(request.prompt, request.namespace)
            bar.advance(bar.task_ids[0])
    common = {"model": model, "gpu": f"{cost.num_gpus} {cost.gpu.name}", "optimum": best.num_cached_tokens}
    return [common | each.row() for each in made]


def cells(config: Config) -> Iterator[Cell]:
    """Yields a cell a trace and model."""
    for trace in config.trace or (EMBEDDED,):
        for model in config.models:
            name = Path(trace).name.split(".")[0]
            yield f"{name}, {model}", partial(measure, config, trace, model)


def measure(config: Config, trace: str, model: str) -> list[Row]:
    """Replays a trace: without bound, then in pools."""

    def requests() -> Any:
        if trace == EMBEDDED:
            return open_workload(EMBEDDED, limit=config.limit)
        return open_trace(trace, tokenizer=config.tokenizer, limit=config.limit)

    name = Path(trace).name.split(".")[0]
    cost = Roofline.of(model, config.gpu, config.num_gpus)
    pools = [None if gib is None else gib * GIB for gib in config.pools_gib]
    rows = replay_all(requests(), model, pools, cost, f"{name}, {model}") if pools else []
    shares = [share * rows[0]["peak_bytes"] for share in config.shares] if rows and None in config.pools_gib else []
    if shares:
        rows += replay_all(requests(), model, shares, cost, f"{name}, {model}, in pools")
    return [{"trace": name, **row} for row in rows]


COLUMNS = {
    "cache": "{label}",
    "pool GiB": "{pool}",
    "hit rate": "{hit_rate:.2%}",
    "of optimum": "{of_optimum:.2%}",
    "computed": "{num_computed_tokens:,}",
    "passes": "{num_passes:,}",
    "prefill s": "{prefill_s:,.1f}",
    "GiB": "{peak_gib:.1f}",
    "states": "{states}",
    "made": "{checkpoints}",
}


def show(data: Data) -> None:
    """Prints a table a trace and model."""
    print_rows(data["rows"])


def print_rows(rows: Sequence[Row], remarks: Sequence[str] = ()) -> None:
    """Prints a table a trace and model, and in words what the tree computes less."""
    for of_trace in grouped(rows, "trace").values():
        for mine in grouped(of_trace, "model").values():
            first = mine[0]
            shown = [
                row
                | {
                    "pool": pool(row),
                    "of_optimum": row["num_cached_tokens"] / max(row["optimum"], 1),
                    "peak_gib": row["peak_bytes"] / GIB,
                    "states": f"{(row['state_bytes'] + row['window_bytes']) / GIB:.1f}" if "state_bytes" in row else "",
                    "checkpoints": "" if row["num_checkpoints"] is None else f"{row['num_checkpoints']:,}",
                }
                for row in mine
            ]
            title = (
                f"{first['trace']}: {first['num_requests']:,} requests, {first['num_prompt_tokens']:,} prompt tokens; "
                f"{first['model']}, prefill in full batches on {first['gpu']}, by the roofline"
            )
            print_table(title, COLUMNS, shown, [*_verdicts(mine), *_refusals(mine), *remarks, ""])


def pool(row: Row) -> str:
    """Names the pool of a row."""
    return "unbounded" if row["pool_gib"] is None else f"{row['pool_gib']:.1f}"


def _refusals(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['label']}, pool {pool(row)}: {row['num_refused_requests']:,} requests did not fit into the pool"
        for row in rows
        if row["num_refused_requests"]
    ]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    lines = []
    for mine in grouped(rows, "pool_gib").values():
        tree = next(row for row in mine if row["cache"] == "radix")
        for other in mine:
            if other is not tree:
                saved = 1 - tree["num_computed_tokens"] / max(other["num_computed_tokens"], 1)
                seconds = other["prefill_s"] - tree["prefill_s"]
                lines.append(
                    f"radix against {other['label']}, pool {pool(tree)}: {saved:.1%} fewer tokens computed, "
                    f"{seconds:,.1f} s of prefill less"
                )
    return lines


def plot(data: Data) -> Figure:
    """Draws the share of prompt tokens that is computed, by trace and cache, a panel a model."""
    rows = [row for row in data["rows"] if row["pool_gib"] is None] or data["rows"]
    plt = pyplot()
    models = grouped(rows, "model")
    traces = len({row["trace"] for row in rows})
    figure, axes = plt.subplots(len(models), 1, figsize=(3.5 + 1.3 * traces, 3.2 * len(models)), squeeze=False)
    for axis, (model, mine) in zip(axes.flat, models.items(), strict=True):
        heights: dict[str, dict[str, float]] = {}
        for row in mine:
            name = row["label"] if row["pool_gib"] is None else f"{row['label']}, {pool(row)} GiB"
            heights.setdefault(name, {})[row["trace"]] = row["num_computed_tokens"] / row["num_prompt_tokens"]
        for row in mine:
            least = 1 - row["optimum"] / row["num_prompt_tokens"]
            heights.setdefault("full attention, to the token", {})[row["trace"]] = least
        draw_bars(axis, heights)
        axis.set(ylabel="of prompt tokens computed", title=model)
        axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def answer(data: Data) -> str:
    """One sentence, from the least to the most over traces and models without bound."""
    free = [row for row in data["rows"] if row["pool_gib"] is None]
    if not free:
        return "Nothing to compare: it needs a pool without bound."
    saved: dict[bool, list[float]] = {}
    near = []
    for some in grouped(free, "trace").values():
        for mine in grouped(some, "model").values():
            tree = next(row for row in mine if row["cache"] == "radix")
            near.append(tree["num_cached_tokens"] / max(tree["optimum"], 1))
            for row in mine:
                if row is not tree:
                    share = 1 - tree["num_computed_tokens"] / max(row["num_computed_tokens"], 1)
                    saved.setdefault("unit" in row["label"], []).append(share)
    told = {}
    for is_fine, each in saved.items():
        least, most = f"{min(each):.0%}", f"{max(each):.0%}"
        told[is_fine] = least if least == most else f"{least} to {most}"
    fine = f", and {told[True]} fewer than with a match unit of 16" if True in told else ""
    return (
        f"On models of several kinds of layers the tree computes {told[False]} fewer prompt tokens than vLLM{fine}; "
        f"it finds {min(near):.1%} and more of what full attention could."
    )


def buys(data: Data) -> Iterator[str]:
    """What the tree computes less."""
    yield answer(data)


def pools_of(texts: Sequence[str]) -> tuple[float | None, ...]:
    """Returns pools in GiB, None for "unbounded".

    Raises:
        ValueError: one is neither.
    """
    found: list[float | None] = []
    for text in texts:
        if text == "unbounded":
            found.append(None)
            continue
        try:
            gib = float(text)
        except ValueError:
            gib = 0.0
        if not 0 < gib < float("inf"):
            raise ValueError(f"--pool-gib: expected numbers over 0, or 'unbounded', got {text!r}")
        found.append(gib)
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("hybrid_gain", __doc__)
    add = options.add_argument
    add("--trace", nargs="+", default=[], metavar="FILE", help="default: the embedded workload")
    add("--tokenizer", default="bytes", help="of traces of text")
    add("--model", nargs="+", choices=HYBRID_MODELS, default=list(Config.models), help="models")
    add("--pool-gib", nargs="+", metavar="GIB|unbounded", help="pools (unbounded, then shares of what that took)")
    add("--gpu", choices=sorted(GPUS), default=Config.gpu, help="whose prefill is told")
    add("--num-gpus", type=int, default=Config.num_gpus)
    add("--limit", type=int, help="read at most so many requests of each trace")
    given = options.parse_args(arguments)
    config = Config(
        tuple(given.trace),
        given.tokenizer,
        tuple(given.model),
        gpu=given.gpu,
        num_gpus=given.num_gpus,
        limit=given.limit,
    )
    if given.smoke:
        config = replace(config, models=config.models[:1], shares=(), limit=config.limit or 100)
    try:
        if given.pool_gib:
            config = replace(config, pools_gib=pools_of(given.pool_gib), shares=())
        run_experiment("hybrid_gain", given.out, config, sys.modules[__name__], at_once=True)
    except (OSError, ValueError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()

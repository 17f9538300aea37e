"""How many bytes does a decode step read and write, if KV that sequences share is read once?

Expectation: KV read over unique KV at most 1.10 on average and 1.30 at worst over regular layered trees, ragged agent
trees, beam search and self-consistency, and over decode batches of real traces; with partial results at most 1.25 and
1.60 (group size 4, bfloat16). Partial results take fewer bytes than are saved wherever a plan shares. The floor is what
is read where every cell is an item of its own: no plan of whole cells reads less, as a cell in which sequences part is
read by each.

    python -m experiments.tree_bytes                                   # a minute, traces where they are
    python -m experiments.tree_bytes --trace my.jsonl --tokenizer bytes
    python -m experiments.tree_bytes --smoke

Plans are made as for Triton (cells of 128 tokens), by the block tables alone; no kernel runs. Of a trace the real
scheduler and radix cache serve the first requests without a model; every some steps the sequences that decode are a
batch.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from radixkv_kernels import TreePlan

from experiments.dry_run import dry_run
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_stacks, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.workloads import FILES, shared_traces
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.scheduling.sequence import Sequence as Running
from radixkv.traces import open_trace
from radixkv.traces.request import TraceRequest

ENTRY = Entry("kernels", seconds=6, place=2)

Segments = list[tuple[int, int]]
"""A sequence: (segment, tokens) from the root on; equal numbers are the same tokens."""


def layered(fan_outs: tuple[int, ...], tokens: tuple[int, ...], rng: random.Random, own: int = 256) -> list[Segments]:
    """A regular tree: level i has fan_outs[i] children a node, each of tokens[i] tokens; then up to `own` of a leaf."""
    fresh = itertools.count()
    paths: list[Segments] = [[]]
    for fan_out, length in zip(fan_outs, tokens, strict=True):
        paths = [[*path, (next(fresh), length)] for path in paths for _ in range(fan_out)]
    return [[*path, (next(fresh), rng.randint(1, own))] for path in paths]


def agents(rng: random.Random, num_seqs: int) -> list[Segments]:
    """A system prompt, some task prompts, and conversations that branch at ragged turns."""
    fresh = itertools.count()
    live: list[Segments] = [[(next(fresh), 1500 + rng.randint(0, 1000))]]
    while len(live) < num_seqs:
        parent = rng.choice(live)
        kept = parent[: rng.randint(1, len(parent))]
        live.append([*kept, *((next(fresh), rng.randint(20, 900)) for _ in range(rng.randint(1, 3)))])
    return [[*path, (next(fresh), rng.randint(1, 60))] for path in live]


def beams(rng: random.Random, width: int, prompt: int, steps: int) -> list[Segments]:
    """Beam search: each step every survivor is an extension of a random survivor of the step before."""
    fresh = itertools.count()
    live: list[Segments] = [[(next(fresh), prompt)]] * width
    for _ in range(steps):
        parents = [rng.choice(live) for _ in range(width)]
        live = [[*parent, (next(fresh), rng.randint(8, 40))] for parent in parents]
    return live


def _regular() -> Iterator[tuple[str, Callable[[random.Random], list[Segments]]]]:
    for fan_outs, tokens in (
        ((1, 2), (128, 128)),
        ((1, 8), (128, 128)),
        ((1, 64), (128, 128)),
        ((1, 16), (1024, 256)),
        ((1, 64), (1024, 128)),
        ((1, 4), (4096, 512)),
        ((1, 32), (4096, 128)),
        ((1, 64), (8192, 512)),
        ((2, 8), (1024, 512)),
        ((4, 16), (2048, 256)),
        ((1, 2, 4), (512, 256, 128)),
        ((1, 4, 4), (1024, 512, 256)),
        ((1, 8, 8), (2048, 256, 128)),
        ((1, 16, 2), (4096, 1024, 256)),
        ((1, 2, 32), (128, 2048, 128)),
        ((2, 2, 16), (8192, 1024, 128)),
        ((1, 2, 2, 2), (512, 512, 512, 512)),
        ((1, 4, 4, 4), (1024, 256, 256, 128)),
        ((1, 2, 4, 8), (2048, 1024, 512, 256)),
        ((1, 8, 2, 4), (200, 1000, 300, 700)),
    ):
        label = f"{'x'.join(map(str, fan_outs))} of {'/'.join(map(str, tokens))}"
        yield label, lambda rng, f=fan_outs, t=tokens: layered(f, t, rng)  # type: ignore[misc]


SHAPES: dict[str, Callable[[random.Random], list[Segments]]] = {
    **dict(_regular()),
    "agents, 16": lambda rng: agents(rng, 16),
    "agents, 64": lambda rng: agents(rng, 64),
    "agents, 256": lambda rng: agents(rng, 256),
    "beam search": lambda rng: beams(rng, 16, 1000, 40),
    "beam search, wide": lambda rng: beams(rng, 64, 300, 60),
    "self-consistency, n = 100": lambda rng: layered((1, 100), (2000, 1), rng, own=1000),
    "self-consistency, long prompt": lambda rng: layered((1, 100), (7777, 1), rng, own=1000),
    "nothing shared": lambda rng: layered((32,), (2000,), rng),
}


def make_tables(name: str, block_size: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Block tables [num_seqs, max_blocks] int32 and lengths [num_seqs] of one of SHAPES, sequences shuffled.

    Whole blocks of a common prefix are the same; the block in which sequences part is each one's own, as in a cache.
    """
    sequences = SHAPES[name](rng)
    rng.shuffle(sequences)
    ids: dict[tuple[object, ...], int] = {}
    rows = []
    for path in sequences:
        filled = 0
        blocks: list[tuple[int, tuple[object, ...]]] = []
        key: tuple[object, ...] = ()
        for segment, tokens in path:
            end = filled + tokens
            key = (*key, segment)
            while len(blocks) < end // block_size:
                blocks.append((len(blocks), key))
            filled = end
        if filled % block_size:
            blocks.append((len(blocks), key))
        row = [ids.setdefault(block, len(ids)) for block in blocks]
        rows.append((row, filled))
    table = np.full((len(rows), max(len(row) for row, _ in rows)), -1, dtype=np.int32)
    for s, (row, _) in enumerate(rows):
        table[s, : len(row)] = row
    names = np.random.default_rng(rng.randrange(1 << 30)).permutation(len(ids))
    lens = np.array([filled for _, filled in rows])
    return np.where(table >= 0, names[table], -1).astype(np.int32), lens


@dataclass(frozen=True)
class Serving:
    """How a trace is served; sizes in tokens."""

    tokenizer: str = "qwen3"
    num_requests: int = 400
    max_prompt_tokens: int = 32_768
    """Longer prompts are left out, and empty ones."""
    output_tokens: int = 64
    """At most, and where the trace has no outputs."""
    pool_tokens: int = 1 << 21
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    every_steps: int = 16
    min_seqs: int = 8
    """Batches of fewer decoding sequences are not looked at."""


def snapshots(path: str, serving: Serving, block_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Block tables [num_seqs, max_blocks] int32 and lengths [num_seqs] of the sequences that decode in a step."""
    manager = KVManager(RadixCache(block_size), serving.pool_tokens // block_size)
    limits = SchedulerConfig(serving.max_num_batched_tokens, serving.max_num_seqs)
    scheduler = Scheduler(manager, limits)
    outputs: dict[str, np.ndarray] = {}
    requests = []
    for number, request in enumerate(_first(path, serving)):
        output = np.frombuffer(request.output, np.int32)[: serving.output_tokens]
        length = len(output) or serving.output_tokens
        name = str(number)
        outputs[name] = output
        prompt = tuple(np.frombuffer(request.prompt, np.int32).tolist())
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        requests.append(Request(name, prompt, params, request.namespace))
    found: list[tuple[np.ndarray, np.ndarray]] = []
    steps = itertools.count(1)

    def look(batch: ScheduledBatch) -> None:
        decoding = [item for item in batch.sequences if item.num_tokens == 1]
        if next(steps) % serving.every_steps == 0 and len(decoding) >= serving.min_seqs:
            lens = np.array([item.end for item in decoding])
            table = np.full((len(decoding), -(-int(lens.max()) // block_size)), -1, np.int32)
            for row, item in zip(table, decoding, strict=True):
                row[: len(item.block_table)] = item.block_table[: len(row)]
            found.append((table, lens))

    dry_run(
        scheduler,
        requests,
        on_batch=look,
        next_token=lambda sequence: _next_token(sequence, outputs[sequence.request.request_id]),
    )
    return found


def _first(path: str, serving: Serving) -> Iterator[TraceRequest]:
    """The first requests that are short enough, and have a prompt."""
    trace = open_trace(path, tokenizer=serving.tokenizer)
    fitting = (request for request in trace if 0 < request.num_prompt_tokens <= serving.max_prompt_tokens)
    return itertools.islice(fitting, serving.num_requests)


def _next_token(sequence: Running, output: np.ndarray) -> int:
    """The trace's, or where it has none one that no other sequence has: samples of one prompt differ."""
    position = len(sequence.generated_token_ids)
    return int(output[position]) if len(output) else (sequence.sequence_id * 1009 + position) % 100_003


NAME = "tree_bytes"


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    shapes: tuple[str, ...] = tuple(SHAPES)
    traces: tuple[str, ...] = ()
    serving: Serving = field(default_factory=Serving)
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    cell_size: int = 128
    seed: int = 0


def bytes_of(config: Config, table: np.ndarray, lens: np.ndarray) -> Row:
    """What the plan of one batch reads and writes, in bytes of KV and of partial results (bfloat16)."""
    make = partial(
        TreePlan.from_block_table,
        table,
        lens,
        np.arange(len(lens) + 1),
        block_size=config.block_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        cell_size=config.cell_size,
    )
    plan = make()
    stats = plan.stats
    finest = make(min_items=sys.maxsize)
    token_bytes = 2 * 2 * config.num_kv_heads * config.head_dim
    # a partial is written and read: head_dim values, a maximum and a sum for each query head
    partial_bytes = stats.num_partials * 2 * 4 * config.num_q_heads * (config.head_dim + 2)
    return {
        "num_seqs": len(lens),
        "shares": plan.shares,
        "num_items": stats.num_items,
        "unique_bytes": stats.num_unique_kv_tokens * token_bytes,
        "read_bytes": stats.num_kv_tokens_read * token_bytes,
        "floor_bytes": finest.stats.num_kv_tokens_read * token_bytes,
        "logical_bytes": stats.num_logical_kv_tokens * token_bytes,
        "partial_bytes": partial_bytes,
    }


def ratios(row: Row) -> Row:
    """The row with what it comes to over its unique bytes."""
    unique, read, partials = row["unique_bytes"], row["read_bytes"], row["partial_bytes"]
    saved = row["logical_bytes"] - read
    return row | {
        "ideal": row["logical_bytes"] / unique,
        "read_of_unique": read / unique,
        "floor_of_unique": row["floor_bytes"] / unique,
        "all_of_unique": (read + partials) / unique,
        "partial_of_saved": partials / saved if saved > 0 else None,
    }


def shape_rows(config: Config, name: str) -> list[Row]:
    """One row."""
    table, lens = make_tables(name, config.block_size, random.Random(config.seed))
    return [ratios({"kind": "shape", "tree": name, **bytes_of(config, table, lens)})]


def trace_rows(config: Config, path: str) -> list[Row]:
    """One row, of all its batches together, with the worst of them."""
    rows = [bytes_of(config, *batch) for batch in snapshots(path, config.serving, config.block_size)]
    if not rows:
        return []
    together: Row = {key: sum(row[key] for row in rows) for key in rows[0]}
    each = [ratios(row) for row in rows]
    return [
        ratios(
            {
                "kind": "trace",
                "tree": Path(path).name.partition(".")[0],
                **together,
                "num_seqs": together["num_seqs"] / len(rows),
                "num_items": together["num_items"] / len(rows),
                "num_batches": len(rows),
                "worst_read": max(row["read_of_unique"] for row in each),
                "worst_floor": max(row["floor_of_unique"] for row in each),
                "worst_all": max(row["all_of_unique"] for row in each),
            }
        )
    ]


def cells(config: Config) -> Iterator[Cell]:
    """A cell a tree and a trace."""
    for name in config.shapes:
        yield f"shape {name}", partial(shape_rows, config, name)
    for path in config.traces:
        yield f"trace {Path(path).name}", partial(trace_rows, config, path)


MEASURES = ("read", "floor", "all")
COLUMNS = {
    "trace": "{tree}",
    "n": "{num_batches}",
    "seqs": "{num_seqs:.0f}",
    "items": "{num_items:.0f}",
    "logical": "{ideal:.2f}",
    "read": "{read_of_unique:.3f}",
    "worst": "{worst_read:.3f}",
    "floor": "{floor_of_unique:.3f}",
    " worst": "{worst_floor:.3f}",
    "+ partials": "{all_of_unique:.3f}",
    "worst ": "{worst_all:.3f}",
    "of saved": "{saved}",
}


def show(data: Data) -> None:
    """Prints a line a tree and trace, and one for all trees and all traces."""
    shown = []
    for kind, rows in grouped(data["rows"], "kind").items():
        for row in rows:
            saved = "-" if row["partial_of_saved"] is None else f"{row['partial_of_saved']:.3f}"
            worst = {f"worst_{of}": row[f"{of}_of_unique"] for of in MEASURES}
            shown.append({"num_batches": 1, **worst, **row, "saved": saved})
        shown.append({"tree": f"all {kind}s", "num_seqs": 0, "num_items": 0, "saved": "-", **_all(rows)})
    print_table("Bytes of a decode step, over those of the unique KV (group size 4, bfloat16)", COLUMNS, shown)


def _all(rows: list[Row]) -> Row:
    """Means and worst."""
    means = {
        key: float(np.mean([row[key] for row in rows])) for key in ("ideal", *(f"{of}_of_unique" for of in MEASURES))
    }
    worst = {}
    for of in MEASURES:
        key = f"worst_{of}"
        worst[key] = max(float(row[key] if key in row else row[f"{of}_of_unique"]) for row in rows)
    return means | worst | {"num_batches": len(rows)}


def plot(data: Data) -> Figure:
    """Bytes over unique bytes of each tree and trace."""
    rows = data["rows"]
    figure, axes = pyplot().subplots(figsize=(8, 0.2 * len(rows) + 1.5))
    parts = {"KV": [row["read_of_unique"] for row in rows]}
    parts["partial results"] = [row["all_of_unique"] - row["read_of_unique"] for row in rows]
    draw_stacks(axes, [row["tree"] for row in rows], parts, fontsize=7)
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("bytes over unique KV bytes")
    axes.set_xlim(0.9)
    axes.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence."""
    told = []
    for kind, rows in grouped(data["rows"], "kind").items():
        a = _all(rows)
        told.append(
            f"over {len(rows)} {kind}s {a['read_of_unique']:.2f} times the unique KV (worst {a['worst_read']:.2f}; "
            f"no plan of whole cells reads less than {a['floor_of_unique']:.2f}, {a['worst_floor']:.2f}) "
            f"and with partial results {a['all_of_unique']:.2f} ({a['worst_all']:.2f}), where each by "
            f"itself reads {a['ideal']:.1f}"
        )
    return f"A decode step reads {'; '.join(told)}."


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(NAME, __doc__)
    options.add_argument("--trace", nargs="+", help="trace files; default: the public ones, where they are")
    options.add_argument("--tokenizer", default=Serving.tokenizer, help="of traces that are text (qwen3)")
    given = options.parse_args(argv)
    found = given.trace or [str(path) for path in shared_traces(*FILES.values())]
    config = Config(traces=tuple(found), serving=replace(Serving(), tokenizer=given.tokenizer))
    if given.smoke:
        config = replace(config, shapes=("1x8 of 128/128", "beam search"), traces=tuple(given.trace or ()))
    run_experiment(NAME, given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

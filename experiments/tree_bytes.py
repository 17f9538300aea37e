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

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from radixkv_kernels import TreePlan

from experiments.lab.harness import Row, parser, shared_traces
from experiments.lab.run import Cell, conduct
from experiments.tree_bytes_report import answer, plot, show
from experiments.tree_shapes import SHAPES, make_tables
from experiments.tree_snapshots import Serving, snapshots

__all__ = ["answer", "plot", "show"]  # what shows the rows

NAME = "tree_bytes"
TRACES = (
    "tau_bench_airline.conversations.jsonl",
    "mtbench101.conversations.jsonl",
    "mini_swe_agent.conversations.jsonl",
    "bbh_3shot.requests.jsonl",
    "loogle_shortdep.requests.jsonl",
    "tot_game24.requests.jsonl",
    "mooncake_conversation.jsonl",
)


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


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(NAME, __doc__)
    options.add_argument("--trace", nargs="+", help="trace files; default: the public ones, where they are")
    options.add_argument("--tokenizer", default=Serving.tokenizer, help="of traces that are text (qwen3)")
    given = options.parse_args(argv)
    found = given.trace or [str(path) for path in shared_traces(*TRACES)]
    config = Config(traces=tuple(found), serving=replace(Serving(), tokenizer=given.tokenizer))
    if given.smoke:
        config = replace(config, shapes=("1x8 of 128/128", "beam search"), traces=tuple(given.trace or ()))
    conduct(NAME, given.out, config, cells(config), sys.modules[__name__])


if __name__ == "__main__":
    main()

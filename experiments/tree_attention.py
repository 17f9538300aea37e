"""How many bytes does a plan save, and how much time does reading a shared prefix once save on this CPU?

Expectation: KV read over unique KV at most 1.10 on average and 1.30 at worst over regular layered trees, ragged agent
trees, beam search and self-consistency; with partial results at most 1.25 and 1.60 (group size 4, bfloat16). Time with
64 sequences on a prefix of 4,096 (own part 128; 32/8 heads, head_dim 128): at least 5.5 times (float32) and 4.5 times
(bfloat16) as fast as gather + scaled_dot_product_attention, 20 times as fast as what people write; with 8 on 1,024,
1.8 and 8 times.

    python -m experiments.tree_attention --out experiments/results         # a minute
    python -m experiments.tree_attention --smoke --out /tmp/tree_attention # some seconds

Plans are made as for Triton (cells of 128 tokens) for the bytes, as for torch (256) for the times. Times are as in
`kernel_bench.py`: sides in turns, beside a canary; a side that is wrong is not timed.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from radixkv_kernels import TreePlan, paged_attention, tree_attention
from torch import Tensor

from experiments import kernel_peers
from experiments.harness import Row, print_table, progress, pyplot, save
from experiments.kernel_bench import Canary, errors_of, time_sides
from experiments.kernel_bench import Config as TimingConfig
from experiments.kernel_peers import Batch, Peer
from experiments.tree_shapes import SHAPES, make_tables

NAME = "tree_attention"


@dataclass(frozen=True)
class Case:
    """num_seqs sequences on one prefix, in tokens; own: what each has behind it."""

    num_seqs: int
    prefix: int
    own: int
    dtype: str


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    shapes: tuple[str, ...]
    cases: tuple[Case, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    cell_size: int = 128
    samples: int = 9
    patience_s: float = 60.0
    canary_slack: float = 1.6
    clock: str = "wall"
    """"wall", all threads; or "cpu": CPU time of one thread, which a busy neighbour hardly changes."""
    seed: int = 0


DTYPES = ("float32", "bfloat16")
FULL = Config(
    tuple(SHAPES),
    tuple(
        Case(n, p, u, d)
        for n, p, u in ((64, 4096, 128), (8, 1024, 128), (32, 1024, 128), (16, 4096, 128), (32, 0, 2048))
        for d in DTYPES
    ),
)
SMOKE = Config(
    ("1x8 of 128/128", "beam search"), (Case(4, 512, 32, "float32"),), samples=2, patience_s=2.0, canary_slack=9.0
)


def bytes_row(config: Config, name: str) -> Row:
    """What the plan of one tree reads and writes, in bytes of KV and of partial results (bfloat16)."""
    table, lens = make_tables(name, config.block_size, random.Random(config.seed))
    plan = TreePlan.from_block_table(
        table,
        lens,
        np.arange(len(lens) + 1),
        block_size=config.block_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        cell_size=config.cell_size,
    )
    stats = plan.stats
    token_bytes = 2 * 2 * config.num_kv_heads * config.head_dim
    # a partial is written and read: head_dim values, a maximum and a sum for each query head
    partial_bytes = stats.num_partials * 2 * 4 * config.num_q_heads * (config.head_dim + 2)
    unique, read = stats.num_unique_kv_tokens * token_bytes, stats.num_kv_tokens_read * token_bytes
    logical = stats.num_logical_kv_tokens * token_bytes
    return {
        "kind": "bytes",
        "tree": name,
        "num_seqs": len(lens),
        "shares": plan.shares,
        "num_items": stats.num_items,
        "unique_bytes": unique,
        "read_bytes": read,
        "logical_bytes": logical,
        "partial_bytes": partial_bytes,
        "ideal": logical / unique,
        "read_of_unique": read / unique,
        "all_of_unique": (read + partial_bytes) / unique,
        "partial_of_saved": partial_bytes / (logical - read) if logical > read else None,
    }


def make_batch(config: Config, case: Case) -> Batch:
    """Blocks scattered at random; the prefix's are the same of every sequence."""
    gen = torch.Generator().manual_seed(config.seed)
    shared, own = case.prefix // config.block_size, case.own // config.block_size
    total = shared + case.num_seqs * own
    ids = torch.randperm(total, generator=gen)
    table = torch.cat((ids[:shared].expand(case.num_seqs, -1), ids[shared:].view(case.num_seqs, own)), 1)
    dtype = getattr(torch, case.dtype)
    shape = (total, config.block_size, config.num_kv_heads, config.head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    q = torch.randn(case.num_seqs, config.num_q_heads, config.head_dim, generator=gen).to(dtype)
    return Batch(q, k_cache, v_cache, table.contiguous(), 1, case.prefix + case.own)


def ours(batch: Batch, *, shared: bool) -> Peer:
    """Attention with a plan made beforehand (it serves all layers), or without one."""
    table = batch.block_table.int()
    lens = torch.full((batch.num_seqs,), batch.context, dtype=torch.int32)
    cu = torch.arange(batch.num_seqs + 1, dtype=torch.int32)
    arguments: dict[str, Any] = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": cu}
    plan = TreePlan.from_block_table(
        table,
        lens,
        cu,
        block_size=batch.k_cache.shape[1],
        num_q_heads=batch.q.shape[1],
        num_kv_heads=batch.num_kv_heads,
        kv_itemsize=batch.k_cache.itemsize,
    )

    def run() -> Tensor:
        if shared:
            out = tree_attention(batch.q, batch.k_cache, batch.v_cache, plan=plan, **arguments, implementation="torch")
        else:
            out = paged_attention(batch.q, batch.k_cache, batch.v_cache, **arguments, implementation="torch")
        assert isinstance(out, Tensor)
        return out

    return run


def naive(batch: Batch) -> Peer:
    """What people write: index the cache by the block table, SDPA with enable_gqa."""
    shape = (batch.num_seqs, batch.context, batch.num_kv_heads, batch.q.shape[2])

    def run() -> Tensor:
        k, v = (c[batch.block_table].reshape(shape).transpose(1, 2) for c in (batch.k_cache, batch.v_cache))
        return F.scaled_dot_product_attention(batch.q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return run


def time_rows(config: Config, case: Case, canary: Canary) -> list[Row]:
    """One row a side; raises where shared and unshared differ in a bit."""
    batch = make_batch(config, case)
    sides = {
        "tree": ours(batch, shared=True),
        "paged": ours(batch, shared=False),
        "gather + SDPA": kernel_peers.gather_sdpa(batch),
        "gather + SDPA by sequence": kernel_peers.gather_sdpa_by_sequence(batch),
        "naive": naive(batch),
    }
    if not torch.equal(sides["tree"](), sides["paged"]()):
        raise AssertionError(f"{case}: shared and unshared differ")
    errors = errors_of(batch, sides)
    timing = TimingConfig(
        (),
        samples=config.samples,
        patience_s=config.patience_s,
        canary_slack=config.canary_slack,
        clock=config.clock,
    )
    times = time_sides(timing, sides, canary)
    medians = {name: sorted(taken)[len(taken) // 2] for name, (taken, _) in times.items()}
    n, p, u = case.num_seqs, case.prefix, case.own
    return [
        {
            "kind": "time",
            **asdict(case),
            "side": name,
            "error": errors[name],
            "samples": len(taken),
            "quiet": quiet,
            "median_s": medians[name],
            "min_s": min(taken),
            "tree_is_faster_by": medians[name] / medians["tree"],
            "ideal": n * (p + u) / (p + n * u),
            "canary_best_s": canary.best_s,
        }
        for name, (taken, quiet) in times.items()
    ]


def run(config: Config) -> list[Row]:
    """Rows of kind "bytes", one a tree, and "time", one a case and side. Clock "cpu" sets PyTorch to one thread."""
    if config.clock == "cpu":
        torch.set_num_threads(1)
    canary = Canary(config.canary_slack)
    rows: list[Row] = []
    with progress(NAME, len(config.shapes) + len(config.cases)) as bar:
        for name in config.shapes:
            rows.append(bytes_row(config, name))
            bar.advance(bar.task_ids[0])
        for case in config.cases:
            rows += time_rows(config, case, canary)
            bar.advance(bar.task_ids[0])
    return rows


def report(rows: list[Row]) -> None:
    """Two tables and the averages, from the rows alone."""
    trees = [r for r in rows if r["kind"] == "bytes"]
    columns = {
        "trace": "{tree}",
        "n": "{num_seqs}",
        "items": "{num_items}",
        "logical": "{ideal:.1f}",
        "read": "{read_of_unique:.3f}",
        "with partials": "{all_of_unique:.3f}",
        "partials/saved": "{saved}",
    }
    shown = [r | {"saved": "-" if r["partial_of_saved"] is None else f"{r['partial_of_saved']:.3f}"} for r in trees]
    for title, key in (("mean", np.mean), ("worst", np.max)):
        of = {name: float(key([r[name] for r in trees])) for name in ("ideal", "read_of_unique", "all_of_unique")}
        shown.append({"tree": title, "num_seqs": "", "num_items": "", "saved": "", **of})
    print_table("Bytes of a decode step, over those of the unique KV (group size 4, bfloat16)", columns, shown)
    times = [r for r in rows if r["kind"] == "time"]
    columns = {
        "trace": "{num_seqs} on {prefix} + {own} {dtype}",
        "cache": "{side}",
        "median ms": "{ms:.1f}",
        "tree is faster by": "{tree_is_faster_by:.2f}",
        "ideal": "{ideal:.1f}",
        "n": "{samples}",
        "quiet": "{quiet}",
    }
    print_table("Decode on this CPU", columns, [r | {"ms": r["median_s"] * 1e3} for r in times])


def plot(path: Path) -> Path:
    """Left: bytes over unique bytes of each tree. Right: speedup over gather + SDPA beside the ideal. From the JSON."""
    rows = json.loads(path.read_text())["rows"]
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6))
    trees = [r for r in rows if r["kind"] == "bytes"]
    at = np.arange(len(trees))
    left.barh(at, [r["read_of_unique"] for r in trees], 0.8, label="KV")
    share = [r["all_of_unique"] - r["read_of_unique"] for r in trees]
    left.barh(at, share, 0.8, left=[r["read_of_unique"] for r in trees], label="partial results")
    left.set_yticks(at, [r["tree"] for r in trees], fontsize=7)
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("bytes over unique KV bytes")
    left.set_xlim(0.9)
    left.legend()
    times = [r for r in rows if r["kind"] == "time"]
    cases = list(dict.fromkeys((r["num_seqs"], r["prefix"], r["own"], r["dtype"]) for r in times))
    for i, side in enumerate(s for s in dict.fromkeys(r["side"] for r in times) if s != "tree"):
        found = [
            next(
                r["tree_is_faster_by"]
                for r in times
                if (r["num_seqs"], r["prefix"], r["own"], r["dtype"]) == case and r["side"] == side
            )
            for case in cases
        ]
        right.bar(np.arange(len(cases)) + (i - 1.5) * 0.2, found, 0.2, label=f"over {side}")
    ideal = [next(r["ideal"] for r in times if (r["num_seqs"], r["prefix"], r["own"]) == c[:3]) for c in cases]
    right.plot(np.arange(len(cases)), ideal, "k_", markersize=24, label="bytes: n(P + U) / (P + nU)")
    right.set_xticks(np.arange(len(cases)), [f"{n} on {p}+{u}\n{d}" for n, p, u, d in cases], fontsize=6)
    right.set_yscale("log")
    right.set_ylabel("times as fast")
    right.legend(fontsize=8)
    picture = path.with_suffix(".png")
    figure.savefig(picture)
    plt.close(figure)
    return picture


def main(argv: list[str] | None = None) -> None:
    """Parses, runs, saves, reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--bytes-only", action="store_true", help="plans without timing")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time of one thread")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON and the plot")
    arguments = parser.parse_args(argv)
    config = SMOKE if arguments.smoke else FULL
    config = replace(config, clock=arguments.clock, cases=() if arguments.bytes_only else config.cases)
    rows = run(config)
    path = save(arguments.out, NAME, asdict(config), rows)
    report(rows)
    if not arguments.bytes_only:
        plot(path)


if __name__ == "__main__":
    main()

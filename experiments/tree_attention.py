"""How much time does reading a shared prefix once save in attention, on this CPU?

Expectation: with 64 sequences on a prefix of 4,096 (own part 128; 32/8 heads, head_dim 128) at least 5.5 times
(float32) and 4.5 times (bfloat16) as fast as gather + scaled_dot_product_attention, 20 times as fast as what people
write; with 8 on 1,024, 1.8 and 8 times; no slower than without a plan where nothing is shared. float32 at half of this
machine's matmul rate or more, bfloat16 at 0.6 of the rate of PyTorch's flash attention for as many rows.

    python -m experiments.tree_attention --out experiments/results         # a minute or more
    python -m experiments.tree_attention --smoke --out /tmp/tree_attention # some seconds

Times are as in `kernel_bench.py`: sides in turns, beside a canary; a side that is wrong is not timed. Plans are made
beforehand, as one serves all layers.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from radixkv_kernels import TreePlan, paged_attention, tree_attention
from torch import Tensor

from experiments import kernel_peers
from experiments.harness import Row, parser, print_table, pyplot
from experiments.kernel_bench import Canary, errors_of, time_sides
from experiments.kernel_bench import Config as TimingConfig
from experiments.kernel_peers import Batch, Peer
from experiments.lab import Cell, Data, conduct

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

    cases: tuple[Case, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    samples: int = 9
    patience_s: float = 60.0
    canary_slack: float = 1.6
    clock: str = "wall"
    """"wall", all threads; or "cpu": CPU time of one thread, which a busy neighbour hardly changes."""
    seed: int = 0


DTYPES = ("float32", "bfloat16")
FULL = Config(
    tuple(
        Case(n, p, u, d)
        for n, p, u in ((64, 4096, 128), (8, 1024, 128), (32, 1024, 128), (16, 4096, 128), (32, 0, 2048))
        for d in DTYPES
    ),
)
SMOKE = Config((Case(4, 512, 32, "float32"),), samples=2, patience_s=2.0, canary_slack=9.0)


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


def rates(config: Config, batch: Batch) -> dict[str, tuple[Peer, float]]:
    """What this machine can do, with its operations: a square product, and flash attention of as many rows."""
    rows = batch.num_seqs * batch.q.shape[1] // batch.num_kv_heads
    shape = (1, batch.num_kv_heads, -1, config.head_dim)
    q = torch.randn(batch.num_kv_heads * rows * config.head_dim).to(batch.q.dtype).view(shape)
    k, v = torch.randn(2, batch.num_kv_heads * 4096 * config.head_dim).to(batch.q.dtype).view(2, *shape[1:])[:, None]
    a = torch.randn(1024, 1024)
    flops = 4.0 * q.numel() * 4096
    return {
        "matmul": (lambda: a @ a, 2.0 * 1024**3),
        "flash": (lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0], flops),
    }


def cells(config: Config) -> Iterator[Cell]:
    """A cell a case. Clock "cpu" sets PyTorch to one thread."""
    if config.clock == "cpu":
        torch.set_num_threads(1)
    canary = Canary(config.canary_slack)
    for case in config.cases:
        yield f"{case.num_seqs} {case.prefix} {case.own} {case.dtype}", partial(measure, config, case, canary)


def measure(config: Config, case: Case, canary: Canary) -> list[Row]:
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
    probes = rates(config, batch)
    timing = TimingConfig(
        (),
        samples=config.samples,
        patience_s=config.patience_s,
        canary_slack=config.canary_slack,
        clock=config.clock,
    )
    times = time_sides(timing, sides | {name: probe for name, (probe, _) in probes.items()}, canary)
    medians = {name: statistics.median(taken) for name, (taken, _) in times.items()}
    n, p, u = case.num_seqs, case.prefix, case.own
    flops = 4.0 * batch.q.numel() * (p + u)
    flop_rates = {name: probes[name][1] / medians[name] for name in probes}
    return [
        {
            **asdict(case),
            "side": name,
            "error": errors[name],
            "samples": len(times[name][0]),
            "quiet": times[name][1],
            "median_s": medians[name],
            "min_s": min(times[name][0]),
            "tree_is_faster_by": medians[name] / medians["tree"],
            "ideal": n * (p + u) / (p + n * u),
            "flops_per_s": flops / medians[name],
            "of_matmul": flops / medians[name] / flop_rates["matmul"],
            "of_flash": flops / medians[name] / flop_rates["flash"],
            "canary_best_s": canary.best_s,
        }
        for name in sides
    ]


COLUMNS = {
    "trace": "{num_seqs} on {prefix} + {own} {dtype}",
    "cache": "{side}",
    "median ms": "{ms:.1f}",
    "tree is faster by": "{tree_is_faster_by:.2f}",
    "ideal": "{ideal:.1f}",
    "of matmul": "{of_matmul:.2f}",
    "of flash": "{of_flash:.2f}",
    "n": "{samples}",
    "quiet": "{quiet}",
}


def show(data: Data) -> None:
    """Prints a line a case and side."""
    print_table("Decode on this CPU", COLUMNS, [r | {"ms": r["median_s"] * 1e3} for r in data["rows"]])


def plot(path: Path) -> Path:
    """Speedup against sharing and prefix length beside the ideal, from the JSON."""
    rows = json.loads(path.read_text())["rows"]
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5))
    cases = list(dict.fromkeys((r["num_seqs"], r["prefix"], r["own"], r["dtype"]) for r in rows))
    of = {(r["num_seqs"], r["prefix"], r["own"], r["dtype"], r["side"]): r for r in rows}
    sides = [side for side in dict.fromkeys(r["side"] for r in rows) if side != "tree"]
    at = np.arange(len(cases))
    for i, side in enumerate(sides):
        found = [of[(*case, side)]["tree_is_faster_by"] for case in cases]
        axes.bar(at + (i - 1.5) * 0.2, found, 0.2, label=f"over {side}")
    ideal = [of[(*case, "tree")]["ideal"] for case in cases]
    axes.plot(at, ideal, "_", color="gray", markersize=24, label="bytes: n(P + U) / (P + nU)")
    axes.set_xticks(at, [f"{n} on {p}+{u}\n{d}" for n, p, u, d in cases], fontsize=6)
    axes.set(yscale="log", ylabel="times as fast")
    axes.legend(fontsize=8)
    picture = path.with_suffix(".png")
    figure.savefig(picture)
    plt.close(figure)
    return picture


def answer(data: Data) -> str:
    """One sentence, of the case that reads most in vain."""
    best = max(row["ideal"] for row in data["rows"])
    told = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        mine = {row["side"]: row for row in data["rows"] if (row["ideal"], row["dtype"]) == (best, dtype)}
        plain, written = (mine[side]["tree_is_faster_by"] for side in ("gather + SDPA", "naive"))
        told.append(f"in {dtype} {plain:.1f} times the best plain torch and {written:.0f} times what people write")
    row = next(row for row in data["rows"] if row["ideal"] == best)
    return f"{row['num_seqs']} sequences on {row['prefix']:,} shared tokens: {', '.join(told)}."


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(NAME, __doc__)
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time of one thread")
    options.add_argument("--patience", type=float, help="seconds a case may take")
    given = options.parse_args(argv)
    config = SMOKE if given.smoke else FULL
    config = replace(config, clock=given.clock, patience_s=given.patience or config.patience_s)
    name = NAME + ("_cpu_clock" if config.clock == "cpu" else "")
    conduct(name, given.out, config, cells(config), sys.modules[__name__])


if __name__ == "__main__":
    main()

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

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from experiments import attention
from experiments.attention import (
    Batch,
    Canary,
    Heads,
    Peer,
    Timing,
    errors_of,
    make_batch,
    ours,
    read_timing,
    result_name,
    start_clock,
    time_sides,
)
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment

ENTRY = Entry("kernels", seconds=75, place=4, report=("--patience", "6"))

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
    heads: Heads = field(default_factory=Heads)
    timing: Timing = field(default_factory=lambda: Timing(samples=9, patience_s=60.0))
    seed: int = 0


DTYPES = ("float32", "bfloat16")
FULL = Config(
    tuple(
        Case(n, p, u, d)
        for n, p, u in ((64, 4096, 128), (8, 1024, 128), (32, 1024, 128), (16, 4096, 128), (32, 0, 2048))
        for d in DTYPES
    ),
)
SMOKE = Config((Case(4, 512, 32, "float32"),), timing=Timing(samples=2, patience_s=2.0, canary_slack=9.0))


def rates(config: Config, batch: Batch) -> dict[str, tuple[Peer, float]]:
    """What this machine can do, with its operations: a square product, and flash attention of as many rows."""
    rows = batch.num_seqs * batch.q.shape[1] // batch.num_kv_heads
    shape = (1, batch.num_kv_heads, -1, config.heads.head_dim)
    q = torch.randn(batch.num_kv_heads * rows * config.heads.head_dim).to(batch.q.dtype).view(shape)
    k, v = (
        torch.randn(2, batch.num_kv_heads * 4096 * config.heads.head_dim).to(batch.q.dtype).view(2, *shape[1:])[:, None]
    )
    a = torch.randn(1024, 1024)
    flops = 4.0 * q.numel() * 4096
    return {
        "matmul": (lambda: a @ a, 2.0 * 1024**3),
        "flash": (lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0], flops),
    }


def cells(config: Config) -> Iterator[Cell]:
    """A cell a case. Clock "cpu" sets PyTorch to one thread."""
    canary = start_clock(config.timing)
    for case in config.cases:
        yield f"{case.num_seqs} {case.prefix} {case.own} {case.dtype}", partial(measure, config, case, canary)


def measure(config: Config, case: Case, canary: Canary) -> list[Row]:
    """One row a side; raises where shared and unshared differ in a bit."""
    batch = make_batch(config.heads, case.num_seqs, case.own, case.dtype, prefix=case.prefix, seed=config.seed)
    sides = {
        "tree": ours(batch, shared=True),
        "paged": ours(batch, shared=False),
        "gather + SDPA": attention.gather_sdpa(batch),
        "gather + SDPA by sequence": attention.gather_sdpa_by_sequence(batch),
        "naive": attention.indexed_sdpa(batch),
    }
    if not torch.equal(sides["tree"](), sides["paged"]()):
        raise AssertionError(f"{case}: shared and unshared differ")
    errors = errors_of(batch, sides)
    probes = rates(config, batch)
    times = time_sides(config.timing, sides | {name: probe for name, (probe, _) in probes.items()}, canary)
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


def plot(data: Data) -> Figure:
    """Speedup against sharing and prefix length beside the ideal."""
    rows = data["rows"]
    figure, axes = pyplot().subplots(figsize=(9, 5))
    cases = [r | {"case": f"{r['num_seqs']} on\n{r['prefix']}+{r['own']}\n{r['dtype']}"} for r in rows]
    sides = grouped((row for row in cases if row["side"] != "tree"), "side").items()
    times = {f"over {side}": {row["case"]: row["tree_is_faster_by"] for row in some} for side, some in sides}
    draw_bars(axes, times, fontsize=8)
    ideal = [row["ideal"] for row in rows if row["side"] == "tree"]
    axes.plot(range(len(ideal)), ideal, "_", color="gray", markersize=24, label="bytes: n(P + U) / (P + nU)")
    axes.set(yscale="log", ylabel="times as fast")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=8)
    return figure


def answer(data: Data) -> str:
    """One sentence, of the case that reads most in vain."""
    best = max(row["ideal"] for row in data["rows"])
    told = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        mine = {row["side"]: row for row in data["rows"] if (row["ideal"], row["dtype"]) == (best, dtype)}
        plain = min(row["tree_is_faster_by"] for side, row in mine.items() if side.startswith("gather"))
        written = mine["naive"]["tree_is_faster_by"]
        told.append(f"in {dtype} {plain:.1f} times as fast as the best plain torch, {written:.0f} as what people write")
    row = next(row for row in data["rows"] if row["ideal"] == best)
    return f"{row['num_seqs']} sequences on {row['prefix']:,} shared tokens: {', '.join(told)}."


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(NAME, __doc__)
    given, config = read_timing(options, argv, FULL, SMOKE)
    run_experiment(result_name(NAME, config.timing), given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

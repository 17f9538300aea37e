"""How fast is the torch path on this CPU, beside the best plain torch one would write?

Expectation: decode of 32 sequences (32/8 heads, head_dim 128, context 2048 and 8192) at least 1.2 times as fast as
gather + scaled_dot_product_attention (group folded, buffers reused) and as FlexAttention compiled; prefill of 2,048 new
tokens on 6,144 cached in at most 1.1 times the time of the better of a masked SDPA and two merged parts.

    python -m experiments.kernel_bench --out experiments/results        # some minutes
    python -m experiments.kernel_bench --smoke --out /tmp/kernel_bench  # some seconds

All sides of a case run alternately. A sample counts only where a small product (the canary) is fast right before and
right after it: a busy neighbour takes samples out instead of deciding the ratio. A side that is wrong is not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from experiments import attention
from experiments.attention import (
    Batch,
    Canary,
    Heads,
    Peer,
    Timing,
    copy_bandwidth,
    errors_of,
    make_batch,
    ours,
    read_timing,
    result_name,
    start_clock,
    time_sides,
)
from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, grouped, parser, print_table
from experiments.lab.plots import Figure, draw_bars, pyplot
from experiments.lab.run import Cell, Data, run_experiment

ENTRY = Entry("kernels", seconds=35, place=1, report=("--context", "2048", "--patience", "10"))

NAME = "kernel_bench"
OURS = "radixkv torch"
BY_SEQUENCE = "gather + SDPA by sequence"


@dataclass(frozen=True)
class Case:
    """One line of the result; lengths in tokens."""

    kind: str
    num_seqs: int
    q_len: int
    context: int
    dtype: str


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    cases: tuple[Case, ...]
    heads: Heads = field(default_factory=Heads)
    timing: Timing = field(default_factory=Timing)
    seed: int = 0


DTYPES = ("float32", "bfloat16")
FULL = Config(
    tuple(Case("decode", 32, 1, n, d) for n in (2048, 8192) for d in DTYPES)
    + tuple(Case("prefill", 1, 2048, 8192, d) for d in DTYPES)
)
SMOKE = Config(
    (*(Case("decode", 4, 1, 512, d) for d in DTYPES), Case("prefill", 1, 64, 256, "float32")),
    timing=Timing(samples=2, patience_s=2.0),
)


def sides_of(batch: Batch, case: Case) -> dict[str, Peer]:
    """Name -> function; the first is ours."""
    sides = {OURS: ours(batch)}
    if case.kind == "decode":
        sides["gather + SDPA"] = attention.gather_sdpa(batch)
        sides[BY_SEQUENCE] = attention.gather_sdpa_by_sequence(batch)
    else:
        sides["masked SDPA"] = attention.masked_sdpa(batch)
        sides["two parts merged"] = attention.two_parts(batch)
    sides["FlexAttention compiled"] = attention.flex(batch)
    return sides


def cells(config: Config) -> Iterator[Cell]:
    """A cell a case, with all its sides. With clock "cpu", sets PyTorch to one thread."""
    canary = start_clock(config.timing)
    for case in config.cases:
        name = f"{case.kind} {case.num_seqs} {case.q_len} {case.context} {case.dtype}"
        yield name, partial(measure, config, case, canary)


def measure(config: Config, case: Case, canary: Canary) -> list[Row]:
    """One row a side."""
    bandwidth = copy_bandwidth()
    batch = make_batch(config.heads, case.num_seqs, case.context, case.dtype, q_len=case.q_len, seed=config.seed)
    sides = sides_of(batch, case)
    errors = errors_of(batch, sides)
    times = time_sides(config.timing, sides, canary)
    kv_bytes = 2 * batch.block_table.numel() * batch.k_cache[0].nbytes
    fastest = min(min(taken) for taken, _ in times.values())
    return [
        {
            **asdict(case),
            "side": name,
            "error": errors[name],
            "samples": len(taken),
            "quiet": quiet,
            "min_s": min(taken),
            "median_s": sorted(taken)[len(taken) // 2],
            "of_fastest": min(taken) / fastest,
            "kv_bytes": kv_bytes,
            "kv_bytes_per_s": kv_bytes / min(taken),
            "copy_bytes_per_s": bandwidth,
            "canary_best_s": canary.best_s,
        }
        for name, (taken, quiet) in times.items()
    ]


def show(data: Data) -> None:
    """Prints a line a case and side."""
    rows = data["rows"]
    columns = {
        "operation": "{kind} {num_seqs}x{q_len} on {context} {dtype}",
        "cache": "{side}",
        "min ms": "{min_ms:.1f}",
        "median ms": "{median_ms:.1f}",
        "n": "{samples}",
        "quiet": "{quiet}",
        "error": "{error:.0e}",
        "KV GB/s": "{gb:.1f}",
    }
    shown = [
        {**r, "min_ms": r["min_s"] * 1e3, "median_ms": r["median_s"] * 1e3, "gb": r["kv_bytes_per_s"] / 1e9}
        for r in rows
    ]
    print_table("Attention on this CPU", columns, shown)


def plot(data: Data) -> Figure:
    """KV bytes over time, decode cases, beside the copy bandwidth."""
    rows = data["rows"]
    rows = [r for r in rows if r["kind"] == "decode"] or rows
    figure, axes = pyplot().subplots()
    sides = grouped((r | {"case": f"{r['context']} tokens\n{r['dtype']}"} for r in rows), "side").items()
    draw_bars(axes, {side: {row["case"]: row["kv_bytes_per_s"] / 1e9 for row in some} for side, some in sides})
    axes.axhline(rows[0]["copy_bytes_per_s"] / 1e9, color="gray", linewidth=1, label="copy, read + write")
    axes.set_ylabel("KV bytes over time, GB/s")
    axes.set_title(f"{rows[0]['kind'].capitalize()} of {rows[0]['num_seqs']} sequences from a paged cache, CPU")
    axes.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence: the speed of each case over that of the best of what the question names, by medians."""
    told = []
    for (kind, dtype), mine in grouped(data["rows"], "kind", "dtype").items():
        ratios = []
        for context, some in grouped(mine, "context").items():
            times = {row["side"]: row["median_s"] for row in some}
            best = min(taken for side, taken in times.items() if side not in (OURS, BY_SEQUENCE))
            ratios.append(f"{best / times[OURS]:.2f} on {context:,} tokens")
        told.append(f"{kind} in {dtype} {' and '.join(ratios)}")
    quiet = all(row["quiet"] for row in data["rows"])
    noise = "" if quiet else " (the machine was never quiet for some of it)"
    return f"Times the speed of the best plain torch: {'; '.join(told)}{noise}."


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(NAME, __doc__)
    options.add_argument("--kind", choices=("decode", "prefill"))
    options.add_argument("--context", type=int, help="only cases of this many tokens")
    given, config = read_timing(options, arguments, FULL, SMOKE)
    chosen = tuple(c for c in config.cases if given.kind in (None, c.kind) and given.context in (None, c.context))
    if not chosen:
        fail(f"--context: expected one of {sorted({c.context for c in config.cases})}, got {given.context}")
    config = replace(config, cases=chosen)
    run_experiment(result_name(NAME, config.timing), given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

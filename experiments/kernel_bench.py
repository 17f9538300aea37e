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

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from radixkv_kernels import paged_attention

from experiments import kernel_peers
from experiments.harness import Row, fail, parser, print_table, pyplot
from experiments.kernel_peers import Batch, Peer
from experiments.lab import Cell, Data, conduct

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
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    samples: int = 15
    patience_s: float = 90.0
    canary_slack: float = 1.6
    clock: str = "wall"
    """"wall", all threads; or "cpu": CPU time of one thread, which a busy neighbour hardly changes."""
    seed: int = 0


DTYPES = ("float32", "bfloat16")
FULL = Config(
    tuple(Case("decode", 32, 1, n, d) for n in (2048, 8192) for d in DTYPES)
    + tuple(Case("prefill", 1, 2048, 8192, d) for d in DTYPES)
)
SMOKE = Config(
    (*(Case("decode", 4, 1, 512, d) for d in DTYPES), Case("prefill", 1, 64, 256, "float32")),
    samples=2,
    patience_s=2.0,
)


class Canary:
    """A product that takes under 0.5 ms where nobody else is at work."""

    def __init__(self, slack: float) -> None:
        self._a, self._b = torch.randn(8, 128, 256), torch.randn(8, 256, 128)
        self._slack = slack
        self.best_s = min(self.look() for _ in range(50))

    def look(self) -> float:
        """Seconds that one product takes now."""
        start = time.perf_counter()
        torch.bmm(self._a, self._b)
        return time.perf_counter() - start

    def quiet(self) -> bool:
        """Whether three in a row are about as fast as the fastest ever."""
        seen = [self.look() for _ in range(3)]
        self.best_s = min(self.best_s, *seen)
        return max(seen) <= self._slack * self.best_s


def make_batch(config: Config, case: Case) -> Batch:
    """Blocks scattered at random, as a cache in use has them."""
    gen = torch.Generator().manual_seed(config.seed)
    blocks = case.context // config.block_size
    total = blocks * case.num_seqs
    dtype = getattr(torch, case.dtype)
    shape = (total, config.block_size, config.num_kv_heads, config.head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    q = torch.randn(case.num_seqs * case.q_len, config.num_q_heads, config.head_dim, generator=gen).to(dtype)
    table = torch.randperm(total, generator=gen).view(case.num_seqs, blocks)
    return Batch(q, k_cache, v_cache, table, case.q_len, case.context)


def ours(batch: Batch) -> Peer:
    """The call under test."""
    n = batch.num_seqs
    table = batch.block_table.int()
    lens = torch.full((n,), batch.context, dtype=torch.int32)
    cu = torch.arange(n + 1, dtype=torch.int32) * batch.q_len

    def run() -> torch.Tensor:
        out = paged_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            block_table=table,
            seq_lens=lens,
            cu_seqlens_q=cu,
            implementation="torch",
        )
        assert isinstance(out, torch.Tensor)
        return out

    return run


def sides_of(batch: Batch, case: Case) -> dict[str, Peer]:
    """Name -> function; the first is ours."""
    sides = {OURS: ours(batch)}
    if case.kind == "decode":
        sides["gather + SDPA"] = kernel_peers.gather_sdpa(batch)
        sides[BY_SEQUENCE] = kernel_peers.gather_sdpa_by_sequence(batch)
    else:
        sides["masked SDPA"] = kernel_peers.masked_sdpa(batch)
        sides["two parts merged"] = kernel_peers.two_parts(batch)
    sides["FlexAttention compiled"] = kernel_peers.flex(batch)
    return sides


def errors_of(batch: Batch, sides: dict[str, Peer]) -> dict[str, float]:
    """Relative error of each against float64, on a few rows; raises where one is wrong."""
    errors = {}
    rows = [0, batch.q.shape[0] // 2, batch.q.shape[0] - 1]
    for name, side in sides.items():
        out, worst = side(), 0.0
        for row in rows:
            s, i = divmod(row, batch.q_len)
            n = batch.context - batch.q_len + i + 1
            k, v = (
                c[batch.block_table[s]].flatten(0, 1)[:n].double().repeat_interleave(batch.q.shape[1] // c.shape[2], 1)
                for c in (batch.k_cache, batch.v_cache)
            )
            x = torch.einsum("hd,nhd->hn", batch.q[row].double(), k) * batch.q.shape[2] ** -0.5
            want = torch.einsum("hn,nhd->hd", torch.softmax(x, 1), v)
            worst = max(worst, float((out[row].double() - want).norm() / want.norm()))
        limit = 1e-5 if batch.q.dtype == torch.float32 else 2e-2
        if not worst < limit:
            raise AssertionError(f"{name}: relative error {worst:.1e}, so its time means nothing")
        errors[name] = worst
    return errors


def time_sides(config: Config, sides: dict[str, Peer], canary: Canary) -> dict[str, tuple[list[float], bool]]:
    """Each side's samples in seconds, taken in turns, and whether they are the quiet ones: all where none was."""
    quiet: dict[str, list[float]] = {name: [] for name in sides}
    every: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + config.patience_s
    clock = time.process_time if config.clock == "cpu" else time.perf_counter
    while min(map(len, quiet.values())) < config.samples and time.perf_counter() < end:
        for name, side in sides.items():
            while not (before := config.clock == "cpu" or canary.quiet()) and time.perf_counter() < end:
                time.sleep(0.05)
            start = clock()
            side()
            took = clock() - start
            every[name].append(took)
            if before and (config.clock == "cpu" or canary.quiet()):
                quiet[name].append(took)
    return {name: (quiet[name], True) if quiet[name] else (every[name], False) for name in sides}


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy far larger than the caches; the best of some."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(8))
    return 2 * source.nbytes / best


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cells(config: Config) -> Iterator[Cell]:
    """A cell a case, with all its sides. With clock "cpu", sets PyTorch to one thread."""
    if config.clock == "cpu":
        torch.set_num_threads(1)
    canary = Canary(config.canary_slack)
    for case in config.cases:
        name = f"{case.kind} {case.num_seqs} {case.q_len} {case.context} {case.dtype}"
        yield name, partial(measure, config, case, canary)


def measure(config: Config, case: Case, canary: Canary) -> list[Row]:
    """One row a side."""
    bandwidth = copy_bandwidth()
    batch = make_batch(config, case)
    sides = sides_of(batch, case)
    errors = errors_of(batch, sides)
    times = time_sides(config, sides, canary)
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


def plot(path: Path) -> Path:
    """KV bytes over time, decode cases, beside the copy bandwidth; from the JSON alone."""
    rows = json.loads(path.read_text())["rows"]
    rows = [r for r in rows if r["kind"] == "decode"] or rows
    plt = pyplot()
    figure, axes = plt.subplots()
    cases = list(dict.fromkeys((r["context"], r["dtype"]) for r in rows))
    sides = list(dict.fromkeys(r["side"] for r in rows))
    for i, side in enumerate(sides):
        speeds = [
            next(r["kv_bytes_per_s"] for r in rows if (r["context"], r["dtype"]) == c and r["side"] == side)
            for c in cases
        ]
        axes.bar([x + (i - 1.5) * 0.2 for x in range(len(cases))], [s / 1e9 for s in speeds], 0.2, label=side)
    axes.axhline(rows[0]["copy_bytes_per_s"] / 1e9, color="gray", linewidth=1, label="copy, read + write")
    axes.set_xticks(range(len(cases)), [f"{n} tokens\n{d}" for n, d in cases])
    axes.set_ylabel("KV bytes over time, GB/s")
    axes.set_title(f"{rows[0]['kind'].capitalize()} of {rows[0]['num_seqs']} sequences from a paged cache, CPU")
    axes.legend()
    picture = path.with_suffix(".png")
    figure.savefig(picture)
    plt.close(figure)
    return picture


def answer(data: Data) -> str:
    """One sentence: medians over those of the best of what the question names."""
    told = []
    for kind, dtype in dict.fromkeys((row["kind"], row["dtype"]) for row in data["rows"]):
        ratios = []
        mine = [row for row in data["rows"] if (row["kind"], row["dtype"]) == (kind, dtype)]
        for context in dict.fromkeys(row["context"] for row in mine):
            times = {row["side"]: row["median_s"] for row in mine if row["context"] == context}
            best = min(taken for side, taken in times.items() if side not in (OURS, BY_SEQUENCE))
            ratios.append(best / times[OURS])
        told.append(f"{kind} in {dtype} {' and '.join(f'{ratio:.2f}' for ratio in ratios)} times")
    quiet = all(row["quiet"] for row in data["rows"])
    mood = "" if quiet else " (the machine was never quiet for some of it)"
    return f"The speed of the best that one would write: {', '.join(told)}{mood}."


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(NAME, __doc__)
    options.add_argument("--kind", choices=("decode", "prefill"))
    options.add_argument("--context", type=int, help="only cases of this many tokens")
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time of one thread")
    options.add_argument("--patience", type=float, help="seconds a case may take")
    given = options.parse_args(arguments)
    config = SMOKE if given.smoke else FULL
    chosen = tuple(c for c in config.cases if given.kind in (None, c.kind) and given.context in (None, c.context))
    if not chosen:
        fail(f"--context: expected one of {sorted({c.context for c in config.cases})}, got {given.context}")
    config = replace(config, cases=chosen, clock=given.clock, patience_s=given.patience or config.patience_s)
    name = NAME + ("_cpu_clock" if config.clock == "cpu" else "")
    conduct(name, given.out, config, cells(config), sys.modules[__name__])


if __name__ == "__main__":
    main()

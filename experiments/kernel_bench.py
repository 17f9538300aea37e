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

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from radixkv_kernels import paged_attention

from experiments import kernel_peers
from experiments.harness import Row, print_table, progress, pyplot, save
from experiments.kernel_peers import Batch, Peer

NAME = "kernel_bench"


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
    sides = {"radixkv torch": ours(batch)}
    if case.kind == "decode":
        sides["gather + SDPA"] = kernel_peers.gather_sdpa(batch)
        sides["gather + SDPA by sequence"] = kernel_peers.gather_sdpa_by_sequence(batch)
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


def time_sides(config: Config, sides: dict[str, Peer], canary: Canary) -> dict[str, list[float]]:
    """Seconds of each side's quiet samples, taken in turns; all samples where none was quiet within the patience."""
    quiet: dict[str, list[float]] = {name: [] for name in sides}
    every: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + config.patience_s
    while min(map(len, quiet.values())) < config.samples and time.perf_counter() < end:
        for name, side in sides.items():
            while not (before := canary.quiet()) and time.perf_counter() < end:
                time.sleep(0.05)
            start = time.perf_counter()
            side()
            took = time.perf_counter() - start
            every[name].append(took)
            if before and canary.quiet():
                quiet[name].append(took)
    return {name: quiet[name] or every[name] for name in sides}


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


def run(config: Config) -> list[Row]:
    """One row a case and side."""
    canary = Canary(config.canary_slack)
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    with progress(NAME, len(config.cases)) as bar:
        for case in config.cases:
            batch = make_batch(config, case)
            sides = sides_of(batch, case)
            errors = errors_of(batch, sides)
            times = time_sides(config, sides, canary)
            kv_bytes = 2 * batch.block_table.numel() * batch.k_cache[0].nbytes
            fastest = min(min(t) for t in times.values())
            for name, taken in times.items():
                median = sorted(taken)[len(taken) // 2]
                rows.append(
                    {
                        **asdict(case),
                        "side": name,
                        "error": errors[name],
                        "samples": len(taken),
                        "min_s": min(taken),
                        "median_s": median,
                        "of_fastest": min(taken) / fastest,
                        "kv_bytes": kv_bytes,
                        "kv_bytes_per_s": kv_bytes / min(taken),
                        "copy_bytes_per_s": bandwidth,
                        "canary_best_s": canary.best_s,
                    }
                )
            bar.advance(bar.task_ids[0])
    return rows


def report(rows: list[Row]) -> None:
    """The table, from the rows alone."""
    columns = {
        "operation": "{kind} {num_seqs}x{q_len} on {context} {dtype}",
        "cache": "{side}",
        "min ms": "{min_ms:.1f}",
        "median ms": "{median_ms:.1f}",
        "n": "{samples}",
        "error": "{error:.0e}",
        "KV GB/s": "{gb:.1f}",
    }
    shown = [
        {**r, "min_ms": r["min_s"] * 1e3, "median_ms": r["median_s"] * 1e3, "gb": r["kv_bytes_per_s"] / 1e9}
        for r in rows
    ]
    print_table("Attention on this CPU", columns, shown)


def plot(path: Path) -> None:
    """KV bytes over time, decode cases, beside the copy bandwidth; from the JSON alone."""
    rows = [r for r in json.loads(path.read_text())["rows"] if r["kind"] == "decode"]
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
    axes.axhline(rows[0]["copy_bytes_per_s"] / 1e9, color="black", linewidth=1, label="copy, read + write")
    axes.set_xticks(range(len(cases)), [f"{n} tokens\n{d}" for n, d in cases])
    axes.set_ylabel("KV bytes over time, GB/s")
    axes.set_title(f"Decode of {rows[0]['num_seqs']} sequences from a paged cache, CPU")
    axes.legend()
    figure.savefig(path.with_suffix(".png"))


def main() -> None:
    """Runs, writes JSON and plot, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("experiments/results"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--kind", choices=("decode", "prefill"))
    arguments = parser.parse_args()
    config = SMOKE if arguments.smoke else FULL
    if arguments.kind:
        chosen = tuple(c for c in config.cases if c.kind == arguments.kind)
        config = Config(**{**vars_of(config), "cases": chosen})
    rows = run(config)
    path = save(arguments.out, NAME, asdict(config), rows)
    report(rows)
    if any(r["kind"] == "decode" for r in rows):
        plot(path)


def vars_of(config: Config) -> dict[str, Any]:
    """The fields as they are (asdict would turn the cases into dicts)."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


if __name__ == "__main__":
    main()

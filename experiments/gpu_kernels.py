"""Do the Triton kernels hold on a real GPU, and how near do they come to its bandwidth and its matrix rate?

Expectation: every feature right in bf16, fp16 and fp8; the same bits however the work is split; decode above 0.7 of the
measured copy bandwidth where KV outgrows the L2 cache; prefill above half of the measured matmul rate; on a prefix that
sequences share, tree attention as many times as fast as plain decode as it reads fewer bytes; less where L2 holds it.

    python -m experiments.gpu_kernels                    # checks, tunes, times; about 7 minutes at most
    python -m experiments.gpu_kernels --write-table      # also puts the tuned entries into the package's table

Needs a CUDA device (made for torch 2.11 and triton 3.6, no network); without one it says so and exits 0. Writes
experiments/results/gpu_kernels.json. No speed is reported where a check failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch

from experiments.gpu_tree import CASES, Case, tree_rows
from experiments.gpu_tree import SMOKE as TREE_SMOKE

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the timed calls (tokens) and the time allowed (seconds from the start)."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    decode: tuple[tuple[int, int], ...] = ((1, 8192), (1, 65536), (8, 16384), (32, 2048), (32, 8192), (256, 2048))
    prefill: tuple[tuple[int, int], ...] = ((2048, 0), (8192, 0), (2048, 6144), (2048, 30720))
    repeats: int = 11
    check_until_s: float = 150.0
    tune_until_s: float = 260.0
    time_until_s: float = 345.0
    tree: tuple[Case, ...] = CASES
    tree_until_s: float = 420.0


SMOKE = Config(
    decode=((4, 1024),),
    prefill=((512, 512),),
    repeats=3,
    tune_until_s=40.0,
    time_until_s=80.0,
    tree=TREE_SMOKE,
    tree_until_s=90.0,
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One timed call: `batch` sequences of `new` tokens on `cached` ones, in blocks and contiguous."""

    name: str
    batch: int
    new: int
    cached: int
    call: dict[str, Any]
    k: torch.Tensor
    v: torch.Tensor
    """[batch, num_kv_heads, length, head_dim], what the blocks hold."""

    @property
    def kv_bytes(self) -> int:
        return 2 * self.k.numel() * self.call["k_cache"].element_size()

    @property
    def flops(self) -> int:
        pairs = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.batch * pairs * self.call["q"].shape[1] * self.call["q"].shape[2]


def workload(name: str, batch: int, new: int, cached: int, config: Config, dtype: torch.dtype, fp8: bool) -> Workload:
    """Random values, blocks in random order."""
    length, size = cached + new, config.block_size
    per_seq = -(-length // size)
    shape = (batch * per_seq, size, config.num_kv_heads, config.head_dim)
    table = torch.randperm(batch * per_seq, device="cuda").reshape(batch, per_seq)
    caches = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)]
    if fp8:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    dense = [cache.to(dtype)[table].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in caches]
    call = {
        "q": torch.randn(batch * new, config.num_q_heads, config.head_dim, device="cuda", dtype=dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cu_seqlens_q": torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new,
        "block_table": table.int(),
        "seq_lens": torch.full((batch,), length, device="cuda", dtype=torch.int32),
        "implementation": "triton",
    }
    return Workload(name, batch, new, cached, call, dense[0], dense[1])


def contenders(work: Workload) -> dict[str, Callable[[], torch.Tensor]]:
    """Ours on blocks; SDPA and FlexAttention on the same KV laid out contiguously, which spares them the gather."""
    from radixkv_kernels import paged_attention
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = work.call["q"].unflatten(0, (work.batch, work.new)).transpose(1, 2).contiguous()
    length = work.k.shape[2]
    mask = causal_lower_right(work.new, length) if work.new > 1 else None
    group = q.shape[1] // work.k.shape[1]
    k_wide, v_wide = (x.repeat_interleave(group, 1) for x in (work.k, work.v)) if work.new > 1 else (work.k, work.v)

    def ours() -> torch.Tensor:
        out = paged_attention(**work.call)
        assert isinstance(out, torch.Tensor)
        return out

    def flat(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def sdpa() -> torch.Tensor:
        if mask is None:
            folded = q.reshape(work.batch, work.k.shape[1], group, -1)
            out = torch.nn.functional.scaled_dot_product_attention(folded, work.k, work.v)
            return out.reshape(work.batch, q.shape[1], -1)
        return flat(torch.nn.functional.scaled_dot_product_attention(q, k_wide, v_wide, attn_mask=mask))

    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if work.new > 1:
        cached = work.cached
        block_mask = create_block_mask(lambda b, h, i, j: j <= i + cached, None, None, work.new, length, device="cuda")

    def flex() -> torch.Tensor:
        return flat(compiled(q, work.k, work.v, block_mask=block_mask, enable_gqa=True))

    return {"radixkv": ours, "sdpa": sdpa, "flex": flex}


def measure(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, alternating, the L2 cache overwritten before every call."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 2):
        for name, function in functions.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def peaks(repeats: int) -> Row:
    """Measured copy bandwidth (GB/s, read plus write) and bf16 matmul rate (TFLOP/s) of this device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    took = measure({"copy": lambda: target.copy_(source), "matmul": lambda: a @ a}, repeats)
    return {
        "part": "peak",
        "name": torch.cuda.get_device_name(),
        "copy_gb_s": 2 * (1 << 30) / took["copy"] / 1e6,
        "matmul_tflop_s": 2 * 8192**3 / took["matmul"] / 1e9,
    }


def time_workloads(config: Config, peak: Row, in_time: Callable[[], bool]) -> Iterator[Row]:
    """One row a workload and dtype; a contender that fails or disagrees is named and not timed."""
    kinds = [("decode", batch, 1, length - 1) for batch, length in config.decode]
    kinds += [("prefill", 1, new, cached) for new, cached in config.prefill]
    for fp8 in (False, True):
        for kind, batch, new, cached in kinds:
            if not in_time():
                return
            name = f"{kind} {batch} x {new} new on {cached} cached{', fp8' if fp8 else ''}"
            work = workload(kind, batch, new, cached, config, torch.bfloat16, fp8)
            agreeing, refused = {}, {}
            ours = None
            for contender, function in contenders(work).items():
                try:
                    out = function()
                except Exception as error:  # a peer that this torch lacks must not end the run; it is reported
                    refused[contender] = f"{type(error).__name__}: {error}"[:200]
                    continue
                ours = out if ours is None else ours
                if float((out.float() - ours.float()).norm() / ours.float().norm()) < 2e-2:
                    agreeing[contender] = function
                else:
                    refused[contender] = "disagrees"
            took = measure(agreeing, config.repeats)
            ms = took.get("radixkv", float("nan"))
            yield {
                "part": "time",
                "name": name,
                "ms": took,
                "not_timed": refused,
                "of_copy_bandwidth": work.kv_bytes / ms / 1e6 / peak["copy_gb_s"],
                "of_matmul_rate": work.flops / ms / 1e9 / peak["matmul_tflop_s"],
            }
            del work
            torch.cuda.empty_cache()


def run(config: Config, write_table: bool, report: Callable[[Row], None]) -> list[Row]:
    """Checks, then tunes, then times; each part ends by its time. Timing is left out where a check failed."""
    from experiments.gpu_checks import run_checks
    from experiments.gpu_tuning import tune

    start = time.monotonic()
    rows = run_checks(torch.device("cuda"), report, lambda: time.monotonic() - start < config.check_until_s)
    if not all(row["passed"] for row in rows):
        return rows

    def add(row: Row) -> Row:
        rows.append(row)
        report(row)
        return row

    def measure_config(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return measure(functions, 5)

    for row in tune(config, measure_config, write_table, lambda: time.monotonic() - start < config.tune_until_s):
        add(row)
    peak = add(peaks(config.repeats))
    for row in time_workloads(config, peak, lambda: time.monotonic() - start < config.time_until_s):
        add(row)
    for row in tree_rows(config, config.tree, peak, measure, lambda: time.monotonic() - start < config.tree_until_s):
        add(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints a line a row, writes the JSON; 1 where a check failed."""
    parser = argparse.ArgumentParser(description="Check, tune and time the Triton kernels on a CUDA device.")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("experiments/results"), help="folder for the JSON"
    )
    parser.add_argument("--write-table", action="store_true", help="put tuned entries into the package's table")
    parser.add_argument("--smoke", action="store_true", help="small sizes, under a minute and a half")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_kernels: no CUDA device here, nothing to do")
        return 0
    config = SMOKE if options.smoke else Config()
    done = 0

    def report(row: Row) -> None:
        nonlocal done
        done += 1
        print(f"{done:4} {json.dumps(row)}", file=sys.stderr, flush=True)

    rows = run(config, options.write_table, report)
    import triton

    environment = {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu_kernels.json"
    result = {"config": dataclasses.asdict(config), "environment": environment, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")
    failed = [row["name"] for row in rows if not row.get("passed", True)]
    print(f"{path}: {len(rows)} rows" + (f"; FAILED: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

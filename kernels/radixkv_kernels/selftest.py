"""Whether this machine's matrix kernels keep the promise that the torch path builds on: a row's bits are its own.

`python -m radixkv_kernels.selftest` prints what it tried and ends with 1 where a result depended on the batch, the rows
beside it or the number of threads. Nothing in PyTorch promises that, so run it once on a new kind of CPU or a new
PyTorch. About 20 s on two cores.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from .torch_impl.cells import CELL_SIZE, ROW_MULTIPLE, CellMath, RowBounds, cell_partials

ROWS = (*range(ROW_MULTIPLE, 72, ROW_MULTIPLE), 128, 188, 192, 196, 256, 508, 764, 768, 772, 1024)


@dataclass(frozen=True)
class Difference:
    """One call whose rows differed in bits from the same rows of the widest call."""

    dtype: torch.dtype
    fused: bool
    head_dim: int
    rows: int
    masked: bool
    threads: int


def differences(head_dims: tuple[int, ...] = (64, 80, 128, 256), num_kv_heads: int = 3) -> list[Difference]:
    """Every difference found; empty where the promise holds. Restores the number of threads."""
    found = []
    threads = torch.get_num_threads()
    try:
        for head_dim in head_dims:
            for dtype, fused in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
                found += _differences(dtype, fused, head_dim, num_kv_heads, sorted({1, threads}, reverse=True))
    finally:
        torch.set_num_threads(threads)
    return found


def _differences(dtype: torch.dtype, fused: bool, head_dim: int, heads: int, threads: list[int]) -> list[Difference]:
    gen = torch.Generator().manual_seed(head_dim)
    widest = max(ROWS) + 52
    q = torch.randn(1, heads, widest, head_dim, generator=gen).to(dtype)
    k, v = (torch.randn(1, CELL_SIZE, heads, head_dim, generator=gen).to(dtype).transpose(1, 2) for _ in range(2))
    lo = torch.zeros(1, widest, dtype=torch.int64)
    bounds = RowBounds(lo, lo + CELL_SIZE, lo)
    math = CellMath(fused, False, dtype, head_dim**-0.5, None, None if fused else 30.0, None)
    torch.set_num_threads(threads[0])
    want = cell_partials(math, q, k, v, lo[:, 0], bounds, False)
    found = []
    for count in threads:
        torch.set_num_threads(count)
        for rows in ROWS:
            for masked in (False, True):
                part = slice(13, 13 + rows)
                got = cell_partials(math, q[:, :, part], k, v, lo[:, 0], bounds[:, part], masked)
                if not _equal(got, want, part):
                    found.append(Difference(dtype, fused, head_dim, rows, masked, count))
    return found


def _equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], part: slice) -> bool:
    return all(torch.equal(g, w[:, :, part]) for g, w in zip(got, want, strict=True))


def main() -> int:
    """Prints the verdict; 0 or 1."""
    found = differences()
    for difference in found:
        print(difference)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}: {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

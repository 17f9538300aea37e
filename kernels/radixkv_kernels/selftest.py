"""Whether this machine keeps the promise that the torch path builds on: a row's bits are its own.

`python -m radixkv_kernels.selftest` prints which numbers of rows agree here (`row_rules` measures it), computes rows of
data whose exact results are zero by these rules, with one thread and with two, and ends with 1 where a result depended
on the batch, the rows beside it or a mask, or where no number of rows agrees. Nothing in PyTorch promises that, so run
it once on a new kind of CPU or a new PyTorch. Some 20 s on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .row_rules import RowRule, measured
from .torch_impl.cells import (
    CELL_SIZE,
    CellMath,
    RowBounds,
    View,
    cell_partials,
    rule_of_cells,
    scores_cancel,
    values_cancel,
)

ROWS = (*range(1, 38), 60, 64, 68, 128, 192, 196, 256, 508, 768, 772, 1024)
"""Numbers of rows that are asked for; the rule pads and cuts them."""
FIRST = 13
"""Where they begin among the rows of the widest call."""


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
    found: list[Difference] = []
    before = torch.get_num_threads()
    try:
        for threads in sorted({1, 2, before}):
            torch.set_num_threads(threads)
            for head_dim in head_dims:
                for dtype, fused in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
                    rule, _ = rule_of_cells(fused, dtype, head_dim, head_dim)
                    found += _differences(rule, dtype, fused, head_dim, num_kv_heads)
    finally:
        torch.set_num_threads(before)
    return found


def _differences(rule: RowRule, dtype: torch.dtype, fused: bool, head_dim: int, heads: int) -> Iterator[Difference]:
    gen = torch.Generator().manual_seed(head_dim)
    widest = rule.padded(max(ROWS) + FIRST)
    softcap = None if fused else 30.0
    for make in (scores_cancel, values_cancel):
        scale, q, k, v = make(dtype, CELL_SIZE, head_dim, head_dim)
        # rows that cancel, and others between them
        rows = torch.randn(1, heads, widest, head_dim, generator=gen).to(dtype)
        rows[:, :, ::2] = q
        keys, values = (x[None, :, None].repeat(1, 1, heads, 1).transpose(1, 2) for x in (k, v))
        lo = torch.zeros(1, widest, dtype=torch.int64)
        bounds = RowBounds(lo, lo + CELL_SIZE, lo)
        math = CellMath(fused, False, dtype, scale, None, softcap, None, rule)
        want = cell_partials(math, rows, keys, values, View.of(math, lo[:, 0], bounds, CELL_SIZE, False))
        for count in ROWS:
            part = slice(FIRST, FIRST + rule.padded(count))
            if part.stop > widest:
                continue
            for masked in (False, True):
                view = View.of(math, lo[:, 0], bounds[:, part], CELL_SIZE, masked)
                got = cell_partials(math, rows[:, :, part].clone(), keys, values, view)
                if not _equal(got, want, part):
                    yield Difference(dtype, fused, head_dim, count, masked, torch.get_num_threads())


def _equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], part: slice) -> bool:
    return all(torch.equal(g, w[:, :, part]) for g, w in zip(got, want, strict=True))


def main() -> int:
    """Prints the rules and the verdict; 0 or 1."""
    found = differences()
    for rule in measured():
        print(rule)
    for difference in found:
        print(difference)
    lost = [rule for rule in measured() if not rule.holds]
    seconds = sum(rule.seconds for rule in measured())
    print(f"{len(measured())} rules of rows, measured in {seconds:.1f} s, {len(lost)} do not hold")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}: {len(found)} differences")
    return 1 if found or lost else 0


if __name__ == "__main__":
    sys.exit(main())

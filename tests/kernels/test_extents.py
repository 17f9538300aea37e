"""What a plan knows of lengths: the same cells for all lengths that it says it holds for, and for no others."""

from __future__ import annotations

import random

import numpy as np
import pytest
from radixkv_kernels.plan.cells import Extents

CELL = 8


def of(length: int, rows: int, window: int | None) -> tuple[int, ...]:
    """Of one sequence: first, last, whole, full, low, high."""
    extents = Extents.of(np.array([length]), np.array([rows]), CELL, window)
    return tuple(int(getattr(extents, name)[0]) for name in ("first", "last", "whole", "full", "low", "high"))


@pytest.mark.parametrize("seed", range(150))
def test_the_cells_are_the_same_where_a_plan_holds_and_nowhere_else(seed):
    rng = random.Random(seed)
    rows = rng.choice([0, 1, 1, 2, rng.randint(1, 30)])
    window = rng.choice([None, 1, rng.randint(1, 20), rng.randint(1, 60)])
    found = {n: of(n, rows, window) for n in range(80)}
    for length in found:
        *cells, low, high = found[length]
        for other in found:
            # an empty sequence's rows see nothing at all, which is a cell range of its own
            assert (low <= other <= high) == ([*cells, low, high] == list(found[other])), (length, other)
            if rows and not low <= other <= high:
                busy = bool(length) != bool(other)
                assert busy or cells != list(found[other][:4]), (length, other)

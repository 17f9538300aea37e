"""Plans kept from step to step give the bits of no plan: chunks of any width, drafts, decodes, windows."""

from __future__ import annotations

import pytest
from radixkv_kernels import plan_tile

from tests.kernels.forests import Call
from tests.kernels.stepping import Counts, check_many

FOREST_COUNT, MANY = 25, 3000
SIZES = {"longest": 800, "most_seqs": 6, "steps": 7}


def tile_of(call: Call) -> dict[str, int]:
    return plan_tile(call.q.dtype, call.q.shape[2], implementation="torch")


def check_counts(counts: Counts) -> None:
    """Many plans are kept, and some where rows crossed a border and the tiles had to know: else nothing was tried."""
    assert counts.kept > counts.steps // 5 and counts.crossed > counts.steps // 100, counts


def test_stepping_forests():
    check_counts(check_many(range(FOREST_COUNT), tile_of, **SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FOREST_COUNT, FOREST_COUNT + MANY, 100))
def test_many_stepping_forests(start):
    check_counts(check_many(range(start, start + 100), tile_of, **SIZES))

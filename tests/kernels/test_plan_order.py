"""The kept order of sequences is the sorted one, whatever changed in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
from radixkv_kernels.plan import order
from radixkv_kernels.plan.order import KeptOrder, sort_sequences


@pytest.mark.parametrize("top", [1 << 62, 3000, 40])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_order_sorted_anew(monkeypatch, seed, top):
    """Keys that are equal, that are prefixes of others, that change few or many at a time; numbers that run out."""
    monkeypatch.setattr(order, "TOP", top)
    rng = random.Random(seed)
    kept, num_rows = KeptOrder(), 30
    kept.grow(12)
    kept.grow(num_rows)
    keys = np.array([[rng.randint(0, 3) * 1000 for _ in range(9)] for _ in range(num_rows)], dtype=np.int32)
    full = np.array([rng.randint(0, 5) for _ in range(num_rows)])
    for _ in range(200):
        for row in rng.sample(range(num_rows), rng.choice([0, 1, 2, 5, num_rows])):
            if rng.random() < 0.3:
                keys[row] = keys[rng.randrange(num_rows)]
                keys[row, rng.randrange(9) :] = rng.randint(0, 5)
                kept.forget(row)
            full[row] = min(9, full[row] + 1) if rng.random() < 0.8 else rng.randint(0, 9)
        rows = np.array(rng.sample(range(num_rows), rng.randint(1, num_rows)))
        got = kept.sort(rows, keys, full[rows])
        nothing = np.zeros(len(rows), dtype=np.int64)
        assert got.tolist() == sort_sequences(keys[rows], nothing, full[rows]).tolist()
    assert len(kept._keys) <= 3 * num_rows + order.FEW, "keys of the past are forgotten"

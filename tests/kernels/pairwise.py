"""A small covering array: every pair of values of any two features occurs together in some row."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise_rows(features: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy: each row is the best of some random ones for the pairs still uncovered. Deterministic for a seed."""
    rng = random.Random(seed)
    names = list(features)

    def pairs_of(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(features[a]))
        for j in range(len(features[b]))
    }
    rows: list[dict[str, int]] = []
    while left:
        a, i, b, j = min(left)
        candidates = []
        for _ in range(40):
            row = {n: rng.randrange(len(features[n])) for n in names}
            row[a], row[b] = i, j
            candidates.append(row)
        best = max(candidates, key=lambda row: len(pairs_of(row) & left))
        left -= pairs_of(best)
        rows.append(best)
    return [{n: features[n][row[n]] for n in names} for row in rows]

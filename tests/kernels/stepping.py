"""Forests that step: sequences grow by any number of rows, come, go and branch, and one planner follows them.

Used by the tests of kept plans, for the torch implementation and for Triton's. A step is a `Forest` like those that
`forests.random_forest` makes; whether a plan was kept for it, and of rows that only a plan of several tiles has, is
counted, because a test in which no such plan is ever kept cannot fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from radixkv_kernels import PlanConfig, TreePlanner

from tests.kernels.forests import BLOCK_SIZES, Call, Forest, check_sound, random_call


@dataclass
class Grown:
    """A sequence: blocks for all that it may become, tokens now, rows now."""

    blocks: list[int]
    tokens: int
    rows: int


@dataclass
class Stepping:
    """Sequences on common prefixes, by name."""

    seed: int
    longest: int
    most_seqs: int
    most_rows: int = 300
    rng: random.Random = field(init=False, repr=False)
    live: dict[int, Grown] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.block_size = rng.choice(BLOCK_SIZES)
        self.group_size, self.num_kv_heads = rng.randint(1, 8), rng.choice([1, 2])
        self.window = rng.choice([None, None, None, rng.randint(1, 40), rng.randint(150, 600), rng.randint(150, 600)])
        self.causal = rng.random() < 0.9
        self.num_blocks = self.num_names = 0
        self.roots: list[Grown] = []
        for _ in range(rng.choice([1, 1, 2])):
            self.roots.append(self._branch(None))
        for _ in range(rng.randint(2, self.most_seqs)):
            self.come()

    def _branch(self, parent: Grown | None) -> Grown:
        """On a prefix of another, mostly on all of it."""
        rng, shared = self.rng, []
        room = -(-self.longest // self.block_size)
        at = 0
        if parent is not None:
            at = rng.choice([parent.tokens, parent.tokens, rng.randint(0, parent.tokens)])
            shared = parent.blocks[: at // self.block_size]
        own = range(self.num_blocks, self.num_blocks + room - len(shared))
        self.num_blocks = own.stop
        tokens = max(1, min(self.longest, at + rng.choice([1, rng.randint(1, 60), rng.randint(1, 300)])))
        if parent is None:
            tokens = rng.randint(1, 3 * self.longest // 4)
        return Grown([*shared, *own], tokens, 1)

    def come(self) -> None:
        """One more sequence: a decode, a draft or a chunk."""
        sequence = self._branch(self.rng.choice([*self.roots, *self.live.values()]))
        sequence.rows = self._rows(sequence.tokens)
        self.live[self.num_names] = sequence
        self.num_names += 1

    def _rows(self, tokens: int) -> int:
        rng = self.rng
        wide = [rng.randint(2, most) for most in (8, 60, 100, 300)]
        some = min(rng.choice([0, 1, 1, 1, *wide]), self.most_rows)
        return min(tokens, some) if rng.random() < 0.9 else some  # some rows see nothing then

    def step(self) -> None:
        """Each grows by what it computed, or by any other number; some come, some go, some get other rows."""
        rng = self.rng
        for sequence in self.live.values():
            grow = rng.choice([sequence.rows, sequence.rows, 1, rng.randint(0, 3), rng.randint(0, 100), -1])
            sequence.tokens = max(min(sequence.tokens + grow, self.longest), min(sequence.rows, 1))
        if rng.random() < 0.25:
            sequence = rng.choice(list(self.live.values()))
            sequence.rows = self._rows(sequence.tokens)
        if rng.random() < 0.15 and len(self.live) < self.most_seqs:
            self.come()
        if rng.random() < 0.1 and len(self.live) > 2:
            del self.live[rng.choice(list(self.live))]

    def forest(self) -> Forest:
        """The step's batch. Blocks that no row sees are none: -1."""
        sequences = list(self.live.values())
        lens = np.array([s.tokens for s in sequences], dtype=np.int64)
        rows = np.array([s.rows for s in sequences], dtype=np.int64)
        table = np.full((len(sequences), max(len(s.blocks) for s in sequences)), -1, dtype=np.int32)
        shape = (self.seed, self.block_size, self.group_size, self.num_kv_heads, self.window, self.causal)
        forest = Forest(*shape, table, lens, rows, self.num_blocks, self.rng)
        for row, sequence, lo in zip(table, sequences, forest.lo().tolist(), strict=True):
            seen = slice(lo // self.block_size, -(-sequence.tokens // self.block_size))
            row[seen] = sequence.blocks[seen]
        return forest

    def config(self, **options: Any) -> PlanConfig:
        heads = self.group_size * self.num_kv_heads, self.num_kv_heads
        return PlanConfig(self.block_size, *heads, causal=self.causal, window=self.window, **options)


@dataclass
class Counts:
    """steps: with a plan. kept: with the plan of the step before. crossed: of these, those in which a row of a sequence
    of several tiles crossed a border between cells."""

    steps: int = 0
    kept: int = 0
    crossed: int = 0


def check_steps(
    stepping: Stepping, steps: int, counts: Counts, tile_of: Callable[[Call], dict[str, int]], **fixed: Any
):
    """A planner's plans have the bits of no plan, step by step, and are those from scratch, kept or not.

    tile_of: what plans of a call are made with. fixed: as for `forests.random_call`.
    """
    rng = stepping.rng
    wholly = rng.random() < 0.25  # looks at each row and key: slow
    planner = before = start = None
    known: dict[int, Grown] = {}
    for _ in range(steps):
        forest = stepping.forest()
        call = random_call(forest, **fixed)
        if planner is None:
            # what is drawn anew in each step is what a plan does not depend on
            fixed |= {"dtype": call.q.dtype, "kv_dtype": call.caches[0].dtype}
            fixed |= {"softcap": call.arguments["softcap"]}
            tile = tile_of(call)
            if rng.random() < 0.75:
                tile["tile_rows"] = min(tile["tile_rows"], rng.choice([forest.group_size, 16, 64]))
            options = {"lead_runs": rng.choice([1, 4]), "min_items": rng.choice([0, 0, 20, 10**6])}
            planner = TreePlanner(stepping.config(**tile, **options))
        for name in known.keys() - stepping.live.keys():
            planner.remove(name)
        for name in stepping.live.keys() - known.keys():
            planner.add(name, stepping.live[name].blocks)
        same = list(known) == list(stepping.live)
        known = dict(stepping.live)
        plan = planner.plan(list(known), forest.seq_lens, forest.cu)
        (out, lse), (want, want_lse) = call.run(plan), call.run(None)
        assert torch.equal(out, want) and torch.equal(lse, want_lse), f"{(out != want).flatten(1).any(1).sum()} rows"
        assert not want.isnan().any()
        if wholly:
            check_sound(forest, plan)
        fresh = forest.plan(**tile, **options)
        for name in ("items", "row_base", "row_slots", "slot_cells"):
            assert np.array_equal(getattr(plan.work, name), getattr(fresh.work, name)), name
        if before is not None and same:
            assert before.serves(forest.seq_lens, forest.cu) == (plan is before)
        counts.steps += 1
        first = (forest.seq_lens - forest.q_lens) // tile["cell_size"]
        if plan is before:
            counts.kept += 1
            wide = forest.q_lens * forest.group_size > tile["tile_rows"]
            counts.crossed += bool((wide & (first != start)).any())
        before, start = plan, first
        stepping.step()


def check_many(seeds: range, tile_of: Callable[[Call], dict[str, int]], *, steps: int, **sizes: Any) -> Counts:
    """Some forests, each stepped so often; `sizes`: of `Stepping`, and `fixed` of the calls."""
    counts, fixed = Counts(), sizes.pop("fixed", {})
    for seed in seeds:
        try:
            check_steps(Stepping(seed, **sizes), steps, counts, tile_of, **fixed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return counts

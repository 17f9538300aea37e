"""Random ragged forests: sequences that share prefixes as a radix cache would have them, poisoned where nothing may be
read; what a sound plan of them is; attention over them in float64.

Used by the tests of plans and of tree attention.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from radixkv_kernels import TreePlan, paged_attention, tree_attention
from torch import Tensor

from tests.rounding import Exact, attention

FP8 = torch.float8_e4m3fn
BLOCK_SIZES = (1, 3, 16, 64)


@dataclass
class Forest:
    """A batch: block table (unused ids are -1), lengths, and which options an attention call has."""

    seed: int
    block_size: int
    group_size: int
    num_kv_heads: int
    window: int | None
    causal: bool
    table: np.ndarray
    seq_lens: np.ndarray
    q_lens: np.ndarray
    num_blocks: int
    rng: random.Random = field(repr=False)

    @property
    def cu(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.q_lens)))

    def lo(self) -> np.ndarray:
        """[num_seqs]: first token that some row sees."""
        if self.window is None:
            return np.zeros_like(self.seq_lens)
        return np.clip(self.seq_lens - self.q_lens - self.window + 1, 0, self.seq_lens)

    def plan(self, **options: Any) -> TreePlan:
        """A plan of this batch."""
        return TreePlan.from_block_table(
            self.table,
            self.seq_lens,
            self.cu,
            block_size=self.block_size,
            num_q_heads=self.group_size * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            causal=self.causal,
            window=self.window,
            **options,
        )


SMALL = {"most": (2, 4), "longest": (400, 700), "most_tokens": 900, "most_queries": 12}
"""For the interpreter, whose time goes by the number of cells."""


def random_forest(
    seed: int,
    *,
    most: tuple[int, ...] = (1, 4, 12, 12, 24, 70),
    longest: tuple[int, ...] = (60, 400, 1500, 1500, 5000),
    most_tokens: int = 12_000,
    most_queries: int = 300,
    **fixed: Any,
) -> Forest:
    """Several roots, depth to 8, fan-out 1 to 64, lengths that are multiples of nothing, mixed query lengths.

    most: sequences at most; longest: tokens of one at most; one of each is drawn. fixed: block_size, group_size,
    window, causal or several (query lengths) where they are not to be drawn.
    """
    rng = random.Random(seed)

    def draw(name: str, values: list[Any]) -> Any:
        value = rng.choice(values)
        return fixed.get(name, value)

    block_size = draw("block_size", list(BLOCK_SIZES))
    most_seqs = rng.choice(most)
    most_long = rng.choice(longest)
    paths: list[list[int]] = []
    fresh = iter(range(1, 1 << 30))

    def grow(path: list[int], num_tokens: int, depth: int) -> None:
        span = rng.choice([0, rng.randint(0, 40), rng.randint(1, 300), rng.randint(1, max(1, most_long // 2))])
        num_tokens = min(most_long, num_tokens + span)
        # the partly filled block is each child's own
        shared = path + [next(fresh) for _ in range(num_tokens // block_size - len(path))]
        children = rng.choice([1, 1, 2, 3, rng.randint(1, 64)]) if depth < 8 and rng.random() < 0.75 else 0
        for _ in range(children):
            if len(paths) < most_seqs and sum(lens) < most_tokens:
                grow(shared, num_tokens, depth + 1)
        if not children and len(paths) < most_seqs:
            n = num_tokens + rng.choice([0, 1, rng.randint(0, 30), rng.randint(0, 400)])
            paths.append(shared[: n // block_size] + [next(fresh) for _ in range(-(-n // block_size) - len(shared))])
            lens.append(n)

    lens: list[int] = []
    for _ in range(rng.randint(1, 4)):
        grow([], 0, 1)
    order = list(range(len(paths)))
    rng.shuffle(order)
    seq_lens = np.array([lens[i] for i in order], dtype=np.int64)
    several = fixed.get("several", rng.random() < 0.4)
    q_lens = np.ones_like(seq_lens)
    for i, n in enumerate(seq_lens.tolist()):
        if n == 0 or rng.random() < 0.05:
            q_lens[i] = 1 if n == 0 else 0
        elif several:
            some = rng.choice([1, 1, rng.randint(1, 8), rng.randint(1, 40), rng.randint(1, 300)])
            q_lens[i] = min(n, some, most_queries)
    table = np.full((len(paths), max(1, *map(len, paths)) + 1), -1, dtype=np.int32)
    for row, i in enumerate(order):
        table[row, : len(paths[i])] = paths[i]
    renamed = list(range(int(table.max(initial=0)) + 1))
    rng.shuffle(renamed)
    table = np.where(table >= 0, np.array(renamed)[table], -1).astype(np.int32)
    kv_heads = rng.choice([1, 2])
    forest = Forest(
        seed,
        block_size,
        draw("group_size", list(range(1, 9))),
        kv_heads,
        draw("window", [None, None, rng.randint(1, 40), rng.randint(1, 900)]),
        draw("causal", [True] * 6 + [False]),
        table,
        seq_lens,
        q_lens,
        len(renamed),
        rng,
    )
    for row, lo in enumerate(forest.lo().tolist()):
        forest.table[row, : lo // block_size] = -1  # dropped by the engine
    return forest


def check_sound(forest: Forest, plan: TreePlan) -> None:
    """Every (row, visible token) covered exactly once, through blocks that are the row's; slots dense; folds legal."""
    config, work = plan.config, plan.work
    group, size, run_cells = config.group_size, config.cell_size, config.run_cells
    cu, bs = forest.cu, forest.block_size
    row_seq, row_token = work.row_seq, work.row_token
    assert sorted(row_token.tolist()) == list(range(int(cu[-1])))
    assert (np.searchsorted(cu, row_token, side="right") - 1 == row_seq).all() or (forest.q_lens == 0).any()
    assert ((row_token >= cu[row_seq]) & (row_token < cu[row_seq + 1])).all()
    position = forest.seq_lens[row_seq] - forest.q_lens[row_seq] + row_token - cu[row_seq]
    hi = forest.seq_lens[row_seq]
    if forest.causal:
        hi = np.clip(position + 1, 0, hi)
    lo = np.zeros_like(hi) if forest.window is None else np.clip(position - forest.window + 1, 0, hi)
    num_cells = -(-int(forest.seq_lens.max(initial=0)) // size)
    covered = np.zeros((len(row_token) * group, num_cells), dtype=np.int64)
    slot_rows, slot_first = (np.full(len(work.row_slots) * group, -1) for _ in range(2))
    for row0, rows, first, last, slot in work.items.tolist():
        assert 0 < rows <= config.tile_rows and 0 <= first < last <= num_cells
        covered[row0 : row0 + rows, first:last] += 1
        assert (slot_rows[slot : slot + rows] == -1).all()
        slot_rows[slot : slot + rows] = np.arange(row0, row0 + rows)
        slot_first[slot : slot + rows] = first
        tokens = np.arange(row0 // group, (row0 + rows - 1) // group + 1)
        seqs = np.unique(row_seq[tokens])
        reader = row_seq[row0 // group]
        seen_lo, seen_hi = int(lo[tokens].min()), int(hi[tokens].max())
        a, b = max(first * size, seen_lo) // bs, -(-min(last * size, seen_hi) // bs)
        if len(seqs) > 1:
            assert (forest.seq_lens[seqs] >= last * size).all() and (forest.lo()[seqs] <= first * size).all()
            assert (forest.table[seqs, a:b] == forest.table[reader, a:b]).all()
        assert (forest.table[reader, a:b] >= 0).all()
        whole_runs = (last - 1) // run_cells > first // run_cells
        assert last - first == 1 or whole_runs or first // run_cells == (last - 1) // run_cells
        for token in tokens.tolist():
            entries = slice(work.row_base[token], work.row_base[token + 1])
            cells = work.slot_cells[entries]
            assert first in cells and (np.diff(cells) > 0).all()
            k = int(np.searchsorted(cells, first))
            begins = k == 0 or cells[k] % run_cells == 0 or cells[k - 1] // run_cells < first // run_cells
            assert begins or last - first == 1, "only the first part of a run folds ahead"
            assert not whole_runs or (k == 0 and (last % run_cells == 0 or last * size >= hi[token]))
            assert k == 0 or cells[k] % run_cells == 0 or cells[k - 1] // run_cells == cells[k] // run_cells
    assert (slot_rows >= 0).all(), "slots are dense"
    cells = np.arange(num_cells) * size
    visible = (cells < hi[:, None]) & (cells + size > lo[:, None]) & (hi > lo)[:, None]
    counts = covered.reshape(len(row_token), group, num_cells).transpose(0, 2, 1)
    assert (counts[visible] == 1).all() and (counts <= 1).all()
    for row in range(len(row_token)):
        entries = slice(work.row_base[row], work.row_base[row + 1])
        assert (slot_rows[work.row_slots[entries]] == row * group).all()
        assert (slot_first[work.row_slots[entries]] == work.slot_cells[entries]).all()
    assert work.row_base[-1] == len(work.row_slots) == len(work.slot_cells)
    stats = plan.stats
    assert stats.num_unique_kv_tokens <= stats.num_kv_tokens_read <= stats.num_kv_tokens_loaded
    assert stats.num_unique_kv_tokens <= stats.num_logical_kv_tokens
    assert stats.num_items == len(work.items) and stats.num_partials == len(work.row_slots)


@dataclass
class Call:
    """Arguments of an attention call over a forest, with the KV that it may see in float64."""

    forest: Forest
    q: Tensor
    caches: list[Tensor]
    arguments: dict[str, Any]

    def run(self, plan: TreePlan | None) -> tuple[Tensor, Tensor]:
        """(out, lse) with or without a plan, out poisoned beforehand."""
        out = torch.full((*self.q.shape[:2], self.caches[1].shape[3]), torch.nan, dtype=self.q.dtype)
        if plan is None:
            result = paged_attention(self.q, *self.caches, out=out, return_lse=True, **self.arguments)
        else:
            result = tree_attention(self.q, *self.caches, plan=plan, out=out, return_lse=True, **self.arguments)
        assert isinstance(result, tuple)
        return result

    def exact(self) -> Exact:
        """The same in float64, sequence by sequence, and what roundings may do."""
        forest, arguments = self.forest, self.arguments
        parts = []
        for s, n in enumerate(forest.seq_lens.tolist()):
            q = self.q[forest.cu[s] : forest.cu[s + 1]]
            tokens = torch.arange(int(forest.lo()[s]), n)
            blocks = torch.from_numpy(forest.table[s]).long()[tokens // forest.block_size]
            kv = [c[blocks, tokens % forest.block_size].double() for c in self.caches]
            for i, name in enumerate(("k_scale", "v_scale")):
                if arguments[name] is not None:
                    kv[i] = kv[i] * arguments[name].double().reshape(-1, 1)
            distance = (n - len(q) + torch.arange(len(q)))[:, None] - tokens
            hidden = torch.zeros(distance.shape, dtype=torch.bool)
            if forest.causal:
                hidden |= distance < 0
            if forest.window is not None:
                hidden |= distance >= forest.window
            options = {
                "softcap": arguments["softcap"],
                "slopes": arguments["alibi_slopes"],
                "sinks": arguments["sinks"],
            }
            parts.append(attention(q, *kv, hidden=hidden, distance=distance, **options))
        return Exact.joined(parts)


def random_call(forest: Forest, **fixed: Any) -> Call:
    """Tensors and options at random; NaN in every slot that no sequence sees.

    fixed: dtype, kv_dtype, or arguments of the attention call where they are not to be drawn.
    """
    rng, gen = forest.rng, torch.Generator().manual_seed(forest.seed)
    heads, dim = forest.num_kv_heads, rng.choice([32, 64])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    dtype = fixed.pop("dtype", dtype)
    kv_dtype = rng.choice([dtype, dtype, dtype, FP8])
    kv_dtype = fixed.pop("kv_dtype", kv_dtype) or dtype
    v_dim = rng.choice([dim, dim, dim, 32])
    used = torch.zeros(forest.num_blocks, forest.block_size, dtype=torch.bool)
    for s, n in enumerate(forest.seq_lens.tolist()):
        if forest.q_lens[s]:
            tokens = torch.arange(int(forest.lo()[s]), n)
            used[torch.from_numpy(forest.table[s]).long()[tokens // forest.block_size], tokens % forest.block_size] = (
                True
            )
    caches = []
    for d in (dim, v_dim):
        data = torch.randn(forest.num_blocks, forest.block_size, heads, d, generator=gen)
        caches.append(data.masked_fill_(~used[..., None, None], torch.nan).to(kv_dtype))
    num_q_heads = heads * forest.group_size
    per_head = torch.randn(num_q_heads, generator=gen)
    scales: list[Tensor | None] = [None, None]
    if kv_dtype == FP8 or rng.random() < 0.15:
        scales = rng.choice(
            [[torch.tensor(0.5), torch.tensor(0.25)], [torch.rand(heads, generator=gen) + 0.25 for _ in range(2)]]
        )
    arguments = {
        "block_table": torch.from_numpy(forest.table),
        "seq_lens": torch.from_numpy(forest.seq_lens).int(),
        "cu_seqlens_q": torch.from_numpy(forest.cu).int(),
        "causal": forest.causal,
        "window": forest.window,
        "softcap": rng.choice([None, None, None, 10.0]),
        "sinks": per_head if rng.random() < 0.3 else None,
        "alibi_slopes": per_head.abs() / 8 if rng.random() < 0.1 else None,
        "k_scale": scales[0],
        "v_scale": scales[1],
        "implementation": "torch",
        **fixed,
    }
    q = torch.randn(int(forest.cu[-1]), num_q_heads, dim, generator=gen).to(dtype)
    return Call(forest, q, caches, arguments)

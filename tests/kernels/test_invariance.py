"""torch.equal, not allclose: a row's result depends on its q, its position and the KV it sees, on nothing else."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from radixkv_kernels import merge_states, paged_attention
from radixkv_kernels.torch_impl import cells, gather

from tests.kernels.problems import FP8, Shape, make, with_shape
from tests.sampling import few

DTYPES = [torch.float32, torch.bfloat16]
BASE = Shape(q_lens=(), seq_lens=(), num_q_heads=8, num_kv_heads=2, head_dim=64)
VARIANTS = {
    "plain": {},
    "mha": {"num_q_heads": 3, "num_kv_heads": 3, "head_dim": 80},
    "group of 5": {"num_q_heads": 5, "num_kv_heads": 1, "head_dim": 128, "block_size": 3},
    "group of 7, window": {"num_q_heads": 14, "num_kv_heads": 2, "window": 300, "block_size": 48},
    "sinks, fp8": {"sinks": True, "kv_dtype": FP8, "scales": "tensor", "layout": "hnd"},
    "softcap": {"softcap": 4.0, "head_dim": 96},
    "alibi, unequal value head": {"alibi": True, "v_head_dim": 40},
    "scale a head": {"scales": "head", "kv_dtype": FP8},
    "one-token window": {"window": 1},
    "wide head": {"head_dim": 256, "block_size": 2048},
}
cases = pytest.mark.parametrize("variant", few(VARIANTS, 4))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def problem_of(variant: str, dtype: torch.dtype, seed: int = 0, scale: int = 1):
    """Ragged prefill of whole sequences, one of them over two runs."""
    lens = tuple(n * scale for n in (70, 1, 530, 257, 33))
    lens = (*lens, 2310) if variant in ("plain", "softcap") else lens
    return make(with_shape(BASE, **VARIANTS[variant], q_lens=lens, seq_lens=lens, dtype=dtype, seed=seed))


def call(problem, pieces, order=None):
    """Rows [start, start + n) of sequences as one call: pieces of (sequence, start, n), in any order.

    Returns {(sequence, row): (out row, lse row)}.
    """
    cu = problem.kwargs["cu_seqlens_q"].tolist()
    rows = torch.cat([torch.arange(cu[s] + a, cu[s] + a + n) for s, a, n in pieces])
    seqs = torch.tensor([s for s, _, _ in pieces])
    kwargs = {
        **problem.kwargs,
        "cu_seqlens_q": torch.tensor([0, *(n for _, _, n in pieces)]).cumsum(0).int(),
        "block_table": problem.kwargs["block_table"][seqs],
        "seq_lens": torch.tensor([a + n for _, a, n in pieces], dtype=torch.int32),
    }
    if problem.shape.window is not None:
        # rows before the last chunk see blocks that the table of the whole sequence still has
        kwargs["validate"] = True
    result = paged_attention(
        problem.q[rows], problem.k_cache, problem.v_cache, return_lse=True, implementation="torch", **kwargs
    )
    out, lse = result
    return {int(r): (out[i], lse[i]) for i, r in enumerate(rows)}


def assert_same(got, want_out, want_lse):
    assert len(got) == want_out.shape[0]
    rows = sorted(got)
    assert torch.equal(torch.stack([got[r][0] for r in rows]), want_out[rows])
    assert torch.equal(torch.stack([got[r][1] for r in rows]), want_lse[rows])


def all_rows(problem):
    return [(s, 0, n) for s, n in enumerate(problem.shape.q_lens)]


@cases
@dtypes
def test_alone_is_batched_in_any_order(variant, dtype):
    problem = problem_of(variant, dtype)
    out, lse = problem.run()
    alone = {}
    for piece in all_rows(problem):
        alone.update(call(problem, [piece]))
    assert_same(alone, out, lse)
    shuffled = all_rows(problem)
    random.Random(1).shuffle(shuffled)
    assert_same(call(problem, shuffled), out, lse)


@cases
@dtypes
def test_whole_is_chunked_at_random_borders(variant, dtype):
    """Also cached against new: a chunk's earlier tokens are cached, the whole's are new. Steps mix all lengths."""
    problem = problem_of(variant, dtype, seed=2)
    out, lse = problem.run()
    rng = random.Random(3)
    done = [0] * len(problem.shape.q_lens)
    got = {}
    while any(d < n for d, n in zip(done, problem.shape.q_lens, strict=True)):
        active = [s for s, n in enumerate(problem.shape.q_lens) if done[s] < n]
        pieces = []
        for s in rng.sample(active, rng.randint(1, len(active))):
            n = min(problem.shape.q_lens[s] - done[s], rng.choice([1, 1, 2, 3, 5, 16, 33, 100, 255, 1000]))
            pieces.append((s, done[s], n))
            done[s] += n
        got.update(call(problem, pieces))
    assert_same(got, out, lse)


@dtypes
def test_decode_is_prefill(dtype):
    problem = make(with_shape(BASE, q_lens=(300,), seq_lens=(300,), dtype=dtype, seed=4))
    out, lse = problem.run()
    got = {}
    for a in range(300):
        got.update(call(problem, [(0, a, 1)]))
    assert_same(got, out, lse)


@cases
@dtypes
def test_one_thread_is_two(variant, dtype):
    problem = problem_of(variant, dtype, seed=5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = problem.run()
        torch.set_num_threads(1)
        one = problem.run()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@dtypes
@pytest.mark.parametrize("variant", ["plain", "softcap", "sinks, fp8"])
def test_where_blocks_lie_does_not_matter(variant, dtype):
    """Other blocks, another block_size, another layout: the same bits."""
    lens = (70, 530, 2310)
    shape = with_shape(BASE, **VARIANTS[variant], q_lens=(1, 200, 3), seq_lens=lens, dtype=dtype)
    want = make(with_shape(shape, block_size=16, layout="nhd"))
    out, lse = want.run()
    for block_size, layout in ((1, "nhd"), (3, "interleaved"), (16, "hnd"), (48, "token_interleaved"), (2048, "nhd")):
        other = make(with_shape(shape, block_size=block_size, layout=layout))
        assert torch.equal(other.q, want.q)
        got = other.run()
        assert torch.equal(got[0], out) and torch.equal(got[1], lse), (block_size, layout)


def test_merging_keeps_states_apart():
    """Merged alone or in a batch, with empties anywhere: the same bits; two empties stay empty."""
    gen = torch.Generator().manual_seed(6)
    outs, lses = torch.randn(5, 37, 3, 40, generator=gen), torch.randn(5, 37, 3, generator=gen)
    lses[torch.rand(5, 37, 3, generator=gen) < 0.4] = -torch.inf
    lses[:, 4] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    out, lse = merge_states(outs, lses, implementation="torch")
    assert not out.isnan().any() and (out[4] == 0).all() and (lse[4] == -torch.inf).all()
    for i in range(37):
        row = merge_states(outs[:, i : i + 1], lses[:, i : i + 1], implementation="torch")
        assert torch.equal(row[0][0], out[i]) and torch.equal(row[1][0], lse[i])
        for h in range(3):
            keep = lses[:, i, h] > -torch.inf
            if keep.any():
                part = merge_states(outs[keep, i, h][:, None, None], lses[keep, i, h][:, None, None])
                assert torch.equal(part[0].view(-1), out[i, h]) and torch.equal(part[1].view(()), lse[i, h])


def test_two_calling_threads_share_no_scratch():
    problems = [problem_of("plain", torch.float32, seed=s) for s in (7, 8)]
    want = [p.run() for p in problems]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            got = list(pool.map(lambda p: p.run(), problems))
            for (a, b), (c, d) in zip(got, want, strict=True):
                assert torch.equal(a, c) and torch.equal(b, d)


@dtypes
@pytest.mark.parametrize("variant", ["plain", "mha", "group of 7, window", "wide head"])
def test_half_cells_have_the_bits_of_whole_ones(variant, dtype, monkeypatch):
    """Where this machine's products allow it, a cell whose later half no row sees is read and computed by half."""
    lens = (1, 128, 129, 257, 300, 384, 385, 511, 512, 2049, 2176)
    problem = make(with_shape(BASE, **VARIANTS[variant], q_lens=(1,) * len(lens), seq_lens=lens, dtype=dtype))
    asked = []
    read = gather.CacheReader.read
    monkeypatch.setattr(gather.CacheReader, "read", lambda self, *args: asked.append(args[1]) or read(self, *args))
    found = problem.run()
    rule, halves = cells.rule_of_cells(True, dtype, problem.shape.head_dim, problem.shape.head_dim)
    assert (cells.HALF_CELL in asked) == halves
    monkeypatch.setattr(cells, "rule_of_cells", lambda *_: (rule, False))
    asked.clear()
    whole = problem.run()
    assert set(asked) == {cells.CELL_SIZE}
    for mine, theirs in zip(found, whole, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("block_size", [1, 16, 128, 256])
@pytest.mark.parametrize("order", [(0, 3, 1, 2), (0, 2, 3, 1), (3, 0, 1, 2), (1, 0, 2, 3), (0, 2, 1, 3)])
def test_caches_of_any_order_of_dimensions(order, block_size):
    """As many heads as columns, so that strides of one look like strides of the other."""
    lens = (100, 600)
    shape = with_shape(
        BASE, num_q_heads=64, num_kv_heads=64, head_dim=64, q_lens=(1, 3), seq_lens=lens, block_size=block_size
    )
    problem = make(shape)
    want = problem.run()
    back = [order.index(i) for i in range(4)]
    problem.k_cache, problem.v_cache = (
        cache.permute(*order).contiguous().permute(*back) for cache in (problem.k_cache, problem.v_cache)
    )
    for mine, theirs in zip(problem.run(), want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("variant", ["plain", "softcap", "alibi, unequal value head"])
def test_neither_the_default_dtype_nor_autocast_shows(variant):
    lens = (600, 700, 2500, 0, 4200)
    problem = make(with_shape(BASE, **VARIANTS[variant], q_lens=(1, 2, 1, 0, 1), seq_lens=lens))
    want = problem.run()
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found = problem.run()
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        found = problem.run()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True))

"""Small inputs that went wrong in other kernels, on every registered implementation."""

from __future__ import annotations

import mmap
import sys
import warnings

import pytest
import torch
from radixkv_kernels import copy_blocks, merge_states, paged_attention, store_kv
from radixkv_kernels.torch_impl.workspace import thread_workspace

from tests.kernels.problems import FP8, Shape, check, empty_cache, make


def one_sequence(k, v, q, implementation, **kwargs):
    """Causal attention of the last len(q) tokens over k, v [n, heads, dim] in blocks of 500."""
    n = k.shape[0]
    num_blocks = -(-n // 500)
    caches = [torch.zeros(num_blocks * 500, *x.shape[1:], dtype=x.dtype) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:n] = x
    return paged_attention(
        q,
        *(cache.view(num_blocks, 500, *cache.shape[1:]) for cache in caches),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        seq_lens=torch.tensor([n], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, q.shape[0]], dtype=torch.int32),
        implementation=implementation,
        return_lse=True,
        **kwargs,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs a mapping without reserved memory")
def test_offsets_past_two_to_the_32_elements(implementation):
    """Blocks 2^31 elements apart, rows of q 2^32: pages never touched cost nothing."""
    block = torch.randn(16, 2, 32)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far = torch.frombuffer(mmap.mmap(-1, 4 * (3 * 2**31 + block.numel()), flags=flags), dtype=torch.float32)
    cache = far.as_strided((4, 16, 2, 32), (2**31, 64, 32, 1))
    for b in range(4):
        cache[b] = block + b
    q = torch.randn(1, 4, 32)
    tables = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    kwargs = {"seq_lens": torch.tensor([40]), "cu_seqlens_q": torch.tensor([0, 1]), "implementation": implementation}
    near = torch.stack([block + b for b in range(4)])
    want = paged_attention(q, near, near, block_table=tables, **kwargs)
    assert torch.equal(paged_attention(q, cache, cache, block_table=tables, **kwargs), want)
    rows = far.as_strided((2, 4, 32), (2**32 + 64, 32, 1))
    rows[0], rows[1] = q[0], 2 * q[0]
    kwargs.update(seq_lens=torch.tensor([40, 40]), cu_seqlens_q=torch.tensor([0, 1, 2]))
    got = paged_attention(rows, near, near, block_table=tables.expand(2, 3), **kwargs)
    assert torch.equal(got[0], want[0])
    new = torch.randn(1, 2, 32)
    store_kv(new, new, cache, cache, torch.tensor([3 * 16 + 5]), implementation=implementation)
    copy_blocks(cache, cache, *(torch.tensor([n]) for n in (3, 1, 6)), implementation=implementation)
    assert torch.equal(cache[3, 5], new[0]) and torch.equal(cache[1, :6], cache[3, :6])


def test_padding_row_of_a_captured_graph(implementation):
    problem = make(Shape(q_lens=(1, 1, 1), seq_lens=(0, 5, 0), sinks=True))
    out, lse = problem.run(implementation)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -torch.inf).all()
    assert lse[1].isfinite().all()


def test_rows_behind_the_last_sequence_are_not_written(implementation):
    problem = make(Shape(q_lens=(1, 2), seq_lens=(9, 5)))
    problem.q = torch.cat((problem.q, torch.full_like(problem.q, torch.nan)))
    out, _ = problem.run(implementation)
    assert not out[:3].isnan().any() and out[3:].isnan().all()


def test_no_sequences_and_no_rows(implementation):
    for q_lens, seq_lens in (((), ()), ((0, 0), (5, 0))):
        out, lse = make(Shape(q_lens=q_lens, seq_lens=seq_lens)).run(implementation)
        assert out.shape[0] == 0 and lse.shape[0] == 0


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 2048, 2049])
def test_lengths_around_cells_and_runs(n, implementation):
    problem = make(Shape(q_lens=(1, min(n, 3)), seq_lens=(n, n), num_q_heads=2, num_kv_heads=1))
    check(problem, implementation)


def test_large_scores_under_softcap(implementation):
    q, k = torch.full((1, 1, 32), 100.0), torch.full((300, 1, 32), 100.0)
    k[::2] *= -1
    out, lse = one_sequence(k, torch.randn(300, 1, 32), q, implementation, softcap=50.0, scale=1e4 / 32e4)
    assert out.isfinite().all() and lse.isfinite().all()


def test_large_scores_without_softcap(implementation):
    q, k = torch.full((2, 1, 32), 100.0), torch.full((300, 1, 32), 100.0)
    k[7] *= -1
    v = torch.randn(300, 1, 32)
    out, lse = one_sequence(-k, v, q, implementation, scale=1e4 / 32e4)
    assert torch.allclose(out[0, 0], v[7, 0]) and torch.allclose(lse, torch.tensor(1e4))


@pytest.mark.parametrize("window", [1, 5, 256, 257])
def test_window_edge_with_one_hot_values(window, implementation):
    """Equal scores and one-hot values say exactly which keys were seen; the same in a chunk and in decode."""
    n = 300
    k, v = torch.zeros(n, 1, 32), torch.zeros(n, 1, 256)
    v[torch.arange(n), 0, torch.arange(n) % 256] = 1.0
    q = torch.randn(40, 1, 32)
    chunk, _ = one_sequence(k, v, q, implementation, window=window)
    decode, _ = one_sequence(k, v, q[-1:], implementation, window=window)
    seen = torch.arange(max(0, n - window), n)
    want = torch.zeros(256).index_add_(0, seen % 256, torch.full((len(seen),), 1.0 / len(seen)))
    assert torch.allclose(decode[0, 0], want, atol=1e-6)
    assert torch.allclose(chunk[-1, 0], want, atol=1e-6)


def test_a_sink_counts_once_however_many_cells(implementation):
    for n in (1, 256, 2500):
        k, v = torch.zeros(n, 1, 32), torch.ones(n, 1, 32)
        sink = torch.tensor([2.0])
        out, lse = one_sequence(k, v, torch.randn(1, 1, 32), implementation, sinks=sink)
        total = torch.logaddexp(torch.tensor(float(n)).log(), sink)
        assert torch.allclose(lse[0], total) and torch.allclose(out[0, 0], (n * torch.exp(-total)).expand(32))


def test_lse_is_natural(implementation):
    k, q = torch.randn(40, 1, 32), torch.randn(1, 1, 32)
    _, lse = one_sequence(k, torch.randn(40, 1, 32), q, implementation)
    assert torch.allclose(lse[0, 0], torch.logsumexp(k[:, 0] @ q[0, 0] * 32**-0.5, 0))


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16, 24])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_groups_and_head_dims(group, head_dim):
    check(make(Shape(q_lens=(1, 9), seq_lens=(270, 31), num_q_heads=group, num_kv_heads=1, head_dim=head_dim)))


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 2048])
def test_block_sizes(block_size):
    check(make(Shape(q_lens=(1, 9, 200), seq_lens=(2100, 270, 200), block_size=block_size)))


def test_fp8_scales(implementation):
    k, v = (torch.randn(20, 2, 32).to(FP8) for _ in range(2))
    q = torch.randn(1, 4, 32)
    got, got_lse = one_sequence(k, v, q, implementation, k_scale=0.5, v_scale=0.25)
    want, want_lse = one_sequence(k.float() * 0.5, v.float() * 0.25, q, "reference")
    assert torch.allclose(got, want, atol=1e-6) and torch.allclose(got_lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_of_empty_states(implementation, dtype):
    out, lse = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2)
    nothing, none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    got, got_lse = merge_states([nothing, nothing], [none, none], implementation=implementation)
    assert (got == 0).all() and (got_lse == -torch.inf).all()
    for outs, lses in (([nothing, out], [none, lse]), ([out, nothing, nothing], [lse, none, none])):
        got, got_lse = merge_states(outs, lses, implementation=implementation)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_merge_is_attention_over_the_union(implementation):
    k, v, q = torch.randn(90, 1, 32), torch.randn(90, 1, 32), torch.randn(1, 3, 32)
    parts = [one_sequence(k[a:b], v[a:b], q, implementation) for a, b in ((0, 20), (20, 21), (21, 90))]
    got = merge_states([p[0] for p in parts], [p[1] for p in parts], implementation=implementation)
    want = one_sequence(k, v, q, "reference")
    assert torch.allclose(got[0], want[0], atol=1e-6) and torch.allclose(got[1], want[1], atol=1e-5)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved", "token_interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_store(implementation, layout, dtype):
    k_cache, v_cache = (empty_cache(5, 3, 2, d, dtype, layout) for d in (8, 4))
    k, v = torch.randn(4, 2, 8) * 3, torch.randn(4, 2, 4)
    k[0, 0, 0] = 1e4
    slots = torch.tensor([13, -1, 0, 7])
    store_kv(
        k, v, k_cache, v_cache, slots, k_scale=0.5, v_scale=torch.tensor([2.0, 4.0]), implementation=implementation
    )
    flat_k, flat_v = (c.float().reshape(15, 2, -1) for c in (k_cache, v_cache))
    keep = [0, 2, 3]
    limit = 448.0 if dtype == FP8 else torch.inf
    assert torch.equal(flat_k[slots[keep]], (k[keep] / 0.5).clamp(-limit, limit).to(dtype).float())
    assert torch.equal(flat_v[slots[keep]], (v[keep] / torch.tensor([2.0, 4.0])[:, None]).to(dtype).float())
    untouched = [i for i in range(15) if i not in (13, 0, 7)]
    assert flat_k[untouched].isnan().all() and flat_v[untouched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_stores_bit_for_bit_what_the_reference_stores(implementation, dtype, fp8):
    """Values of another head size than keys, in another order of dimensions, into one tensor for both."""
    generator = torch.Generator().manual_seed(1)
    k = (torch.randn(9, 3, 40, generator=generator) * 300).to(dtype)
    v = torch.randn(3, 9, 72, generator=generator).to(dtype).transpose(0, 1)
    slots = torch.tensor([3, -1, 40, 0, 47, 12, 13, -1, 30])
    scales = {"k_scale": 0.5, "v_scale": torch.tensor([0.25, 2.0, 3.0])} if fp8 else {}
    both = []
    for name in (implementation, "reference"):
        cache = torch.zeros(3, 2, 3, 16, 72).to(FP8 if fp8 else dtype).transpose(2, 3)
        store_kv(k, v, cache[:, 0, :, :, :40], cache[:, 1], slots, **scales, implementation=name)
        both.append(cache.view(torch.uint8) if fp8 else cache)
    assert torch.equal(*both)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved"])
def test_copy_of_partial_blocks(implementation, layout):
    k_cache, v_cache = (empty_cache(6, 4, 2, d, torch.float32, layout) for d in (8, 4))
    k_cache[:3], v_cache[:3] = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 4)
    src, dst, counts = torch.tensor([0, 1, 0]), torch.tensor([3, 4, 5]), torch.tensor([4, 1, 0])
    copy_blocks(k_cache, v_cache, src, dst, counts, implementation=implementation)
    for cache in (k_cache, v_cache):
        assert torch.equal(cache[3], cache[0]) and torch.equal(cache[4, 0], cache[1, 0])
        assert cache[4, 1:].isnan().all() and cache[5].isnan().all()


def test_scratch_made_in_inference_mode_serves_outside_of_it_too():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(300, 2, 32, generator=generator) for _ in range(2))
    q = torch.randn(3, 4, 32, generator=generator)
    thread_workspace().clear()
    with torch.inference_mode():
        inside, _ = one_sequence(k, v, q, "torch")
    outside, _ = one_sequence(k, v, q, "torch")
    with torch.inference_mode():
        again, _ = one_sequence(k, v, q, "torch")
    assert torch.equal(inside, outside) and torch.equal(outside, again)


def test_windows_with_a_run_between_them_that_nobody_sees():
    """A short and a long sequence under a window: keys of runs 0 and 2, none of run 1."""
    check(make(Shape(q_lens=(1, 1), seq_lens=(300, 5000), window=100)))

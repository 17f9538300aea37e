"""The flash-attn- and FlashInfer-shaped calls against plain implementations of what those packages document."""

from __future__ import annotations

import math

import pytest
import torch
from radixkv_kernels import UnsupportedImplementation
from radixkv_kernels.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from radixkv_kernels.integrations.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)

from tests.rounding import attention

INT = torch.int32


def plain(q, k, v, *, scale=None, causal=False, left=-1, softcap=0.0, slopes=None):
    """One sequence, float64: q [n, heads, dim], k, v [m, kv_heads, dim]; bottom-right aligned."""
    distance = (k.shape[0] - q.shape[0] + torch.arange(q.shape[0]))[:, None] - torch.arange(k.shape[0])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    return attention(q, k, v, hidden=hidden, distance=distance, scale=scale, softcap=softcap, slopes=slopes)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (5, 0), "softcap": 3.0},
    {"window_size": (4, -1), "softmax_scale": 0.3},
    {"window_size": (-1, 0)},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
]


def plain_options(options):
    left, right = options.get("window_size", (-1, -1))
    return {
        "scale": options.get("softmax_scale"),
        "causal": options.get("causal", False) or right == 0,
        "left": left,
        "softcap": options.get("softcap", 0.0),
        "slopes": options.get("alibi_slopes"),
    }


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen(options, paged):
    q_lens, k_lens = (3, 1, 7), (9, 20, 7)
    q, k, v = torch.randn(11, 4, 32), torch.randn(36, 2, 32), torch.randn(36, 2, 32)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).to(INT) for lens in (q_lens, k_lens))
    caches, table = (k, v), None
    if paged:
        table = torch.tensor([[5, 0, 0], [1, 4, 2], [3, 0, 0]], dtype=INT)
        caches = [torch.full((6, 9, 2, 32), torch.nan) for _ in range(2)]
        for cache, x in zip(caches, (k, v), strict=True):
            for s, n in enumerate(k_lens):
                for t in range(n):
                    cache[table[s, t // 9], t % 9] = x[int(cu_k[s]) + t]
    out, lse, probs = flash_attn_varlen_func(
        q, *caches, cu_q, cu_k, 7, 20, return_attn_probs=True, block_table=table, **options
    )
    assert probs is None and lse.shape == (4, 11)
    for s in range(3):
        rows, keys = slice(int(cu_q[s]), int(cu_q[s + 1])), slice(int(cu_k[s]), int(cu_k[s + 1]))
        plain(q[rows], k[keys], v[keys], **plain_options(options)).check(out[rows], lse[:, rows].T)
    alone = flash_attn_varlen_func(q, *caches, cu_q, cu_k, 7, 20, block_table=table, **options)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_with_kvcache(options, paged, append):
    batch, seqlen_q, length = 3, 2, 24
    before = torch.tensor([5, 20, 2], dtype=INT)
    q = torch.randn(batch, seqlen_q, 4, 32)
    dense = [torch.randn(batch, length, 2, 32) for _ in range(2)]
    new = [torch.randn(batch, seqlen_q, 2, 32) for _ in range(2)]
    if paged:
        table = torch.randperm(18).view(3, 6).to(INT)
        caches = [torch.empty(18, 4, 2, 32) for _ in range(2)]
        for cache, x in zip(caches, dense, strict=True):
            cache[table.long().flatten()] = x.view(18, 4, 2, 32)
        where = {"block_table": table}
    else:
        index = torch.tensor([2, 0, 1], dtype=INT)
        caches = [torch.empty_like(x) for x in dense]
        for cache, x in zip(caches, dense, strict=True):
            cache[index.long()] = x
        where = {"cache_batch_idx": index}
    k, v = new if append else (None, None)
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=before, return_softmax_lse=True, **where, **options
    )
    assert lse.shape == (batch, 4, seqlen_q)
    for s in range(batch):
        n = int(before[s])
        keys, values = (torch.cat((x[s, :n], y[s])) if append else x[s, :n] for x, y in zip(dense, new, strict=True))
        plain(q[s], keys, values, **plain_options(options)).check(out[s], lse[s].T)


def test_kvcache_lengths_as_an_int_or_left_out():
    q, k = torch.randn(2, 1, 4, 32), torch.randn(2, 10, 2, 32)
    plain(q[1], k[1, :7], k[1, :7]).check(flash_attn_with_kvcache(q, k, k, cache_seqlens=7)[1])
    plain(q[1], k[1], k[1]).check(flash_attn_with_kvcache(q, k, k)[1])


def test_flash_attn_refusals():
    q, k = torch.randn(2, 1, 4, 32), torch.randn(2, 10, 2, 32)
    for name, changes in {
        "rotary_cos": {"rotary_cos": torch.ones(10, 16), "rotary_sin": torch.ones(10, 16)},
        "cache_leftpad": {"cache_leftpad": torch.zeros(2, dtype=INT)},
        "window_size": {"window_size": (3, 3)},
        "alibi_slopes": {"alibi_slopes": torch.zeros(2, 4)},
    }.items():
        with pytest.raises(UnsupportedImplementation, match=name):
            flash_attn_with_kvcache(q, k, k, **changes)
    cu = torch.tensor([0, 1], dtype=INT)
    with pytest.raises(UnsupportedImplementation, match="dropout_p"):
        flash_attn_varlen_func(q[0], k[0], k[0], cu, cu, 1, 1, dropout_p=0.1)
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn_with_kvcache(q, k, k, k[:, :1], k[:, :1], cache_seqlens=10)


def paged_problem(layout, one_tensor):
    """Three sequences of 9, 20 and 4 tokens in pages of 5."""
    lens, indptr = (9, 20, 4), torch.tensor([0, 2, 6, 7], dtype=INT)
    indices = torch.tensor([4, 1, 0, 6, 2, 7, 5], dtype=INT)
    last = torch.tensor([4, 5, 4], dtype=INT)
    cache = torch.full((8, 2, 5, 2, 32), torch.nan)
    keys, values = [], []
    for s, n in enumerate(lens):
        pages = indices[int(indptr[s]) : int(indptr[s + 1])].long()
        kv = torch.randn(n, 2, 2, 32)
        for t in range(n):
            cache[pages[t // 5], :, t % 5] = kv[t]
        keys.append(kv[:, 0])
        values.append(kv[:, 1])
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    return indptr, indices, last, cache if one_tensor else (cache[:, 0], cache[:, 1]), keys, values


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("one_tensor", [True, False])
@pytest.mark.parametrize("options", [{}, {"window_left": 6, "logits_soft_cap": 4.0, "sm_scale": 0.2}])
def test_flashinfer_decode(layout, one_tensor, options):
    indptr, indices, last, cache, keys, values = paged_problem(layout, one_tensor)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), layout)
    wrapper.plan(indptr, indices, last, 4, 2, 32, 5, q_data_type=torch.float32, **options)
    q = torch.randn(3, 4, 32)
    out, lse = wrapper.run(q, cache, return_lse=True, k_scale=0.5, v_scale=2.0)
    for s in range(3):
        exact = plain(
            q[s : s + 1],
            keys[s] * 0.5,
            values[s] * 2.0,
            scale=options.get("sm_scale"),
            left=options.get("window_left", -1),
            softcap=options.get("logits_soft_cap", 0.0),
        )
        exact.check(out[s], lse[s].double() * math.log(2))
    assert torch.equal(wrapper.run(q, cache, k_scale=0.5, v_scale=2.0), out)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
def test_flashinfer_prefill(layout, causal):
    indptr, indices, last, cache, keys, values = paged_problem(layout, True)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), layout)
    qo_indptr = torch.tensor([0, 3, 4, 8], dtype=INT)
    wrapper.plan(qo_indptr, indptr, indices, last, 4, 2, 32, 5, causal=causal, q_data_type=torch.float32)
    q = torch.randn(8, 4, 32)
    out, lse = wrapper.run(q, cache, return_lse=True, q_scale=0.5)
    for s in range(3):
        rows = slice(int(qo_indptr[s]), int(qo_indptr[s + 1]))
        exact = plain(q[rows] * 0.5, keys[s], values[s], causal=causal)
        exact.check(out[rows], lse[rows].double() * math.log(2))


def test_flashinfer_refusals():
    indptr, indices, last, cache, _, _ = paged_problem("NHD", True)
    with pytest.raises(ValueError, match="kv_layout"):
        BatchDecodeWithPagedKVCacheWrapper(None, "DHN")
    with pytest.raises(UnsupportedImplementation, match="use_cuda_graph"):
        BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=True)
    decode = BatchDecodeWithPagedKVCacheWrapper(None)
    with pytest.raises(ValueError, match="plan"):
        decode.run(torch.randn(3, 4, 32), cache)
    with pytest.raises(UnsupportedImplementation, match="pos_encoding_mode"):
        decode.plan(indptr, indices, last, 4, 2, 32, 5, pos_encoding_mode="ROPE_LLAMA")
    decode.plan(indptr, indices, last, 4, 2, 32, 5)
    with pytest.raises(ValueError, match="planned"):
        decode.run(torch.randn(3, 8, 32), cache)
    prefill = BatchPrefillWithPagedKVCacheWrapper(None)
    with pytest.raises(UnsupportedImplementation, match="custom_mask"):
        prefill.plan(indptr, indptr, indices, last, 4, 2, 32, 5, custom_mask=torch.ones(3, dtype=torch.bool))

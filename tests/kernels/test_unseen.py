"""Rows that see no key: more queries than keys under a causal mask, and sequences of no keys. Their out is 0, lse -inf.

That holds with sinks too: a sink has no value, and a part without keys is the identity of `merge_states`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from radixkv_kernels import TreePlan, merge_states, paged_attention
from radixkv_kernels.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from radixkv_kernels.integrations.flashinfer import BatchPrefillWithPagedKVCacheWrapper

from tests.kernels.problems import Shape, make
from tests.sampling import few

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # to shrink in the interpreter takes minutes


def rows_alone(problem, implementation, s):
    """(out, lse) of sequence s from a call of its own, with as many queries as it has keys at most."""
    shape, kwargs = problem.shape, problem.kwargs
    end = sum(shape.q_lens[: s + 1])
    n = min(shape.q_lens[s], shape.seq_lens[s]) if shape.causal else shape.q_lens[s]
    options = {name: kwargs[name] for name in ("window", "softcap", "sinks", "alibi_slopes", "k_scale", "v_scale")}
    if shape.ragged:
        first = int(kwargs["kv_indptr"][s])
        table = kwargs["kv_indices"][first : int(kwargs["kv_indptr"][s + 1])][None]
    else:
        table = kwargs["block_table"][s : s + 1]
    return paged_attention(
        problem.q[end - n : end],
        problem.k_cache,
        problem.v_cache,
        block_table=table,
        seq_lens=torch.tensor(shape.seq_lens[s : s + 1]),
        cu_seqlens_q=torch.tensor([0, n]),
        causal=shape.causal,
        implementation=implementation,
        return_lse=True,
        **options,
    )


@st.composite
def shapes(draw):
    lens = [
        draw(st.tuples(st.sampled_from((0, 1, 2, 5, 9, 70)), st.sampled_from((0, 1, 2, 5, 9, 64)))) for _ in range(3)
    ]
    return Shape(
        q_lens=tuple(q for q, _ in lens),
        seq_lens=tuple(k for _, k in lens),
        causal=draw(st.sampled_from((True, True, False))),
        window=draw(st.sampled_from((None, 1, 3, 100))),
        softcap=draw(st.sampled_from((None, 5.0))),
        sinks=draw(st.booleans()),
        scales=draw(st.sampled_from(("none", "head"))),
        ragged=draw(st.booleans()),
        block_size=draw(st.sampled_from((1, 4, 16))),
        head_dim=32,
    )


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(shapes())
def test_more_queries_than_keys(shape):
    """Rows that see a key have what they have without the others, but for the order of adding."""
    for implementation in ("torch", "reference"):
        check_rows(shape, implementation)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_interpreter")
@settings(max_examples=6, deadline=None, phases=PHASES)
@given(shapes())
def test_more_queries_than_keys_in_triton(shape):
    check_rows(shape, "triton")


def check_rows(shape, implementation):
    problem = make(shape)
    out, lse = problem.run(implementation)
    # head_dim products a score, up to 64 exponentials; scores and values of some standard normals stay below 16
    bound = 2 * (32 + 2 * 64) * 16 * torch.finfo(torch.float32).eps
    first = 0
    for s, (q_len, seq_len) in enumerate(zip(shape.q_lens, shape.seq_lens, strict=True)):
        seen = 0 if seq_len == 0 else min(q_len, seq_len) if shape.causal else q_len
        blind = slice(first, first + q_len - seen)
        rest = slice(first + q_len - seen, first + q_len)
        assert (out[blind] == 0).all() and (lse[blind] == -math.inf).all()
        if seen:
            want, want_lse = rows_alone(problem, implementation, s)
            assert want_lse.isfinite().all() and float((lse[rest] - want_lse).abs().max()) <= bound
            assert float((out[rest] - want).abs().max()) <= bound
        first += q_len


@pytest.mark.parametrize("seq_len", [5, 256, 270, 530])
@pytest.mark.parametrize("more", [1, 30, 200])
@pytest.mark.parametrize("window", [None, 100])
def test_with_a_plan(seq_len, more, window):
    """A sequence of fewer keys than queries beside four that share 512 tokens with it, as far as it goes."""
    torch.manual_seed(0)
    table = torch.arange(5 * 40, dtype=torch.int32).view(5, 40)
    table[:, :32] = table[0, :32]
    lists = {
        "block_table": table,
        "seq_lens": torch.tensor([530, seq_len, 600, 513, 640], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([1, seq_len + more, 1, 1, 3], dtype=torch.int32).cumsum(0, dtype=torch.int32),
    }
    lists["cu_seqlens_q"] = torch.cat((torch.zeros(1, dtype=torch.int32), lists["cu_seqlens_q"]))
    plan = TreePlan.from_block_table(*lists.values(), block_size=16, num_q_heads=4, num_kv_heads=2, window=window)
    assert plan.shares == (window is None and seq_len < 530)  # where it is worth it
    q, (k_cache, v_cache) = torch.randn(int(lists["cu_seqlens_q"][-1]), 4, 32), torch.randn(2, 200, 16, 2, 32)
    options = {**lists, "window": window, "return_lse": True}
    out, lse = paged_attention(q, k_cache, v_cache, plan=plan, **options)
    want, want_lse = paged_attention(q, k_cache, v_cache, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert (out[1 : 1 + more] == 0).all() and (lse[1 : 1 + more] == -math.inf).all()
    assert lse[1 + more :].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("seq_len", [0, 1, 4])
def test_the_wrappers_too(causal, q_len, seq_len):
    torch.manual_seed(0)
    q, k, v = torch.randn(q_len, 4, 32), torch.randn(seq_len, 2, 32), torch.randn(seq_len, 2, 32)
    seen = 0 if seq_len == 0 else min(q_len, seq_len) if causal else q_len
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (q_len, seq_len))
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, q_len, seq_len, causal=causal, return_attn_probs=True)
    results = [(out, lse.T)]
    room = [torch.cat((x, torch.full((8 - seq_len, 2, 32), torch.nan)))[None] for x in (k, v)]
    out, lse = flash_attn_with_kvcache(q[None], *room, cache_seqlens=seq_len, causal=causal, return_softmax_lse=True)
    results.append((out[0], lse[0].T))
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    pages = -(-seq_len // 8)
    indptr, last = torch.tensor([0, pages], dtype=torch.int32), torch.tensor([seq_len], dtype=torch.int32)
    wrapper.plan(cu_q, indptr, torch.arange(pages, dtype=torch.int32), last, 4, 2, 32, 8, causal=causal)
    out, lse = wrapper.run(q, tuple(room), return_lse=True)
    results.append((out, lse * math.log(2)))
    x = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 32**-0.5
    hidden = torch.ones(q_len, seq_len).triu(seq_len - q_len + 1).bool() & causal
    want = torch.logsumexp(x.masked_fill(hidden, -math.inf), 2).T
    for out, lse in results:
        assert (out[: q_len - seen] == 0).all() and (lse[: q_len - seen] == -math.inf).all()
        assert out.isfinite().all()
        # 32 products and a handful of exponentials, each rounded
        bound = 2 * (32 + 2 * seq_len) * torch.finfo(torch.float32).eps * max(1.0, float(x.abs().max())) if seen else 0
        assert float((lse.double() - want)[q_len - seen :].abs().max() if seen else 0.0) <= bound


# ---- parts without keys in a merge


def merge_oracle(outs, lses):
    """Element by element in plain floats: +-inf is an empty part, NaN makes NaN."""
    states, tokens, heads, _ = outs.shape
    out, lse = torch.zeros(outs.shape[1:]), torch.full(lses.shape[1:], -math.inf)
    for t in range(tokens):
        for h in range(heads):
            parts = [(lses[s, t, h].item(), outs[s, t, h].double()) for s in range(states)]
            parts = [(part, values) for part, values in parts if not math.isinf(part)]
            if not parts:
                continue
            if any(math.isnan(part) for part, _ in parts):
                out[t, h], lse[t, h] = math.nan, math.nan
                continue
            top = max(part for part, _ in parts)
            total = sum(math.exp(part - top) for part, _ in parts)
            out[t, h] = sum(values * (math.exp(part - top) / total) for part, values in parts).float()
            lse[t, h] = top + math.log(total)
    return out, lse


SPECIAL = [-math.inf, math.inf, math.nan, 0.5, -3.0]


@pytest.mark.parametrize("states", few([2, 1, 3], 1))
def test_infinite_and_nan_lse_in_every_place_of_a_merge(implementation, states):
    """All combinations of special values over the parts; what an empty part's out holds is never looked at."""
    combinations = list(itertools.product(SPECIAL, repeat=states))
    lses = torch.tensor(combinations).T[:, :, None].contiguous()
    outs = torch.randn(states, len(combinations), 1, 16, generator=torch.Generator().manual_seed(0))
    want, want_lse = merge_oracle(outs, lses)
    for garbage in (math.nan, math.inf, -math.inf, 7.0):
        given = torch.where(lses.isinf()[..., None], garbage, outs)
        before = lses.clone()
        out, lse = merge_states(given, lses, implementation=implementation)
        assert torch.equal(lses.nan_to_num(), before.nan_to_num())
        assert torch.equal(out.isnan(), want.isnan()) and torch.equal(lse.isnan(), want_lse.isnan())
        # up to three exponentials and products
        torch.testing.assert_close(out, want, rtol=2e-6, atol=2e-6, equal_nan=True)
        torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_a_part_with_keys_holds_shows(implementation, special):
    outs, lses = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 4)
    outs[1, 0, 2, 5] = special
    out, lse = merge_states(outs, lses, implementation=implementation)
    finite = torch.ones_like(out, dtype=torch.bool)
    finite[0, 2, 5] = False
    assert torch.equal(out.isfinite(), finite) and lse.isfinite().all()


@pytest.mark.parametrize("empty", [math.inf, -math.inf])
def test_an_empty_part_is_the_identity_bit_for_bit(implementation, empty):
    outs, lses = torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2)
    nothing, none = torch.full((1, 5, 2, 16), math.nan), torch.full((1, 5, 2), empty)
    want, want_lse = merge_states(outs, lses, implementation=implementation)
    for at in range(3):
        given = [torch.cat((x[:at], y, x[at:])) for x, y in ((outs, nothing), (lses, none))]
        out, lse = merge_states(*given, implementation=implementation)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)

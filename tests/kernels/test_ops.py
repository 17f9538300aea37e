"""The torch.library operators: opcheck, and one graph under torch.compile."""

from __future__ import annotations

import pytest
import radixkv_kernels.ops  # noqa: F401
import torch

from tests.kernels.problems import Shape, make

OPS = torch.ops.radixkv


def problem():
    return make(Shape(q_lens=(1, 3), seq_lens=(20, 40), sinks=True))


def attention_arguments(made):
    kwargs = made.kwargs
    positional = made.q, made.k_cache, made.v_cache, kwargs["block_table"], kwargs["seq_lens"], kwargs["cu_seqlens_q"]
    return positional, {"sinks": kwargs["sinks"]}


def test_paged_attention_opcheck():
    positional, keywords = attention_arguments(problem())
    torch.library.opcheck(OPS.paged_attention.default, positional, keywords)


def test_store_copy_merge_opcheck():
    cache = torch.zeros(4, 4, 2, 8)
    k = torch.randn(3, 2, 8)
    torch.library.opcheck(OPS.store_kv.default, (k, k.clone(), cache, cache.clone(), torch.tensor([1, -1, 9])))
    ids = torch.tensor([0]), torch.tensor([1]), torch.tensor([3])
    torch.library.opcheck(OPS.copy_blocks.default, (cache, cache.clone(), *ids))
    torch.library.opcheck(OPS.merge_states.default, (torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(dynamic):
    made = problem()
    positional, keywords = attention_arguments(made)

    def layer(q, k_cache, v_cache, new, slots, *rest):
        OPS.store_kv(new, new, k_cache, v_cache, slots)
        out, lse = OPS.paged_attention(q * 2.0, k_cache, v_cache, *rest, **keywords)
        return out + 1.0, lse

    q, k_cache, v_cache, *rest = positional
    new, slots = torch.randn(2, 2, 64), torch.tensor([int(rest[0][0, 0]) * 16, -1])
    # NaN where nothing was stored compares unequal to itself
    caches = [c.nan_to_num() for c in (k_cache, v_cache)]
    want_caches = [c.clone() for c in caches]
    want = layer(q, *want_caches, new, slots, *rest)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got = compiled(q, *caches, new, slots, *rest)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert all(torch.equal(a, b) for a, b in zip(caches, want_caches, strict=True))

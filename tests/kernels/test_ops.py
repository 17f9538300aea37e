"""The torch.library operators: opcheck, and one graph under torch.compile."""

from __future__ import annotations

import pytest
import radixkv_kernels.ops  # noqa: F401
import torch
from radixkv_kernels import PlanBuffers, TreePlan, plan_tile

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


def shared_prefix():
    """A problem whose sequences begin with the same 512 tokens, and the operator's arguments for its plan."""
    made = make(Shape(q_lens=(1, 3, 1), seq_lens=(520, 530, 515), sinks=True))
    table = made.kwargs["block_table"]
    table[:, :32] = table[0, :32]
    positional, keywords = attention_arguments(made)
    tile = plan_tile(torch.float32, 64)
    options = {"block_size": 16, "num_q_heads": made.q.shape[1], "num_kv_heads": made.k_cache.shape[2]}
    plan = TreePlan.from_block_table(*positional[3:], **options, **tile)
    assert plan.shares
    tensors = PlanBuffers(8, 8, 16, "cpu").load(plan)
    lists = tensors.tensors
    workspace = torch.zeros(tensors.workspace_size(64))
    return positional, lists, workspace, tile, keywords


def test_tree_attention_has_the_bits_of_paged_attention():
    positional, lists, workspace, tile, keywords = shared_prefix()
    want = OPS.paged_attention(*positional, **keywords)
    got = OPS.tree_attention(*positional, *lists, workspace, **tile, **keywords)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_tree_attention_opcheck_and_fullgraph():
    positional, lists, workspace, tile, keywords = shared_prefix()
    # NaN where nothing was stored compares unequal to itself
    positional = [x.nan_to_num() if x.is_floating_point() else x for x in positional]
    torch.library.opcheck(OPS.tree_attention.default, (*positional, *lists, workspace), keywords | tile)
    want = OPS.paged_attention(*positional, **keywords)

    def layer(q, *rest):
        out, lse = OPS.tree_attention(q * 1.0, *rest, **tile, **keywords)
        return out + 1.0, lse

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*positional, *lists, workspace)
    assert torch.equal(got[0], want[0] + 1.0) and torch.equal(got[1], want[1])


def test_tree_attention_names_a_wrong_plan():
    positional, lists, workspace, tile, keywords = shared_prefix()
    with pytest.raises(ValueError, match="plan: expected cell_size 256"):
        OPS.tree_attention(*positional, *lists, workspace, **(tile | {"cell_size": 128}), **keywords)
    with pytest.raises(ValueError, match="items: expected"):
        OPS.tree_attention(*positional, lists[0], lists[1][:, :3], *lists[2:], workspace, **tile, **keywords)


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

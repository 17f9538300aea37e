"""What calls of one step have in common is made once; what has changed between two calls is never passed over."""

from __future__ import annotations

import random

import pytest
import torch
from radixkv_kernels import TreePlan, paged_attention, plan_tile
from radixkv_kernels.torch_impl.workspace import NUM_LAYOUTS, Layout, thread_workspace

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
NUM_SEQS, MAX_BLOCKS, NUM_BLOCKS = 4, 24, 40


def fresh(**call):
    """The same call with nothing kept."""
    thread_workspace().clear()
    return paged_attention(**call)


@pytest.fixture
def call():
    gen = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, NUM_BLOCKS, BLOCK, KV_HEADS, DIM, generator=gen)
    return {
        "q": torch.randn(NUM_SEQS + 3, HEADS, DIM, generator=gen),
        "k_cache": k,
        "v_cache": v,
        "cu_seqlens_q": torch.tensor([0, 1, 2, 5, 7], dtype=torch.int32),
        "block_table": torch.randint(NUM_BLOCKS, (NUM_SEQS, MAX_BLOCKS), generator=gen, dtype=torch.int32),
        "seq_lens": torch.tensor([300, 17, 384, 256], dtype=torch.int32),
        "return_lse": True,
    }


def changes(call, rng):
    """Ways to change a call in place, or its options."""

    def a_block():
        row = rng.randrange(NUM_SEQS)
        call["block_table"][row, rng.randrange(int(call["seq_lens"][row] - 1) // BLOCK + 1)] = rng.randrange(NUM_BLOCKS)

    def a_length():
        call["seq_lens"][rng.randrange(NUM_SEQS)] = rng.randint(8, MAX_BLOCKS * BLOCK)

    def the_rows():
        cuts = sorted(rng.sample(range(1, 7), 3))
        call["cu_seqlens_q"].copy_(torch.tensor([0, *cuts, 7]))

    def the_window():
        call["window"] = rng.choice([None, 5, 200])

    def causality():
        call["causal"] = rng.random() < 0.8

    def the_numbers():
        call["q"].normal_()
        call["k_cache"].normal_()

    def the_cache():
        call["k_cache"] = call["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)

    return [a_block, a_length, the_rows, the_window, causality, the_numbers, the_cache]


@pytest.mark.parametrize("seed", range(12))
def test_calls_one_after_the_other(call, seed):
    """Anything may change between two calls, in place too; each gives what it gives with nothing kept."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        for change in rng.sample(changes(call, rng), rng.randint(0, 2)):
            change()
        got = paged_attention(**call)
        again = paged_attention(**call)
        assert all(map(torch.equal, got, again))
        kept = list(thread_workspace()._layouts)
        want = fresh(**call)
        thread_workspace()._layouts = kept
        assert all(map(torch.equal, got, want)), seed


def test_plans_in_turn(call):
    """Two plans of equal shapes, of one batch: the second must not be run by the first one's layout."""
    call |= {"q": torch.randn(NUM_SEQS, HEADS, DIM), "cu_seqlens_q": torch.arange(NUM_SEQS + 1, dtype=torch.int32)}
    call["seq_lens"].fill_(MAX_BLOCKS * BLOCK)
    table = call["block_table"]
    table[1:, :16] = table[0, :16]
    tile = plan_tile(torch.float32, DIM)
    shapes = {"block_size": BLOCK, "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, **tile}
    want = fresh(**call)
    for tile_rows in (tile["tile_rows"], 4, tile["tile_rows"], 4):
        shapes["tile_rows"] = tile_rows
        plan = TreePlan.from_block_table(table, call["seq_lens"], call["cu_seqlens_q"], **shapes)
        assert plan.shares
        got = paged_attention(**call, plan=plan)
        assert all(map(torch.equal, got, want))
        # the work list says what is read: of a plan that leaves a row out, that row is not computed
    thread_workspace().clear()
    paged_attention(**call, plan=plan)
    plan.work.row_slots[:] = plan.work.row_slots[::-1].copy()
    assert not torch.equal(paged_attention(**call, plan=plan)[0], want[0])


def test_layers_of_a_step_have_one_layout(call, monkeypatch):
    made = []
    part = Layout.part
    monkeypatch.setattr(Layout, "part", lambda self, name, make: part(self, name, lambda: made.append(name) or make()))
    thread_workspace().clear()
    for _ in range(5):
        for window in (None, 100):
            paged_attention(**call, window=window)
            call["k_cache"] = torch.randn_like(call["k_cache"])
    assert len(made) == len(set(made)) * 2  # a window each


def test_few_layouts_are_kept(call):
    thread_workspace().clear()
    for window in range(1, 10):
        paged_attention(**call, window=window)
    assert len(thread_workspace()._layouts) == NUM_LAYOUTS

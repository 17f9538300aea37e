"""Plans: sound on random forests at any cell size and tiling; what they refuse; what they count."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from radixkv_kernels import PlanBuffers, PlanConfig, TreePlan
from radixkv_kernels.plan import tensors as plan_tensors

from tests import interruptions
from tests.kernels.forests import check_sound, random_forest
from tests.sampling import few

GOOD = {
    "block_table": np.arange(8, dtype=np.int32).reshape(2, 4),
    "seq_lens": np.array([60, 50]),
    "cu_seqlens_q": np.array([0, 1, 2]),
    "block_size": 16,
    "num_q_heads": 8,
    "num_kv_heads": 2,
}


def plan(**changes) -> TreePlan:
    arguments = {**GOOD, **changes}
    lists = [arguments.pop(name) for name in ("block_table", "seq_lens", "cu_seqlens_q")]
    return TreePlan.from_block_table(*lists, **arguments)


@pytest.mark.parametrize("start", few(range(0, 400, 100), 1))
def test_sound(start):
    for seed in range(start, start + 100):
        forest = random_forest(seed)
        rng = forest.rng
        options = {
            "cell_size": rng.choice([64, 128, 256]),
            "tile_rows": rng.choice([1, 7, 64, 128]),
            "lead_runs": rng.choice([1, 2, 4]),
            "min_items": rng.choice([0, 50, 10**6]),
            "kv_itemsize": rng.choice([1, 2, 4, 10**3]),
        }
        check_sound(forest, forest.plan(**options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": np.zeros(4, dtype=np.int32)}, "block_table: expected a tensor of 2"),
        ({"block_table": np.zeros((2, 4))}, "block_table: expected int32 or int64"),
        ({"seq_lens": np.array([60])}, r"seq_lens: expected shape \[2\]"),
        ({"seq_lens": np.array([60, 65])}, "seq_lens: expected at most block_size . max_blocks = 64"),
        ({"seq_lens": np.array([60, -1])}, "seq_lens: expected values >= 0"),
        ({"cu_seqlens_q": np.array([0, 1])}, r"cu_seqlens_q: expected shape \[3\]"),
        ({"cu_seqlens_q": np.array([1, 1, 2])}, "cu_seqlens_q: expected a first entry of 0"),
        ({"cu_seqlens_q": np.array([0, 2, 1])}, "cu_seqlens_q: expected a non-decreasing"),
        ({"block_size": 0}, "block_size: expected"),
        ({"num_q_heads": 7}, "num_q_heads: expected a multiple"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected"),
        ({"cell_size": 100}, "cell_size: expected a divisor of 2048"),
        ({"window": 0}, "window: expected"),
        ({"tile_rows": 0}, "tile_rows: expected"),
        ({"lead_runs": 0}, "lead_runs: expected"),
        ({"min_items": -1}, "min_items: expected"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_empty_batches():
    nothing = plan(
        block_table=np.zeros((0, 4), dtype=np.int32), seq_lens=np.zeros(0, int), cu_seqlens_q=np.zeros(1, int)
    )
    assert nothing.num_items == 0 and not nothing.shares and nothing.stats.num_logical_kv_tokens == 0
    idle = plan(seq_lens=np.array([0, 0]))
    assert idle.num_items == 0 and idle.work.row_token.tolist() == [0, 1]


def test_torch_tensors_and_arrays_give_the_same_plan():
    lists = ("block_table", "seq_lens", "cu_seqlens_q")
    other = plan(**{name: torch.from_numpy(GOOD[name]).int() for name in lists})
    assert np.array_equal(plan().work.items, other.work.items)


def two_prompts(shared: int, own: int, num_seqs: int = 2) -> dict:
    """num_seqs sequences of block_size 1 with a common prefix."""
    table = np.arange(num_seqs * (shared + own), dtype=np.int32).reshape(num_seqs, -1)
    table[:, :shared] = table[0, :shared]
    lens = np.full(num_seqs, shared + own)
    return {"block_table": table, "seq_lens": lens, "cu_seqlens_q": np.arange(num_seqs + 1), "block_size": 1}


def test_a_branch_inside_a_cell_leaves_that_cell_to_each_child():
    got = plan(**two_prompts(300, 50))
    assert got.stats.num_unique_kv_tokens == 400 and got.stats.num_kv_tokens_read == 256 + 2 * 94
    assert [item[2:4] for item in got.work.items.tolist()] == [[0, 1], [1, 2], [1, 2]]


def test_sharing_that_costs_more_than_it_saves_is_left():
    # one shared cell of eight saves one cell and costs 2 * 7 partials more, each the bytes of 1/32 of a cell
    assert plan(**two_prompts(256, 1700), kv_itemsize=2).shares
    # and here, of one byte a number and group size 16, each the bytes of 1/4 of a cell
    assert not plan(**two_prompts(256, 1700), kv_itemsize=1, num_q_heads=32).shares


def test_the_first_block_may_differ_though_the_last_is_shared():
    """Sorting goes by last block ids; what is shared is what agrees block by block."""
    batch = two_prompts(512, 50)
    batch["block_table"][1, 3] = 10**6
    assert not (plan(**batch).work.items[:, 1] > 4)[plan(**batch).work.items[:, 2] == 0].any()
    assert plan(**batch).shares, "the second cell still agrees"


def test_many_sharers_are_tiled_but_counted_once():
    got = plan(**two_prompts(512, 20, 64), tile_rows=64)
    assert got.stats.num_kv_tokens_read == got.stats.num_unique_kv_tokens == 512 + 64 * 20
    assert got.stats.num_kv_tokens_loaded == 4 * 512 + 64 * 20
    assert (got.work.items[:, 1] <= 64).all()


def test_a_batch_of_thousands_with_windows_cut_by_cell():
    """Numbers of cells are small integers, which must not wrap when multiplied by sequences."""
    batch = two_prompts(1400, 40, 2300)
    stats = plan(**batch, window=460, cell_size=64, min_items=10**9).stats
    assert stats.num_logical_kv_tokens == 2300 * 460
    assert stats.num_unique_kv_tokens == 420 + 2300 * 40
    # cells 16 to 20 are shared; the window begins in cell 15, at 980, and they part in cell 21, which begins at 1344
    assert stats.num_kv_tokens_read == 2300 * (1024 - 980 + 1440 - 1344) + 1344 - 1024


def test_more_items_for_a_device_to_fill():
    batch = two_prompts(4000, 50)
    few, many = plan(**batch), plan(**batch, min_items=16)
    assert few.num_items < 10 and many.num_items == 17
    assert many.stats.num_kv_tokens_read == few.stats.num_kv_tokens_read


def test_config():
    config = PlanConfig(16, 32, 8, cell_size=128)
    assert (config.group_size, config.run_cells, config.partial_cost) == (4, 16, 1 / 16)


def test_buffers_keep_their_addresses_and_refuse_what_does_not_fit():
    buffers = PlanBuffers(max_items=20, max_rows=8, max_partials=40, device="cpu")
    few, more = plan(), plan(**two_prompts(4000, 50), lead_runs=1)
    before = buffers.load(few).items.data_ptr()
    for got in (more, few):
        tensors = buffers.load(got)
        assert tensors.items.data_ptr() == before and tensors.num_items.item() == got.num_items
        assert np.array_equal(tensors.items[: got.num_items].numpy(), got.work.items)
        assert tensors.row_token[:2].tolist() == got.work.row_token.tolist()
        assert tensors.row_base[:3].tolist() == got.work.row_base.tolist()
        assert (tensors.row_base[3:] == len(got.work.row_slots)).all()
        assert tensors.row_slots[: len(got.work.row_slots)].tolist() == got.work.row_slots.tolist()
        assert tensors.slot_cells[: len(got.work.row_slots)].tolist() == got.work.slot_cells.tolist()
    assert buffers.load(few) is tensors
    for size, name in ((more, "max_items = 3"), (plan(**two_prompts(300, 50, 9)), "max_rows = 8")):
        with pytest.raises(ValueError, match=f"plan: expected at most {name}"):
            PlanBuffers(3 if size is more else 20, 8, 40, "cpu").load(size)
    with pytest.raises(ValueError, match="plan: expected at most max_partials = 1"):
        PlanBuffers(20, 8, 1, "cpu").load(more)


def test_plans_pickle():
    """And come back working: work, what they serve, what they count; tensors are made anew."""
    for batch in (two_prompts(600, 50), {**two_prompts(600, 50, 3), "cu_seqlens_q": np.array([0, 40, 41, 41])}):
        made = plan(**batch)
        made.to("cpu")
        for got in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            assert got.config == made.config and got.stats == made.stats and got.cells == made.cells
            for name in ("items", "row_token", "row_seq", "row_base", "row_slots", "slot_cells", "groups", "shared"):
                assert np.array_equal(getattr(got.work, name), getattr(made.work, name)), name
            assert got.serves(made.seq_lens, made.cu_seqlens_q) and not got.serves(
                made.seq_lens + 256, made.cu_seqlens_q
            )
            tensors, want = got.to("cpu"), made.to("cpu")
            assert torch.equal(tensors.items, want.items) and tensors.items is not want.items


def test_pickled_buffers_are_of_the_same_sizes_and_empty():
    """Their views would be copies: a plan loaded later would go nowhere."""
    made, other = plan(**two_prompts(600, 50)), plan(**two_prompts(300, 50))
    buffers = PlanBuffers(20, 8, 40, "cpu")
    buffers.load(made)
    for got in (pickle.loads(pickle.dumps(buffers)), copy.deepcopy(buffers)):
        for loaded in (made, other):
            assert torch.equal(got.load(loaded).items[: loaded.num_items], torch.from_numpy(loaded.work.items))


def test_interrupted_buffers_load_again():
    """At any line: the plan loaded before is not taken for one that is still there."""
    first, second = plan(**two_prompts(600, 50)), plan(**two_prompts(300, 50))
    line, reached = 1, True
    while reached:
        buffers = PlanBuffers(20, 8, 40, "cpu")
        buffers.load(first)
        reached = interruptions.interrupted_at(line, (plan_tensors,), lambda at=buffers: at.load(second))
        assert torch.equal(buffers.load(first).items[: first.num_items], torch.from_numpy(first.work.items))
        assert int(buffers.load(first).num_items) == first.num_items
        line += 1
    assert line > 10


def test_tables_of_any_strides():
    table = torch.tensor([[*range(40)], [*range(35), *range(50, 55)]], dtype=torch.int32)
    options = {"block_size": 16, "num_q_heads": 4, "num_kv_heads": 2}
    lens, cu = torch.tensor([640, 630]), torch.arange(3)
    want = TreePlan.from_block_table(table, lens, cu, **options)
    assert want.shares
    strided = torch.stack([table, table], 2)[:, :, 0]
    wide = torch.cat([table, table], 1)[:, :40]
    fortran = np.asfortranarray(table.numpy())
    for other in (table.T.contiguous().T, strided, wide, fortran, table.long().T.contiguous().T):
        assert np.array_equal(TreePlan.from_block_table(other, lens, cu, **options).work.items, want.work.items)
    for wrong in (table.to_sparse(), table.to("meta")):
        with pytest.raises(ValueError, match=r"^block_table: expected"):
            TreePlan.from_block_table(wrong, lens, cu, **options)
    for name in ("block_size", "window", "tile_rows"):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            TreePlan.from_block_table(table, lens, cu, **{**options, name: True})

"""The Triton kernels over plans, in the interpreter: the bits of the plain launch on random ragged forests; float64."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import (
    PlanBuffers,
    TreePlan,
    UnsupportedImplementation,
    paged_attention,
    plan_tile,
    tree_attention,
    triton_impl,
)
from radixkv_kernels.triton_impl import attention
from radixkv_kernels.triton_impl.config import Config

from tests.kernels.forests import FP8, SMALL, Call, Forest, check_sound, random_call, random_forest
from tests.kernels.pairwise import pairwise_rows
from tests.kernels.stepping import Counts, check_many
from tests.sampling import few

pytestmark = pytest.mark.usefixtures("exact_interpreter")

FOREST_COUNT, A_TEST, MANY = 20, 10, 300
FEATURES = {
    "block_size": [1, 3, 16, 64],
    "group_size": [1, 3, 4, 8],
    "window": [None, 30, 400],
    "several": [False, True],
    "causal": [True, False],
    "dtype": [torch.float16, torch.bfloat16],
    "kv_dtype": [None, FP8],
    "softcap": [None, 20.0],
    "sinks": [False, True],
}
PAIRS = pairwise_rows(FEATURES)


@pytest.fixture(autouse=True)
def large_float32_tiles(monkeypatch):
    """The shipped float32 tiles are small, and the interpreter's time goes by the number of tiles."""
    shipped, big = triton_impl._lookup, Config(64, 64, 64, 4, 2, "ieee")
    monkeypatch.setattr(
        triton_impl, "_lookup", lambda device, key: big if key.dtype == "fp32" else shipped(device, key)
    )


def tile_of(call: Call) -> dict[str, int]:
    """What plans of this call have to be made with; the interpreter's table is that of an architecture."""
    q, (k_cache, v_cache) = call.q, call.caches
    softcap = call.arguments["softcap"] is not None
    more = {"v_head_dim": v_cache.shape[3], "kv_dtype": k_cache.dtype, "softcap": softcap}
    return plan_tile(q.dtype, q.shape[2], **more, implementation="triton")


def check(forest: Forest, call: Call) -> TreePlan:
    rng = forest.rng
    tile = tile_of(call)
    if rng.random() < 0.3:
        tile["tile_rows"] = rng.choice([8, 16])
    options = {"lead_runs": rng.choice([1, 2, 4]), "min_items": rng.choice([0, 0, 20, 10**6])}
    plan = forest.plan(**tile, **options, kv_itemsize=rng.choice([1, 2, 4, 64]))
    check_sound(forest, plan)
    # as tensors, an item that serves one sequence takes the kernel's loop as well
    out, lse = call.run(plan.to("cpu") if rng.random() < 0.5 else plan)
    plain, plain_lse = call.run(None)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    call.exact().check(out, lse)
    return plan


def check_forests(seeds: range) -> int:
    """Returns how many plans shared anything."""
    num_shared = 0
    for seed in seeds:
        several_runs = {"longest": (2600,), "most_tokens": 5000} if seed % 30 == 7 else {}
        forest = random_forest(seed, **(SMALL | several_runs))
        try:
            num_shared += check(forest, random_call(forest, alibi_slopes=None, implementation="triton")).shares
        except Exception as error:
            raise AssertionError(f"seed {seed}, {forest}: {error}") from error
    return num_shared


@pytest.mark.parametrize("start", few(range(0, FOREST_COUNT, A_TEST), 1))
def test_random_forests(start):
    assert check_forests(range(start, start + A_TEST)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FOREST_COUNT, FOREST_COUNT + MANY, 50))
def test_many_random_forests(start):
    assert check_forests(range(start, start + 50)) >= 10


def step(seeds: range) -> Counts:
    """Forests that step, in cells of 128 tokens."""
    fixed = {"alibi_slopes": None, "implementation": "triton"}
    return check_many(seeds, tile_of, longest=300, most_seqs=3, most_rows=80, steps=4, fixed=fixed)


def test_stepping_forests():
    counts = step(range(2))
    assert counts.kept > 0, counts


@pytest.mark.slow
def test_many_stepping_forests():
    counts = step(range(60))
    assert counts.kept > counts.steps // 8 and counts.crossed > 2, counts


@pytest.mark.parametrize("index", few(range(len(PAIRS)), 5))
def test_every_pair_of_features(index):
    row = dict(PAIRS[index])
    of_call = {name: row.pop(name) for name in ("dtype", "kv_dtype", "softcap")}
    if not row.pop("sinks"):
        of_call["sinks"] = None
    forest = random_forest(1000 + index, **SMALL, **row)
    if "sinks" not in of_call:
        of_call["sinks"] = torch.randn(forest.group_size * forest.num_kv_heads)
    check(forest, random_call(forest, alibi_slopes=None, implementation="triton", **of_call))


def prefix_batch(num_seqs=3, shared=16, blocks=20):
    """A plan's arguments and an attention call: num_seqs sequences, 16 * shared tokens in common."""
    table = torch.arange(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
    table[:, :shared] = table[0, :shared]
    lens = torch.tensor([300, 310, 295, 320][:num_seqs], dtype=torch.int32)
    cache = torch.randn(num_seqs * blocks, 16, 2, 64)
    lists = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": torch.arange(num_seqs + 1, dtype=torch.int32)}
    q = torch.randn(num_seqs, 8, 64).half()
    return lists, {"q": q, "k_cache": cache.half(), "v_cache": cache.half(), "implementation": "triton"}


def plan_of(lists, **changes):
    tile = plan_tile(torch.float16, 64, implementation="triton") | changes
    return TreePlan.from_block_table(*lists.values(), block_size=16, num_q_heads=8, num_kv_heads=2, **tile)


@pytest.mark.parametrize("processors", [1, 8])
def test_one_set_of_buffers_serves_one_plan_after_another(processors, monkeypatch):
    """As under a CUDA graph: larger buffers than the plan needs, stale entries of a larger plan, no look at lengths."""
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    buffers = PlanBuffers(max_items=16, max_rows=6, max_partials=32, device="cpu")
    workspace = None
    for num_seqs in (4, 2):
        lists, call = prefix_batch(num_seqs)
        tensors = buffers.load(plan_of(lists))
        if workspace is None:
            workspace = torch.full((tensors.workspace_size(64),), torch.nan)
        spare = torch.full((6, 8, 64), torch.nan, dtype=torch.float16)
        q = torch.cat((call.pop("q"), torch.randn(6 - num_seqs, 8, 64).half()))
        tree_attention(q=q, **call, **lists, plan=tensors, workspace=workspace, out=spare)
        assert torch.equal(spare[:num_seqs], paged_attention(q[:num_seqs], **call, **lists))
        assert spare[num_seqs:].isnan().all(), "rows of no sequence are not written"


def test_a_plan_that_shares_nothing_takes_the_plain_launch(monkeypatch):
    lists, call = prefix_batch(shared=0)
    monkeypatch.setattr(attention, "launch_plan", None)
    assert torch.equal(tree_attention(**call, **lists, plan=plan_of(lists)), paged_attention(**call, **lists))


def test_an_empty_plan():
    lists, call = prefix_batch()
    lists["seq_lens"] = torch.zeros(3, dtype=torch.int32)
    out, lse = tree_attention(**call, **lists, plan=plan_of(lists).to("cpu"), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell_size": 256}, "plan: expected cell_size 128 for implementation 'triton', got 256"),
        ({"tile_rows": 65}, "plan: expected tile_rows of at most 64, got 65"),
    ],
)
def test_a_plan_for_another_kernel_is_refused(changes, message):
    lists, call = prefix_batch()
    with pytest.raises(ValueError, match=message):
        tree_attention(**call, **lists, plan=plan_of(lists, **changes))


def test_a_workspace_that_is_too_small_is_refused():
    lists, call = prefix_batch()
    with pytest.raises(ValueError, match="workspace: expected at least"):
        tree_attention(**call, **lists, plan=plan_of(lists), workspace=torch.empty(10))
    with pytest.raises(ValueError, match="workspace: expected"):
        tree_attention(**call, **lists, plan=plan_of(lists), workspace=torch.empty(10**5).half())


def test_plan_tile():
    assert plan_tile(torch.bfloat16, 64, implementation="triton") == {"cell_size": 128, "tile_rows": 64}
    assert plan_tile(torch.float32, 128) == {"cell_size": 256, "tile_rows": 1024}
    with pytest.raises(ValueError, match="dtype: expected one of"):
        plan_tile(torch.int8, 128)
    with pytest.raises(ValueError, match="head_dim: expected at most 256"):
        plan_tile(torch.float16, 512, implementation="triton")
    with pytest.raises(UnsupportedImplementation):
        plan_tile(torch.float16, 64, device="meta", implementation="triton")

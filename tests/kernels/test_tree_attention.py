"""Attention over plans: the bits of attention without one, on random ragged forests with every feature; float64."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import TreePlan, paged_attention, tree_attention

from tests.kernels.forests import Forest, check_sound, random_call, random_forest
from tests.kernels.problems import relative_error
from tests.sampling import few

FOREST_COUNT, A_TEST = 240, 24
MANY = 2000


def check_forest(seed: int) -> Forest:
    forest = random_forest(seed)
    rng = forest.rng
    tile_rows = rng.choice([forest.group_size, 16, 64, 1024, 1024])
    options = {"tile_rows": tile_rows, "lead_runs": rng.choice([1, 2, 4]), "min_items": rng.choice([0, 0, 20, 10**6])}
    plan = forest.plan(**options, kv_itemsize=rng.choice([1, 2, 4, 64]))
    check_sound(forest, plan)
    call = random_call(forest)
    out, lse = call.run(plan)
    plain, plain_lse = call.run(None)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    if seed % 3:
        return forest  # float64 costs more than all the rest
    call.exact().check(out, lse)
    return forest


def check_forests(seeds: range) -> None:
    for seed in seeds:
        try:
            check_forest(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {random_forest(seed)}: {error}") from error


@pytest.mark.parametrize("start", few(range(0, FOREST_COUNT, A_TEST), 4))
def test_random_forests(start):
    check_forests(range(start, start + A_TEST))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FOREST_COUNT, FOREST_COUNT + MANY, 100))
def test_many_random_forests(start):
    check_forests(range(start, start + 100))


def decode_batch(shared_tokens: int, own: int, num_seqs: int):
    blocks = (shared_tokens + own) // 16
    table = torch.arange(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
    table[:, : shared_tokens // 16] = table[0, : shared_tokens // 16]
    lens = torch.full((num_seqs,), shared_tokens + own, dtype=torch.int32)
    cache = torch.randn(num_seqs * blocks, 16, 2, 64)
    arguments = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": torch.arange(num_seqs + 1).int()}
    return torch.randn(num_seqs, 8, 64), cache, cache.clone(), arguments


def plan_of(arguments, **options):
    heads = {"num_q_heads": 8, "num_kv_heads": 2}
    return TreePlan.from_block_table(*arguments.values(), block_size=16, **heads, **options)


def test_reads_a_shared_prefix_once():
    q, k, v, arguments = decode_batch(512, 32, 16)
    plan = plan_of(arguments)
    stats = plan.stats
    assert stats.num_logical_kv_tokens == 16 * 544 and stats.num_unique_kv_tokens == 512 + 16 * 32
    assert stats.num_kv_tokens_read == stats.num_unique_kv_tokens and stats.num_items == 17
    assert torch.equal(tree_attention(q, k, v, plan=plan, **arguments), paged_attention(q, k, v, **arguments))


def test_a_plan_serves_the_steps_up_to_the_next_cell():
    q, k, v, arguments = decode_batch(512, 32, 4)
    plan = plan_of(arguments)
    for length in (513, 530, 544):
        arguments["seq_lens"] = torch.tensor([length, 544, 520, length], dtype=torch.int32)
        assert torch.equal(tree_attention(q, k, v, plan=plan, **arguments), paged_attention(q, k, v, **arguments))
    arguments["seq_lens"] = torch.tensor([512, 544, 544, 544], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"plan: .*cell border"):
        tree_attention(q, k, v, plan=plan, **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell_size": 128}, "plan: expected cell_size 256"),
        ({"window": 9}, "plan: expected one made with window None"),
        ({"causal": False}, "plan: expected one made with causal True"),
        ({"tile_rows": 2}, "plan: expected tile_rows"),
    ],
)
def test_a_plan_for_another_call_is_refused(options, message):
    q, k, v, arguments = decode_batch(512, 32, 4)
    with pytest.raises(ValueError, match=message):
        tree_attention(q, k, v, plan=plan_of(arguments, **options), **arguments, implementation="torch")


def test_a_plan_of_other_sequences_is_refused():
    q, k, v, arguments = decode_batch(512, 32, 4)
    fewer = {name: x[: len(x) - 1] for name, x in arguments.items()}
    with pytest.raises(ValueError, match="plan: expected one of 4 sequences"):
        tree_attention(q, k, v, plan=plan_of(fewer), **arguments)
    other = {**arguments, "cu_seqlens_q": torch.tensor([0, 0, 1, 2, 4], dtype=torch.int32)}
    with pytest.raises(ValueError, match="plan: expected one made with these cu_seqlens_q"):
        tree_attention(q, k, v, plan=plan_of(other), **arguments)


def test_the_reference_takes_a_plan():
    q, k, v, arguments = decode_batch(256, 32, 3)
    got = tree_attention(q, k, v, plan=plan_of(arguments), **arguments, implementation="reference")
    assert relative_error(got, paged_attention(q, k, v, **arguments).double()) < 1e-6

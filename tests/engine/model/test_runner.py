"""The Runner's own duties: order of the step, what is written, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from radixkv.blocks.kv_manager import BlockCopy
from radixkv.engine.model.checkpoint import load_checkpoint
from radixkv.engine.model.weights import Model
from radixkv.engine.runner import Runner, kv_bytes_per_block
from radixkv.scheduling.batch import ScheduledBatch, ScheduledSequence
from tests.engine.model.sequences import Sequence, runner_of, step
from tests.engine.model.tiny_checkpoints import tokens


@pytest.fixture(scope="module")
def model():
    return load_checkpoint("tiny_gpt", max_positions=256).model


def scheduled(**changes):
    values = {
        "sequence_id": 3,
        "token_ids": np.arange(20, dtype=np.int32),
        "start": 0,
        "end": 20,
        "write_start": 0,
        "block_table": np.arange(2, dtype=np.int32),
        "needs_logits": True,
    }
    return ScheduledSequence(**{**values, **changes})


def test_only_rows_that_need_logits_come_back_in_the_batchs_order(model):
    runner = runner_of(model)
    parts = [Sequence(tokens(9, seed), [seed]) for seed in range(3)]
    all_rows = step(runner, [(part, 9) for part in parts])
    assert all_rows.shape == (3, 260) and all_rows.dtype == torch.float32
    for part in parts:
        part.computed = 0
    needed = [part.scheduled(9, needs_logits=index != 1) for index, part in enumerate(parts)]
    assert torch.equal(runner.forward(ScheduledBatch(needed, [])), all_rows[[0, 2]])
    none = [part.scheduled(9, needs_logits=False) for part in parts]
    assert runner.forward(ScheduledBatch(none, [])).shape == (0, 260)
    assert runner.forward(ScheduledBatch([], [])).shape == (0, 260)


def test_writes_exactly_its_slots(model):
    runner = runner_of(model, block_size=4, num_blocks=8)
    step(runner, [(Sequence(tokens(10), [5, 2, 7]), 10)])
    written = ~runner.k_cache.isnan().flatten(3).any(-1)  # [num_layers, num_blocks, block_size]
    expected = torch.zeros(8, 4, dtype=torch.bool)
    expected[[5, 2]] = True
    expected[7, :2] = True
    assert (written == expected).all()
    assert (~runner.v_cache.isnan().flatten(3).any(-1) == expected).all()


def test_tokens_before_write_start_are_computed_and_not_written(model):
    runner = runner_of(model, block_size=4, num_blocks=8)
    ids = tokens(10)
    (whole,) = step(runner, [(Sequence(ids, [0, 1, 2]), 10)])
    kept = runner.k_cache[:, :2].clone()
    again = Sequence(ids, [0, 1, 3], read_only=8)
    (row,) = step(runner, [(again, 10)])
    assert torch.equal(row, whole)
    assert torch.equal(runner.k_cache[:, :2], kept)
    assert torch.equal(runner.k_cache[:, 3, :2], runner.k_cache[:, 2, :2])


def test_copies_run_in_every_layer_and_before_the_step(model):
    runner = runner_of(model, block_size=4, num_blocks=8)
    step(runner, [(Sequence(tokens(8), [0, 1]), 8)])
    runner.forward(ScheduledBatch([], [BlockCopy(1, 6, 3), BlockCopy(0, 4, 1)]))
    for cache in (runner.k_cache, runner.v_cache):
        assert torch.equal(cache[:, 6, :3], cache[:, 1, :3])
        assert torch.equal(cache[:, 4, :1], cache[:, 0, :1])
        assert cache[:, 6, 3:].isnan().all() and cache[:, 4, 1:].isnan().all() and cache[:, 5].isnan().all()


def test_bytes_of_a_block(model):
    runner = runner_of(model, block_size=4, num_blocks=8, dtype=torch.bfloat16)
    assert runner.kv_bytes_per_block == 2 * 4 * 4 * 2 * 64 * 2
    stored = runner.k_cache.nbytes + runner.v_cache.nbytes
    assert stored == 8 * kv_bytes_per_block(model.config, 4, torch.bfloat16)


def test_bfloat16_is_near_float32(model):
    ids = tokens(30)
    (exact,) = step(runner_of(model), [(Sequence(ids, [0, 1]), 30)])
    (rounded,) = step(runner_of(model, dtype=torch.bfloat16), [(Sequence(ids, [0, 1]), 30)])
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, atol=0.2, rtol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.full(20, 260, np.int32)}, "token_ids: expected values in .0, 260., got 260"),
        ({"token_ids": np.full(20, -5, np.int32)}, "got -5"),
        ({"token_ids": np.arange(19, dtype=np.int32)}, "expected 20 tokens and 2 blocks, got 19 and 2"),
        ({"block_table": np.zeros(1, np.int32)}, "got 20 and 1"),
        ({"block_table": np.array([0, 64], np.int32)}, "block_table: expected blocks in .0, 64."),
        ({"block_table": np.array([0, -1], np.int32)}, "block_table"),
        ({"start": 20}, "expected 0 <= start < end"),
        ({"start": 5}, "got start 5, end 20, write_start 0"),
        ({"write_start": 21}, "write_start 21"),
        ({"token_ids": np.zeros(300, np.int32), "end": 257}, "end: expected at most 256, the model's, got 257"),
    ],
)
def test_what_a_batch_may_not_hold(model, changes, message):
    with pytest.raises(ValueError, match=message):
        runner_of(model).forward(ScheduledBatch([scheduled(**changes)], []))


@pytest.mark.parametrize("copy", [BlockCopy(64, 1, 3), BlockCopy(0, -1, 3), BlockCopy(0, 1, 17)])
def test_copies_of_blocks_that_do_not_exist(model, copy):
    with pytest.raises(ValueError):
        runner_of(model).forward(ScheduledBatch([], [copy]))


def test_what_a_runner_may_not_be(model):
    with pytest.raises(ValueError, match="num_blocks"):
        Runner(model, num_blocks=0, block_size=16, deterministic=True)
    with pytest.raises(ValueError, match="block_size"):
        Runner(model, num_blocks=4, block_size=0, deterministic=True)
    with pytest.raises(ValueError, match=r"dtype: .*float16"):
        Runner(model, num_blocks=4, block_size=16, dtype=torch.float16, deterministic=True)


def test_runners_share_nothing_but_weights(model):
    first, second = runner_of(model), runner_of(Model(replace(model.config, max_positions=64), model.weights))
    ids = tokens(20)
    (row,) = step(first, [(Sequence(ids, [0, 1]), 20)])
    step(second, [(Sequence(tokens(20, 1), [0, 1]), 20)])
    assert torch.equal(step(first, [(Sequence(ids, [0, 1], computed=16), 4)])[0], row)

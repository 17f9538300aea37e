"""The engine with tree attention: the same logits to the bit, and in every step the plan that its tables ask for."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from radixkv_kernels import TreePlan

from radixkv.batch import ScheduledSequence
from radixkv.engine import Engine
from radixkv.kv_manager import KVManager
from radixkv.model.presets import PRESETS, RandomTensors
from radixkv.model.weights import Model, assemble
from radixkv.replay import CacheConfig
from radixkv.request import SamplingParams
from radixkv.runner import Runner
from radixkv.scheduler import Scheduler, SchedulerConfig
from radixkv.tree_plans import TreePlans

sys.path.insert(0, str(Path(__file__).parent))

CPU = torch.device("cpu")


def tiny_model(windows=(None, None)):
    config = replace(
        PRESETS["tiny_gpt"],
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        windows=windows,
        max_positions=2048,
    )
    return Model(config, assemble(config, RandomTensors(config, 0), torch.float32, CPU))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


class Checked(TreePlans):
    """Holds every plan against the one made from scratch of the batch's tables."""

    def of(self, sequences, seq_lens, cu_seqlens_q):
        plans = super().of(sequences, seq_lens, cu_seqlens_q)
        width = max(len(s.block_table) for s in sequences)
        table = np.full((len(sequences), width), -1, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.block_table)] = sequence.block_table
        for config in self._configs:
            names = ("block_size", "num_q_heads", "num_kv_heads", "cell_size", "window", "tile_rows", "kv_itemsize")
            options = {name: getattr(config, name) for name in names}
            want = TreePlan.from_block_table(table, seq_lens, cu_seqlens_q, **options)
            got = plans.get(config.window)
            if got is None:
                assert not want.shares or len(sequences) < 2
                continue
            for name in ("items", "row_base", "row_slots", "slot_cells"):
                assert np.array_equal(getattr(got.work, name), getattr(want.work, name)), name
            assert np.array_equal(got.row_token, want.row_token) and np.array_equal(got.row_seq, want.row_seq)
        return plans


class Recorded(Engine):
    """Keeps the logits from which each token was sampled."""

    def __init__(self, model, mode, cache="radix", block_size=16, num_blocks=256, **limits):
        runner = Runner(model, num_blocks=num_blocks, block_size=block_size, deterministic=True, tree_attention=mode)
        sizes = {"block_size": block_size, "dtype": runner.dtype, "device": runner.device}
        runner.tree_plans = Checked(model.config, **sizes, mode=mode)
        manager = KVManager(CacheConfig(cache, block_size).make(), num_blocks)
        super().__init__(runner, Scheduler(manager, SchedulerConfig(**limits)))
        self.logits = {}

    def _accept(self, batch, sequences, logits):
        wanted = [s for s, item in zip(sequences, batch.sequences, strict=True) if item.needs_logits]
        for sequence, row in zip(wanted, logits, strict=True):
            self.logits[sequence.request.request_id, sequence.sample, sequence.num_tokens] = row.clone()
        return super()._accept(batch, sequences, logits)


def play(model, seed, mode):
    """Serves random requests on common prefixes, with forks, aborts, preemptions and failing steps."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 16, 16, 64])
    engine = Recorded(
        model,
        mode,
        rng.choice(["radix", "radix", "flat_hash"]),
        block_size,
        rng.choice([700, 1000, 3000]) // block_size,
        max_num_batched_tokens=rng.choice([64, 300, 2048]),
        max_num_seqs=rng.choice([4, 256]),
    )
    forward, fails = engine.runner.forward, rng.random() < 0.5
    dice = random.Random(seed)

    def failing(batch):
        if fails and len(batch.sequences) > 1 and dice.random() < 0.1:
            if dice.random() < 0.5:
                forward(batch)
            raise MemoryError("planted")
        return forward(batch)

    engine.runner.forward = failing
    roots = [[rng.randrange(256) for _ in range(rng.randint(260, 600))] for _ in range(2)]
    made = []
    for i in range(rng.randint(4, 8)):
        root = rng.choice(roots)
        prompt = root[: rng.choice([len(root), len(root), rng.randint(1, len(root))])]
        prompt = prompt + [rng.randrange(256) for _ in range(rng.randint(1, 120))]
        roots.append(prompt)
        params = SamplingParams(n=rng.choice([1, 1, 3]), max_tokens=rng.choice([4, 14, 60]), ignore_eos=True)
        if len(prompt) + params.max_tokens > engine.runner.num_blocks * block_size:
            continue
        engine.add_request(prompt, params, request_id=str(i))
        made.append(engine.generation(str(i)))
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.15:
            engine.abort(str(rng.randrange(i + 1)))
    for _ in range(1000):
        if not engine.has_unfinished_requests:
            break
        engine.step()
    assert not engine.has_unfinished_requests
    tokens = [[o.token_ids for o in generation.output().outputs] for generation in made]
    return engine, tokens


def play_many(seeds):
    planned = preemptions = 0
    models = {windows: tiny_model(windows) for windows in ((None, None), (None, 300), (40, 40))}
    for seed in seeds:
        model = list(models.values())[seed % 3 if seed % 2 else 0]
        off, want = play(model, seed, "off")
        for mode in ("on", "auto"):
            engine, tokens = play(model, seed, mode)
            assert tokens == want
            assert engine.logits.keys() == off.logits.keys()
            for name, row in engine.logits.items():
                assert torch.equal(row, off.logits[name]), (seed, mode, name)
            planned += engine.runner.tree_plans.num_planned_steps
        preemptions += engine.scheduler.num_preemptions
        assert not off.runner.tree_plans.num_planned_steps
    return planned, preemptions


def test_the_same_bits_with_and_without():
    planned, preemptions = play_many(range(8))
    assert planned > 50 and preemptions > 0


@pytest.mark.slow
def test_the_same_bits_with_and_without_in_100_schedules():
    planned, preemptions = play_many(range(100, 200))
    assert planned > 500 and preemptions > 10


def test_the_same_bits_as_alone_without_a_cache(model):
    root = list(range(250)) * 2
    prompts = [[*root, i] for i in range(5)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = Recorded(model, "on")
    together = engine.generate(prompts, params)
    assert engine.runner.tree_plans.num_planned_steps >= 7
    for i, prompt in enumerate(prompts):
        alone = Recorded(model, "off", "null")
        assert alone.generate([prompt], params)[0].outputs[0].token_ids == together[i].outputs[0].token_ids
        for (_, sample, position), row in alone.logits.items():
            assert torch.equal(row, engine.logits[str(i), sample, position])


def test_an_unfinished_prefix_that_several_prefill_is_one_item(model):
    """Chunks of several prompts over the same cached cells."""
    root = list(range(250)) * 6
    engine = Recorded(model, "on", max_num_batched_tokens=2048)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.generate([root], params)
    plans = []
    planned = engine.runner.tree_plans.of

    def keep(*arguments):
        plans.append(planned(*arguments))
        return plans[-1]

    engine.runner.tree_plans.of = keep
    engine.generate([[*root, *range(i, i + 60)] for i in range(3)], params)
    (plan,) = plans[0].values()
    assert (np.diff(plan.cu_seqlens_q) > 1).sum() >= 2 and plan.shares


def sequence(name, table, start, end):
    tokens = np.zeros(end, np.int32)
    return ScheduledSequence(name, tokens, start, end, start, table, True)


def make_plans(model, mode="on"):
    return TreePlans(model.config, block_size=16, dtype=torch.float32, device=CPU, mode=mode)


def ask(plans, *sequences):
    cu = np.concatenate([[0], np.cumsum([s.num_tokens for s in sequences])])
    return plans.of(sequences, np.array([s.end for s in sequences]), cu)


def test_a_block_put_in_place_of_another_is_noticed(model):
    plans = make_plans(model)
    a, b = np.arange(20, dtype=np.int32), np.arange(20, dtype=np.int32)
    first = ask(plans, sequence(0, a, 299, 300), sequence(1, b, 299, 300))
    assert first[None].shares
    assert ask(plans, sequence(0, a, 300, 301), sequence(1, b, 300, 301))[None] is first[None]
    other = b.copy()
    other[3] = 99
    assert not ask(plans, sequence(0, a, 300, 301), sequence(1, other, 300, 301))
    assert ask(plans, sequence(0, a, 300, 301), sequence(1, np.append(b, 50), 300, 301))[None].shares


def test_what_fails_half_way_is_made_anew(model, monkeypatch):
    plans = make_plans(model)
    a, b = np.arange(20, dtype=np.int32), np.arange(20, dtype=np.int32)
    pair = sequence(0, a, 299, 300), sequence(1, b, 299, 300)
    add = plans._planners[0].add

    def interrupted(name, table):
        add(name, table)
        if name == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(plans._planners[0], "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(plans, *pair)
    assert ask(plans, *pair)[None].shares


def test_nothing_shared_makes_no_plan(model, monkeypatch):
    plans = make_plans(model)
    monkeypatch.setattr(plans._planners[0], "plan", None)
    tables = [np.arange(20, dtype=np.int32) + 20 * i for i in range(3)]
    assert not ask(plans, *(sequence(i, table, 299, 300) for i, table in enumerate(tables)))
    assert not ask(make_plans(model), sequence(0, tables[0], 299, 300))
    assert not plans.num_planned_steps


def test_auto_leaves_a_plan_that_saves_little(model):
    tables = [np.arange(120, dtype=np.int32) + 200 * i for i in range(2)]
    for table in tables:
        table[:16] = np.arange(1000, 1016)
    pair = [sequence(i, table, 1899, 1900) for i, table in enumerate(tables)]
    assert ask(make_plans(model, "on"), *pair) and not ask(make_plans(model, "auto"), *pair)


def test_an_unknown_mode_is_refused(model):
    with pytest.raises(ValueError, match="tree_attention: expected one of"):
        Runner(model, num_blocks=4, block_size=16, deterministic=True, tree_attention="yes")

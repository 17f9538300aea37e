"""The engine with tree attention: the same logits to the bit, and in every step the plan that its tables ask for."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from radixkv_kernels import TreePlan, TreePlanner, TreePlans, tree_plans
from radixkv_kernels.plan import cells, cuts, order, planner, tables, tree_plan

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.engine.engine import Engine
from radixkv.engine.model.presets import PRESETS, RandomTensors
from radixkv.engine.model.weights import Model, assemble
from radixkv.engine.runner import Runner
from radixkv.scheduling.batch import ScheduledSequence
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from tests import interruptions

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
    """Holds every plan against the one made from scratch of the batch's tables.

    What is wrong is noted in `mistakes`: an engine would take an AssertionError for a step that failed, and recover.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mistakes = []

    def of(self, names, block_tables, seq_lens, cu_seqlens_q):
        plans = super().of(names, block_tables, seq_lens, cu_seqlens_q)
        table = np.full((len(names), max(map(len, block_tables))), -1, np.int32)
        for row, blocks in zip(table, block_tables, strict=True):
            row[: len(blocks)] = blocks
        for config in self._configs:
            names = ("block_size", "num_q_heads", "num_kv_heads", "cell_size", "window", "tile_rows", "kv_itemsize")
            options = {name: getattr(config, name) for name in names}
            want = TreePlan.from_block_table(table, seq_lens, cu_seqlens_q, **options)
            got = plans.get(config.window)
            if got is None:
                if self.mode == "on" and want.shares:
                    self.mistakes.append("none where KV is shared")
                continue
            for name in ("items", "row_base", "row_slots", "slot_cells"):
                if not np.array_equal(getattr(got.work, name), getattr(want.work, name)):
                    self.mistakes.append(name)
            if not (
                np.array_equal(got.work.row_token, want.work.row_token)
                and np.array_equal(got.work.row_seq, want.work.row_seq)
            ):
                self.mistakes.append("rows")
        return plans


def arguments_of(model, block_size=16):
    """What `TreePlans` asks about a model in float32 on the CPU."""
    names = ("windows", "num_q_heads", "num_kv_heads", "head_dim")
    sizes = {name: getattr(model.config, name) for name in names}
    return {**sizes, "block_size": block_size, "dtype": torch.float32, "device": CPU}


class Recorded(Engine):
    """Keeps the logits from which each token was sampled, by the tokens before it."""

    def __init__(self, model, mode, cache="radix", block_size=16, num_blocks=256, **limits):
        runner = Runner(model, num_blocks=num_blocks, block_size=block_size, deterministic=True, tree_attention=mode)
        runner.tree_plans = Checked(**arguments_of(model, block_size), mode=mode)
        manager = KVManager(CacheConfig(cache, block_size).make(), num_blocks)
        super().__init__(runner, Scheduler(manager, SchedulerConfig(**limits)))
        self.logits = {}
        forward = runner.forward

        def recording(batch):
            logits = forward(batch)
            wanted = [s for s in batch.sequences if s.needs_logits]
            for sequence, row in zip(wanted, logits, strict=True):
                self.logits[sequence.token_ids[: sequence.end].tobytes()] = row.clone()
            return logits

        runner.forward = recording

    def check_equals(self, other):
        """The same logits, to the bit, behind the same tokens."""
        assert self.logits and self.logits.keys() == other.logits.keys()
        for tokens, row in self.logits.items():
            assert torch.equal(row, other.logits[tokens]), f"after {len(tokens) // 4} tokens"
        for engine in (self, other):
            assert not engine.runner.tree_plans.mistakes, engine.runner.tree_plans.mistakes


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
        engine, tokens = play(model, seed, "on")
        assert tokens == want
        engine.check_equals(off)
        planned += engine.runner.tree_plans.num_planned_steps
        preemptions += engine.scheduler.num_preemptions
        assert not off.runner.tree_plans.num_planned_steps
    return planned, preemptions


def test_the_same_bits_with_and_without():
    planned, preemptions = play_many(range(4))
    assert planned > 20 and preemptions > 0


def small_model(windows):
    """Cheap to run."""
    config = replace(
        PRESETS["tiny_gpt"],
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=16,
        windows=windows,
        max_positions=2048,
    )
    return Model(config, assemble(config, RandomTensors(config, 0), torch.float32, CPU))


class Stepped(Recorded):
    """Counts plans that were kept, and of them those in which a row of a chunk of several tiles crossed a border.

    Tiles are small and KV is dear, so that chunks have several tiles and share what they can.
    """

    kept = crossed = 0

    def __init__(self, *arguments, tile_rows, **options):
        super().__init__(*arguments, **options)
        plans = self.runner.tree_plans
        plans._configs = [replace(c, tile_rows=tile_rows, kv_itemsize=64) for c in plans._configs]
        planned, before, start = plans.of, {}, None

        def of(names, block_tables, seq_lens, cu_seqlens_q):
            nonlocal before, start
            plans = planned(names, block_tables, seq_lens, cu_seqlens_q)
            rows = np.diff(cu_seqlens_q)
            first = (seq_lens - rows) // 256
            for window, plan in plans.items():
                if plan is before.get(window):
                    self.kept += 1
                    self.crossed += bool(((first != start) & (rows * plan.config.group_size > tile_rows)).any())
            before, start = plans, first
            return plans

        plans.of = of


def step_engines(model, seed):
    """The same requests with tree attention, without, and without a cache: the same logits at every token.

    Some decode while prompts behind the same root are computed in chunks smaller than a cell, so plans are kept from
    chunk to chunk.
    """
    rng = random.Random(seed)
    block_size, budget = rng.choice([1, 16, 16, 64]), rng.choice([80, 100, rng.randint(20, 140)])
    tile_rows = rng.choice([4, 16, 64, 256])
    root = [rng.randrange(256) for _ in range(rng.randint(257, 560))]
    num_decodes = rng.randint(1, 3)
    prompts, outputs, pauses = [], [], []
    for i in range(num_decodes + 2):
        decodes = i < num_decodes
        kept = rng.choice([len(root), len(root), rng.randint(256, len(root))])
        own = rng.randint(1, 20) if decodes else rng.randint(200, 600)
        prompts.append(root[:kept] + [rng.randrange(256) for _ in range(own)])
        tokens = rng.randint(12, 20) if decodes else rng.randint(1, 4)
        outputs.append(SamplingParams(max_tokens=tokens, ignore_eos=True, n=rng.choice([1, 1, 2])))
        pauses.append(rng.choice([0, 1, 3]))
    pauses[num_decodes - 1] = len(root) // budget + 3

    def serve(mode, cache, **limits):
        engine = Stepped(model, mode, cache, block_size, 6000 // block_size, tile_rows=tile_rows, **limits)
        for i, (prompt, params) in enumerate(zip(prompts, outputs, strict=True)):
            engine.add_request(prompt, params, request_id=str(i))
            for _ in range(pauses[i]):
                engine.step()
        while engine.has_unfinished_requests:
            engine.step()
        return engine

    shared = serve("on", "radix", max_num_batched_tokens=budget)
    unshared = serve("off", "radix", max_num_batched_tokens=budget)
    uncached = serve("off", "null")
    shared.check_equals(unshared)
    shared.check_equals(uncached)
    return shared


def step_many(seeds):
    """Enough plans are kept, and enough of them where rows crossed a border, for the comparison to tell anything."""
    models = [small_model(windows) for windows in ((None, None), (None, 300), (500, 500))]
    planned = kept = crossed = 0
    for seed in seeds:
        engine = step_engines(models[seed % 3], seed)
        planned += engine.runner.tree_plans.num_planned_steps
        kept += engine.kept
        crossed += engine.crossed
    assert kept > planned // 6 and crossed > planned // 100, (planned, kept, crossed)


def test_engines_that_step_by_small_budgets():
    step_many(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10, 510, 100))
def test_many_engines_that_step_by_small_budgets(start):
    step_many(range(start, start + 100))


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
        assert alone.logits.keys() <= engine.logits.keys() and len(alone.logits) == 8
        assert all(torch.equal(row, engine.logits[tokens]) for tokens, row in alone.logits.items())


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
    return TreePlans(**arguments_of(model), mode=mode)


def checked_plans(model):
    return Checked(**arguments_of(model), mode="on")


def ask(plans, *sequences):
    cu = np.concatenate([[0], np.cumsum([s.num_tokens for s in sequences])])
    names, tables = [s.sequence_id for s in sequences], [s.block_table for s in sequences]
    return plans.of(names, tables, np.array([s.end for s in sequences]), cu)


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


def test_a_number_changed_in_a_table_is_noticed_or_refused(model):
    """A table that owns its numbers can't change once it was planned for; one that shows another's is compared."""
    plans, buffer = make_plans(model), np.tile(np.arange(20, dtype=np.int32), (2, 1))
    shown = sequence(0, buffer[0], 299, 300), sequence(1, buffer[1], 299, 300)
    assert ask(plans, *shown)[None].shares
    buffer[1, 3] = 99
    assert not ask(plans, *shown)
    owned = buffer[0].copy()
    ask(plans, sequence(0, owned, 299, 300), shown[1])
    with pytest.raises(ValueError, match="read-only"):
        owned[3] = 99


PLANNING = (tree_plans, planner, tables, cells, order, cuts, tree_plan)


def script():
    """Steps in which sequences come, grow, cross borders, get other blocks and go: batches, the last one twice."""
    root, own = np.arange(40, dtype=np.int32), np.arange(100, 200, dtype=np.int32)
    tables = {i: np.concatenate([root[:20], own[10 * i : 10 * i + 10]]) for i in range(4)}
    yield [sequence(i, tables[i], 299, 300) for i in range(3)]
    yield [sequence(i, tables[i], 300, 301) for i in range(3)]
    tables[1] = np.concatenate([root[:20], own[90:94]])
    yield [sequence(i, tables[i], 301, 341 + 20 * i) for i in (1, 0, 3)]
    tables[0] = np.append(tables[0], np.int32(99))
    for _ in range(2):
        yield [sequence(i, tables[i], 341, 345 + i) for i in (0, 1, 3)]


@pytest.mark.parametrize("window", [None, 200])
def test_interrupted_anywhere_the_next_plans_are_those_from_scratch(window):
    """At a line of each step in turn, and the step is asked for again, or another is."""
    model, line, reached = tiny_model((window,) * 2), 1, True
    while reached:
        plans, reached = checked_plans(model), False
        for number, batch in enumerate(script()):
            if interruptions.interrupted_at(line, PLANNING, partial(ask, plans, *batch)):
                reached = True
                if line % 3 == 0:
                    plans.forget()
                if number % 2 and line % 2:
                    continue
            ask(plans, *batch)
        assert not plans.mistakes, (line, plans.mistakes)
        line += 11


def test_interrupted_while_it_forgets(model):
    plans = checked_plans(model)
    for batch in script():
        for line in range(1, 4):
            interruptions.interrupted_at(line, PLANNING, plans.forget)
            ask(plans, *batch)
    assert not plans.mistakes


def test_a_runner_forgets(model):
    runner = Runner(model, num_blocks=4, block_size=16, deterministic=True, tree_attention="on")
    batch = next(script())
    first = ask(runner.tree_plans, *batch)[None]
    assert ask(runner.tree_plans, *batch)[None] is first
    runner.forget_plans()
    assert ask(runner.tree_plans, *batch)[None] is not first


def test_nothing_shared_makes_no_plan(model, monkeypatch):
    plans = make_plans(model)
    monkeypatch.setattr(TreePlanner, "plan", None)
    tables = [np.arange(20, dtype=np.int32) + 20 * i for i in range(3)]
    assert not ask(plans, *(sequence(i, table, 299, 300) for i, table in enumerate(tables)))
    assert not ask(make_plans(model), sequence(0, tables[0], 299, 300))
    assert not plans.num_planned_steps


def pair_of(shared, blocks):
    """Two sequences of so many blocks, the first `shared` in common."""
    tables = [np.arange(blocks, dtype=np.int32) + 1000 * (i + 1) for i in range(2)]
    for table in tables:
        table[:shared] = np.arange(shared)
    return [sequence(i, table, blocks * 16 - 1, blocks * 16) for i, table in enumerate(tables)]


@pytest.mark.parametrize(
    ("shared", "blocks", "pays"), [(16, 120, False), (16, 20, False), (600, 640, True), (64, 900, False)]
)
def test_auto_leaves_a_plan_that_saves_little(model, shared, blocks, pays):
    """Little of what there is to read, or little for a CPU: 1/8 MiB a cell here, and 4 MiB are wanted."""
    pair = pair_of(shared, blocks)
    assert ask(make_plans(model, "on"), *pair)
    assert bool(ask(make_plans(model, "auto"), *pair)) == pays


def test_cells_read_and_not_read_again(model):
    assert ask(make_plans(model), *pair_of(32, 40))[None].cells == (2 + 2, 2 * 3)


def test_an_unknown_mode_is_refused(model):
    with pytest.raises(ValueError, match="tree_attention: expected one of"):
        Runner(model, num_blocks=4, block_size=16, deterministic=True, tree_attention="yes")

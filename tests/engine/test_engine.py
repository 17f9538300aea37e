"""The engine with a real model: golden outputs, the same bits however it is scheduled, aborts, failures, streams."""

import asyncio
import itertools
import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.namespace import Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.engine.engine import Engine
from radixkv.engine.model.config import ModelConfig
from radixkv.engine.model.presets import PRESETS, RandomTensors, byte_tokenizer
from radixkv.engine.model.weights import Model, assemble
from radixkv.engine.runner import Runner
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.sampling import few
from tests.shared_files import shared_file

CPU = torch.device("cpu")


def tiny_model():
    from dataclasses import replace

    preset: ModelConfig = PRESETS["tiny_gpt"]
    config = replace(
        preset,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        windows=(None,) * 2,
        max_positions=512,
    )
    return Model(config, assemble(config, RandomTensors(config, 0), torch.float32, CPU))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def make_engine(model, cache="radix", block_size=16, num_blocks=64, deterministic=True, **limits):
    made = cache if not isinstance(cache, str) else CacheConfig(cache, block_size).make()
    runner = Runner(model, num_blocks=num_blocks, block_size=made.block_size, deterministic=deterministic)
    scheduler = Scheduler(KVManager(made, num_blocks), SchedulerConfig(**limits))
    return Recorded(runner, scheduler, tokenizer=byte_tokenizer(), eos_token_ids=model.config.eos_token_ids)


class Recorded(Engine):
    """Checks the owner of each block after each step, and keeps the logits from which each token was sampled."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.logits = {}
        self.on_logits = self.keep

    def step(self):
        stats = super().step()
        self.scheduler.manager.check()
        assert stats.sizes.num_blocks == self.runner.num_blocks
        return stats

    def keep(self, sequence, row):
        self.logits[sequence.request.request_id, sequence.sample, sequence.num_tokens] = row.clone()


CACHES = few([("radix", 16), ("null", 16), ("flat_hash", 16), ("radix", 1)], 1)


@pytest.mark.parametrize(("cache", "block_size"), CACHES)
def test_golden_outputs_cold_and_warm_alone_and_in_one_batch(cache, block_size):
    folder = shared_file("models/stories260k")
    golden = json.loads((folder / "golden.json").read_text())
    prompts = [case["prompt_token_ids"] for case in golden["cases"]]
    wanted = [case["greedy_token_ids"] for case in golden["cases"]]
    engine = Engine.from_pretrained(folder, cache=CacheConfig(cache, block_size, num_blocks=4096 // block_size))

    def params(ids):
        return SamplingParams(max_tokens=len(ids), ignore_eos=True)

    each = [params(ids) for ids in wanted]
    together = engine.generate(prompts, each)
    warm = engine.generate(prompts, each)
    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, each, strict=True)]
    for outputs in (together, warm, alone):
        assert [output.outputs[0].token_ids for output in outputs] == wanted
    if cache != "null":
        assert any(output.num_cached_tokens for output in warm)


def play(model, seed):
    """Serves random requests in a random schedule, and each of them alone without a cache; compares every bit."""
    rng = random.Random(seed)
    cache, block_size = rng.choice([("radix", 16), ("radix", 1), ("radix", 3), ("flat_hash", 16), ("flat_hash", 4)])
    num_blocks = rng.choice([70, 90, 120, 400]) // block_size + 4
    engine = make_engine(
        model,
        cache,
        block_size,
        num_blocks,
        max_num_batched_tokens=rng.choice([7, 32, 200]),
        max_num_seqs=rng.choice([2, 5, 256]),
        order=rng.choice(["fcfs", "longest_prefix", "depth_first"]),
        max_overtakes=rng.choice([0, 3, 256]),
    )
    asked, texts = {}, [[1]]
    for i in range(rng.randint(4, 9)):
        text = rng.choice(texts)
        text = text[: rng.randint(0, len(text))] + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        texts.append(text)
        params = SamplingParams(
            n=rng.choice([1, 1, 3]),
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 20]),
            seed=rng.randrange(1000),
            max_tokens=rng.randint(1, 10),
            ignore_eos=True,
        )
        namespace = rng.choice([None, None, Salt("a")])
        if len(text) + params.max_tokens - 1 > num_blocks * block_size:
            continue
        engine.add_request(text, params, request_id=str(i), namespace=namespace)
        asked[str(i)] = (engine.generation(str(i)), text, params)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.1:
            engine.abort(str(rng.randrange(i + 1)))
    for _ in range(2000):
        if not engine.has_unfinished_requests:
            break
        engine.step()
    assert not engine.has_unfinished_requests
    for request_id, (generation, text, params) in asked.items():
        alone = make_engine(model, "null", 16, 64)
        expected = alone.generate([text], params)[0]
        for sample, (got, want) in enumerate(zip(generation.output().outputs, expected.outputs, strict=True)):
            assert got.finish_reason in ("length", "abort")
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            assert got.finish_reason == "abort" or got.token_ids == want.token_ids
            for step in range(len(got.token_ids)):
                if sample and not step:
                    continue  # the first token comes from the row of sample 0
                position = len(text) + step
                mine, theirs = engine.logits[request_id, sample, position], alone.logits["0", sample, position]
                assert torch.equal(mine, theirs), (request_id, sample, position)
    return engine.scheduler


def play_many(model, seeds):
    hits = preemptions = 0
    for seed in seeds:
        scheduler = play(model, seed)
        hits, preemptions = hits + scheduler.num_hit_tokens, preemptions + scheduler.num_preemptions
    return hits, preemptions


def test_every_logit_has_the_same_bits_however_it_is_scheduled(model):
    hits, preemptions = play_many(model, range(12))
    assert hits > 100 and preemptions > 0


@pytest.mark.slow
def test_every_logit_has_the_same_bits_in_500_schedules(model):
    hits, preemptions = play_many(model, range(1000, 1500))
    assert hits > 10_000 and preemptions > 50


def test_a_failing_forward_ends_its_own_request_alone(model):
    engine = make_engine(model)
    text = list(range(40))
    forward = engine.runner.forward

    def fails(batch):
        if any(item.token_ids[40] == 99 for item in batch.sequences if item.end > 40):
            raise MemoryError("planted")
        return forward(batch)

    engine.runner.forward = fails
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = engine.generate([[*text, 99], [*text, 7], [*text, 8]], params)
    assert outputs[0].outputs[0].finish_reason == "error" and "planted" in outputs[0].outputs[0].error
    fine = make_engine(model, "null").generate([[*text, 7], [*text, 8]], params)
    assert [o.outputs[0].token_ids for o in outputs[1:]] == [o.outputs[0].token_ids for o in fine]
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0


def test_sampling_is_the_requests_own(model):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    alone = make_engine(model).generate(["hello there"], params)[0]
    crowd = make_engine(model).generate(["hello there", "hello you", "what"], params)[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in crowd.outputs]
    assert len({tuple(o.token_ids) for o in alone.outputs}) == 3
    later = SamplingParams(temperature=1.0, seed=6, max_tokens=6, ignore_eos=True)
    assert make_engine(model).generate(["hello there"], later)[0].outputs[0].token_ids == alone.outputs[1].token_ids


def test_stops(model):
    engine = make_engine(model)
    free = engine.generate(["abc"], SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True))[0].outputs[
        0
    ]
    token = free.token_ids[3]
    first = free.token_ids.index(token)
    stopped = engine.generate(
        ["abc"], SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, stop_token_ids=(token,))
    )[0].outputs[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: first + 1]
    text = free.text
    stop = text[4:6]
    cut = engine.generate(["abc"], SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, stop=stop))[
        0
    ].outputs[0]
    assert cut.finish_reason == "stop" and cut.text == text[: text.index(stop)]
    told = engine.generate(["abc"], SamplingParams(max_tokens=3, logprobs=4))[0].outputs[0]
    assert len(told.logprobs) == 3 and all(len(one.top) == 4 for one in told.logprobs)
    assert all(one.chosen == max(one.top.values()) for one in told.logprobs)


def test_streams_and_leaving_one(model):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    whole = make_engine(model).generate(["abcdef"], params)[0].outputs[0]
    seen = list(engine.stream("abcdef", params))
    assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3, 4, 5]
    assert seen[-1].outputs[0].token_ids == whole.token_ids
    for output in engine.stream("abcdef", params):
        if len(output.outputs[0].token_ids) == 2:
            break
    assert not engine.has_unfinished_requests
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0


def test_streams_of_coroutines(model):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    async def read(prompt):
        return [output async for output in engine.stream_async(prompt, params)][-1]

    async def leave(prompt):
        async for _ in engine.stream_async(prompt, params):
            break

    async def all_of_them():
        return await asyncio.gather(read("abc"), read("abd"), leave("abe"), read("xyz"))

    outputs = asyncio.run(all_of_them())
    while engine.has_unfinished_requests:
        engine.step()
    alone = make_engine(model, "null").generate(["abc", "abd", "xyz"], params)
    served = [outputs[0], outputs[1], outputs[3]]
    assert [o.outputs[0].token_ids for o in served] == [o.outputs[0].token_ids for o in alone]


@dataclass
class Bad:
    prompt: object
    options: dict
    message: str


@pytest.mark.parametrize(
    "bad",
    [
        Bad([], {}, "at least one token"),
        Bad([1, 999_999], {}, "999999"),
        Bad([1, -3], {}, "-3"),
        Bad([1.5], {}, "1.5"),
        Bad(list(range(256)) * 2, {}, "512"),
        Bad(list(range(200)) * 2, {"max_tokens": 80}, "pool"),
        Bad(5, {}, "a text, token ids or messages"),
        Bad(None, {}, "a text, token ids or messages"),
    ],
)
def test_what_cannot_be_served_is_refused_and_disturbs_nothing(model, bad):
    engine = make_engine(model, num_blocks=20)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first = engine.add_request("abc", params)
    generation = engine.generation(first)
    engine.step()
    with pytest.raises(ValueError, match=bad.message):
        engine.add_request(bad.prompt, SamplingParams(**{"max_tokens": 8, **bad.options}))
    with pytest.raises(ValueError, match="not in use"):
        engine.add_request("abc", request_id=first)
    while engine.has_unfinished_requests:
        engine.step()
    assert generation.output().outputs[0].finish_reason == "length"


def test_metrics_are_in_order(model):
    engine = make_engine(model)
    output = engine.generate(["abc"], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    metrics = output.metrics
    times = [metrics.arrival_s, metrics.first_scheduled_s, metrics.first_token_s, *metrics.token_times_s[1:]]
    assert times == sorted(times) and len(metrics.token_times_s) == 5
    assert metrics.finished_s >= metrics.token_times_s[-1] and np.isfinite(times).all()


def test_a_namespace_that_is_none_is_refused_on_arrival(model):
    engine = make_engine(model)
    with pytest.raises(ValueError, match="namespace"):
        engine.add_request("abc", namespace="tenant")
    with pytest.raises(ValueError, match="sampling_params"):
        engine.add_request("abc", {"max_tokens": 3})
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(("cache", "block_size"), [("radix", 16), ("radix", 1), ("flat_hash", 16)])
@pytest.mark.parametrize("interrupted", [1, 3, 4])
def test_an_interrupted_step_leaves_nothing_behind(model, cache, block_size, interrupted):
    engine = make_engine(model, cache, block_size, num_blocks=128)
    engine.runner.k_cache.fill_(3.0)
    engine.runner.v_cache.fill_(3.0)
    forward, count = engine.runner.forward, [0]

    def interrupts(batch):
        count[0] += 1
        if count[0] == interrupted:
            raise KeyboardInterrupt
        return forward(batch)

    engine.runner.forward = interrupts
    prompt, params = list(range(100, 130)), SamplingParams(max_tokens=10, ignore_eos=True)
    generation = engine.generation(engine.add_request(prompt, params))
    num_interrupts = 0
    while engine.has_unfinished_requests:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            engine.scheduler.manager.check()
    wanted = make_engine(model, "null").generate([prompt], params)[0].outputs[0].token_ids
    assert num_interrupts == 1 and generation.output().outputs[0].token_ids == wanted
    warm = engine.generate([prompt + wanted[:5]], params)[0]
    assert warm.num_cached_tokens >= 30 - block_size
    assert warm.outputs[0].token_ids[:5] == wanted[5:]


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_neighbours_failure_ends_no_request_whose_prompt_is_cached(model, block_size):
    engine = make_engine(model, "radix", block_size, num_blocks=128)
    prompt, params = list(range(32)), SamplingParams(max_tokens=4, ignore_eos=True)
    wanted = engine.generate([prompt], params)[0].outputs[0].token_ids
    forward = engine.runner.forward

    def fails(batch):
        if any(item.token_ids[0] == 200 for item in batch.sequences):
            raise MemoryError("planted")
        return forward(batch)

    engine.runner.forward = fails
    outputs = [o.outputs[0] for o in engine.generate([prompt, [201, 1, 2], [200, 1, 2], prompt], params)]
    assert [o.finish_reason for o in outputs] == ["length", "length", "error", "length"]
    assert outputs[0].token_ids == outputs[3].token_ids == wanted


@pytest.mark.parametrize("n", [1, 3])
def test_logits_that_are_no_numbers_end_their_own_request(model, n):
    engine = make_engine(model)
    forward = engine.runner.forward

    def poisons(batch):
        logits = forward(batch).clone()
        wanted = [item for item in batch.sequences if item.needs_logits]
        for row, item in enumerate(wanted):
            if item.token_ids[0] == 200:
                logits[row, 5] = float("nan")
        return logits

    engine.runner.forward = poisons
    params = [SamplingParams(n=n, temperature=1.0, seed=i, max_tokens=4, ignore_eos=True) for i in range(3)]
    prompts = [[1, 2, 3], [200, 2, 3], [4, 5, 6]]
    outputs = engine.generate(prompts, params)
    assert all(o.finish_reason == "error" and "NaN" in o.error for o in outputs[1].outputs)
    fine = make_engine(model, "null").generate([prompts[0], prompts[2]], [params[0], params[2]])
    for mine, alone in zip((outputs[0], outputs[2]), fine, strict=True):
        assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in alone.outputs]
    assert not engine.has_unfinished_requests and engine.scheduler.manager.sizes.pinned == 0


def test_a_copy_that_fails_at_a_fork_ends_its_own_request(model):
    engine = make_engine(model)

    def fails(copies):
        raise MemoryError("planted")

    engine.runner.copy, copy = fails, engine.runner.copy
    forward = engine.runner.forward

    def forwards(batch):
        engine.runner.copy = copy
        try:
            return forward(batch)
        finally:
            engine.runner.copy = fails

    engine.runner.forward = forwards
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    many = SamplingParams(n=3, max_tokens=3, ignore_eos=True)
    outputs = engine.generate(["abcd", "xyz"], [many, params])
    assert [o.finish_reason for o in outputs[0].outputs] == ["error"] * 3
    assert outputs[1].outputs[0].finish_reason == "length"
    assert not engine.has_unfinished_requests and engine.scheduler.manager.sizes.private == 0


def test_an_abort_means_the_request_it_was_said_of(model):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.abort("x")
    engine.add_request("abc", params, request_id="x")
    generation = engine.generation("x")
    while engine.has_unfinished_requests:
        engine.step()
    assert generation.output().outputs[0].finish_reason == "length"
    engine.add_request("abc", params, request_id="y")
    generation = engine.generation("y")
    engine.abort("y")
    stats = engine.step()
    assert generation.output().outputs[0].finish_reason == "abort" and stats.num_finished == 1


def test_a_stream_never_takes_text_back(model):
    engine = make_engine(model)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    text = engine.generate(["abc"], params)[0].outputs[0].text
    stop = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, stop=text[4:7])
    shown = [output.outputs[0].text for output in engine.stream("abc", stop)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert shown[-1] == text[: text.index(text[4:7])]


def test_cancelled_coroutines_leave_the_others_alone(model):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [f"prompt {i}" for i in range(5)]
    wanted = [o.outputs[0].token_ids for o in make_engine(model, "null").generate(prompts, params)]
    for seed in range(4):
        engine = make_engine(model)
        rng = random.Random(seed)

        async def read(prompt, engine=engine):
            return [output async for output in engine.stream_async(prompt, params)][-1].outputs[0].token_ids

        async def all_of_them(read=read, rng=rng):
            tasks = [asyncio.create_task(read(prompt)) for prompt in prompts]
            await asyncio.sleep(rng.random() * 0.02)
            gone = rng.randrange(5)
            tasks[gone].cancel()
            return gone, await asyncio.gather(*tasks, return_exceptions=True)

        gone, results = asyncio.run(all_of_them())
        for index, result in enumerate(results):
            if not isinstance(result, asyncio.CancelledError):
                assert result == wanted[index], (seed, gone, index)
        while engine.has_unfinished_requests:
            engine.step()
        assert engine.scheduler.manager.sizes.pinned == 0


def test_a_part_belongs_to_one_owner(model):
    """Block ids of one pool say nothing in another: what a second engine would serve, it never computed."""
    cache = RadixCache(16)
    engine = make_engine(model, cache)
    manager, scheduler, runner = engine.scheduler.manager, engine.scheduler, engine.runner
    with pytest.raises(ValueError, match="cache: expected one that nothing else uses, got the RadixCache of another"):
        KVManager(cache, 64)
    with pytest.raises(ValueError, match="manager: expected one that nothing else uses"):
        Scheduler(manager)
    with pytest.raises(ValueError, match="scheduler: expected one that nothing else uses"):
        Engine(Runner(model, num_blocks=64, block_size=16, deterministic=True), scheduler)
    with pytest.raises(ValueError, match="runner: expected one that nothing else uses"):
        Engine(runner, Scheduler(KVManager(RadixCache(16), 64)))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))  # all of it goes on working


def test_limits_that_are_refused_leave_the_cache_free():
    cache = RadixCache(16)
    with pytest.raises(ValueError, match="order: expected one of"):
        Engine.from_pretrained("tiny_gpt", cache=cache, scheduler=SchedulerConfig(order="shortest"), num_blocks=60)
    Engine.from_pretrained("tiny_gpt", cache=cache, num_blocks=60)


def test_a_cache_that_holds_blocks_of_another_pool_is_refused():
    cache = RadixCache(4)
    lease = cache.acquire(range(8))
    cache.insert(lease, range(8), [0, 1])
    cache.commit()
    with pytest.raises(ValueError, match="cache: expected one that holds nothing, got 2 blocks of another pool"):
        KVManager(cache, 64)


@pytest.mark.parametrize(("num_blocks", "block_size", "message"), [(63, 16, "num_blocks 64"), (64, 8, "block_size 16")])
def test_a_pool_that_is_not_the_runners_is_refused(model, num_blocks, block_size, message):
    runner = Runner(model, num_blocks=64, block_size=16, deterministic=True)
    with pytest.raises(ValueError, match=f"scheduler: expected a pool with {message}, the runner's"):
        Engine(runner, Scheduler(KVManager(RadixCache(block_size), num_blocks)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "radix"}, "cache: expected a CacheConfig or a PrefixCache, got 'radix'"),
        ({"cache": CacheConfig("flat")}, "cache: expected one of null, flat_hash, radix, got 'flat'"),
        ({"scheduler": {"order": "fcfs"}}, "scheduler: expected a SchedulerConfig, got {'order': 'fcfs'}"),
        ({"cache": CacheConfig(num_blocks=8), "num_blocks": 9}, "num_blocks: expected None, as CacheConfig"),
    ],
)
def test_what_is_no_configuration_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained("tiny_gpt", **options)


def test_the_pool_is_of_the_size_that_the_configuration_or_the_argument_says():
    for options in ({"cache": CacheConfig(num_blocks=8)}, {"num_blocks": 8}, {"cache": RadixCache(4), "num_blocks": 8}):
        engine = Engine.from_pretrained("tiny_gpt", **options)
        assert engine.runner.num_blocks == engine.scheduler.manager.sizes.num_blocks == 8


def test_a_detokenizer_that_fails_at_the_end_loses_no_other_abort(model):
    engine = make_engine(model)
    made, make = [], engine.tokenizer.detokenizer

    class Broken:
        def push(self, token_id):
            return ""

        def finish(self):
            raise RuntimeError("planted")

    engine.tokenizer.detokenizer = lambda: Broken() if not made.append(0) and len(made) == 1 else make()
    names = [engine.add_request([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True)) for _ in range(3)]
    kept = [engine.generation(name) for name in names]
    engine.step()
    for name in names:
        engine.abort(name)
    engine.step()
    assert not engine.has_unfinished_requests and not engine.generations
    outputs = [generation.output().outputs[0] for generation in kept]
    assert [output.finish_reason for output in outputs] == ["abort"] * 3
    assert "planted" in outputs[0].error and outputs[1].error is None


def test_a_stop_whose_text_fails_is_an_error(model):
    engine = make_engine(model)

    class Broken:
        def push(self, token_id):
            return ""

        def finish(self):
            raise RuntimeError("planted")

    engine.tokenizer.detokenizer = Broken
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.outputs[0].finish_reason == "error" and "planted" in output.outputs[0].error

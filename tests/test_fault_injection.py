"""Faults planted where they can happen in an engine with a real model: every other request keeps its bits."""

import asyncio
import random
import threading

import pytest
import torch

from radixkv.engine import engine as engine_module
from radixkv.engine.generation import Sample
from radixkv.engine.model import transformer
from radixkv.scheduling.request import SamplingParams
from tests.engine.test_engine import make_engine, tiny_model

SHARED = [(7 * i) % 251 for i in range(37)]  # no whole number of blocks: partial matches are copied
PROMPTS = [[*SHARED[: 20 + 4 * i], 200 + i, i] for i in range(5)]
PARAMS = [
    SamplingParams(n=n, temperature=temperature, seed=i, max_tokens=6, ignore_eos=True)
    for i, (n, temperature) in enumerate([(1, 0.0), (1, 1.0), (3, 1.0), (1, 0.7), (1, 0.0)])
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def wanted(model):
    """What each request gets alone, without a cache: tokens and the logits behind them."""
    every = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine = make_engine(model, "null")
        output = engine.generate([prompt], params)[0]
        every.append(([one.token_ids for one in output.outputs], {key[1:]: row for key, row in engine.logits.items()}))
    return every


def served(engine, wanted, may_fail=()):
    """Serves all requests, some of them twice; one that may not fail has the bits that it has alone."""
    generations = []
    for round_of in range(2):
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            name = f"{round_of}-{index}"
            engine.add_request(prompt, params, request_id=name)
            generations.append((name, index, engine.generation(name)))
            engine.step()
    for _ in range(500):
        if not engine.has_unfinished_requests:
            break
        engine.step()
    assert not engine.has_unfinished_requests
    failed = []
    for name, index, generation in generations:
        outputs = generation.output().outputs
        if any(output.finish_reason == "error" for output in outputs):
            failed.append(index)
            continue
        assert [output.token_ids for output in outputs] == wanted[index][0]
        for (request_id, sample, position), row in engine.logits.items():
            if request_id == name:
                assert torch.equal(row, wanted[index][1][sample, position]), (name, sample, position)
    assert set(failed) <= set(may_fail)
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0 and sizes.num_blocks == engine.runner.num_blocks
    return failed


def every_nth(call, n, error, when=lambda *_: True):
    """The call, but each nth time it raises."""
    count = [0]

    def planted(*arguments, **options):
        if when(*arguments):
            count[0] += 1
            if count[0] % n == 0:
                raise error
        return call(*arguments, **options)

    planted.count = count
    return planted


CACHES = [("radix", 16), ("radix", 1), ("radix", 3), ("flat_hash", 16)]


@pytest.mark.parametrize(("cache", "block_size"), CACHES)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), RuntimeError("planted")])
def test_a_layer_that_fails_for_a_batch(model, wanted, monkeypatch, cache, block_size, error):
    """In any layer, after the layers before have written their KV; the batch fails, alone each is fine."""
    engine = make_engine(model, cache, block_size, num_blocks=-(-512 // block_size))
    for n in (2, 3, 5):  # the second layer, the first, and where it falls
        planted = every_nth(transformer.store_kv, n, error, when=lambda *a: len(engine.scheduler.batch) > 1)
        with monkeypatch.context() as patch:
            patch.setattr(transformer, "store_kv", planted)
            assert served(engine, wanted) == []
        assert planted.count[0] >= n
        engine.logits.clear()
    assert engine.metrics.num_failed_steps > 3


@pytest.mark.parametrize(("cache", "block_size"), CACHES)
def test_sampling_that_fails_for_a_batch(model, wanted, monkeypatch, cache, block_size):
    engine = make_engine(model, cache, block_size, num_blocks=-(-512 // block_size))
    sample_tokens = engine_module.sample_tokens
    count = [0]

    def fails(logits, params, numbers):
        tokens = sample_tokens(logits, params, numbers)
        count[0] += 1
        if len(params) > 1 and count[0] % 2:
            raise MemoryError("planted")
        return tokens

    monkeypatch.setattr(engine_module, "sample_tokens", fails)
    assert served(engine, wanted) == [] and count[0] > 5


def test_an_interruption_while_sampling(model, wanted, monkeypatch):
    engine = make_engine(model)
    planted = every_nth(engine_module.sample_tokens, 3, KeyboardInterrupt())
    monkeypatch.setattr(engine_module, "sample_tokens", planted)
    step, count = engine.step, [0]

    def steps():
        try:
            return step()
        except KeyboardInterrupt:
            count[0] += 1

    engine.step = steps
    assert served(engine, wanted) == [] and count[0] > 3


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("n", [2, 3])
def test_the_copy_of_a_partial_block_that_fails(model, wanted, block_size, n):
    """A step whose copy fails is run again; at a fork (request 2) the request ends, and no other notices."""
    engine = make_engine(model, "radix", block_size, num_blocks=-(-512 // block_size))
    planted = every_nth(engine.runner.copy, n, torch.OutOfMemoryError("planted"), when=lambda copies: len(copies) > 0)
    engine.runner.copy = planted
    served(engine, wanted, may_fail=[2])
    assert planted.count[0] >= 2 * n and engine.metrics.num_failed_steps > 0


def test_a_detokenizer_that_fails_ends_its_own_request(model, wanted):
    engine = make_engine(model)
    detokenizer = engine.tokenizer.detokenizer
    broken = [0]

    class Broken:
        def push(self, token_id):
            raise RuntimeError("planted")

        finish = push

    def made():
        broken[0] += 1
        return Broken() if broken[0] == 2 else detokenizer()

    engine.tokenizer.detokenizer = made
    try:
        assert served(engine, wanted, may_fail=[1]) == [1]
    finally:
        engine.tokenizer.detokenizer = detokenizer


def test_an_abort_that_comes_too_late(model, wanted):
    """Said while the request's last step ran, it is not meant for the next request of that id."""
    engine = make_engine(model)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=1), request_id="x")
    engine.on_logits = lambda sequence, row: engine.abort("x")
    engine.step()
    engine.on_logits = None
    engine.add_request(PROMPTS[0], PARAMS[0], request_id="x")
    generation = engine.generation("x")
    while engine.has_unfinished_requests:
        engine.step()
    assert [output.token_ids for output in generation.output().outputs] == wanted[0][0]


def test_an_interrupted_abort_is_not_forgotten(model, wanted, monkeypatch):
    """Neither is the one behind it; the request beside them gives the tokens that it would have given."""
    engine = make_engine(model)
    for index in range(3):
        engine.add_request(PROMPTS[index], PARAMS[index], request_id=str(index))
    kept = [engine.generation(str(index)) for index in range(3)]
    engine.step()
    monkeypatch.setattr(Sample, "end", every_nth(Sample.end, 1, MemoryError("planted")))
    engine.abort("0")
    engine.abort("2")
    with pytest.raises(MemoryError, match="planted"):
        engine.step()
    monkeypatch.undo()
    while engine.has_unfinished_requests:
        engine.step()
    assert [kept[index].output().outputs[0].finish_reason for index in range(3)] == ["abort", "length", "abort"]
    assert [output.token_ids for output in kept[1].output().outputs] == wanted[1][0]


def test_cancellation_at_every_await(model, wanted):
    """One of three streams is cancelled after k turns of the loop, for every k until it ends by itself."""

    async def read(engine, index, seen):
        async for output in engine.stream_async(PROMPTS[index], PARAMS[index]):
            seen[index] = output

    async def play(engine, turns):
        seen = {}
        tasks = [asyncio.create_task(read(engine, index, seen)) for index in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
            if tasks[1].done():
                break
        was_over = tasks[1].done()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return was_over, seen

    cancelled = 0
    for turns in [*range(12), 20, 40, 80, 200, 1000, 100_000]:
        engine = make_engine(model)
        was_over, seen = asyncio.run(play(engine, turns))
        for index in (0, 2):
            assert [output.token_ids for output in seen[index].outputs] == wanted[index][0], turns
        while engine.has_unfinished_requests:
            engine.step()
        sizes = engine.scheduler.manager.sizes
        assert sizes.private == sizes.pinned == 0 and not engine.generations
        cancelled += not was_over
    assert cancelled >= 12 and was_over


def test_one_thread_steps_and_others_add_abort_reset_and_scrape(model, wanted):
    """What the engine's docstring says may be called from any thread, all at once."""
    engine = make_engine(model, num_blocks=200)
    done, errors = threading.Event(), []
    kept = {}

    def client(seed):
        rng = random.Random(seed)
        try:
            for turn in range(12):
                index = rng.randrange(5)
                name = engine.add_request(PROMPTS[index], PARAMS[index], request_id=f"{seed}-{turn}")
                generation = engine._known(name)  # None where it has ended already
                if rng.random() < 0.3:
                    engine.abort(name)
                elif generation is not None:
                    kept[name] = (index, generation)
                if rng.random() < 0.3:
                    engine.reset_cache()
                engine.metrics.text()
        except Exception as error:
            errors.append(error)

    def drive():
        try:
            while not done.is_set() or engine.has_unfinished_requests:
                engine.step()
        except Exception as error:
            errors.append(error)

    driver = threading.Thread(target=drive)
    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(3)]
    for thread in (driver, *clients):
        thread.start()
    for thread in clients:
        thread.join()
    done.set()
    driver.join(60)
    assert not driver.is_alive() and not errors
    for index, generation in kept.values():
        assert [output.token_ids for output in generation.output().outputs] == wanted[index][0]
    assert len(kept) > 10
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0

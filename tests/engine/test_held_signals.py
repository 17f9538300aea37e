"""Real signals, sent at chosen places: held where lines belong together, let through where a call is long."""

import os
import signal
import threading

import pytest

from radixkv.blocks import kv_manager
from radixkv.cache.radix.cache import RadixCache
from radixkv.engine import held_signals
from radixkv.engine.held_signals import HeldSignals
from radixkv.scheduling.request import SamplingParams
from tests.test_isolation import PROMPT, shadow_engine


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_are_as_before():
    # A job in the background of a shell starts with the signal ignored; these tests are of Python's own handler.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    try:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)


def test_held_until_the_block_ends():
    done = []
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        interrupt()
        done.append("the rest of the block")
    assert done


def test_let_through_first_what_waited():
    with HeldSignals() as signals:
        interrupt()
        with pytest.raises(KeyboardInterrupt), signals.let_through():
            pytest.fail("what waited comes before the call begins")
        with pytest.raises(KeyboardInterrupt), signals.let_through():
            interrupt()
        with signals.let_through():
            pass  # nothing waits any more


def test_nested_blocks_hold_to_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        with HeldSignals():
            interrupt()
        done.append("after the inner one")
    assert done


def test_an_error_of_the_block_and_a_signal():
    with pytest.raises(KeyboardInterrupt) as caught, HeldSignals():
        interrupt()
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_block_that_was_left_without_its_end_holds_nothing():
    """As a debugger or a tracer can leave it."""

    def leave():
        HeldSignals().__enter__()

    leave()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_other_threads_and_other_handlers_are_left_alone(monkeypatch):
    seen = []

    def in_thread():
        with HeldSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with HeldSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, handler)


PLACES = {
    "in the allocator": (kv_manager.BlockAllocator, "take"),
    "in the manager": (kv_manager.KVManager, "publish"),
    "in the cache": (RadixCache, "insert"),
    "at commit": (kv_manager.KVManager, "commit"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_ctrl_c_in_a_step_keeps_what_is_cached(monkeypatch, place):
    """It comes where nothing is half done, and costs one step at most."""
    engine = shadow_engine(RadixCache(4))
    for _ in range(2):
        engine.add_request(PROMPT, SamplingParams(max_tokens=9))
    engine.step()
    owner, name = PLACES[place]
    call, count = getattr(owner, name), [0]

    def interrupted(self, *arguments, **options):
        count[0] += 1
        if count[0] == 1:
            interrupt()
        return call(self, *arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)
    generations = list(engine.generations.values())
    num_interrupts = 0
    while engine.has_unfinished_requests:
        before = sum(generation.num_tokens for generation in generations)
        try:
            engine.step()
        except KeyboardInterrupt:  # after the step, or before its forward pass: then it is withdrawn
            num_interrupts += 1
        else:
            assert sum(generation.num_tokens for generation in generations) > before
        engine.scheduler.manager.check()
    assert num_interrupts == 1
    assert engine.scheduler.manager.cache.peek(PROMPT) == len(PROMPT)


def test_a_ctrl_c_while_generate_runs_aborts_its_requests():
    engine = shadow_engine(RadixCache(4))
    other = engine.generation(engine.add_request(PROMPT, SamplingParams(max_tokens=20)))
    forward, count = engine.runner.forward, [0]

    def interrupted(batch):
        count[0] += 1
        if count[0] == 4:
            interrupt()
        return forward(batch)

    engine.runner.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, PROMPT[:20]], SamplingParams(max_tokens=50))
    assert list(engine.generations.values()) == [other]
    while engine.has_unfinished_requests:
        engine.step()
    assert other.num_tokens == 20
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0


@pytest.mark.parametrize("place", range(1, 5))
def test_what_fails_while_signals_are_taken_gives_them_back(monkeypatch, place):
    before = {number: signal.getsignal(number) for number in held_signals.HELD}
    left, getsignal = place, held_signals._signal.getsignal

    def fails(number):
        nonlocal left
        left -= 1
        if not left:
            raise MemoryError("planted")
        return getsignal(number)

    with monkeypatch.context() as patched:
        patched.setattr(held_signals._signal, "getsignal", fails)
        with pytest.raises(MemoryError), HeldSignals():
            raise AssertionError("not reached")
    assert {number: signal.getsignal(number) for number in held_signals.HELD} == before

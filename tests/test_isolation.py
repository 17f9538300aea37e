"""No request reads the KV of another namespace, and what the clock tells one tenant of another's prompts."""

import numpy as np
import pytest

from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import LoRA, Media, Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.engine.engine import Engine
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.engine.test_engine import make_engine, tiny_model
from tests.sampling import few
from tests.shadow_engine import ShadowRunner

CACHES = {
    "radix": RadixCache,
    "radix whole": lambda block_size: RadixCache(block_size, partial_blocks=False),
    "flat_hash": FlatHashCache,
}
PROMPT = [(i * i) % 7 for i in range(48)]
ONE = SamplingParams(max_tokens=1)


def shadow_engine(cache, num_blocks=200, **limits):
    manager = KVManager(cache, num_blocks)
    scheduler = Scheduler(manager, SchedulerConfig(**limits))
    return Engine(ShadowRunner(scheduler), scheduler)


def hits(engine, namespace=None, tokens=PROMPT):
    """Serves a request to its end; returns how many of its tokens were found."""
    name = engine.add_request(tokens, ONE, namespace=namespace)
    generation = engine.generation(name)
    while engine.has_unfinished_requests:
        engine.step()
    engine.scheduler.manager.check()
    assert generation.output().outputs[0].finish_reason == "length"
    return generation.num_cached_tokens


@pytest.fixture(params=CACHES)
def engine(request):
    return shadow_engine(CACHES[request.param](4))


EACH = [
    None,
    Salt("a"),
    Salt("b"),
    LoRA("a"),
    LoRA("b"),
    LoRA("a", path="elsewhere"),
    LoRA("a", version=1),
    Media("a", 0, 8),
    Media("b", 0, 8),
    (LoRA("a"), Salt("a")),
    (LoRA("a"), Salt("b")),
]


def test_namespaces_are_typed_and_share_nothing_but_within_themselves(engine):
    """A salt named as an adapter, an adapter of another version or path, and pairs of both share nothing."""
    assert [hits(engine, namespace) for namespace in EACH] == [0] * len(EACH)
    assert all(hits(engine, namespace) >= 44 for namespace in EACH)
    assert hits(engine, (Salt("a"), LoRA("a"))) >= 44  # in whatever order they are given


def test_an_adapter_reloaded_under_its_name_finds_nothing(engine):
    hits(engine, LoRA("x", version=1))
    assert hits(engine, LoRA("x", version=1)) >= 44
    assert hits(engine, LoRA("x", version=2)) == 0
    # A caller that keeps no versions resets.
    stats = engine.reset_cache(LoRA("x", version=1))
    assert stats.num_freed_blocks >= 12 and stats.num_pinned_blocks == stats.num_stale_sequences == 0
    assert hits(engine, LoRA("x", version=1)) == 0
    assert hits(engine, LoRA("x", version=2)) >= 44


def test_a_shared_system_prompt_and_private_tails(engine):
    """A salt from token 20 on: what stands before is shared by all."""
    assert hits(engine, Salt("a", start=20)) == 0
    assert hits(engine, Salt("b", start=20)) == 20
    assert hits(engine, Salt("a", start=20)) >= 44
    assert hits(engine) == 20
    # In the middle of a block: the radix tree shares to the token, the flat hash whole blocks.
    partial = engine.scheduler.manager.cache.partial_blocks
    assert hits(engine, Salt("c", start=22)) == (22 if partial else 20)


def test_an_image_parts_what_stands_behind_it_alone(engine):
    assert hits(engine, Media("cat", 12, 8)) == 0
    assert hits(engine, Media("dog", 12, 8)) == 12
    assert hits(engine, Media("cat", 12, 8)) >= 44


def test_a_reset_of_one_tenant_leaves_the_others(engine):
    for namespace in (None, Salt("a", start=20), Salt("b", start=20), (LoRA("x"), Salt("a"))):
        hits(engine, namespace)
    engine.reset_cache(Salt("a"))  # wherever it starts
    engine.scheduler.manager.check()
    cache = engine.scheduler.manager.cache
    assert cache.peek(PROMPT, Salt("a", start=20)) <= 20 and cache.peek(PROMPT, (LoRA("x"), Salt("a"))) == 0
    assert hits(engine, Salt("a", start=20)) == 20
    assert hits(engine, (LoRA("x"), Salt("a"))) == 0
    assert hits(engine, Salt("b", start=20)) >= 44 and hits(engine) >= 44
    engine.reset_cache((Salt("b"), LoRA("x")))  # what depends on either
    assert hits(engine, Salt("b", start=20)) == 20 and hits(engine, (LoRA("x"), Salt("a"))) == 0
    with pytest.raises(ValueError, match="namespace"):
        engine.reset_cache("a")


@pytest.mark.parametrize("namespace", [None, Salt("a")])
def test_a_reset_while_requests_run(engine, namespace):
    """A running request goes on with what it has and gives the same tokens; nothing of it is found afterwards."""
    params = SamplingParams(max_tokens=30)
    long = engine.generation(engine.add_request(PROMPT, params, namespace=Salt("a")))
    many = engine.generation(engine.add_request(PROMPT, SamplingParams(max_tokens=30, n=3), namespace=Salt("a")))
    for _ in range(6):
        engine.step()
    stats = engine.reset_cache(namespace)
    assert stats.num_stale_sequences == 4 and stats.num_pinned_blocks >= 12
    engine.scheduler.manager.check()
    assert engine.scheduler.manager.cache.peek(PROMPT, Salt("a")) == 0
    late = engine.generation(engine.add_request(PROMPT, params, namespace=Salt("a")))
    while engine.has_unfinished_requests:
        engine.step()
        engine.scheduler.manager.check()
    assert late.num_cached_tokens == 0
    tokens = long.output().outputs[0].token_ids
    assert len(tokens) == 30 and late.output().outputs[0].token_ids == tokens
    assert [output.token_ids for output in many.output().outputs] == [tokens] * 3
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0
    assert hits(engine, Salt("a")) >= 44  # of the late one


@pytest.mark.parametrize("name", CACHES)
def test_a_fork_of_who_ran_before_a_reset_is_not_found_either(name):
    engine = shadow_engine(CACHES[name](4), max_num_batched_tokens=16)
    scheduler = engine.scheduler
    many = engine.generation(engine.add_request(PROMPT, SamplingParams(max_tokens=30, n=3)))
    engine.step()
    engine.reset_cache()  # in the middle of its prompt, before it is forked
    while not many.is_finished:
        engine.step()
        scheduler.manager.check()
    text = PROMPT + many.samples[0].token_ids
    assert scheduler.manager.cache.peek(text) == 0
    assert hits(engine, None, text) == 0


def sha256_cbor(block_size):
    return FlatHashCache(block_size, hash_algorithm="sha256_cbor")


@pytest.mark.parametrize("make", [RadixCache, sha256_cbor])
def test_what_a_reset_tells_subscribers(make):
    """A subscriber of the events knows what is cached, after resets of a tenant and of all."""
    cache, held, told = make(4), set(), []
    engine = shadow_engine(cache)

    def follow(number, event):
        told.append(type(event))
        if isinstance(event, BlockStored):
            assert not held & set(event.block_hashes)
            held.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            held.difference_update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            held.clear()

    cache.subscribe(follow)
    hits(engine)
    before = set(held)
    hits(engine, Salt("a"))
    running = engine.generation(engine.add_request(PROMPT, SamplingParams(max_tokens=8), namespace=Salt("a")))
    engine.step()
    engine.reset_cache(Salt("a"))
    assert held == before and told[-1] is BlockRemoved
    engine.reset_cache()
    assert held == set() and told[-1] is AllBlocksCleared
    num_told = len(told)
    while not running.is_finished:
        engine.step()
    assert len(told) == num_told  # nothing that ran before the reset is announced
    hits(engine)
    assert held == before


def test_a_reset_in_the_middle_of_a_step_is_refused(engine):
    manager = engine.scheduler.manager
    engine.add_request(PROMPT, ONE)
    engine._take_in()
    engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match="reset"):
        manager.reset()
    engine.scheduler.withdraw()
    manager.reset()
    manager.check()


def test_hashes_that_can_be_made_to_collide_are_accepted_only_in_so_many_words():
    for weak in ({"hash_algorithm": "xxhash"}, {"hash_algorithm": "xxhash_cbor"}, {"digest_bits": 64}):
        with pytest.raises(ValueError, match="accept_collisions"):
            FlatHashCache(16, **weak)
        FlatHashCache(16, accept_collisions=True, **weak)
        FlatHashCache(16, verify=True, **weak)
    cache = FlatHashCache(4, verify=True, digest_bits=2)
    engine = shadow_engine(cache, 400)
    for tenant in range(60):  # four digests for sixty tenants: every read is checked by the shadow runner
        assert hits(engine, Salt(str(tenant))) == 0
    assert cache.num_collisions > 50


def test_a_namespace_without_users_is_forgotten():
    """A tenant a request: what is kept of their names follows the pool, not the tenants ever seen."""
    cache = RadixCache(4)
    engine = shadow_engine(cache, 60)
    for tenant in range(2500):
        cache.peek(PROMPT, Salt(f"only asked {tenant}"))
        assert hits(engine, (LoRA("x"), Salt(str(tenant))), PROMPT[:9]) == 0
    assert len(cache._interner) < 60 + 1024 + 200
    assert len(cache._interner._pairs) < 60 + 1024 + 400  # ids are given again
    assert hits(engine, (LoRA("x"), Salt("2499")), PROMPT[:9]) == 8


@pytest.mark.parametrize("cache", few(["radix", "flat_hash"], 1))
def test_a_foreign_tenants_prefix_does_not_show_in_the_time_to_first_token(cache):
    """A tenant times prompts that another has cached, and prompts that none has, alternating; CPU time.

    A sign test on the pairs: were the two alike, each would be the faster in half of them; 33 of 40 or more, or 7 or
    fewer, has a chance of 4e-5. The same test on a prompt of its own must see the difference, or it would see nothing.
    """
    import time

    engine = make_engine(tiny_model(), cache, num_blocks=400)
    rng = np.random.default_rng(0)

    def first_token_s(prompt, tenant):
        engine.add_request(prompt, ONE, namespace=Salt(tenant))
        began = time.thread_time()
        engine.step()
        return time.thread_time() - began

    def num_faster(of_whom):
        faster = 0
        for _ in range(40):
            cached, unknown = rng.integers(0, 256, (2, 480)).tolist()
            first_token_s(cached, of_whom)
            pair = [(cached, 0), (unknown, 1)]
            rng.shuffle(pair)
            times = {which: first_token_s(prompt, "spy") for prompt, which in pair}
            faster += times[0] < times[1]
        return faster

    assert num_faster("spy") >= 33  # the test has the power
    assert 7 < num_faster("victim") < 33


def test_a_fork_whose_copy_failed_leaves_nothing_in_the_cache():
    """Its last block was never written, though the tokens that belong there are known."""
    engine = shadow_engine(RadixCache(16))
    prompt = PROMPT[:44]  # two blocks, and twelve tokens that a fork copies
    engine.runner.fails_once = None
    many = engine.generation(engine.add_request(prompt, SamplingParams(max_tokens=3, n=3)))
    copy = engine.runner.copy

    def fails(copies):
        if copies and many.has_started:
            raise MemoryError("planted in a copy")
        copy(copies)

    engine.runner.copy = fails
    engine.step()
    assert [sample.finish_reason for sample in many.samples] == ["error"] * 3
    engine.runner.copy = copy
    engine.scheduler.manager.check()
    assert hits(engine, None, [*prompt, 1, 2]) >= 32  # whatever is found was written: the shadow pool looks

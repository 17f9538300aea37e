"""Every public call with bad input: a ValueError that names something, and nothing is disturbed.

Never a crash of the interpreter, a hang, another kind of error, or a silent wrong number.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.contract import PartialBlock
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import LoRA, Media, Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies.cost import Cost
from radixkv.cache.radix.policies.probation import Probation
from radixkv.engine.engine import Engine
from radixkv.fleet.routing.policies import make_router
from radixkv.fleet.simulated import Fleet
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate.arrivals import ClosedLoop
from radixkv.simulate.cost_model import Roofline
from tests.shadow_engine import CACHES, VOCABULARY, ShadowRunner, expected

ANYTHING = st.sampled_from(
    [
        None,
        True,
        -1,
        2**31,
        2**63,
        10**30,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "tenant",
        "\ud800",
        b"",
        b"abc",
        b"\xff\xff\xff\xff",
        [],
        [[]],
        [[1, 2], [3]],
        [None],
        [1, None],
        [1.5],
        [float("nan")],
        [-1],
        [2**31],
        [2**70],
        ["a"],
        [True, False],
        [{}],
        [{"role": "user"}],
        [{"role": None, "content": None}],
        {},
        {1: 2},
        object(),
        range(3),
        iter([1, 2]),
        np.array(3),
        np.array([], np.float32),
        np.array([1, 2], np.float32),
        np.array([[1, 2]]),
        np.array([1, -2]),
        np.array([1, 2], np.int64)[::-1],
        np.array([1, 2**40]),
        np.array(["a", "b"]),
        np.array([None, 1], object),
        np.array([1, 2], np.uint64) + np.uint64(2**63),
        np.array([True, False]),
        np.array([1 + 2j]),
        torch.tensor([1, 2]),
        torch.tensor([1.0]),
        torch.tensor([[1]]),
        torch.tensor([1], device="meta"),
    ]
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
NAMESPACES = st.sampled_from(
    [
        "tenant",
        5,
        [Salt("a")],
        (Salt("a"), None),
        ((Salt("a"),),),
        Salt(5),
        Salt(None),
        Salt(["a"]),
        Salt("a", -1),
        Salt("a", 1.5),
        Salt("a", True),
        LoRA("a", path=[]),
        LoRA("a", path=None),
        LoRA("a", version="1"),
        LoRA("a", version=[1]),
        LoRA("a", version=float("nan")),
        Media("a", 0, 0),
        Media("a", 0, "3"),
        Media("a", 0, 1.5),
        Media("a", 0, None),
        Media("a", 0, True),
        Media(b"a", 0, 3),
        torch.tensor([1]),
        np.array([1]),
    ]
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def refused(call, *arguments, **options):
    """Calls; returns whether it was refused, in the one right way."""
    try:
        call(*arguments, **options)
    except ValueError as error:
        assert str(error) and len(str(error)) < 3000
        return True
    return False


def busy_engine():
    """An engine in the middle of something, and the request it must not forget."""
    scheduler = Scheduler(KVManager(CACHES["radix"](3), 60))
    engine = Engine(ShadowRunner(scheduler), scheduler)
    generation = engine.generation(engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=5)))
    engine.step()
    return engine, generation


def undisturbed(engine, generation):
    for _ in range(200):
        if not engine.has_unfinished_requests:
            break
        engine.step()
        engine.scheduler.manager.check()
    tokens = generation.output().outputs[0].token_ids
    assert tokens == expected([1, 2, 3, 4, 5], None, SamplingParams(max_tokens=5))[0]
    sizes = engine.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0


@FUZZ
@given(prompt=ANYTHING, params=ANYTHING, request_id=ANYTHING, namespace=ANYTHING | NAMESPACES, which=st.integers(0, 3))
def test_requests(prompt, params, request_id, namespace, which):
    engine, generation = busy_engine()
    arguments = {"prompt": [1, 2, 3], "sampling_params": SamplingParams(), "request_id": "x", "namespace": None}
    name = list(arguments)[which]
    arguments[name] = (prompt, params, request_id, namespace)[which]
    was_refused = refused(engine.add_request, **arguments)
    if name == "sampling_params" and params is not None:
        assert was_refused
    refused(engine.reset_cache, namespace)
    for call in (engine.abort, lambda name: engine.has_unfinished_requests):
        refused(call, request_id if isinstance(request_id, str) else "y")
    undisturbed(engine, generation)


PARAMS = list(SamplingParams.__dataclass_fields__)


@FUZZ
@given(values=st.dictionaries(st.sampled_from(PARAMS), ANYTHING, min_size=1, max_size=3))
def test_sampling_params(values):
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        assert any(name in str(error) for name in values)
        return
    if params.n > 100 or params.max_tokens > 1000:
        return
    engine, generation = busy_engine()
    if not refused(engine.add_request, [1, 2], params):
        undisturbed(engine, generation)


@FUZZ
@given(
    cache=st.sampled_from(sorted(CACHES)),
    block_size=st.sampled_from([1, 3, 16]),
    good=TOKENS,
    bad=ANYTHING,
    namespace=NAMESPACES | ANYTHING,
)
def test_caches(cache, block_size, good, bad, namespace):
    cache = CACHES[cache](block_size)
    lease = cache.acquire(good)
    cache.insert(lease, good, range(1000, 1000 + len(good) // block_size))
    cache.commit()
    num_cached = cache.peek(good)
    refused(cache.peek, bad)
    refused(cache.peek, good, namespace)
    refused(cache.acquire, bad)
    refused(cache.acquire, good, namespace)
    cache.check()
    assert cache.peek(good) == num_cached and cache.sizes.evictable == 0
    refused(cache.advance, lease, bad)
    for arguments in ((bad, []), (bad, range(500, 600)), ([1] * block_size, bad)):
        refused(cache.insert, lease, *arguments)
        cache.check()
        cache.commit()
    if not isinstance(bad, int):
        refused(cache.evict, bad)
    assert namespace is None or refused(cache.reset, namespace)
    num_pinned = cache.sizes.pinned
    for wrong in (PartialBlock(bad, 800), PartialBlock([1], bad)):
        if not lease.released and refused(cache.release, lease, wrong):
            assert cache.sizes.pinned == num_pinned
        cache.check()


@FUZZ
@given(good=TOKENS, bad=ANYTHING, count=ANYTHING, namespace=NAMESPACES)
def test_managers(good, bad, count, namespace):
    manager = KVManager(CACHES["radix"](3), 20)
    sequence = manager.begin(good)
    manager.grow(sequence, len(good))
    manager.publish(sequence, good)
    manager.commit()
    calls = [
        (manager.begin, bad),
        (manager.begin, good, namespace),
        (manager.grow, sequence, count),
        (manager.grow, bad, 3),
        (manager.advance, sequence, bad),
        (manager.publish, sequence, bad),
        (manager.publish, bad, good),
        (manager.fork, sequence, bad),
        (manager.fork, bad, good),
        (manager.end, bad),
        (manager.cancel, bad),
        (manager.reset, namespace),
        (KVManager, CACHES["radix"](3), count),
    ]
    for call, *arguments in calls:
        try:
            refused(call, *arguments)
        except OutOfBlocks:
            assert call in (manager.grow, manager.fork)
        manager.check()
        manager.commit()
        manager.check()


@FUZZ
@given(name=st.sampled_from(["max_num_batched_tokens", "max_num_seqs", "order", "max_overtakes"]), bad=ANYTHING)
def test_limits(name, bad):
    def make():
        return Scheduler(KVManager(CACHES["radix"](3), 20), SchedulerConfig(**{name: bad}))

    if not refused(make):
        assert type(bad) is int and bad > 0


@pytest.mark.parametrize("make", [CACHES["radix"], CACHES["flat_hash"]])
@FUZZ
@given(bad=ANYTHING)
def test_block_sizes(make, bad):
    assert refused(make, bad)


def _a_router():
    router = make_router("round_robin")
    router.add_replica("a")
    return router, router.route([1, 2, 3])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("policy", lambda: RadixCache(16, policy=["lru"])),
        ("policy", lambda: RadixCache(16, policy=None)),
        ("share", lambda: Probation("x")),
        ("share", lambda: Probation(float("nan"))),
        ("knee_tokens", lambda: Cost(float("nan"))),
        ("knee_tokens", lambda: Cost(None)),
        ("watch", lambda: RadixCache(1).unwatch(None)),
        ("watch", lambda: FlatHashCache(1).unwatch(3)),
        ("rank", lambda: RadixCache(1).watch([1], rank=5)),
        ("rank", lambda: FlatHashCache(1).watch([1], rank=(1, float("nan")))),
        ("num_open", lambda: ClosedLoop([], "a")),
        ("think_s", lambda: ClosedLoop([], 1, "a")),
        ("block_size", lambda: Roofline.of("llama-3-8b", "h100-sxm").num_blocks(0)),
        ("memory_share", lambda: Roofline.of("llama-3-8b", "h100-sxm").num_blocks(16, float("nan"))),
        ("num_replicas", lambda: Fleet("round_robin", None, num_replicas=-1)),
        ("health_timeout_s", lambda: Fleet("round_robin", None, health_timeout_s=float("nan"))),
    ],
)
def test_odd_numbers_are_named(name, call):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call()


def test_a_router_is_not_disturbed_by_a_wrong_count():
    router, assignment = _a_router()
    for count in (-1, 4, 1.5, "a"):
        with pytest.raises(ValueError, match=r"^num_cached_tokens: expected"):
            router.prefilled(assignment, count)
    assert not assignment.is_prefilled
    router.prefilled(assignment, 3)
    assert assignment.is_prefilled

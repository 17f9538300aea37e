"""Real engines on Ray: the tokens of one engine, whatever dies or drains under them. Needs Ray; skips without it."""

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
pytest.importorskip("zmq")

import ray
from ray import serve
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import RequestRouter

from radixkv.engine.engine import Engine
from radixkv.fleet.ray import PrefixRouter, deploy, stream
from radixkv.scheduling.request import SamplingParams

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)
PROMPTS = [[*range(1, 80), *([i] * 40)] for i in range(12)]


@pytest.fixture(scope="module")
def expected():
    engine = Engine.from_pretrained("tiny_gpt", num_blocks=2048)
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


def start(num_replicas, **options):
    return deploy("tiny_gpt", num_replicas=num_replicas, num_cpus=0.5, num_blocks=2048, **options)


async def ask(handle, prompt, on_first=lambda replica: None):
    token_ids, replicas, num_cached = [], [], 0
    async for chunk in stream(handle, prompt, PARAMS):
        if not token_ids:
            on_first(chunk.replica)
        token_ids += chunk.token_ids
        num_cached = chunk.num_cached_tokens
        if chunk.replica not in replicas:
            replicas.append(chunk.replica)
    return token_ids, replicas, num_cached


def replica_actors():
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith("SERVE_REPLICA::")]


def test_the_same_tokens_and_the_prefix_where_it_is(cluster, expected):
    handle = start(2)

    async def run():
        together = await asyncio.gather(*(ask(handle, prompt) for prompt in PROMPTS))
        assert [token_ids for token_ids, _, _ in together] == expected
        await asyncio.sleep(2)  # until the router has heard where the events are
        again = [await ask(handle, prompt) for prompt in PROMPTS]
        assert [token_ids for token_ids, _, _ in again] == expected
        assert all(num_cached == len(prompt) - 1 for (_, _, num_cached), prompt in zip(again, PROMPTS, strict=True))
        assert [replicas for _, replicas, _ in again] == [replicas for _, replicas, _ in together]
        assert len({replicas[0] for _, replicas, _ in together}) == 2

    asyncio.run(run())


def test_a_replica_killed_in_the_middle(cluster, expected):
    handle = start(2)
    killed = []

    def kill(replica):
        if not killed:
            killed.append(replica)
            (name,) = [name for name in replica_actors() if name.endswith(replica)]
            ray.kill(ray.get_actor(name, namespace="serve"))

    async def run():
        answers = await asyncio.gather(*(ask(handle, prompt, kill) for prompt in PROMPTS))
        assert [token_ids for token_ids, _, _ in answers] == expected
        assert any(replicas[0] == killed[0] and len(replicas) > 1 for _, replicas, _ in answers)
        later = [await ask(handle, prompt) for prompt in PROMPTS]
        assert [token_ids for token_ids, _, _ in later] == expected
        assert all(killed[0] not in replicas for _, replicas, _ in later)

    asyncio.run(run())


def test_a_replica_that_drains_ends_what_it_has(cluster, expected):
    handle = start(2)

    async def run():
        running = [asyncio.create_task(ask(handle, prompt)) for prompt in PROMPTS]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(start, 1)
        answers = await asyncio.gather(*running)
        assert [token_ids for token_ids, _, _ in answers] == expected
        assert all(len(replicas) == 1 for _, replicas, _ in answers)  # none was moved
        assert [(await ask(handle, prompt))[0] for prompt in PROMPTS[:3]] == expected[:3]

    asyncio.run(run())
    deadline = time.monotonic() + 60
    while len(replica_actors()) > 1:
        assert time.monotonic() < deadline, "the drained replica stays"
        time.sleep(0.5)


class FakeReplica(SimpleNamespace):
    """What a router sees of a replica."""

    def __init__(self, name):
        super().__init__(replica_id=SimpleNamespace(unique_id=name), routing_stats={}, max_ongoing_requests=9)


def test_the_router_forgets_who_is_gone(monkeypatch):
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)

    async def run():
        router = PrefixRouter(deployment_id=DeploymentID("x"), handle_source=DeploymentHandleSource.REPLICA)
        router.initialize_state(block_size=4)
        a, b = FakeReplica("a"), FakeReplica("b")
        router.update_replicas([a, b])
        router.update_replicas([a, b])
        pending = [
            SimpleNamespace(
                args=(list(range(i, 40)), PARAMS),
                metadata=SimpleNamespace(internal_request_id=str(i), request_id=f"r{i}"),
            )
            for i in range(6)
        ]
        chosen = [await router.choose_replicas([a, b], each) for each in pending]
        assert {each[0][0].replica_id.unique_id for each in chosen} == {"a", "b"}
        queued = sum(replica.queued_tokens for replica in router._router.replicas)
        router.prefilled("r1", 0)
        router.prefilled("r1", 0)
        router.prefilled("another router's", 0)
        assert sum(replica.queued_tokens for replica in router._router.replicas) == queued - 39
        router.on_request_completed(a.replica_id, "0")
        router.on_request_completed(a.replica_id, "0")
        assert len(router._assignments) == 5
        router.update_replicas([b])
        assert [replica.name for replica in router._router.replicas] == ["b"]
        assert [(await router.choose_replicas([b], each))[0][0] for each in pending] == [b] * 6

    asyncio.run(run())


def test_a_replica_that_tells_nonsense_is_routed_to_all_the_same(monkeypatch):
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)

    class Nonsense:
        is_open = True

        def poll(self):
            raise ValueError("payload: expected msgpack")

        def close(self):
            self.is_open = False

    async def run():
        router = PrefixRouter(deployment_id=DeploymentID("x"), handle_source=DeploymentHandleSource.REPLICA)
        router.initialize_state(block_size=4)
        router.update_replicas([FakeReplica("a")])
        router._subscribers["a"] = bad = Nonsense()
        name = SimpleNamespace(internal_request_id="1", request_id="r1")
        request = SimpleNamespace(args=([1, 2, 3], PARAMS), metadata=name)
        assert await router.choose_replicas([FakeReplica("a")], request)
        assert not bad.is_open and not router._subscribers

    asyncio.run(run())

"""Real engines on Ray: actors behind Ray Serve, with a router of `radixkv.fleet.routing` as its request router.

    ray.init()                                       # or the address of a cluster; add nodes and raise num_replicas
    handle = deploy("tiny_gpt", num_replicas=2)
    async for chunk in stream(handle, token_ids, SamplingParams(max_tokens=20)): ...

Each replica steps its engine in a thread and publishes its cache's events over ZeroMQ. Serve tells the router where
(`record_routing_stats`), which follows them from the process that the handle lives in. Serve watches health, replaces
replicas and drains them; `stream` sends a request whose replica has died to another and goes on where it was.

Needs Ray (`pip install radixkv[replicas]`). With many handles, each has a router, which knows its own queue alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from radixkv.cache.events import AllBlocksCleared
from radixkv.cache.namespace import Namespace
from radixkv.engine.engine import Engine
from radixkv.fleet.routing.policies import make_router
from radixkv.fleet.routing.router import Assignment
from radixkv.fleet.routing.stream import EventLog
from radixkv.fleet.routing.zmq import ZmqPublisher, ZmqSubscriber
from radixkv.scheduling.request import SamplingParams

logger = logging.getLogger(__name__)

IDLE_FLUSH_S = 0.2  # a replica that has nothing to do looks for snapshots asked of it so often
STATS_PERIOD_S = 0.5

# Serve makes the routers, one for each handle; `stream` tells those of its process of first tokens.
_here: WeakSet[PrefixRouter] = WeakSet()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a request has got since the last one.

    Attributes:
        token_ids: new ones.
        num_cached_tokens: of the prompt.
        finish_reason: None while it runs.
        replica: the one that served it.
    """

    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: str | None
    replica: str


class EngineReplica:
    """One engine in an actor. Deployed by `deploy`.

    Args:
        model: a path or preset for `Engine.from_pretrained`.
        options: of it.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._engine = Engine.from_pretrained(model, **options)
        address = f"tcp://{ray.util.get_node_ip_address()}:*"
        log = EventLog(self._engine.scheduler.manager.cache)
        self._publisher = ZmqPublisher(log, address, address)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._wake = threading.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.get_event_loop()
        self._stepped = asyncio.Event()  # set, and replaced, after each step
        threading.Thread(target=self._run, name="radixkv-engine", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                if self._engine.has_unfinished_requests:
                    self._engine.step()
                    self._publisher.flush()
                    self._loop.call_soon_threadsafe(self._announce)
                else:
                    self._wake.wait(IDLE_FLUSH_S)
                    self._wake.clear()
                    self._publisher.flush()
        except BaseException as error:
            self._failure = error
            self._loop.call_soon_threadsafe(self._announce)
            raise

    def _announce(self) -> None:
        stepped, self._stepped = self._stepped, asyncio.Event()
        stepped.set()

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, namespace: Namespace | None = None
    ) -> AsyncIterator[Chunk]:
        """Serves one request; yields its tokens as they come."""
        request_id = self._engine.add_request(token_ids, params, namespace=namespace)
        generation = self._engine.generation(request_id)
        self._wake.set()
        seen = 0
        try:
            while True:
                stepped = self._stepped
                is_finished = generation.is_finished
                found = generation.samples[0].token_ids
                if len(found) > seen or is_finished:
                    new, seen = found[seen:], len(found)
                    reason = generation.samples[0].finish_reason if is_finished else None
                    yield Chunk(list(new), generation.num_cached_tokens, reason, self._name)
                if is_finished:
                    return
                if self._failure is not None:
                    raise RuntimeError("the engine has failed") from self._failure
                await stepped.wait()
        finally:
            self._engine.abort(request_id)  # passed over where it has ended

    def record_routing_stats(self) -> dict[str, str]:
        """Where the events of this replica's cache are. Called by Serve."""
        return {"endpoint": self._publisher.endpoint, "replay_endpoint": self._publisher.replay_endpoint}

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica whose engine has failed."""
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure


class PrefixRouter(RequestRouter):
    """Serve's request router: one of ours in its place. Its options are those of `radixkv.fleet.routing.policies`."""

    def initialize_state(self, router: str = "cache_aware", **options: Any) -> None:
        self._lock = threading.Lock()  # Serve reports ends from other threads
        self._router = make_router(router, **options)
        self._subscribers: dict[str, ZmqSubscriber] = {}
        self._assignments: dict[str, Assignment] = {}  # by Serve's internal id of the request
        self._internal_ids: dict[str, str] = {}  # by its public one, until the first token
        _here.add(self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        with self._lock:
            here = {replica.replica_id.unique_id: replica for replica in replicas}
            known = {replica.name for replica in self._router.replicas}
            for name in known - here.keys():
                self._forget(name)
            for name in here.keys() - known:
                self._router.add_replica(name)
            for name, replica in here.items():
                stats = replica.routing_stats
                if "endpoint" in stats and name not in self._subscribers:
                    apply = partial(self._router.apply, name)
                    self._subscribers[name] = ZmqSubscriber(apply, stats["endpoint"], stats["replay_endpoint"])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        with self._lock:
            if any(replica.name == replica_id.unique_id for replica in self._router.replicas):
                self._forget(replica_id.unique_id)

    def _forget(self, name: str) -> None:
        self._router.remove_replica(name)
        if name in self._subscribers:
            self._subscribers.pop(name).close()

    def _listen(self) -> None:
        """Takes in what replicas have told. Whose events can't be read is heard again after Serve's next word."""
        for name, subscriber in tuple(self._subscribers.items()):
            try:
                subscriber.poll()
            except ValueError:
                logger.exception("events of replica %s", name)
                self._subscribers.pop(name).close()
                self._router.apply(name, AllBlocksCleared())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        token_ids, _, *namespace = pending_request.args
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        with self._lock:
            self._listen()
            self._finish(pending_request.metadata.internal_request_id)  # chosen before, and refused
            assignment = self._router.route(token_ids, *namespace)
            self._assignments[pending_request.metadata.internal_request_id] = assignment
            self._internal_ids[pending_request.metadata.request_id] = pending_request.metadata.internal_request_id
        return [[candidates[assignment.replica]]] if assignment.replica in candidates else []

    def prefilled(self, request_id: str, num_cached_tokens: int) -> None:
        """The first token of a request has come, by Serve's name for it; one of another router is passed over."""
        with self._lock:
            internal_id = self._internal_ids.pop(request_id, None)
            if internal_id in self._assignments:
                self._router.prefilled(self._assignments[internal_id], num_cached_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        with self._lock:
            self._finish(internal_request_id)

    def _finish(self, internal_request_id: str) -> None:
        assignment = self._assignments.pop(internal_request_id, None)
        if assignment is not None:
            self._router.finish(assignment)
            self._internal_ids = {name: own for name, own in self._internal_ids.items() if own != internal_request_id}


def deploy(
    model: str,
    *,
    num_replicas: int = 2,
    router: str | None = "cache_aware",
    router_options: dict[str, Any] | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    name: str = "radixkv",
    **engine: Any,
) -> DeploymentHandle:
    """Starts replicas of an engine; called again with other numbers, has some join or drain and leave.

    Args:
        model: a path or preset for `Engine.from_pretrained`.
        router: a name of `radixkv.fleet.routing.policies.ROUTERS`; None: Serve's own, which looks at queues alone.
        router_options: of the router.
        num_cpus, num_gpus: of each replica.
        name: of the application. With another router take another name: Serve keeps to the one that a name began with.
        engine: options of `Engine.from_pretrained`.
    """
    config = RequestRouterConfig()
    if router is not None:
        options = {"router": router, **(router_options or {})}
        if router in ("longest_match", "cache_aware"):
            options.setdefault("block_size", engine["cache"].block_size if "cache" in engine else 16)
        config = RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs=options,
            request_routing_stats_period_s=STATS_PERIOD_S,
        )
    deployment = serve.deployment(
        EngineReplica,
        name="engine",
        num_replicas=num_replicas,
        max_ongoing_requests=256,
        request_router_config=config,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        graceful_shutdown_timeout_s=60.0,
    )
    return serve.run(deployment.bind(model, engine), name=name, route_prefix=None)


async def stream(
    handle: DeploymentHandle,
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    namespace: Namespace | None = None,
    *,
    max_moves: int = 3,
) -> AsyncIterator[Chunk]:
    """Serves one request, yielding its tokens as they come, each once.

    A replica that dies takes no answer with it: the request goes to another, and what came already is passed
    over. So it must be repeatable: greedy, or with a seed; else what goes on may be another text.

    Args:
        max_moves: replicas that may die under it.

    Raises:
        RayActorError: more have died.
        ValueError: more than one sample is asked for.
    """
    params = params or SamplingParams()
    if params.n != 1:
        raise ValueError(f"params: expected n = 1, got {params.n}")
    num_received = 0
    for move in range(max_moves + 1):
        num_again = num_received
        try:
            response = handle.options(stream=True).generate.remote(tuple(token_ids), params, namespace)
            async for chunk in response:
                for router in tuple(_here):
                    router.prefilled(response.request_id, chunk.num_cached_tokens)
                new = chunk.token_ids[num_again:]
                num_again = max(num_again - len(chunk.token_ids), 0)
                num_received += len(new)
                if new or chunk.finish_reason:
                    yield replace(chunk, token_ids=new)
            return
        except RayActorError:
            if move == max_moves:
                raise
            await asyncio.sleep(0.1 * 2**move)

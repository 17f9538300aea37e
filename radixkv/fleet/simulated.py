"""Fleet: replicas behind a router, in one process and in virtual time. Nothing is lost when replicas come and go.

    fleet = Fleet("cache_aware", make_simulator, num_replicas=8, block_size=16)
    fleet.at(30.0, lambda: fleet.kill("replica3"))
    result = run(fleet, poisson(open_trace("trace.jsonl"), rate_per_s=40))     # radixkv.simulate.run

Each replica is a `radixkv.simulate.Simulator`; the router hears of its cache through numbered events, and of first
tokens and ends as they happen. A request whose replica goes is sent to another, and counts from its first arrival. One
that no replica can take waits for the next that comes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from typing import Any

from radixkv.cache.contract import check_count
from radixkv.cache.namespace import parts
from radixkv.fleet.routing.policies import make_router
from radixkv.fleet.routing.router import Assignment, NoReplicas
from radixkv.fleet.routing.stream import EventLog, Follower
from radixkv.scheduling.batch import ScheduledBatch, StepStats
from radixkv.simulate import Served, Simulator
from radixkv.traces import TraceRequest

# Called with on_batch and on_step, to be passed on; returns a simulator with an empty cache.
MakeSimulator = Callable[..., Simulator]


@dataclass(eq=False, slots=True)
class _Sent:
    """A request on a replica, or waiting for one."""

    request: TraceRequest
    max_tokens: int
    arrival_s: float
    assignment: Assignment | None = None
    num_moves: int = 0


class _Replica:
    """One simulator, its events, and its requests by the simulator's own names."""

    def __init__(self, name: str, make_simulator: MakeSimulator, fleet: Fleet) -> None:
        self.name, self._fleet = name, fleet
        self.simulator = make_simulator(on_batch=self._on_batch, on_step=self._on_step)
        self.sent: dict[str, _Sent] = {}
        self.is_answering = True
        self._num_submitted = 0
        self._first: list[tuple[str, int]] = []  # whose first tokens the step under way brings, and what was cached
        self._log = EventLog(self.simulator.cache, clock=lambda: fleet.now_s)
        self._follower = Follower(partial(fleet.router.apply, name))
        self.flush()

    def submit(self, sent: _Sent, now_s: float) -> None:
        own_name = str(self._num_submitted)
        if self.is_answering:  # one that hangs computes nothing of what is sent to it
            self.simulator.advance(now_s)
            # The simulator gives its own names back in no other way.
            self.simulator.submit(replace(sent.request, id=own_name), now_s, max_tokens=sent.max_tokens)
        self._num_submitted += 1
        self.sent[own_name] = sent

    def flush(self) -> None:
        if numbered := self._log.flush():
            self._follower.receive(*numbered)

    def _on_batch(self, batch: ScheduledBatch) -> None:
        sequences = [running.sequence for running in self.simulator.scheduler.batch]
        self._first += [
            (sequence.request.request_id, sequence.num_cached_tokens or 0)
            for sequence, item in zip(sequences, batch.sequences, strict=True)
            if item.needs_logits and sequence.num_tokens == sequence.num_prompt_tokens and not sequence.sample
        ]

    def _on_step(self, _: StepStats) -> None:
        self.flush()
        for own_name, num_cached_tokens in self._first:
            sent = self.sent.get(own_name)
            if sent is not None and sent.assignment is not None:
                self._fleet.router.prefilled(sent.assignment, num_cached_tokens)
        self._first.clear()


class Fleet:
    """Serves requests with several simulators; stepped like one (`radixkv.simulate.run`).

    Args:
        router: a name of `radixkv.fleet.routing.policies.ROUTERS`.
        make_simulator: called with `on_batch` and `on_step` for each replica.
        num_replicas: at the start: replica0, replica1, ...
        health_timeout_s: a replica that has stopped answering is given up after so long.
        options: of the router.

    Attributes:
        now_s: virtual time.
        router: it, for its counts.
        num_moved: requests that were sent on because their replica had gone.
    """

    def __init__(
        self,
        router: str,
        make_simulator: MakeSimulator,
        *,
        num_replicas: int = 0,
        health_timeout_s: float = 1.0,
        **options: Any,
    ) -> None:
        check_count("num_replicas", num_replicas)
        if not isinstance(health_timeout_s, int | float) or not health_timeout_s > 0:
            raise ValueError(f"health_timeout_s: expected a time over 0, got {health_timeout_s!r}")
        self.now_s = 0.0
        self.num_moved = 0
        self.router = make_router(router, clock=lambda: self.now_s, **options)
        self._make_simulator = make_simulator
        self._health_timeout_s = health_timeout_s
        self._replicas: dict[str, _Replica] = {}
        self._homeless: deque[_Sent] = deque()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()
        for i in range(num_replicas):
            self.add_replica(f"replica{i}")

    # ---- replicas

    def simulator(self, name: str) -> Simulator:
        """Returns a replica's simulator, to be read."""
        return self._replica(name).simulator

    @property
    def names(self) -> list[str]:
        """The replicas that are there, those that drain or answer no longer included."""
        return list(self._replicas)

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Has something happen at a time: `kill`, `drain`, `add_replica`."""
        heapq.heappush(self._due, (max(at_s, self.now_s), next(self._ties), action))

    def add_replica(self, name: str) -> None:
        """A replica with an empty cache joins.

        Raises:
            ValueError: there is one of that name, or its pool is too small for a request that may have to move there.
                Nothing changes.
        """
        self.router.add_replica(name)
        made = _Replica(name, self._make_simulator, self)
        unfinished = [*self._homeless, *(sent for each in self._replicas.values() for sent in each.sent.values())]
        if not all(made.simulator.fits(sent.request, sent.max_tokens) for sent in unfinished):
            self.router.remove_replica(name)
            raise ValueError(f"{name}: expected a pool that holds every request under way, got a smaller one")
        self._replicas[name] = made
        made.simulator.advance(self.now_s)
        for _ in range(len(self._homeless)):
            self._send(self._homeless.popleft())

    def kill(self, name: str, *, is_noticed: bool = True) -> None:
        """A replica is gone with its cache and all it was doing; its requests go elsewhere.

        Args:
            is_noticed: at once, as a closed connection is; else the router sends on to it until the health check finds
                that it no longer answers.
        """
        killed = self._replica(name)
        killed.is_answering = False
        if not is_noticed:
            self.at(self.now_s + self._health_timeout_s, lambda: self._bury(killed))
            return
        self._bury(killed)

    def drain(self, name: str) -> None:
        """A replica takes nothing new, and leaves when what is there has ended."""
        self.router.drain(self._replica(name).name)
        self._leave_if_drained()

    def _replica(self, name: str) -> _Replica:
        if name not in self._replicas:
            raise ValueError(f"name: expected one of {', '.join(self._replicas) or 'no replicas'}, got {name!r}")
        return self._replicas[name]

    def _bury(self, dead: _Replica) -> None:
        if self._replicas.get(dead.name) is not dead:
            return
        del self._replicas[dead.name]
        self.router.remove_replica(dead.name)
        self.num_moved += len(dead.sent)
        for sent in dead.sent.values():
            sent.num_moves += 1
            self._send(sent)

    def _leave_if_drained(self) -> None:
        for known in self.router.replicas:
            if known.is_draining and not self._replicas[known.name].sent:
                del self._replicas[known.name]
                self.router.remove_replica(known.name)

    # ---- requests

    def fits(self, request: TraceRequest, max_tokens: int = 16) -> bool:
        """Whether each replica could ever hold a request and its output."""
        return all(replica.simulator.fits(request, max_tokens) for replica in self._replicas.values())

    def submit(self, request: TraceRequest, *, max_tokens: int = 16) -> None:
        """Has a request arrive now, and routes it.

        Raises:
            ValueError: it is longer than a replica's pool, has no tokens, or a bad namespace. Nothing changes.
        """
        parts(request.namespace)
        if not self.fits(request, max_tokens):
            raise ValueError(f"request: expected one that fits into every pool, got {request.num_prompt_tokens} tokens")
        self._send(_Sent(request, max_tokens, self.now_s))

    def _send(self, sent: _Sent) -> None:
        try:
            sent.assignment = self.router.route(sent.request.prompt, sent.request.namespace)
        except NoReplicas:
            sent.assignment = None
            self._homeless.append(sent)
            return
        self._replicas[sent.assignment.replica].submit(sent, self.now_s)

    # ---- time

    def next_event_time(self) -> float:
        """Begins the steps that are due now; returns when something happens next; inf: nothing does."""
        times = [each.simulator.next_event_time() for each in self._replicas.values() if each.is_answering]
        return min([*times, self._due[0][0] if self._due else inf])

    def advance(self, until_s: float) -> list[Served]:
        """Lets time pass; returns the requests that ended, in the order of their ends.

        Raises:
            ValueError: `until_s` has passed, or is infinite.
        """
        if not self.now_s <= until_s < inf:
            raise ValueError(f"until_s: expected a time from {self.now_s} s on, got {until_s!r}")
        ended: list[Served] = []
        while self._due and self._due[0][0] <= until_s:
            at_s, _, action = heapq.heappop(self._due)
            ended += self._advance(at_s)
            action()
        ended += self._advance(until_s)
        self._leave_if_drained()
        return sorted(ended, key=lambda served: served.metrics.finished_s or 0.0)

    def _advance(self, until_s: float) -> list[Served]:
        self.now_s = until_s
        ended = []
        for each in self._replicas.values():
            if not each.is_answering:
                continue
            for served in each.simulator.advance(until_s):
                sent = each.sent.pop(served.request_id)
                assert sent.assignment is not None
                self.router.finish(sent.assignment)
                served.metrics.arrival_s = sent.arrival_s
                ended.append(replace(served, request_id=sent.request.id))
        return ended

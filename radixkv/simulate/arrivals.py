"""When requests arrive, and `run`, which feeds them to a simulator. Open loops stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Protocol

import numpy as np

from radixkv.simulate.report import Served
from radixkv.traces import TraceRequest


class Arrivals(Protocol):
    """Requests and their times. Each is asked for with `next`, in order of time."""

    @property
    def next_s(self) -> float:
        """When the next one arrives, as far as is known; inf: none does unless one that runs ends."""
        ...

    def next(self) -> TraceRequest:
        """Takes the next one out."""
        ...

    def ended(self, request_id: str, at_s: float) -> None:
        """One that was taken out has ended, or was refused."""
        ...


class OpenLoop:
    """Arrivals by the clock, whether they are kept up with or not.

    Args:
        requests: in order of their times.
        times_s: one for each; None: the trace's own timestamps, counted from its first.

    Raises:
        ValueError: while it is read: a request without a timestamp, too few times, or one that goes back or is endless.
    """

    def __init__(self, requests: Iterable[TraceRequest], times_s: Iterable[float] | None = None) -> None:
        self._requests = iter(requests)
        self._times = None if times_s is None else iter(times_s)
        self._origin_s: float | None = None
        self.next_s = 0.0
        self._request: TraceRequest | None = None
        self._step()

    def _step(self) -> None:
        self._request = next(self._requests, None)
        if self._request is None:
            self.next_s = inf
            return
        if self._times is not None:
            at_s = next(self._times, nan)
            if not isfinite(at_s):
                raise ValueError(f"times_s: expected a finite time for {self._request.id!r}, got {at_s} or none")
        elif self._request.timestamp_s is None:
            raise ValueError(f"requests: expected a timestamp for {self._request.id!r}, got none; give times_s")
        else:
            self._origin_s = self._request.timestamp_s if self._origin_s is None else self._origin_s
            at_s = self._request.timestamp_s - self._origin_s
        if not self.next_s <= at_s < inf:
            raise ValueError(f"times_s: expected times in order, got {at_s} s after {self.next_s} s")
        self.next_s = at_s

    def next(self) -> TraceRequest:
        request = self._request
        assert request is not None
        self._step()
        return request

    def ended(self, request_id: str, at_s: float) -> None:
        pass


def at_once(requests: Iterable[TraceRequest]) -> OpenLoop:
    """Everything is queued at time 0."""
    return OpenLoop(requests, iter(lambda: 0.0, None))


def poisson(requests: Iterable[TraceRequest], rate_per_s: float, seed: int = 0) -> OpenLoop:
    """Arrivals at a mean rate, by a seeded stream.

    Raises:
        ValueError: the rate is not above 0.
    """
    if not 0 < rate_per_s < inf:
        raise ValueError(f"rate_per_s: expected a number above 0, got {rate_per_s!r}")

    def times() -> Iterator[float]:
        rng, now = np.random.default_rng(seed), 0.0
        while True:
            now += float(rng.exponential(1 / rate_per_s))
            yield now

    return OpenLoop(requests, times())


class ClosedLoop:
    """Sessions: each request arrives when the one before it in its session has ended, so many sessions at once.

    Args:
        requests: sessions are taken in the order of their first requests; a request without one is a session by itself.
        num_open: sessions open at once; when one has ended, the next one begins.
        think_s: between an end and the next arrival.

    The whole trace is held in memory.
    """

    def __init__(self, requests: Iterable[TraceRequest], num_open: int, think_s: float = 0.0) -> None:
        if not isinstance(num_open, int | np.integer) or num_open < 1:
            raise ValueError(f"num_open: expected an int >= 1, got {num_open!r}")
        if not isinstance(think_s, int | float) or not 0 <= think_s < inf:
            raise ValueError(f"think_s: expected a time >= 0, got {think_s!r}")
        sessions: dict[str, deque[TraceRequest]] = {}
        for number, request in enumerate(requests):
            # A name of our own: traces repeat theirs.
            named = replace(request, id=f"{number}:{request.id}")
            key = f"alone:{number}" if request.session is None else f"session:{request.session}"
            sessions.setdefault(key, deque()).append(named)
        self._waiting = deque(sessions.values())
        self._think_s = think_s
        self._due: deque[tuple[float, deque[TraceRequest]]] = deque()
        self._open: dict[str, deque[TraceRequest]] = {}
        for _ in range(min(num_open, len(self._waiting))):
            self._due.append((0.0, self._waiting.popleft()))

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else inf

    def next(self) -> TraceRequest:
        _, session = self._due.popleft()
        request = session.popleft()
        self._open[request.id] = session
        return request

    def ended(self, request_id: str, at_s: float) -> None:
        session = self._open.pop(request_id)
        if not session:
            if not self._waiting:
                return
            session = self._waiting.popleft()
        self._due.append((at_s + self._think_s, session))  # ends come in order of time


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to: the requests served, in the order of their ends, and how many were not.

    Attributes:
        num_refused: longer than the pool.
        num_empty: of no tokens.
    """

    served: list[Served]
    num_refused: int
    num_empty: int = 0


class Server(Protocol):
    """What `run` steps: a Simulator, or a fleet of them."""

    now_s: float

    def fits(self, request: TraceRequest, max_tokens: int = 16) -> bool: ...
    def submit(self, request: TraceRequest, *, max_tokens: int = 16) -> None: ...
    def next_event_time(self) -> float: ...
    def advance(self, until_s: float) -> list[Served]: ...


def run(
    simulator: Server,
    arrivals: Arrivals,
    *,
    max_tokens: int = 16,
    on_ended: Callable[[int], None] = lambda count: None,
) -> Result:
    """Serves all that arrives to its end.

    Args:
        max_tokens: drawn where a request has no output.
        on_ended: told how many requests have just ended or been refused, for a progress bar.
    """
    served: list[Served] = []
    num_refused = num_empty = 0
    while (now := min(arrivals.next_s, simulator.next_event_time())) < inf:
        ended = simulator.advance(max(now, simulator.now_s))
        for each in ended:
            arrivals.ended(each.request_id, simulator.now_s)
        served += ended
        refused = 0
        while arrivals.next_s <= simulator.now_s:
            request = arrivals.next()
            if request.prompt and simulator.fits(request, max_tokens):
                simulator.submit(request, max_tokens=max_tokens)
                continue
            refused += 1
            num_empty += not request.prompt
            arrivals.ended(request.id, simulator.now_s)
        num_refused += refused
        if ended or refused:
            on_ended(len(ended) + refused)
    return Result(served, num_refused - num_empty, num_empty)

"""Router: the base of all of them. Which replicas there are, what was sent to each, what is left to compute.

    router = CacheAware(["a", "b"], block_size=16)
    assignment = router.route(token_ids, namespace)    # send it to assignment.replica
    router.prefilled(assignment, num_cached_tokens)    # its first token came
    router.finish(assignment)                          # it has ended, in whatever way

A subclass chooses; nothing here blocks.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from radixkv.cache.contract import check_count
from radixkv.cache.events import Event
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


class NoReplicas(RuntimeError):
    """There is no replica that takes requests."""


@dataclass(eq=False, slots=True)
class Replica:
    """What a router knows of one replica.

    Attributes:
        slot: its bit where masks are used.
        queued_tokens: expected to be computed of prompts sent there whose first token has not come.
        num_requests: sent there and not ended.
        work_tokens: computed of prompts since it came, as far as known; it came with the mean of the others.
        is_draining: takes nothing new.
    """

    name: str
    slot: int
    queued_tokens: int = 0
    num_requests: int = 0
    work_tokens: float = 0.0
    is_draining: bool = False


@dataclass(eq=False, slots=True)
class Assignment:
    """A request on its way.

    Attributes:
        replica: the name of where it was sent.
        num_tokens: of its prompt.
        num_expected_tokens: of these, thought to be cached there.
        routed_s: when, by the router's clock.
    """

    replica: str
    num_tokens: int
    num_expected_tokens: int
    routed_s: float
    is_prefilled: bool = field(default=False, repr=False)
    is_finished: bool = field(default=False, repr=False)

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_expected_tokens


class Router(ABC):
    """Sends requests to replicas.

    Args:
        replicas: names; more may come and go.
        clock: seconds.
    """

    def __init__(self, replicas: Iterable[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._open: list[Replica] = []  # those that take requests
        self._in_flight: dict[Assignment, None] = {}  # oldest first
        for name in replicas:
            self.add_replica(name)

    # ---- replicas

    @property
    def replicas(self) -> list[Replica]:
        """What is known of each; to be read."""
        return list(self._replicas.values())

    def add_replica(self, name: str) -> None:
        """A replica is there, its cache empty. It is taken to have done the mean of the others' work: no stampede.

        Raises:
            ValueError: there is one of that name.
        """
        if name in self._replicas:
            raise ValueError(f"name: expected a replica that is not there yet, got {name!r}")
        taken = {replica.slot for replica in self._replicas.values()}
        replica = Replica(name, next(slot for slot in range(len(taken) + 1) if slot not in taken))
        if self._open:
            replica.work_tokens = sum(other.work_tokens for other in self._open) / len(self._open)
        self._replicas[name] = replica
        self._open.append(replica)

    def drain(self, name: str) -> None:
        """Sends a replica nothing new; what is there goes on."""
        replica = self._replica(name)
        replica.is_draining = True
        self._open = [other for other in self._open if other is not replica]

    def remove_replica(self, name: str) -> list[Assignment]:
        """A replica is gone, with all that it held. Returns what was on it, to be routed again, oldest first."""
        self.drain(name)
        del self._replicas[name]
        lost = [assignment for assignment in self._in_flight if assignment.replica == name]
        for assignment in lost:
            assignment.is_finished = True
            del self._in_flight[assignment]
        return lost

    def apply(self, name: str, event: Event) -> None:
        """Takes in an event of a replica's cache; a router that knows no caches passes over it."""
        return None

    def _replica(self, name: str) -> Replica:
        if name not in self._replicas:
            raise ValueError(f"name: expected one of {', '.join(self._replicas) or 'no replicas'}, got {name!r}")
        return self._replicas[name]

    # ---- requests

    def route(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Assignment:
        """Chooses a replica for a request.

        Raises:
            ValueError: the prompt is empty.
            NoReplicas: none takes requests.
        """
        key = pack(token_ids)
        if not key:
            raise ValueError("token_ids: expected at least one token, got none")
        if not self._open:
            raise NoReplicas(f"expected a replica that takes requests, got {len(self._replicas)} that drain")
        now_s = self._clock()
        replica, num_cached = self._choose(key, namespace, now_s)
        num_tokens = len(key) // TOKEN_BYTES
        assignment = Assignment(replica.name, num_tokens, min(num_cached, num_tokens - 1), now_s)
        replica.queued_tokens += assignment.num_to_compute
        replica.work_tokens += assignment.num_to_compute
        replica.num_requests += 1
        self._in_flight[assignment] = None
        return assignment

    def prefilled(self, assignment: Assignment, num_cached_tokens: int | None = None) -> None:
        """The first token of a request has come: its prompt waits no longer. A second call does nothing.

        Args:
            num_cached_tokens: found in the cache, where the replica says so.
        """
        if (
            num_cached_tokens is not None
            and check_count("num_cached_tokens", num_cached_tokens) > assignment.num_tokens
        ):
            raise ValueError(
                f"num_cached_tokens: expected at most the prompt's {assignment.num_tokens}, got {num_cached_tokens}"
            )
        if assignment.is_prefilled or assignment.is_finished:
            return
        assignment.is_prefilled = True
        replica = self._replicas[assignment.replica]
        replica.queued_tokens -= assignment.num_to_compute
        if num_cached_tokens is not None:
            replica.work_tokens += assignment.num_expected_tokens - num_cached_tokens

    def finish(self, assignment: Assignment) -> None:
        """A request has ended, in whatever way. A second call does nothing, nor one after its replica has gone."""
        self.prefilled(assignment)
        if not assignment.is_finished:
            assignment.is_finished = True
            del self._in_flight[assignment]
            self._replicas[assignment.replica].num_requests -= 1

    @abstractmethod
    def _choose(self, key: bytes, namespace: Namespace | None, now_s: float) -> tuple[Replica, int]:
        """Returns one of `_open`, and how many of the tokens it is thought to have cached."""

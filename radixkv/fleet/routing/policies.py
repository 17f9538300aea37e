"""The routers: five that are the field's baselines, and `CacheAware`. By name: `make_router`."""

import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Any

from radixkv.cache.events import Event
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.fleet.routing.index import FleetIndex
from radixkv.fleet.routing.marks import mark_request
from radixkv.fleet.routing.router import Assignment, Replica, Router

Clock = Callable[[], float]
MEMORY_TOKENS = 2**24  # work of a replica, in the mean, after which all of it counts half

EXPIRE_EVERY = 16  # decisions


class RoundRobin(Router):
    """One after the other."""

    def __init__(self, replicas: Iterable[str] = (), *, clock: Clock = time.monotonic) -> None:
        super().__init__(replicas, clock=clock)
        self._turns = count()

    def _choose(self, key: bytes, namespace: Namespace | None, now_s: float) -> tuple[Replica, int]:
        return self._open[next(self._turns) % len(self._open)], 0


class RandomChoice(Router):
    """Any, by a seeded draw."""

    def __init__(self, replicas: Iterable[str] = (), *, seed: int = 0, clock: Clock = time.monotonic) -> None:
        super().__init__(replicas, clock=clock)
        self._rng = Random(seed)

    def _choose(self, key: bytes, namespace: Namespace | None, now_s: float) -> tuple[Replica, int]:
        return self._rng.choice(self._open), 0


class LeastLoaded(Router):
    """Fewest tokens waiting to be computed; of equals, fewest requests, then fewest tokens computed."""

    def _choose(self, key: bytes, namespace: Namespace | None, now_s: float) -> tuple[Replica, int]:
        return min(self._open, key=_load), 0


class ConsistentHash(Router):
    """By a hash of the first tokens and the namespace: rendezvous hashing, so that a replica gone moves only its own.

    Args:
        prefix_tokens: hashed; what all requests begin with must be shorter, or one replica gets everything.
    """

    def __init__(
        self, replicas: Iterable[str] = (), *, prefix_tokens: int = 256, clock: Clock = time.monotonic
    ) -> None:
        if prefix_tokens < 1:
            raise ValueError(f"prefix_tokens: expected an int >= 1, got {prefix_tokens}")
        super().__init__(replicas, clock=clock)
        self._prefix_tokens = prefix_tokens

    def _choose(self, key: bytes, namespace: Namespace | None, now_s: float) -> tuple[Replica, int]:
        key = key[: self._prefix_tokens * TOKEN_BYTES]
        if namespace is not None:
            key = mark_request(key, namespace, 1)
        prefix = blake2b(key, digest_size=16).digest()
        return max(self._open, key=lambda replica: blake2b(prefix + replica.name.encode()).digest()), 0


class _Indexed(Router):
    """A router that knows what is cached where.

    From events, once they come (`apply`), and from what is in flight, which no event tells of yet; of a replica that
    has told of nothing so far, and with `follows_events=False` of each, from all that was sent, which decays.

    Args:
        block_size: of the replicas' caches.
        follows_events: whether `apply` will be called with the events of each replica.
        max_blocks: remembered of each replica; about its pool, where nothing else says what it has evicted.
        max_age_s: what was sent where no event tells is forgotten after so long unused; None: never.

    Attributes:
        held: what events told; None without.
        sent: what was sent, as far as it counts.
    """

    def __init__(
        self,
        replicas: Iterable[str] = (),
        *,
        block_size: int = 16,
        follows_events: bool = True,
        max_blocks: int | None = None,
        max_age_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._max_age_s = max_age_s
        self._turn = self._num_slots = 0
        self.held = FleetIndex(block_size, max_blocks=max_blocks, clock=clock) if follows_events else None
        self.sent = FleetIndex(block_size, max_blocks=max_blocks, clock=clock)
        self._heard_of: set[str] = set()  # replicas that have told of something
        self._indexes = [self.sent] if self.held is None else [self.sent, self.held]
        super().__init__(replicas, clock=clock)

    def add_replica(self, name: str) -> None:
        super().add_replica(name)
        slot = self._replicas[name].slot
        self._num_slots = max(self._num_slots, slot + 1)
        for index in self._indexes:
            assert index.add_replica(name) == slot, "one numbering"

    def remove_replica(self, name: str) -> list[Assignment]:
        lost = super().remove_replica(name)
        self._heard_of.discard(name)
        for index in self._indexes:
            index.remove_replica(name)
        return lost

    def apply(self, name: str, event: Event) -> None:
        if self.held is not None:
            self.held.apply(name, event)
            self._heard_of.add(name)

    def _choose(self, key: bytes, namespace: Namespace | None, now_s: float) -> tuple[Replica, int]:
        # Looking costs more than forgetting, so not each time; a claim too long is a detour at most.
        self._turn += 1
        if not self._in_flight or self._turn % EXPIRE_EVERY == 0:
            self._expire(now_s)
        matched = [0] * self._num_slots
        for index in self._indexes:
            _fill(matched, index.match(key, namespace))
        replica = self._best(len(key) // TOKEN_BYTES, matched)
        self.sent.add(replica.name, key, namespace)
        return replica, matched[replica.slot]

    def _expire(self, now_s: float) -> None:
        oldest = next(iter(self._in_flight), None)
        self.sent.expire(now_s if oldest is None else oldest.routed_s, self._heard_of)
        if self._max_age_s is not None:
            self.sent.expire(now_s - self._max_age_s)

    def _best(self, num_tokens: int, matched: list[int]) -> Replica:
        raise NotImplementedError


class LongestMatch(_Indexed):
    """Where most is cached; of equals the least loaded. What all requests share pulls everything to one replica."""

    def _best(self, num_tokens: int, matched: list[int]) -> Replica:
        return min(self._open, key=lambda replica: (-matched[replica.slot], *_load(replica)))


class CacheAware(_Indexed):
    """Where a request costs least, in tokens: those to compute there, those queued there, and a share of past work.

    The queues spread what comes faster than it is served; then others compute a hot prefix too, and all of them serve
    it. Past work spreads what comes slowly: a little of it counts everywhere, so that where nothing is cached, or the
    same everywhere, the replica that has done least comes first; and much of what a replica has done beyond the others,
    so that no prefix, however long, pulls everything to one.

    Args:
        balance: weight of a token of past work against one to be computed now.
        slack: by what share of the mean a replica may be ahead before
        pressure: is the weight of each further token of work.
    """

    def __init__(
        self,
        replicas: Iterable[str] = (),
        *,
        balance: float = 0.05,
        slack: float = 0.2,
        pressure: float = 1.75,
        **index: Any,
    ) -> None:
        for name, value in (("balance", balance), ("slack", slack), ("pressure", pressure)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        self._balance, self._slack, self._pressure = balance, slack, pressure
        super().__init__(replicas, **index)

    def _best(self, num_tokens: int, matched: list[int]) -> Replica:
        balance, pressure = self._balance, self._pressure
        mean = sum([replica.work_tokens for replica in self._open]) / len(self._open)
        if mean > MEMORY_TOKENS:  # what was long ago counts less
            for replica in self._replicas.values():
                replica.work_tokens /= 2
            mean /= 2
        limit = mean * (1 + self._slack)
        best, least = self._open[0], float("inf")
        for replica in self._open:
            work = replica.work_tokens
            cost = num_tokens - matched[replica.slot] + replica.queued_tokens + balance * work
            if work > limit:
                cost += pressure * (work - limit)
            if cost < least:
                best, least = replica, cost
        return best


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "consistent_hash": ConsistentHash,
    "longest_match": LongestMatch,
    "cache_aware": CacheAware,
}


def make_router(name: str, replicas: Iterable[str] = (), **options: Any) -> Router:
    """Returns a router.

    Args:
        name: a key of ROUTERS.
        options: of its class.

    Raises:
        ValueError: an unknown name, or an option out of range.
    """
    if name not in ROUTERS:
        raise ValueError(f"router: expected one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name](replicas, **options)


def _load(replica: Replica) -> tuple[int, int, float]:
    return replica.queued_tokens, replica.num_requests, replica.work_tokens


def _fill(matched: list[int], levels: list[tuple[int, int]]) -> None:
    """Raises each replica's entry to the deepest level that it is in."""
    everyone = (1 << len(matched)) - 1
    deeper = 0
    for num_tokens, mask in reversed(levels):
        if mask & everyone == everyone:  # what all have
            matched[:] = [num_tokens if num < num_tokens else num for num in matched]
            return
        new = mask & ~deeper
        deeper |= mask
        while new:
            lowest = new & -new
            slot = lowest.bit_length() - 1
            if matched[slot] < num_tokens:
                matched[slot] = num_tokens
            new ^= lowest

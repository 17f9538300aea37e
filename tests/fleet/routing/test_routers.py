"""The routers: which replica is chosen, replicas that come and go, and the faults that routers have met."""

import random
from collections import Counter

import pytest

from experiments import route_cost
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.events import AllBlocksCleared
from radixkv.cache.namespace import LoRA, Salt
from radixkv.fleet.routing.policies import ROUTERS, CacheAware, LongestMatch, make_router
from radixkv.fleet.routing.router import NoReplicas

INDEXED = ("longest_match", "cache_aware")


class Fleet:
    """Replicas without time: a request is served before the next one comes. Events go straight to the router."""

    def __init__(self, router, names, block_size=4, num_blocks=None):
        self.router, self.now_s = router, 0.0
        self.replays = {}
        for name in names:
            self.add(name, block_size, num_blocks)

    def add(self, name, block_size=4, num_blocks=None):
        self.replays[name] = Replay(CacheConfig("radix", block_size, num_blocks=num_blocks))
        self.replays[name].cache.subscribe(lambda _, event: self.router.apply(name, event))

    def serve(self, tokens, namespace=None):
        assignment = self.router.route(tokens, namespace)
        num_cached = self.replays[assignment.replica].feed(tokens, b"", namespace)
        self.router.prefilled(assignment, num_cached)
        self.router.finish(assignment)
        return assignment.replica

    def load_ratio(self):
        computed = [each.num_prompt_tokens - each.num_cached_tokens for each in self.replays.values()]
        return max(computed) / (sum(computed) / len(computed))

    def hit_rate(self):
        replays = self.replays.values()
        return sum(each.num_cached_tokens for each in replays) / sum(each.num_prompt_tokens for each in replays)


def ticking():
    """A clock that ticks at each look."""
    times = iter(range(10**9))
    return lambda: float(next(times))


def make(name, replicas, block_size=4, **options):
    if name in INDEXED:
        options |= {"block_size": block_size}
    return make_router(name, replicas, clock=ticking(), **options)


@pytest.fixture(params=ROUTERS)
def router(request):
    return make(request.param, ["a", "b", "c"])


def test_every_router_keeps_count(router):
    rng = random.Random(0)
    on = Counter()
    live = []
    for _ in range(200):
        if live and rng.random() < 0.5:
            assignment = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.5:
                router.prefilled(assignment, rng.randrange(assignment.num_tokens))
                router.prefilled(assignment)
            router.finish(assignment)
            router.finish(assignment)
            on[assignment.replica] -= 1
        else:
            live.append(router.route([rng.randrange(2) for _ in range(rng.randint(1, 20))]))
            on[live[-1].replica] += 1
        assert {replica.name: replica.num_requests for replica in router.replicas} == {n: on[n] for n in "abc"}
    for assignment in live:
        router.finish(assignment)
    assert all(replica.num_requests == replica.queued_tokens == 0 for replica in router.replicas)


def test_replicas_drain_go_and_come_back(router):
    assignments = [router.route([i, i, i, i, i]) for i in range(30)]
    router.drain("b")
    assert all(router.route([9, i]).replica != "b" for i in range(30))
    mine = [each for each in assignments if each.replica == "b"]
    assert router.remove_replica("b") == mine
    for assignment in mine:
        router.prefilled(assignment, 0)
        router.finish(assignment)  # too late: nothing happens
    assert [replica.name for replica in router.replicas] == ["a", "c"]
    router.add_replica("b")
    assert any(router.route([i, 7, 7, i, 3]).replica == "b" for i in range(60))
    for name in "abc":
        router.drain(name)
    with pytest.raises(NoReplicas):
        router.route([1])


def test_bad_arguments(router):
    with pytest.raises(ValueError, match="token_ids: expected at least one token"):
        router.route([])
    with pytest.raises(ValueError, match="name: expected a replica that is not there yet, got 'a'"):
        router.add_replica("a")
    with pytest.raises(ValueError, match="name: expected one of a, b, c, got 'd'"):
        router.drain("d")
    with pytest.raises(ValueError, match=f"router: expected one of {', '.join(ROUTERS)}, got 'best'"):
        make_router("best")
    with pytest.raises(ValueError, match="slack: expected a number above 0, got 0"):
        make_router("cache_aware", slack=0)


def test_a_hash_moves_only_what_was_on_the_replica_that_went():
    router = make_router("consistent_hash", "abcd", prefix_tokens=2)
    before = {i: router.route([i, 1, i]).replica for i in range(200)}
    assert min(Counter(before.values()).values()) > 25
    assert all(router.route([i, 1, 9]).replica == before[i] for i in range(200))
    router.remove_replica("c")
    for i, name in before.items():
        after = router.route([i, 1]).replica
        assert after == name if name != "c" else after != "c"


# ---- the faults


def test_a_first_block_that_every_request_shares():
    rng = random.Random(0)
    prompts = [[0] * 4 + [rng.randrange(10**6) for _ in range(rng.randint(10, 60))] for _ in range(400)]
    drawn = {}
    for name in INDEXED:
        fleet = Fleet(make(name, "abcd"), "abcd")
        for prompt in prompts:
            fleet.serve(prompt)
        drawn[name] = fleet.load_ratio()
    assert drawn["cache_aware"] < 1.1
    assert drawn["longest_match"] == 4  # the fault itself: one replica gets everything


def test_a_system_prompt_longer_than_half_of_most_prompts():
    rng = random.Random(1)
    system = list(range(2000))
    users = [[*system, *(rng.randrange(10**6) for _ in range(500))] for _ in range(40)]
    fleet, alone = Fleet(make("cache_aware", "abcd"), "abcd"), Fleet(make("cache_aware", "x"), "x")
    for _ in range(10):
        for i in range(len(users)):
            users[i] = [*users[i], *(rng.randrange(10**6) for _ in range(150))]
            fleet.serve(users[i])
            alone.serve(users[i])
    assert fleet.load_ratio() < 1.25
    assert fleet.hit_rate() > 0.97 * alone.hit_rate()


@pytest.mark.parametrize("name", ["cache_aware", "longest_match", "least_loaded"])
def test_one_request_at_a_time_is_spread_where_nothing_matches(name):
    fleet = Fleet(make(name, "abcd"), "abcd")
    assert sorted(fleet.serve([i] * 5) for i in range(4)) == ["a", "b", "c", "d"]


def test_namespaces_are_part_of_the_key():
    fleet = Fleet(make("cache_aware", "abcd"), "abcd")
    tokens = list(range(100))
    homes = {}
    for namespace in (None, Salt("x"), LoRA("x"), Salt("y")):
        homes[namespace] = fleet.serve(tokens, namespace)
    assert len(set(homes.values())) == 4
    for namespace, home in homes.items():
        assert fleet.serve([*tokens, 7], namespace) == home
    assert len({make_router("consistent_hash", "abcdefgh").route(tokens, Salt(str(i))).replica for i in range(30)}) > 4


def test_a_hot_prefix_is_replicated_when_its_replica_has_a_queue():
    router = CacheAware("abcd", block_size=4, clock=ticking())
    fleet = Fleet(router, "abcd")
    prefix = list(range(100))
    home = fleet.serve(prefix)
    burst = [router.route([*prefix, *([i] * 20)]) for i in range(40)]  # none is served yet
    where = Counter(assignment.replica for assignment in burst)
    assert set(where) == set("abcd")
    assert where[home] == max(where.values()) < 20
    # what is in flight is known to be cached soon: each of the others computes the prefix once
    assert sum(assignment.num_expected_tokens == 0 for assignment in burst) == 3


def test_what_is_in_flight_is_forgotten_where_no_event_confirms_it():
    router = LongestMatch("ab", block_size=4, clock=ticking())
    for name in "ab":
        router.apply(name, AllBlocksCleared())
    first = router.route(range(40))
    assert router.route(range(40)).num_expected_tokens == 39
    router.finish(first)
    router = LongestMatch("ab", block_size=4, clock=ticking())
    for name in "ab":
        router.apply(name, AllBlocksCleared())
    router.finish(router.route(range(40)))
    assert router.route(range(40)).num_expected_tokens == 0


def test_until_a_replica_tells_of_something_what_was_sent_there_counts():
    router = LongestMatch("ab", block_size=4, clock=ticking())
    home = router.route(range(40))
    router.finish(home)
    again = router.route(range(44))
    assert (again.replica, again.num_expected_tokens) == (home.replica, 40)
    router.finish(again)
    router.apply(home.replica, AllBlocksCleared())
    assert router.route(range(40)).num_expected_tokens == 0


def test_a_cold_replica_is_used_and_not_flooded():
    fleet = Fleet(make("cache_aware", "abc"), "abc")
    rng = random.Random(2)

    def prompt():
        return [rng.randrange(10**6) for _ in range(50)]

    for _ in range(300):
        fleet.serve(prompt())
    fleet.router.add_replica("d")
    fleet.add("d")
    where = Counter(fleet.serve(prompt()) for _ in range(80))
    assert 15 <= where["d"] <= 25


def test_without_events_what_was_sent_decays():
    now_s = 0.0
    router = CacheAware("ab", block_size=4, follows_events=False, max_blocks=10, max_age_s=5.0, clock=lambda: now_s)
    first = router.route(range(20))
    router.finish(first)
    second = router.route(range(20))
    assert second.num_expected_tokens == 19
    router.finish(second)
    now_s = 6.0
    assert router.route(range(20)).num_expected_tokens == 0
    for i in range(40):
        now_s += 0.01
        router.finish(router.route([i] * 20))
    assert router.route(range(20)).num_expected_tokens == 0  # pushed out


def test_a_replica_that_is_gone_is_out_of_the_index():
    fleet = Fleet(make("cache_aware", "ab"), "ab")
    home = fleet.serve(range(40))
    fleet.router.remove_replica(home)
    assert fleet.router.route(range(40)).num_expected_tokens == 0
    fleet.router.add_replica(home)
    assert fleet.router.route(range(40)).num_expected_tokens in (0, 39)  # 39: what was sent to the other just now
    for index in fleet.router._indexes:
        index.tree.check()


@pytest.mark.slow
def test_a_decision_costs_little_at_64_replicas_and_a_million_blocks():
    (row,) = route_cost.measure(route_cost.Config(num_requests=500), 64, 1_000_000)
    assert row["match_p50_us"] <= 50
    assert row["route_p50_us"] <= 100  # costs and bookkeeping of 64 replicas besides

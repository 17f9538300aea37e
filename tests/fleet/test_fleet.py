"""A fleet in virtual time: replicas that are killed, drain, hang and join, under load; nothing is lost."""

import random
from collections import Counter

import pytest

from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import pack
from radixkv.fleet.routing.policies import ROUTERS
from radixkv.fleet.simulated import Fleet
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate import Simulator, poisson, run
from radixkv.traces import TraceRequest

INDEXED = ("longest_match", "cache_aware")


class PerToken:
    """A millisecond a token computed."""

    def step_s(self, load):
        return 1e-3 * max(load.num_prefill_tokens + load.num_decode_tokens, 1)


def make_simulator(num_blocks=500, **hooks):
    config = SchedulerConfig(max_num_batched_tokens=64)
    return Simulator(Scheduler(KVManager(RadixCache(4), num_blocks), config), PerToken(), **hooks)


def requests(count, seed=0):
    rng = random.Random(seed)
    systems = [[rng.randrange(1000) for _ in range(40)] for _ in range(6)]
    for i in range(count):
        own = [rng.randrange(1000) for _ in range(rng.randint(2, 20))]
        output = [rng.randrange(1000) for _ in range(rng.randint(1, 10))]
        yield TraceRequest(f"r{i}", pack(rng.choice(systems) + own), pack(output))


def make_fleet(router, num_replicas=4, **more):
    options = {"block_size": 4} if router in INDEXED else {}
    return Fleet(router, make_simulator, num_replicas=num_replicas, **options, **more)


def check_all_served(result, count):
    assert result.num_refused == 0
    assert Counter(served.request_id for served in result.served) == {f"r{i}": 1 for i in range(count)}
    wanted = {request.id: request for request in requests(count)}
    for served in result.served:
        request = wanted[served.request_id]
        assert (served.num_prompt_tokens, served.num_output_tokens) == (
            request.num_prompt_tokens,
            request.num_output_tokens,
        )
        assert served.metrics.arrival_s < served.metrics.first_token_s <= served.metrics.finished_s


def check_index(fleet):
    """The router knows exactly what the caches hold."""
    held = getattr(fleet.router, "held", None)
    if held is None:
        return
    held.tree.check()
    assert set(held._slots) == set(fleet.names)
    for name in fleet.names:
        cache = fleet.simulator(name).cache
        for request in requests(30):
            whole = cache.peek(request.prompt) // 4 * 4
            assert held.num_matched(name, request.prompt) == whole


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_serves_everything_and_shares_the_load(router):
    fleet = make_fleet(router)
    result = run(fleet, poisson(requests(300), 40))
    check_all_served(result, 300)
    check_index(fleet)
    assert all(replica.num_requests == replica.queued_tokens == 0 for replica in fleet.router.replicas)
    if router in ("round_robin", "random", "least_loaded", "consistent_hash", "cache_aware"):
        assert min(fleet.simulator(name).num_finished for name in fleet.names) > 20


def test_cache_aware_hits_more_and_waits_less():
    results = {}
    for router in ("round_robin", "cache_aware"):
        served = run(make_fleet(router), poisson(requests(300), 40)).served
        hits = sum(each.num_cached_tokens for each in served)
        results[router] = hits, sum(each.metrics.first_token_s - each.metrics.arrival_s for each in served)
    assert results["cache_aware"][0] > results["round_robin"][0]
    assert results["cache_aware"][1] < results["round_robin"][1]


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "hangs"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_replica_killed_in_the_middle_loses_nothing(router, is_noticed):
    fleet = make_fleet(router, health_timeout_s=0.5)
    busy = []

    def kill():
        name = max(fleet.names, key=lambda name: fleet.simulator(name).num_unfinished)
        busy.append(fleet.simulator(name).num_unfinished)
        fleet.kill(name, is_noticed=is_noticed)

    fleet.at(0.5, kill)
    fleet.at(1.2, kill)
    result = run(fleet, poisson(requests(300), 200))
    check_all_served(result, 300)
    check_index(fleet)
    assert len(fleet.names) == len(fleet.router.replicas) == 2
    assert fleet.num_moved >= sum(busy) > 0


def test_what_was_moved_counts_from_its_first_arrival():
    fleet = make_fleet("round_robin", 2, health_timeout_s=5.0)
    fleet.kill("replica0", is_noticed=False)
    for request in requests(2):
        fleet.submit(request)
    ended = []
    while len(ended) < 2:
        ended += fleet.advance(fleet.next_event_time())
    moved = max(ended, key=lambda served: served.metrics.finished_s)
    assert moved.metrics.arrival_s == 0.0
    assert moved.metrics.first_token_s > 5.0


@pytest.mark.parametrize("router", ROUTERS)
def test_a_draining_replica_ends_what_it_has_and_leaves(router):
    fleet = make_fleet(router)
    counts = []

    def drain():
        name = max(fleet.names, key=lambda name: fleet.simulator(name).num_unfinished)
        simulator = fleet.simulator(name)
        counts.append((simulator, simulator.num_unfinished, simulator.num_finished))
        fleet.drain(name)

    fleet.at(0.5, drain)
    result = run(fleet, poisson(requests(300), 200))
    check_all_served(result, 300)
    check_index(fleet)
    (simulator, num_unfinished, num_finished) = counts[0]
    assert num_unfinished > 0
    assert simulator.num_finished == num_finished + num_unfinished
    assert fleet.num_moved == 0
    assert len(fleet.names) == len(fleet.router.replicas) == 3


def test_with_all_replicas_gone_requests_wait_for_the_next():
    fleet = make_fleet("cache_aware", 2)
    for at_s, name in ((1.0, "replica0"), (1.1, "replica1")):
        fleet.at(at_s, lambda name=name: fleet.kill(name))
    fleet.at(20.0, lambda: fleet.add_replica("fresh"))
    result = run(fleet, poisson(requests(100), 60))
    check_all_served(result, 100)
    check_index(fleet)
    assert fleet.names == ["fresh"]


def test_evictions_reach_the_router():
    fleet = Fleet("cache_aware", lambda **hooks: make_simulator(40, **hooks), num_replicas=2, block_size=4)
    check_all_served(run(fleet, poisson(requests(200), 20)), 200)
    check_index(fleet)
    assert sum(fleet.simulator(name).scheduler.manager.num_evicted_blocks for name in fleet.names) > 100


def test_bad_arguments():
    fleet = make_fleet("round_robin", 1)
    with pytest.raises(ValueError, match="name: expected one of replica0, got 'x'"):
        fleet.kill("x")
    with pytest.raises(ValueError, match="name: expected a replica that is not there yet"):
        fleet.add_replica("replica0")
    with pytest.raises(ValueError, match="request: expected one that fits"):
        fleet.submit(TraceRequest("long", pack([1] * 3000)))
    with pytest.raises(ValueError, match=r"until_s: expected a time from 0\.0 s on, got -1"):
        fleet.advance(-1)


def test_a_replica_too_small_for_what_may_move_there_is_refused():
    sizes = iter([500, 2, 500])
    fleet = Fleet("round_robin", lambda **hooks: make_simulator(next(sizes), **hooks), num_replicas=1)
    for request in requests(3):
        fleet.submit(request)
    with pytest.raises(ValueError, match="small: expected a pool"):
        fleet.add_replica("small")
    assert fleet.names == ["replica0"]
    fleet.add_replica("large")
    fleet.kill("replica0")
    ended = []
    while fleet.next_event_time() < float("inf"):
        ended += fleet.advance(fleet.next_event_time())
    assert sorted(served.request_id for served in ended) == ["r0", "r1", "r2"]
    assert all(not replica.num_requests for replica in fleet.router.replicas)


def test_a_request_that_is_refused_leaves_no_trace():
    fleet = make_fleet("least_loaded", 2)
    for _ in range(3):
        with pytest.raises(ValueError, match="namespace"):
            fleet.submit(TraceRequest("x", pack([1, 2]), namespace="bad"))
    assert all(not replica.num_requests and not replica.queued_tokens for replica in fleet.router.replicas)


def test_a_replica_that_hangs_computes_nothing():
    fleet = make_fleet("round_robin", 1, health_timeout_s=5.0)
    first, second = requests(2)
    fleet.submit(first)
    fleet.kill("replica0", is_noticed=False)
    dead = fleet.simulator("replica0")
    fleet.advance(3.0)
    fleet.submit(second)
    assert dead.num_finished == 0 and dead.now_s == 0.0
    fleet.add_replica("new")
    ended = []
    while fleet.next_event_time() < float("inf"):
        ended += fleet.advance(fleet.next_event_time())
    assert sorted(served.request_id for served in ended) == ["r0", "r1"]

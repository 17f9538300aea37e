"""HybridCache, the caller's part: what a lease says, steps that are undone, namespaces, resets, bad input."""

import doctest

import pytest

from radixkv.cache.hybrid import cache as cache_module
from radixkv.cache.hybrid import placements
from radixkv.cache.hybrid.cache import HybridCache
from radixkv.cache.hybrid.checkpoints import Checkpoint
from radixkv.cache.hybrid.placement import Visit
from radixkv.cache.hybrid.placements import PLACEMENTS, make_placement
from radixkv.cache.hybrid.placements.grid import Grid
from radixkv.cache.hybrid.retention import Weight
from radixkv.cache.hybrid.retentions import RETENTIONS, make_retention
from radixkv.cache.hybrid.retentions.adaptive import EDGES, NUM_BINS, Adaptive, age_bin, index_by_age
from radixkv.cache.layers import FullAttention, Recurrent
from radixkv.cache.namespace import Salt

LAYERS = (FullAttention(1), Recurrent(1_000, 10))


class Caller:
    """Serves requests one at a time; the state of a position is the tokens before it."""

    def __init__(self, **options):
        self.cache = HybridCache(LAYERS, 4, **{"placement": "branch+end", "retention": "recency", **options})
        self.num_blocks = 0

    def blocks(self, num_tokens):
        first, self.num_blocks = self.num_blocks, self.num_blocks + num_tokens // 4
        return list(range(first, self.num_blocks))

    def compute(self, lease, prompt):
        rest = prompt[lease.kv.num_tokens :]
        self.cache.insert(lease, rest, self.blocks(len(rest)))
        for stop in lease.stops:
            self.cache.checkpoint(lease, stop, tuple(prompt[:stop]), 1_000)

    def serve(self, prompt, namespace=None):
        lease = self.cache.acquire(prompt, namespace)
        self.compute(lease, prompt)
        self.cache.commit()
        self.cache.release(lease)
        self.cache.check()
        return lease


def test_the_docs_are_right():
    for module in (cache_module, placements):
        assert doctest.testmod(module).failed == 0 and doctest.testmod(module).attempted > 0


def test_a_lease_says_what_is_found_and_what_was():
    caller = Caller()
    caller.serve([1, 2, 3, 4, 5, 6, 7, 8, 9])
    lease = caller.serve([1, 2, 3, 4, 5, 6, 20, 21])
    assert (lease.num_tokens, lease.num_kv_tokens, lease.num_shared) == (0, 4, 6)
    assert lease.stops == {6: "branch", 8: "end"}
    lease = caller.serve([1, 2, 3, 4, 5, 6, 30, 31])
    assert (lease.num_tokens, lease.num_kv_tokens, lease.ghost) == (6, 6, None)
    while caller.cache.num_checkpoints:
        caller.cache.evict()
        caller.cache.check()
    assert caller.cache.kv.tree.num_blocks == 0
    lease = caller.serve([1, 2, 3, 4, 5, 6, 40, 41])
    assert (lease.num_tokens, lease.num_kv_tokens, lease.num_shared, lease.ghost.position) == (0, 0, 6, 6)


def test_kv_beyond_the_last_checkpoint_of_a_branch_goes_with_the_request():
    caller = Caller(placement="named")
    cache = caller.cache
    lease = cache.acquire(list(range(20)), named=[9])
    cache.insert(lease, list(range(20)), caller.blocks(20))
    assert cache.checkpoint(lease, 9, "nine", 10)
    cache.commit()
    assert cache.release(lease).tolist() == [4, 3, 2]
    lease = cache.acquire(list(range(20)))
    assert (lease.num_tokens, lease.checkpoint.state) == (9, "nine")
    assert cache.cancel(lease).tolist() == []
    given_up = cache.evict()
    assert given_up.states == ["nine"] and given_up.block_ids.tolist() == [1, 0]
    assert cache.evict() is None


def test_what_a_lease_goes_on_from_stays():
    caller = Caller()
    caller.serve([1, 2, 3, 4, 5])
    lease = caller.cache.acquire([1, 2, 3, 4, 5, 6])
    assert caller.cache.evict() is None
    caller.cache.cancel(lease)
    assert lease.num_tokens == 5 and caller.cache.evict() is not None


def test_a_step_that_fails_leaves_nothing():
    caller = Caller()
    cache = caller.cache
    caller.serve([1, 2, 3, 4, 5])
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lease = cache.acquire(prompt)
    source = lease.checkpoint
    caller.compute(lease, prompt)
    assert lease.checkpoint is not source
    given_up = cache.withdraw()
    assert given_up.states == [tuple(prompt)] and len(given_up.block_ids) == 1
    assert lease.checkpoint is source and source.pins == 1 and lease.kv.num_tokens == 4
    cache.check()
    caller.compute(lease, prompt)
    cache.commit()
    cache.release(lease)
    assert cache.acquire([*prompt, 10]).num_tokens == 9


def test_namespaces_share_what_stands_before_them():
    caller = Caller()
    prompt = list(range(1, 14))
    caller.serve(prompt, Salt("a", start=6))
    assert caller.serve(prompt, Salt("b", start=6)).num_tokens == 0  # parts at 6, leaves a checkpoint there
    assert caller.serve(prompt, Salt("c", start=6)).num_tokens == 6
    assert caller.serve([*prompt, 14], Salt("a", start=6)).num_tokens == 13
    assert caller.serve([*prompt, 14], Salt("d", start=6)).num_tokens == 6
    assert caller.serve([*prompt, 14]).num_tokens == 6


def test_nothing_is_kept_in_the_block_where_a_namespace_starts():
    caller = Caller()
    lease = caller.serve([1, 2, 3, 4, 5, 6], Salt("a", start=5))
    assert lease.stops == {6: "end"} and caller.cache.num_checkpoints == 0


def test_reset():
    caller = Caller()
    caller.serve([1, 2, 3, 4, 5], Salt("a"))
    caller.serve([1, 2, 3, 4, 5])
    running = caller.cache.acquire([1, 2, 3, 4, 5, 6])
    given_up = caller.cache.reset(Salt("a"))
    assert len(given_up.states) == len(given_up.block_ids) == 1
    assert caller.cache.acquire([1, 2, 3, 4, 5, 6]).num_tokens == 5
    given_up = caller.cache.reset()
    assert len(given_up.states) == 1 and not len(given_up.block_ids)
    caller.cache.check()
    lease = caller.cache.acquire([1, 2, 3, 4, 5, 6])
    assert (lease.num_tokens, lease.num_shared) == (0, 0)
    caller.cache.release(running)
    caller.cache.check()


def test_history_is_bounded_and_forgets_what_passed_first():
    caller = Caller(max_ghost_tokens=64)
    for first in range(20):
        caller.serve([first, *range(100, 130)])
        assert caller.cache._history.num_tokens <= 64
    assert caller.cache.acquire([19, *range(100, 125), 7]).num_shared == 26
    assert caller.cache.acquire([0, 100, 5]).num_shared == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_placement("branch+nowhere"), "placement: expected some of"),
        (lambda: make_placement(3), "placement: expected some of"),
        (lambda: make_retention("magic"), "retention: expected one of"),
        (lambda: Grid(0), "distance: expected"),
        (lambda: Adaptive(0), "confidence: expected"),
        (lambda: HybridCache(LAYERS, 0), "block_size"),
        (lambda: HybridCache(LAYERS, max_ghost_tokens=-1), "max_ghost_tokens: expected"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_checkpoint_needs_its_blocks():
    caller = Caller()
    lease = caller.cache.acquire([1, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="position: expected one whose blocks are inserted"):
        caller.cache.checkpoint(lease, 5, "state", 1)
    caller.cache.release(lease)
    with pytest.raises(ValueError, match="lease: expected one that is still held"):
        caller.cache.checkpoint(lease, 5, "state", 1)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_placements_stay_inside_what_is_computed(name):
    for visit in (Visit(1000, 0, 0), Visit(1000, 100, 700, 300, (90, 300, 800), (5, 500, 2000)), Visit(3, 2, 2, 2)):
        found = make_placement(name).positions(visit)
        assert all(visit.start < position <= visit.num_tokens for position in found)
        assert list(found) == sorted(found) and set(found.values()) <= {name}


def test_placements_together():
    visit = Visit(1000, 100, 700, turns=(90, 300, 800), named=(5, 500, 2000))
    expected = {300: "turn", 500: "named", 636: "before_branch", 700: "branch", 744: None, 800: "turn", 1000: "end"}
    found = make_placement("end+branch+before_branch+named+turn+before_end").positions(visit)
    assert found == {position: name for position, name in expected.items() if name}
    assert make_placement("before_end").positions(Visit(1000, 0, 0)) == {744: "before_end"}
    assert list(make_placement(Grid(400)).positions(Visit(1000, 400, 0))) == [800]
    assert make_placement("fork").positions(Visit(1000, 100, 700, fork=640)) == {640: "fork"}
    assert make_placement("fork").positions(Visit(1000, 600, 700, fork=640)) == {}
    assert make_placement("output").keeps_output and not make_placement("end").keeps_output


# ---- retentions


@pytest.mark.parametrize("name", sorted(RETENTIONS))
def test_ranks_compare_and_the_longer_unused_does_not_rank_higher(name):
    retention = make_retention(name)
    weight = Weight(100, 1_000, False)
    old, new = Checkpoint(100, "end", 1), Checkpoint(100, "end", 90)
    assert retention.rank(old, weight, 100) < retention.rank(new, weight, 100)


def test_ages_fall_into_bins_whose_edges_they_are():
    bins = [age_bin(age) for age in range(5_000)]
    assert bins == sorted(bins)
    for age, which in enumerate(bins):
        assert EDGES[which] <= age < EDGES[which + 1]
    assert age_bin(2**60) == NUM_BINS - 1


def test_the_index_is_the_best_ratio_of_uses_to_time():
    chances = [0.0] * NUM_BINS
    chances[5] = 0.5  # at an age of 5 requests every second one is used, no other ever
    index = index_by_age(pytest.importorskip("numpy").array(chances))
    assert index[5] == pytest.approx(0.5 / 0.75)
    assert index[3] == pytest.approx(0.5 / 2.75)
    assert index[6] == 0


def test_where_requests_come_round_the_old_stays():
    adaptive = Adaptive()
    known = []
    adaptive.begin(known)
    for tick in range(40):
        checkpoint = Checkpoint(1_000, "before_end", tick)
        known.append(checkpoint)
        if tick >= 10:
            adaptive.met(known[tick - 10], tick)
            known[tick - 10].last_use, known[tick - 10].num_uses = tick, 1
    weight = Weight(1_000, 1_000, False)
    ranks = [adaptive.rank(Checkpoint(1_000, "before_end", 40 - age), weight, 40) for age in range(10)]
    assert ranks == sorted(ranks)


def test_what_is_never_used_again_goes_first():
    adaptive = Adaptive()
    known = [Checkpoint(1_000, "end", tick) for tick in range(100)]
    adaptive.begin(known)
    for tick in range(100):
        adaptive.met(Checkpoint(500, "branch", tick), tick + 1)
    weight = Weight(500, 1_000, False)
    newest, oldest = Checkpoint(1_000, "end", 100), Checkpoint(500, "branch", 99)
    assert adaptive.rank(newest, weight, 100) < adaptive.rank(oldest, weight, 100)


def test_a_checkpoint_at_a_fork_takes_the_place_of_the_one_above_it():
    caller = Caller(placement="end+fork", retention="saved_per_byte")
    cache = caller.cache
    start, middle = list(range(32)), list(range(100, 228))
    caller.serve(start)
    for end in ([1], [2, 3]):
        assert caller.serve([*start, *middle, *end]).num_tokens == 32
    lease = caller.serve([*start, *middle, 4])
    assert lease.num_tokens == 32 and lease.stops == {160: "fork", 161: "end"}
    at = {each.position: each for each in cache._checkpoints}
    assert at[32].is_superseded and at[160].reason == "end"
    assert cache.weigh(at[32]).num_saved == 0 and cache.weigh(at[160]).num_saved == 160
    assert cache.evict().states == [tuple(start)]
    assert caller.serve([*start, *middle, 5]).num_tokens == 160
    # What parts above it needs the one that was there: a use of that would have brought it back.
    assert caller.serve([*start, 9]).num_tokens == 0


def test_a_use_brings_a_superseded_checkpoint_back():
    caller = Caller(placement="end+fork", retention="saved_per_byte")
    start, middle = list(range(32)), list(range(100, 228))
    caller.serve(start)
    for end in ([1], [2, 3], [4]):
        caller.serve([*start, *middle, *end])
    (source,) = (each for each in caller.cache._checkpoints if each.position == 32)
    assert source.is_superseded
    assert caller.serve([*start, 9]).num_tokens == 32
    assert not source.is_superseded and caller.cache.weigh(source).num_saved == 32

"""The waiting queue: its bound in every order, priorities, and what a pass costs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.ordering import ORDERS
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.waiting import WaitingQueue

numbers = itertools.count()


def sequence(prompt, priority=0):
    number = next(numbers)
    return Sequence(number, (number, 0), Request(str(number), tuple(prompt), priority=priority), 0)


def publish(cache, tokens):
    lease = cache.acquire(tokens)
    rest = tokens[lease.num_tokens :]
    cache.insert(lease, rest, range(10**6 + next(numbers) * 100, 10**6 + next(numbers) * 100 + len(rest)))
    cache.commit()
    cache.release(lease)


class Bounded:
    """A queue, and for each that waits what has started since it began to."""

    def __init__(self, order, max_overtakes, queue_aware):
        self.cache = RadixCache(1)
        self.queue = WaitingQueue(self.cache, order, max_overtakes, queue_aware=queue_aware, seed=3)
        self.max_overtakes = max_overtakes
        self.entered = itertools.count()
        self.met = {}  # sequence -> [number, how many waited, starts since, overtakes]
        self.started = []

    def add(self, one):
        self.met[one] = [next(self.entered), len(self.queue), 0, 0]
        self.queue.add(one)

    def start(self):
        self.queue.begin_pass()
        one = self.queue.next()
        if one is None:
            return
        self.queue.remove(one, is_started=True)
        number, num_waiting, starts, overtakes = self.met.pop(one)
        assert starts <= num_waiting + self.max_overtakes and overtakes <= self.max_overtakes
        for other in self.met.values():
            other[2] += 1
            other[3] += other[0] < number
        self.started.append(one)
        publish(self.cache, list(one.request.prompt_token_ids))

    def leave(self, one):
        self.queue.remove(one, is_started=False)
        del self.met[one]


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
# Mostly arrivals and starts; some give up, some are preempted and wait again.
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, st.integers(-1, 2)),
        st.tuples(st.just("start"), st.none(), st.none()),
        st.tuples(st.sampled_from(["leave", "again"]), st.integers(0, 50), st.none()),
    ),
    min_size=20,
    max_size=120,
)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=60, deadline=None)
@given(moves=MOVES, max_overtakes=st.integers(0, 6), queue_aware=st.booleans())
def test_nothing_starts_later_than_the_bound_says(order, moves, max_overtakes, queue_aware):
    run = Bounded(order, max_overtakes, queue_aware)
    for move, what, priority in moves:
        if move == "add":
            run.add(sequence(what, priority))
        elif move == "start":
            run.start()
        elif move == "leave" and run.met:
            run.leave(list(run.met)[what % len(run.met)])
        elif move == "again" and run.started:  # preempted: with its old arrival, and a new wait
            run.add(run.started.pop(what % len(run.started)))
    while run.met:
        run.start()
    run.cache.check()
    assert len(run.queue) == 0


@pytest.mark.parametrize("order", ORDERS)
def test_an_adversary_does_not_hold_up_one_that_shares_nothing(order):
    """Endless arrivals of high priority that hit a hot prefix, sort before it and arrive by twos."""
    run = Bounded(order, 10, True)
    publish(run.cache, [5, 5, 5])
    for _ in range(7):
        run.add(sequence([5, 5, 5, 6], 9))
    cold = sequence([9, 9, 9], 0)
    run.add(cold)
    while cold in run.met:
        run.add(sequence([5, 5, 5, 7], 9))
        run.add(sequence([5, 5, 5, 7], 9))
        run.start()
    assert len(run.started) == 7 + 10 + 1  # not earlier either: what waits before it, the bound, itself


def test_higher_priorities_first_and_the_order_within_each():
    queue = WaitingQueue(RadixCache(1), "depth_first", 100)
    made = {name: sequence(prompt, priority) for name, prompt, priority in ROWS}
    for one in made.values():
        queue.add(one)
    names = []
    while len(queue):
        queue.begin_pass()
        one = queue.next()
        queue.remove(one, is_started=True)
        names.append(next(name for name in made if made[name] is one))
    assert names == ["d", "b", "c", "a", "e"]


def test_as_many_priorities_as_requests_leave_nothing_behind():
    queue = WaitingQueue(RadixCache(1), "longest_prefix", 10**6)
    made = [sequence([i], priority=i) for i in range(300)]
    for one in made:
        queue.add(one)
    for one in reversed(made):
        queue.begin_pass()
        assert queue.next() is one
        queue.remove(one, is_started=True)
    assert len(queue) == 0 and len(queue._orders) == 1


ROWS = [("a", [2, 1], 0), ("b", [1, 1], 3), ("c", [1, 2], 3), ("d", [0, 9], 3), ("e", [3], -1)]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_skipped_comes_again_in_the_next_pass(order):
    queue = WaitingQueue(RadixCache(1), order, 100)
    made = [sequence([i]) for i in range(5)]
    for one in made:
        queue.add(one)
    for _ in range(3):
        queue.begin_pass()
        seen = []
        while (one := queue.next()) is not None:
            seen.append(one)
            queue.skip(one)
        assert sorted(s.sequence_id for s in seen) == [s.sequence_id for s in made]
    queue.begin_pass()
    assert queue.next() is seen[0]


def test_the_random_order_is_another_for_each_seed_and_the_same_for_one():
    def started(seed):
        queue = WaitingQueue(RadixCache(1), "random", 100, seed=seed)
        for i in range(20):
            queue.add(Sequence(i, (i, 0), Request(str(i), (i,)), 0))
        names = []
        while len(queue):
            queue.begin_pass()
            one = queue.next()
            queue.remove(one, is_started=True)
            names.append(one.sequence_id)
        return names

    assert started(1) == started(1) != started(2)
    assert started(1) != list(range(20))


def test_longest_prefix_follows_the_cache_without_matching_again(monkeypatch):
    cache = RadixCache(1)
    queue = WaitingQueue(cache, "longest_prefix", 10**6)
    first, second = sequence([1, 2, 3, 9]), sequence([5, 6, 7, 9])
    queue.add(first)
    queue.add(second)

    def best():
        queue.begin_pass()
        return queue.next()

    assert best() is first  # nothing is cached: the earlier one
    publish(cache, [5, 6])
    assert best() is second
    publish(cache, [1, 2, 3])
    assert best() is first
    walks = []
    walk = cache._watches._match
    monkeypatch.setattr(cache._watches, "_match", lambda *given: walks.append(given) or walk(*given))
    monkeypatch.setattr(cache, "peek", None)
    for _ in range(10):
        assert best() is first
    publish(cache, [7, 7, 7])  # concerns neither
    assert best() is first and not walks
    cache.evict(10**6)
    assert best() is first and not walks  # back to the earlier one; a cut matches nothing either
    publish(cache, [5])
    assert best() is second and len(walks) == 1


@pytest.mark.parametrize(("hint", "value"), [("priority", 1.5), ("keep_steps", -1), ("keep_steps", True)])
def test_bad_hints_are_named(hint, value):
    with pytest.raises(ValueError, match=hint):
        Request("r", (1,), **{hint: value})


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_of_lower_priority_gives_way_and_still_ends(order):
    scheduler = Scheduler(KVManager(RadixCache(4), 8), SchedulerConfig(order=order, max_overtakes=4))
    ended = []
    for i in range(12):
        prompt = tuple(range(100 * i, 100 * i + 8))
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=8), priority=i % 3))
    for _ in range(400):
        scheduler.schedule()
        for one in scheduler.commit():
            if one.running.num_computed == one.num_tokens:
                scheduler.append_token(one, 1)
                if len(one.generated_token_ids) == 8:
                    scheduler.finish(one)
                    ended.append(int(one.request.request_id))
        if not scheduler.has_unfinished:
            break
    assert sorted(ended) == list(range(12))
    assert ended[0] % 3 == 2 and ended.index(0) <= 8


def test_a_kept_prefix_goes_last_and_only_for_so_long():
    cache = RadixCache(4)
    scheduler = Scheduler(KVManager(cache, 10), SchedulerConfig())

    def serve(name, start, keep_steps=0):
        scheduler.add(Request(name, tuple(range(start, start + 16)), keep_steps=keep_steps))
        while scheduler.has_unfinished:
            scheduler.schedule()
            (one,) = scheduler.commit()
            scheduler.append_token(one, 1)
            scheduler.finish(one)

    serve("kept", 0, keep_steps=5)
    for i in range(3):
        serve(str(i), 1000 * i + 1000)
    assert cache.peek(list(range(16))) == 16  # though it is the oldest
    for i in range(3, 6):
        serve(str(i), 1000 * i + 1000)
    assert cache.peek(list(range(16))) == 0
    serve("kept", 0, keep_steps=10**6)
    assert len(cache.evict(10)) >= 8 and cache.peek(list(range(16))) == 0  # soft: where nothing else is left, it goes


def test_prefixes_are_kept_as_far_as_the_pool_reaches():
    """Steps without end take no memory without end: what would be let go first is kept no longer."""
    scheduler = Scheduler(KVManager(RadixCache(4), 10), SchedulerConfig())
    watches = []
    watch = scheduler.manager.cache.watch
    scheduler.manager.cache.watch = lambda *given, **options: watches.append(watch(*given, **options)) or watches[-1]
    for i in range(50):
        prompt, params = tuple(range(100 * i, 100 * i + 9)), SamplingParams(max_tokens=1)
        scheduler.add(Request(str(i), prompt, params, keep_steps=10**9 - 3 * i))
        scheduler.schedule()
        (sequence,) = scheduler.commit()
        scheduler.finish(sequence)
        scheduler.manager.check()
    kept = [watch for watch in watches if watch.rank is not None]
    live = [i for i, watch in enumerate(kept) if watch.cursor is not None]
    assert len(kept) == 50 and live == [0, 1, 2, 3]  # four times nine of forty tokens; the last to be let go stay

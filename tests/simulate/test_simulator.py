"""The simulator against the engine, the dry run and the replay; loads against counting; time never goes back."""

import random
from math import inf, nan

import numpy as np
import pytest

from experiments.dry_run import dry_run
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import pack
from radixkv.engine.engine import Engine
from radixkv.scheduling.ordering import ORDERS
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate import ClosedLoop, OpenLoop, Roofline, Simulator, StepLoad, at_once, run
from radixkv.simulate import simulator as simulator_module
from radixkv.traces import TraceRequest, open_workload

CACHES = {"radix": RadixCache, "flat_hash": lambda size: FlatHashCache(size, verify=True), "null": NullCache}


LIMITS = ("max_num_batched_tokens", "max_num_seqs", "order", "max_overtakes")


class SlowInTokens:
    """A cost model that is easy to reckon with: a second a step, and one for each token."""

    def step_s(self, load):
        return 1.0 + load.num_tokens


def make(cache=None, num_blocks=200, cost=None, **options):
    config = {k: options.pop(k) for k in list(options) if k in LIMITS}
    scheduler = Scheduler(KVManager(cache or RadixCache(16), num_blocks), SchedulerConfig(**config))
    return Simulator(scheduler, cost or SlowInTokens(), **options)


def tree_of_requests(rng, count, vocabulary=5, longest=120):
    """Prompts that share prefixes of all lengths, with outputs."""
    prompts = [[rng.randrange(vocabulary) for _ in range(3)]]
    requests = []
    for number in range(count):
        base = rng.choice(prompts)
        own = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40))]
        prompt = (base[: rng.randrange(1, len(base) + 1)] + own)[:longest]
        prompts.append(prompt)
        output = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 30))]
        requests.append(TraceRequest(f"r{number}", pack(prompt), pack(output), session=f"s{rng.randrange(12)}"))
    return requests


def test_a_request_by_hand():
    simulator = make()
    simulator.submit(TraceRequest("a", pack(range(20)), pack([7, 8, 9])), 5.0)
    assert simulator.next_event_time() == 5.0 and simulator.num_unfinished == 1
    (served,) = simulator.advance(inf)
    # 20 tokens from 5 s on, then one each for the second and the third token
    assert served.metrics.token_times_s == [26.0, 28.0, 30.0]
    assert (served.metrics.arrival_s, served.metrics.first_scheduled_s) == (5.0, 5.0)
    assert (served.metrics.first_token_s, served.metrics.finished_s) == (26.0, 30.0)
    assert (served.num_prompt_tokens, served.num_cached_tokens, served.num_output_tokens) == (20, 0, 3)
    assert simulator.next_event_time() == inf and simulator.busy_s == 25.0
    # Its prompt and all of its output but the last token, which was never fed, are cached now.
    simulator.submit(TraceRequest("b", pack([*range(20), 7, 8, 9, 1])))
    assert simulator.advance(inf)[0].num_cached_tokens == 22


def test_the_same_steps_as_the_engine():
    """Sizes, hits, evictions and preemptions of every step, where both generate the same tokens."""
    rng = random.Random(3)
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "max_overtakes": 2}
    engine = Engine.from_pretrained(
        "tiny_gpt", cache=CacheConfig(block_size=4, num_blocks=40), scheduler=SchedulerConfig(**limits)
    )
    requests = tree_of_requests(rng, 25, longest=60)
    for request in requests:
        prompt = np.frombuffer(request.prompt, np.int32).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True))
    generations = [engine.generation(str(i)) for i in range(len(requests))]
    expected = []
    while engine.has_unfinished_requests:
        expected.append(engine.step())
    outputs = [generation.output() for generation in generations]

    found = []
    simulator = make(RadixCache(4), 40, on_step=found.append, order="longest_prefix", **limits)
    for request, output in zip(requests, outputs, strict=True):
        simulator.submit(TraceRequest(request.id, request.prompt, pack(output.outputs[0].token_ids)))
    served = {each.request_id: each for each in simulator.advance(inf)}

    def counts(stats):
        names = [name for name in stats.__slots__ if name not in ("schedule_s", "forward_s", "postprocess_s")]
        return {name: getattr(stats, name) for name in names}

    assert [counts(stats) for stats in found] == [counts(stats) for stats in expected]
    assert sum(stats.num_preemptions for stats in found) and sum(stats.num_evicted_blocks for stats in found)
    assert [served[r.id].num_cached_tokens for r in requests] == [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("order", sorted(ORDERS))
def test_the_same_counts_as_the_dry_run(cache, order):
    requests = tree_of_requests(random.Random(5), 60)
    zeros = [TraceRequest(r.id, r.prompt, bytes(len(r.output))) for r in requests]
    prompts = [(r.id, tuple(np.frombuffer(r.prompt, np.int32).tolist()), r.num_output_tokens) for r in requests]
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=6, order=order)
    dry = Scheduler(KVManager(CACHES[cache](4), 60), limits)
    expected = dry_run(dry, [Request(i, p, SamplingParams(max_tokens=n)) for i, p, n in prompts])
    simulator = make(CACHES[cache](4), 60, max_num_batched_tokens=64, max_num_seqs=6, order=order)
    result = run(simulator, at_once(zeros))
    scheduler = simulator.scheduler
    assert len(result.served) == 60 and not result.num_refused
    assert simulator.num_steps == expected.num_steps
    assert scheduler.num_hit_tokens == expected.num_hit_tokens
    assert sum(served.num_cached_tokens for served in result.served) == expected.num_hit_tokens
    assert (scheduler.num_preemptions, scheduler.manager.num_evicted_blocks) == (
        expected.num_preemptions,
        expected.num_evicted_blocks,
    )


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 900), (16, 60), (16, 1000)])
def test_one_at_a_time_hits_what_a_replay_hits(cache, block_size, num_blocks):
    requests = tree_of_requests(random.Random(7), 120)
    # In a tight pool an engine can evict what a partial match was copied from before its request ends; a replay can't.
    config = CacheConfig(cache, block_size, partial_blocks=num_blocks != 60, num_blocks=num_blocks)
    replay = Replay(config, cache_outputs=True)
    expected = [replay.feed(r.prompt, r.output[:-4]) for r in requests]  # the last token is never fed
    simulator = make(config.make(), num_blocks, order="fcfs")
    alone = [TraceRequest(r.id, r.prompt, r.output) for r in requests]
    result = run(simulator, ClosedLoop(alone, num_open=1))
    assert [served.num_cached_tokens for served in result.served] == expected
    assert sum(expected) > 0 or cache == "null"


def brute_force_load(batch, scheduler):
    """Every slot that a decode sees, counted in a set."""
    slots, logical, num_decodes = set(), 0, 0
    by_id = {running.sequence.sequence_id: running.sequence for running in scheduler.running}
    for item in batch.sequences:
        if item.num_tokens == 1 and item.end > by_id[item.sequence_id].num_prompt_tokens:
            num_decodes += 1
            logical += item.end
            slots |= {
                (int(item.block_table[p // scheduler.block_size]), p % scheduler.block_size) for p in range(item.end)
            }
    pairs = sum(
        position + 1
        for item in batch.sequences
        if not (item.num_tokens == 1 and item.end > by_id[item.sequence_id].num_prompt_tokens)
        for position in range(item.start, item.end)
    )
    return num_decodes, logical, len(slots), pairs


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(4))
def test_random_runs_keep_every_invariant(cache, seed, monkeypatch):
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    num_blocks = rng.choice([160, 300, 1000]) // block_size + 1
    loads = []

    def checked(batch, scheduler):
        load = simulator_module_measure(batch, scheduler)
        found = (load.num_decode_tokens, load.num_decode_kv_tokens, load.num_unique_kv_tokens, load.num_prefill_pairs)
        assert found == brute_force_load(batch, scheduler)
        assert load.num_tokens == batch.num_tokens
        loads.append(load)
        return load

    simulator_module_measure = simulator_module.measure_load
    monkeypatch.setattr(simulator_module, "measure_load", checked)
    times = []

    def on_step(stats):
        simulator.scheduler.manager.check()
        assert stats.sizes.num_blocks == num_blocks
        assert simulator.now_s > (times[-1] if times else -1)
        times.append(simulator.now_s)

    simulator = make(
        CACHES[cache](block_size),
        num_blocks,
        on_step=on_step,
        max_num_batched_tokens=rng.choice([16, 50, 300]),
        max_num_seqs=rng.choice([3, 10]),
        order=rng.choice(sorted(ORDERS)),
    )
    requests = tree_of_requests(rng, 60)
    arrivals = rng.choice([at_once(requests), ClosedLoop(requests, 5)])
    result = run(simulator, arrivals)
    assert len(result.served) == 60 and simulator.num_unfinished == 0 and simulator.num_finished == 60
    for served in result.served:
        m = served.metrics
        assert m.arrival_s <= m.first_scheduled_s < m.first_token_s == m.token_times_s[0]
        assert m.finished_s == m.token_times_s[-1] and served.num_output_tokens == len(m.token_times_s)
        assert all(a < b for a, b in zip(m.token_times_s, m.token_times_s[1:], strict=False))
        assert set(m.token_times_s) <= set(times)
    ends = [served.metrics.finished_s for served in result.served]
    assert ends == sorted(ends)
    assert simulator.num_kv_tokens == sum(load.num_decode_kv_tokens for load in loads)
    assert simulator.num_unique_kv_tokens == sum(load.num_unique_kv_tokens for load in loads)
    sizes = simulator.scheduler.manager.sizes
    assert sizes.private == sizes.pinned == 0 and sizes.free + sizes.evictable == num_blocks
    if cache == "radix":
        assert simulator.num_unique_kv_tokens < simulator.num_kv_tokens


def test_samples_of_one_prompt_run_side_by_side():
    simulator = make(seed=4)
    simulator.submit(Request("a", tuple(range(40)), SamplingParams(n=3, max_tokens=5)))
    (served,) = simulator.advance(inf)
    assert served.num_output_tokens == 15 and len(served.metrics.token_times_s) == 5
    assert simulator.num_steps == 5  # the prompt gives each its first token
    simulator.scheduler.manager.check()


def test_outputs_are_drawn_from_a_seed():
    def tokens(seed):
        simulator = make(seed=seed)
        seen = []
        finish = simulator.scheduler.finish
        simulator.scheduler.finish = lambda sequence: (seen.extend(sequence.generated_token_ids), finish(sequence))
        for name in "ab":
            simulator.submit(TraceRequest(name, pack([1, 2, 3])), max_tokens=6)
        simulator.advance(inf)
        return seen

    assert tokens(1) == tokens(1) != tokens(2)
    assert len(tokens(1)) == 12 and tokens(1)[0] != tokens(1)[1]


@pytest.mark.parametrize("seed", range(3))
def test_small_steps_of_time_come_to_the_same(seed):
    rng = random.Random(seed)
    requests = tree_of_requests(rng, 30)
    times = sorted(rng.choice([0, 10, rng.uniform(0, 300)]) for _ in requests)

    def submitted():
        simulator = make(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=40)
        return simulator

    whole = submitted()
    for request, at_s in zip(requests, times, strict=True):
        whole.submit(request, at_s)
    expected = whole.advance(inf)

    parts, found = submitted(), []
    for request, at_s in zip(requests, times, strict=True):
        while rng.random() < 0.7:
            found += parts.advance(rng.uniform(parts.now_s, at_s))
        found += parts.advance(at_s)
        assert parts.now_s == at_s
        parts.submit(request)
    while parts.next_event_time() < inf:
        found += parts.advance(parts.next_event_time())
    assert found == expected
    assert (parts.num_steps, parts.busy_s) == (whole.num_steps, whole.busy_s)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(4))
def test_steps_passed_over_at_once_are_the_same_steps(cache, seed):
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([(1, 600), (4, 100), (16, 40), (64, 10)])
    requests = tree_of_requests(rng, 60)
    times = sorted(rng.uniform(0, 600) for _ in requests)
    arrivals = [
        lambda: ClosedLoop(requests, 3, think_s=1.5),
        lambda: OpenLoop(requests, times),
        lambda: at_once(requests),
    ]
    make_arrivals = arrivals[seed % 3]
    found = []
    for on_step in (lambda stats: None, None):
        scheduled = []
        simulator = make(CACHES[cache](block_size), num_blocks, on_step=on_step, max_num_seqs=6)
        schedule = simulator.scheduler.schedule
        simulator.scheduler.schedule = lambda s=schedule, c=scheduled: (c.append(1), s())[1]
        result = run(simulator, make_arrivals())
        simulator.scheduler.manager.check()
        scheduler = simulator.scheduler
        counts = (simulator.num_steps, simulator.busy_s, simulator.num_kv_tokens, simulator.num_unique_kv_tokens)
        evicted = scheduler.manager.num_evicted_blocks
        found.append((result, counts, scheduler.num_preemptions, evicted, scheduler.manager.sizes, simulator.now_s))
        passed = simulator.num_steps - len(scheduled)
    assert found[0] == found[1]
    assert passed > 0


def test_kept_prefixes_are_let_go_in_the_step_they_would_be():
    for on_step in (None, lambda stats: None):
        simulator = make(num_blocks=100, on_step=on_step)
        kept = Request("a", tuple(range(20)), SamplingParams(max_tokens=2), keep_steps=7)
        simulator.submit(kept)
        simulator.submit(TraceRequest("b", pack(range(100, 120)), pack(range(30))))
        let_go = []
        unwatch = simulator.cache.unwatch
        simulator.cache.unwatch = lambda watch, u=unwatch, s=simulator, g=let_go: (g.append(s.num_steps), u(watch))
        simulator.advance(inf)
        assert let_go[-1] == 2 + 7 - 1  # kept from the end of the second step on, let go as the ninth begins


def test_what_arrives_together_is_in_the_step_that_begins_then():
    simulator = make()
    for name in "ab":
        simulator.advance(3.0)
        simulator.submit(TraceRequest(name, pack(range(5)), pack([1])))
    first, second = simulator.advance(inf)
    assert first.metrics.first_token_s == second.metrics.first_token_s
    assert simulator.num_steps == 1


def test_a_fleet_in_the_time_of_all():
    """Two replicas in lockstep of virtual time serve as each would by itself, and events come when steps end."""
    requests = list(open_workload("multi_turn", num_conversations=8, num_turns=3, rate_per_s=0.02, seed=2))
    cost = SlowInTokens()
    replicas = [make(cost=cost, num_blocks=2000) for _ in range(2)]
    heard = []
    for index, replica in enumerate(replicas):
        replica.cache.subscribe(lambda number, event, i=index: heard.append((i, replicas[i].now_s)))
    waiting = [(request.timestamp_s, i % 2, request) for i, request in enumerate(requests)][::-1]
    ended = [[], []]
    last = 0.0
    while True:
        now = min([waiting[-1][0] if waiting else inf, *(replica.next_event_time() for replica in replicas)])
        if now == inf:
            break
        assert now >= last
        last = now
        for replica, each in zip(replicas, ended, strict=True):
            each += replica.advance(now)
        while waiting and waiting[-1][0] == now:
            _, index, request = waiting.pop()
            replicas[index].submit(request, now)
            assert replicas[index].num_waiting >= 1 and replicas[index].num_waiting_tokens >= request.num_prompt_tokens
    for index in range(2):
        alone = make(cost=cost, num_blocks=2000)
        for request in requests[index::2]:
            alone.submit(request, request.timestamp_s)
        assert alone.advance(inf) == ended[index]
    ends = {(i, t) for i in range(2) for each in ended[i] for t in each.metrics.token_times_s}
    assert heard and {(i, t) for i, t in heard if t} <= ends


def test_a_closed_loop_keeps_so_many_open_and_turns_in_order():
    requests = list(open_workload("multi_turn", num_conversations=10, num_turns=4, seed=1))
    most = 0

    def on_step(stats):
        nonlocal most
        most = max(most, stats.num_running + stats.num_waiting)

    simulator = make(num_blocks=3000, on_step=on_step)
    result = run(simulator, ClosedLoop(requests, num_open=4, think_s=2.0))
    assert most <= 4 and len(result.served) == 40
    by_session = {}
    for served in sorted(result.served, key=lambda served: served.metrics.arrival_s):
        session, turn = served.request_id.split(":")[1].split("/")
        turns = by_session.setdefault(session, [])
        assert len(turns) == int(turn)
        if turns:
            assert served.metrics.arrival_s == turns[-1].metrics.finished_s + 2.0
        turns.append(served)
    # A later turn finds all but the last token of what was said before.
    assert all(turn.num_cached_tokens > 0 for turns in by_session.values() for turn in turns[1:])


def test_what_cannot_be_is_refused():
    simulator = make(num_blocks=4)
    simulator.advance(10.0)
    with pytest.raises(ValueError, match=r"at_s: expected a time from 10\.0 s on, got 9"):
        simulator.submit(TraceRequest("a", pack([1])), 9)
    with pytest.raises(ValueError, match=r"until_s: expected a time from 10\.0 s on, got 9"):
        simulator.advance(9)
    with pytest.raises(ValueError, match="pool's tokens"):
        simulator.submit(TraceRequest("a", pack(range(65)), pack([1])))
    with pytest.raises(ValueError, match="at least one token"):
        simulator.submit(TraceRequest("a", b""))
    assert simulator.num_unfinished == 0 and simulator.next_event_time() == inf
    long, short = TraceRequest("long", pack(range(65)), pack([1])), TraceRequest("short", pack(range(64)), pack([1]))
    result = run(simulator, at_once([long, short]))
    assert result.num_refused == 1 and [served.request_id for served in result.served] == ["short"]

    class Free:
        def step_s(self, load: StepLoad) -> float:
            return 0.0

    stopped = make(cost=Free())
    stopped.submit(short)
    with pytest.raises(ValueError, match="cost: expected a step above 0 s"):
        stopped.advance(inf)


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_whose_last_token_a_chunk_left_over_has_a_first_token(n):
    def serve(**watched):
        cost = Roofline.of("llama-3-8b", "h100-sxm")
        simulator = Simulator(Scheduler(KVManager(RadixCache(16), 1000)), cost, **watched)
        simulator.submit(Request("big", tuple(range(2040)), SamplingParams(max_tokens=20)), 0.0)
        simulator.submit(Request("small", tuple(range(5000, 5009)), SamplingParams(max_tokens=8, n=n)), 0.0)
        served = simulator.advance(inf)
        assert not simulator.num_unfinished
        return [(each.request_id, each.metrics.first_token_s, each.metrics.finished_s) for each in served]

    found = serve()
    assert len(found) == 2 and all(first is not None for _, first, _ in found)
    assert found == serve(on_step=lambda stats: None)


def test_times_must_be_finite_and_enough():
    requests = [TraceRequest(str(i), pack([1, 2])) for i in range(2)]
    for times in ([0.0, nan], [0.0, inf], [0.0]):
        loop = OpenLoop(requests, times)
        with pytest.raises(ValueError, match="times_s"):
            loop.next()
    for think_s in (nan, inf, -1.0):
        with pytest.raises(ValueError, match="think_s"):
            ClosedLoop(requests, 1, think_s)

"""The tree inside vLLM: vLLM's scheduler over a shadow worker, and a tiny model in vLLM's own engine."""

import json
import os
import random
import subprocess
import sys
from collections import Counter, deque
from copy import copy
from importlib.metadata import entry_points
from itertools import islice
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: `make test-vllm` runs these in an environment of their own")

# isort: split
from tests.integrations.vllm_engines import MAX_LEN, VOCABULARY, Engine, save_tiny_llama, with_tokenizer

# isort: split
from vllm.config import KVEventsConfig
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import Replay
from radixkv.cache.namespace import LoRA, Media, Salt
from radixkv.cache.tokens import pack, unpack
from radixkv.fleet.routing.index import FleetIndex
from radixkv.fleet.routing.zmq import ZmqSubscriber
from radixkv.integrations.vllm import RadixKVCacheManager, RadixScheduler, check_fit, namespace_of, options_of
from radixkv.traces.trace import open_trace
from radixkv.traces.workload import open_workload
from tests.integrations.shadow_worker import ShadowWorker, continuation, make_request, make_scheduler
from tests.shared_files import shared_file


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


class Script:
    """Random requests and what happens to them, step by step, against one scheduler.

    Attributes:
        seen: how often which kind of thing happened.
        ended: the requests that ran to their end.
    """

    def __init__(self, seed, scheduler, worker, *, is_async):
        self.random = random.Random(seed)
        self.scheduler = scheduler
        self.worker = worker
        self.depth = 2 if is_async else 1
        self.in_flight = deque()
        self.texts = []
        self.live = {}
        self.requests = []
        self.seen = Counter()
        if tables := self.tables:
            drop = tables.drop

            def watched(name, num_computed):
                self.seen["taken out of its step"] += name in tables._unpublished
                drop(name, num_computed)

            tables.drop = watched

    @property
    def tables(self):
        """The tree's; None with vLLM's own index."""
        return getattr(self.scheduler.kv_cache_manager, "tables", None)

    def arrive(self):
        choose = self.random
        text = list(choose.choice(self.texts)) if self.texts and choose.random() < 0.8 else []
        text = text[: choose.randint(0, len(text))]
        text += [choose.randrange(3, 40) for _ in range(choose.randint(1, 40))]
        text = text[:110]
        self.texts = [*self.texts[-12:], text]
        images = ()
        if choose.random() < 0.15 and len(text) > 8:
            offset = choose.randint(0, len(text) - 5)
            text = text[:offset] + [3] * 4 + text[offset + 4 :]
            images = ((choose.choice("xy"), offset, 4),)
        options = {
            "salt": choose.choice([None, None, None, "tenant"]),
            "lora": choose.choice([None, None, None, "adapter"]),
            "images": images,
            "priority": choose.randint(0, 5),
            "scored": choose.random() < 0.1,
            "max_tokens": choose.randint(1, 20),
            "block_size": self.worker.block_size,
        }
        for _ in range(choose.choice([1, 1, 1, 3])):  # as `n` of one request: vLLM makes a request of each sample
            name = str(len(self.requests))
            request = make_request(name, text, **options)
            self.worker.salts[name] = options["salt"]
            self.requests.append(request)
            self.live[name] = request
            self.scheduler.add_request(request)
            self.seen.update(key for key in ("salt", "lora", "images", "scored") if options[key])

    def step(self):
        if self.scheduler.has_requests() and len(self.in_flight) < self.depth:
            step = self.scheduler.schedule()
            self.in_flight.append((step, self.worker.execute(step)))
            self.check()
            if len(self.in_flight) < self.depth and self.random.random() < 0.8:
                return
        if self.in_flight:
            self.scheduler.update_from_output(*self.in_flight.popleft())
            self.check()
        for name, request in list(self.live.items()):
            if request.is_finished():
                del self.live[name]

    def abort(self):
        from vllm.v1.request import RequestStatus

        if self.live:
            name = self.random.choice(list(self.live))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.live[name]
            self.seen["abort"] += 1
            self.check()

    def reset(self):
        preempts = self.random.random() < 0.5
        done = self.scheduler.reset_prefix_cache(reset_running_requests=preempts)
        self.seen["reset, running requests preempted" if preempts else "reset"] += done
        self.check()

    def check(self):
        if self.tables:
            self.tables.manager.check()

    def run(self, num_operations):
        for _ in range(num_operations):
            operations = [self.arrive, self.step, self.abort, self.reset]
            self.random.choices(operations, [10, 60, 2, 1])[0]()
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
        self.seen["preemption"] += sum(request.num_preemptions for request in self.requests)
        self.seen["copy"] += self.worker.num_copies
        self.seen["ended"] += sum(request.status.name == "FINISHED_LENGTH_CAPPED" for request in self.requests)
        for request in self.requests:
            expected = continuation(request)
            if request.status.name != "FINISHED_LENGTH_CAPPED":
                expected = expected[: request.num_output_tokens]
            assert list(request.output_token_ids) == expected, request.request_id
        if self.tables:
            assert not list(self.tables.names())
            sizes = self.tables.manager.sizes
            assert sizes.private == sizes.pinned == 0
        return self.seen


def run_script(model, seed, *, tree=True, is_async, num_operations=150, drops_copies=False, **options):
    choose = random.Random(seed)
    block_size, policy = choose.choice([1, 4, 16]), choose.choice(["fcfs", "priority"])
    scheduler = make_scheduler(
        model,
        tree=tree,
        block_size=block_size,
        num_blocks=choose.choice([160, 160, 250, 4000]) // block_size + 1,
        is_async=is_async,
        max_num_batched_tokens=choose.choice([32, 64, 1024]),
        scheduling_policy=policy,
        max_model_len=150,
        watermark=choose.choice([0.0, 0.05]),
        scheduler_reserve_full_isl=choose.choice([True, False]),
        **options,
    )
    script = Script(seed, scheduler, ShadowWorker(block_size, drops_copies), is_async=is_async)
    return script.run(num_operations)


HAPPENS = [
    *("salt", "lora", "images", "scored", "abort", "reset", "reset, running requests preempted"),
    *("preemption", "taken out of its step", "copy"),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_every_row_read_is_the_readers_own_history(model, is_async):
    seen = Counter()
    for seed in range(40):
        seen.update(run_script(model, seed, is_async=is_async))
    assert seen["ended"] > 1000
    assert all(seen[what] > 5 for what in HAPPENS), seen


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_the_shadow_worker_agrees_with_plain_vllm(model, is_async):
    for seed in range(6):
        run_script(model, seed, tree=False, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_without_prefix_caching_nothing_is_shared(model, is_async):
    for seed in range(6):
        assert not run_script(model, seed, is_async=is_async, enable_prefix_caching=False)["copy"]


def test_a_dropped_copy_is_noticed(model):
    with pytest.raises(AssertionError):
        for seed in range(12):
            run_script(model, seed, is_async=False, drops_copies=True)


# ---- hits, request by request, in vLLM's engine


def conversations(seed, num_requests=120):
    """Prompts that repeat, go on from, or leave earlier ones, most of them inside a block."""
    choose = random.Random(seed)
    systems = [[choose.randrange(3, VOCABULARY) for _ in range(choose.randint(20, 300))] for _ in range(3)]
    texts = []
    for _ in range(num_requests):
        base = choose.choice(texts) if texts and choose.random() < 0.6 else choose.choice(systems)
        if choose.random() < 0.3:
            base = base[: choose.randint(1, len(base))]
        text = base + [choose.randrange(3, VOCABULARY) for _ in range(choose.randint(1, 80))]
        texts = [*texts[-20:], text[:800]]
        yield text[:800]


def trace(workload, **sizes):
    """The prompts of a workload, in the tiny model's tokens."""
    for request in islice(open_workload(workload, seed=1, **sizes), 100):
        yield (unpack(pack(request.prompt)) % (VOCABULARY - 3) + 3).tolist()[: MAX_LEN - 8]


def serve_step_by_step(manager, prompt, output):
    """Serves a request as an engine does, a block when it is needed; returns how many tokens were cached."""
    tokens = list(prompt)
    sequence = manager.begin(tokens)
    for token in output:
        manager.grow(sequence, len(tokens))
        if len(tokens) == len(prompt):
            num_cached = sequence.num_cached_tokens
        manager.publish(sequence, tokens, keep_own=True)
        manager.commit()
        computed, tokens = tokens, [*tokens, token]
    manager.end(sequence, computed)
    return num_cached


TRACES = {
    "conversations": lambda: conversations(7),
    "tree of thought": lambda: trace("tree_of_thought", num_problems=4),
    "multi turn": lambda: trace("multi_turn", num_conversations=20, num_turns=5),
    "few shot": lambda: trace("few_shot"),
}


def public_trace(name, every, num_sessions):
    """The prompts of some conversations, of which every so many tokens are taken: what was a prefix stays one."""
    sessions = set()
    for request in open_trace(shared_file(f"traces/{name}.jsonl")):
        if len(sessions) < num_sessions:
            sessions.add(request.session)
        if request.session in sessions:
            tokens = unpack(pack(request.prompt))[::every] % (VOCABULARY - 3) + 3
            yield tokens[: MAX_LEN - 8].tolist()


PUBLIC_TRACES = {
    "game of 24": lambda: islice(public_trace("tot_game24.requests", 2, 1), 100),
    "tau-bench": lambda: public_trace("tau_bench_airline.conversations", 20, 6),
    "MT-Bench-101": lambda: public_trace("mtbench101.conversations", 2, 25),
}
SIZES = [(32, 40), (32, 400), (128, 12), (128, 100)]


def check_hits(model, traces, block_size, num_blocks):
    """Serves traces by plain vLLM and by the tree; returns hits by trace and side, and least blocks evicted."""
    totals, num_evicted = Counter(), {}
    for tree in (False, True):
        config = CacheConfig("radix" if tree else "flat_hash", block_size, num_blocks=num_blocks - 1)
        manager = KVManager(config.make(), num_blocks - 1)
        with Engine(model, tree=tree, block_size=block_size, num_blocks=num_blocks) as engine:
            for name, prompts in traces.items():
                assert engine.engine.reset_prefix_cache()
                manager.reset()
                hits, expected = [], []
                for i, prompt in enumerate(prompts()):
                    engine.add(f"{name} {i}", prompt, max_tokens=3)
                    (done,) = engine.finish().values()
                    hits.append(done.num_cached_tokens)
                    expected.append(serve_step_by_step(manager, prompt, done.outputs[0].token_ids))
                assert hits == expected, name
                totals[name, tree] = sum(hits)
            num_evicted[tree] = manager.num_evicted_blocks
    return totals, min(num_evicted.values())


@pytest.mark.parametrize(("block_size", "num_blocks"), SIZES)
def test_hits_are_those_of_a_replay(model, block_size, num_blocks):
    totals, num_evicted = check_hits(model, TRACES, block_size, num_blocks)
    for name in TRACES:  # partly filled blocks take room, which is missed where not all fits
        assert totals[name, True] > totals[name, False] * 0.98
    assert sum(totals[name, True] for name in TRACES) > sum(totals[name, False] for name in TRACES)
    assert num_evicted > 100 or num_blocks not in (40, 12)


@pytest.mark.parametrize(("block_size", "num_blocks"), SIZES)
def test_hits_on_public_traces_are_those_of_a_replay(model, block_size, num_blocks):
    totals, num_evicted = check_hits(model, PUBLIC_TRACES, block_size, num_blocks)
    for name in PUBLIC_TRACES:
        assert totals[name, True] > totals[name, False] * (0.98 if num_evicted else 1)


def computed_tokens(model, seed, block_size, num_blocks, **options):
    """Serves conversations one by one; returns how many tokens were computed."""
    scheduler = make_scheduler(model, block_size=block_size, num_blocks=num_blocks, **options)
    worker = ShadowWorker(block_size)
    for i, prompt in enumerate(conversations(seed)):
        request = make_request(str(i), prompt, max_tokens=4, block_size=block_size)
        scheduler.add_request(request)
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            scheduler.update_from_output(step, worker.execute(step))
        assert list(request.output_token_ids) == continuation(request)
    return worker.num_computed_tokens


@pytest.mark.parametrize(("seed", "block_size"), [(1, 16), (2, 64), (3, 128), (4, 1)])
def test_never_fewer_hits_than_plain_vllm_where_all_fits(model, seed, block_size):
    plain, tree = (computed_tokens(model, seed, block_size, 60_000 // block_size, tree=tree) for tree in (False, True))
    assert tree < plain or (block_size == 1 and tree == plain)


@pytest.mark.parametrize(("seed", "block_size", "num_blocks"), [(1, 16, 61), (2, 64, 16), (3, 128, 10)])
def test_the_hits_of_plain_vllm_where_only_whole_blocks_are_shared(model, seed, block_size, num_blocks):
    plain = computed_tokens(model, seed, block_size, num_blocks, tree=False)
    config = {"radixkv": {"partial_blocks": False}}
    assert computed_tokens(model, seed, block_size, num_blocks, tree=True, additional_config=config) == plain


# ---- vLLM's engine with a model


def mixed(seed, num_requests=200):
    """(name, prompt, options) of requests that share, with salts, priorities, several samples and scored prompts."""
    choose = random.Random(seed)
    for i, prompt in enumerate(conversations(seed, num_requests)):
        options = {"max_tokens": choose.randint(1, 30), "priority": choose.randint(0, 3)}
        if choose.random() < 0.2:
            options["salt"] = "tenant"
        if choose.random() < 0.1:
            options["prompt_logprobs"] = 1
        if choose.random() < 0.2:  # several samples may not be called greedy; these are
            options |= {"n": 3, "temperature": 1.0, "top_k": 1}
        yield str(i), prompt[:600], options


def serve_mixed(model, tree):
    """Returns the tokens by request and sample, the requests that were aborted, and how often things happened."""
    seen = Counter()
    options = {"scheduling_policy": "priority", "max_num_batched_tokens": 256, "num_blocks": 60}
    with Engine(model, tree=tree, **options) as engine:
        scheduler, choose, tokens, aborted = engine.scheduler, random.Random(0), {}, set()
        waiting, preempt = deque(mixed(5)), scheduler._preempt_request
        scheduler._preempt_request = lambda *args, **kwargs: (seen.update(["preemption"]), preempt(*args, **kwargs))
        while waiting or engine.engine.has_unfinished_requests():
            for _ in range(choose.randint(0, 3)):
                if waiting:
                    name, prompt, sampling = waiting.popleft()
                    engine.add(name, prompt, **sampling)
            if choose.random() < 0.05 and waiting:
                aborted.add(name)
                engine.engine.abort_request([name])
            if choose.random() < 0.05:
                seen["reset"] += engine.engine.reset_prefix_cache(reset_running_requests=choose.random() < 0.5)
            for output in engine.step():
                tokens[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
                seen["hits"] += output.num_cached_tokens or 0
            if tree:
                scheduler.kv_cache_manager.tables.manager.check()
        if tree:
            tables = scheduler.kv_cache_manager.tables
            assert not list(tables.names()) and tables.manager.sizes.pinned == tables.manager.sizes.private == 0
            assert tables.usage == 0
    return tokens, aborted, seen


@pytest.fixture(scope="module")
def plain_tokens(model):
    return serve_mixed(model, tree=False)[0]


def differing(tokens, aborted, plain):
    return {name for name in plain.keys() - aborted if tokens.get(name) != plain[name]}


def test_mixed_requests_get_the_tokens_of_plain_vllm(model, plain_tokens):
    tokens, aborted, seen = serve_mixed(model, tree=True)
    assert seen["reset"] > 2 and seen["hits"] > 5000 and seen["preemption"] > 5
    assert len(plain_tokens) > 150 and aborted
    assert not differing(tokens, aborted, plain_tokens)


def test_without_the_copies_tokens_differ(model, plain_tokens, monkeypatch):
    take = RadixKVCacheManager.take_kv_cache_block_copies
    monkeypatch.setattr(RadixKVCacheManager, "take_kv_cache_block_copies", lambda self: (take(self)[0][:0], []))
    tokens, aborted, _ = serve_mixed(model, tree=True)
    assert differing(tokens, aborted, plain_tokens)


def test_grammars_are_followed_on_a_hit(model, tmp_path):
    folder = with_tokenizer(model, tmp_path / "with_tokenizer")
    with Engine(folder, tree=True, skip_tokenizer_init=False) as engine:
        grammar = StructuredOutputsParams(choice=["yes", "no"])
        prompt = [40 + i % 50 for i in range(100)]
        for i in range(3):
            engine.add(str(i), prompt, max_tokens=4, structured_outputs=grammar, ends=True)
            done = engine.finish()[str(i)]
            assert "".join(chr(29 + token) for token in done.outputs[0].token_ids if token > 2) in ("yes", "no")
            assert done.num_cached_tokens == (99 if i else 0)


def test_hits_are_counted_once_in_vllms_own_metrics(model):
    scheduler, worker = make_scheduler(model, tree=True, block_size=16, num_blocks=20), ShadowWorker(16)
    shared = list(range(3, 60))
    requests = [make_request(str(i), [*shared, 100 + i], max_tokens=3, priority=i) for i in range(12)]
    queries = hits = 0
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        for of in scheduler.update_from_output(step, worker.execute(step)).values():
            if of.scheduler_stats:
                queries += of.scheduler_stats.prefix_cache_stats.queries
                hits += of.scheduler_stats.prefix_cache_stats.hits
    computed = worker.num_computed_tokens - 2 * len(requests)  # but for decodes
    assert queries == sum(request.num_prompt_tokens for request in requests) and not any(
        request.num_preemptions for request in requests
    )
    assert hits == queries - computed > 0


def test_events_reach_an_index_through_vllms_publisher(model, tmp_path):
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    index = FleetIndex(32)
    index.add_replica("vllm")
    num_batches = num_hits = 0
    with (
        Engine(model, tree=True, num_blocks=60, kv_events_config=config) as engine,
        ZmqSubscriber(lambda event: index.apply("vllm", event), *endpoints) as subscriber,
    ):
        for i, prompt in enumerate(conversations(9, 60)):
            salt = "tenant" if i % 5 == 0 else None
            while num := subscriber.poll(0.05):
                num_batches += num
            predicted = index.num_matched("vllm", prompt[:-1], Salt(salt) if salt else None)
            engine.add(str(i), prompt, max_tokens=2, salt=salt)
            cached = engine.finish()[str(i)].num_cached_tokens
            assert cached // 32 * 32 == predicted
            num_hits += predicted
    assert num_batches > 30 and num_hits > 500


def test_a_running_request_survives_a_reset_and_shares_no_more(model):
    scheduler, worker = make_scheduler(model, tree=True, block_size=4, num_blocks=50), ShadowWorker(4)
    old, new = (make_request(name, range(3, 33), max_tokens=20, block_size=4) for name in "ab")
    scheduler.add_request(old)
    for _ in range(5):
        step = scheduler.schedule()
        scheduler.update_from_output(step, worker.execute(step))
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(new)
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        scheduler.update_from_output(step, worker.execute(step))
        scheduler.kv_cache_manager.tables.manager.check()
    assert list(new.output_token_ids) == list(old.output_token_ids) == continuation(old)
    assert worker.num_computed_tokens == 2 * (30 + 19)  # the later one found nothing of the first


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_a_streamed_session_goes_on_in_its_own_blocks(model, is_async):
    scheduler = make_scheduler(model, tree=True, block_size=4, num_blocks=80, is_async=is_async)
    worker, in_flight = ShadowWorker(4), deque()

    def run():
        while scheduler.has_unfinished_requests() or in_flight:
            if scheduler.has_unfinished_requests() and len(in_flight) <= is_async:
                step = scheduler.schedule()
                in_flight.append((step, worker.execute(step)))
                if len(in_flight) <= is_async:
                    continue
            scheduler.update_from_output(*in_flight.popleft())
            scheduler.kv_cache_manager.tables.manager.check()

    turns = [(list(range(3, 14)), ()), ([60, 61, 62, 63, 64], ()), ([70] * 6, [("x", 1, 4)]), ([80, 81, 82], ())]
    session = None
    for i, (prompt, images) in enumerate(turns):
        turn = make_request("session", prompt, max_tokens=7, block_size=4, images=images, resumable=i < 3)
        scheduler.add_request(turn)
        session = session or turn
        run()
    tokens, features = list(session._all_token_ids), session.mm_features
    assert len(features) == 1 and "session" not in scheduler.requests
    computed = worker.num_computed_tokens
    other = make_request("other", tokens[:60], block_size=4)  # without the image
    scheduler.add_request(other)
    run()
    assert list(other.output_token_ids) == continuation(other)
    assert 0 < worker.num_computed_tokens - computed < 60


def test_new_blocks_are_told_to_workers_that_zero_them(model):
    scheduler, worker = make_scheduler(model, tree=True, block_size=4, num_blocks=50), ShadowWorker(4)
    scheduler.needs_kv_cache_zeroing = scheduler.kv_cache_manager._is_zeroing = True
    for name, prompt in (("a", range(3, 33)), ("b", [*range(3, 26), 99, 98])):
        request = make_request(name, prompt, max_tokens=6, block_size=4)
        scheduler.add_request(request)
        zeroed, known = [], set(scheduler.kv_cache_manager.tables.manager.allocator.free_ids().tolist())
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            zeroed += step.new_block_ids_to_zero or []
            scheduler.update_from_output(step, worker.execute(step))  # zeroes before it copies
        assert list(request.output_token_ids) == continuation(request)
        assert len(zeroed) == (9 if name == "a" else 3) and set(zeroed) <= known
    assert worker.num_copies == 1


# ---- what is refused, and by which name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c, k: setattr(c, "speculative_config", object()), "speculative decoding"),
        (lambda c, k: setattr(c, "kv_transfer_config", SimpleNamespace(kv_connector="Nixl")), "the KV connector Nixl"),
        (lambda c, k: k.kv_cache_groups.append(k.kv_cache_groups[0]), "2 KV cache groups"),
        (lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2), "context parallelism"),
        (lambda c, k: setattr(c.observability_config, "kv_cache_metrics", True), "residency metrics"),
    ],
)
def test_what_is_not_handled_is_refused_by_name(model, change, named):
    scheduler = make_scheduler(model, tree=True, block_size=16, num_blocks=10)
    config, kv_cache = copy(scheduler.vllm_config), copy(scheduler.kv_cache_config)
    kv_cache.kv_cache_groups = list(kv_cache.kv_cache_groups)
    for name in ("parallel_config", "observability_config"):
        setattr(config, name, copy(getattr(config, name)))
    change(config, kv_cache)
    with pytest.raises(NotImplementedError, match=f"does not handle: .*{named}"):
        RadixScheduler(config, kv_cache, None, 16)


def test_sliding_windows_are_refused_by_name(model):
    scheduler = make_scheduler(model, tree=True, block_size=16, num_blocks=10)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=32)
    kv_cache = copy(scheduler.kv_cache_config)
    kv_cache.kv_cache_groups = [copy(kv_cache.kv_cache_groups[0])]
    kv_cache.kv_cache_groups[0].kv_cache_spec = window
    with pytest.raises(NotImplementedError, match="SlidingWindowSpec"):
        RadixScheduler(scheduler.vllm_config, kv_cache, None, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"polcy": "lru"}, "polcy"), ({"policy": 3}, "policy"), ({"partial_blocks": 1}, "partial_blocks"), (3, "mapping")],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        options_of({"radixkv": options})


def test_options_reach_the_cache(model):
    config = {"radixkv": {"policy": "lfu", "partial_blocks": False}}
    scheduler = make_scheduler(model, tree=True, block_size=16, num_blocks=10, additional_config=config)
    cache = scheduler.kv_cache_manager.tables.manager.cache
    assert not cache.partial_blocks and type(cache.tree.policy).__name__.lower() == "lfu"


def test_a_vllm_that_asks_for_more_is_refused():
    class Later(KVCacheManager):
        def think(self):
            """A method that is not known."""

        def free(self, request, how):
            """A parameter that is not known."""

    with pytest.raises(ImportError, match=r"vllm 9\.9: Later has methods that radixkv does not know: \['think'\]"):
        check_fit(Later, RadixKVCacheManager, "9.9")
    del Later.think
    with pytest.raises(ImportError, match=r"vllm 9\.9: Later.free takes \['how'\]"):
        check_fit(Later, RadixKVCacheManager, "9.9")


def test_embeddings_and_media_are_namespaces():
    import torch

    request = make_request("a", range(10), salt="s", lora="l", images=[("x", 2, 3)])
    assert namespace_of(request) == (LoRA("l", "/l"), Salt("s"), Media("x", 2, 3))
    request.prompt_embeds = torch.zeros(10, 4)
    *_, first = namespace_of(request)
    request.prompt_embeds = torch.ones(10, 4)
    *_, second = namespace_of(request)
    assert (first.start, first.length) == (0, 10) and first != second
    assert namespace_of(make_request("b", range(10))) is None


# ---- as an installed plugin, with the engine core in a process of its own

SERVE = """
import json, sys
from tests.integrations.vllm_engines import engine_args
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    prompts = json.load(sys.stdin)
    llm = LLM(**engine_args(sys.argv[1], tree=False, block_size=int(sys.argv[2])))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    done = [llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for prompt in prompts]
    print(json.dumps([[list(output.outputs[0].token_ids), output.num_cached_tokens] for output in done]))
"""


@pytest.mark.parametrize(
    ("plugins", "block_size"), [("radixkv", 32), ("radixkv,radixkv_attention", 16)], ids=["tree", "tree and attention"]
)
def test_as_an_installed_plugin_with_the_core_in_its_own_process(model, plugins, block_size):
    """vLLM's own attention takes no blocks of 16 on a CPU: with ours vLLM starts at all."""
    if set(plugins.split(",")) - {point.name for point in entry_points(group="vllm.general_plugins")}:
        pytest.skip("radixkv is not installed here, so vLLM can't find its entry points: `make test-vllm` installs it")
    prompts = list(conversations(3, 12))

    def serve(plugins, block_size):
        return subprocess.run(
            [sys.executable, "-c", SERVE, model, str(block_size)],
            input=json.dumps(prompts),
            capture_output=True,
            text=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": plugins},
        )

    found = {}
    for name, size in (("none", 32), (plugins, block_size)):
        done = serve(name, size)
        assert done.returncode == 0, done.stderr[-2000:]
        found[name] = json.loads(done.stdout.splitlines()[-1])
    assert [tokens for tokens, _ in found[plugins]] == [tokens for tokens, _ in found["none"]]
    replay = Replay(CacheConfig("radix", block_size), cache_outputs=True)
    expected = [replay.feed(prompt, tokens[:-1]) for prompt, (tokens, _) in zip(prompts, found["none"], strict=True)]
    assert [hits for _, hits in found[plugins]] == expected
    assert sum(hits for _, hits in found["none"]) < sum(expected)
    if "attention" in plugins and current_platform.is_cpu():
        assert serve("none", block_size).returncode != 0

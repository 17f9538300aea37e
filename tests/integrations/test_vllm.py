"""The tree inside vLLM: vLLM's scheduler over a shadow worker, and a tiny model in vLLM's own engine."""

import random
from collections import Counter, deque

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: `make test-vllm` runs these in an environment of their own")

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from tests.integrations.shadow_worker import ShadowWorker, continuation, make_request, make_scheduler
from tests.integrations.vllm_engines import VOCABULARY, Engine, save_tiny_llama


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


def run_script(model, seed, *, tree=True, is_async, num_operations=150, drops_copies=False):
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


@pytest.mark.parametrize(("block_size", "num_blocks"), [(32, 40), (32, 200), (128, 12), (128, 60)])
def test_hits_are_those_of_a_replay(model, block_size, num_blocks):
    totals = {}
    for tree in (False, True):
        replay = Replay(CacheConfig("radix" if tree else "flat_hash", block_size, num_blocks=num_blocks - 1))
        hits, expected = [], []
        with Engine(model, tree=tree, block_size=block_size, num_blocks=num_blocks) as engine:
            for i, prompt in enumerate(conversations(block_size + num_blocks)):
                engine.add(str(i), prompt, max_tokens=1)
                hits.append(engine.finish()[str(i)].num_cached_tokens)
                expected.append(replay.feed(prompt))
        assert hits == expected
        totals[tree] = sum(hits)
        assert tree or replay.num_evicted_blocks > 0 or num_blocks in (60, 200)
    assert totals[True] > totals[False] > 0

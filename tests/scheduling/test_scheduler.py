"""The scheduler on a shadow runner: cases that went wrong elsewhere, and random runs."""

import random

import pytest

from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import Salt
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.ordering import ORDERS
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.sampling import few
from tests.shadow_runner import ForwardFailed, ShadowRunner, histories, next_token


class Driver:
    """schedule -> run -> postprocess, as the engine does it, with the invariants checked after every step."""

    def __init__(self, cache=None, num_blocks=1000, **config):
        self.manager = KVManager(cache or RadixCache(16), num_blocks)
        self.scheduler = Scheduler(self.manager, SchedulerConfig(**config))
        self.runner = ShadowRunner(self.scheduler)
        self.num_blocks = num_blocks
        self.finished = {}
        self.sequences = {}
        self.num_computed = 0
        self.num_steps = 0
        self.starts = []  # request ids, in order of their first step

    def add(self, name, prompt, max_tokens=1, namespace=None, n=1, **hints):
        request = Request(str(name), tuple(prompt), SamplingParams(max_tokens=max_tokens, n=n), namespace, **hints)
        sequence = self.scheduler.add(request)
        self.sequences[str(name)] = sequence
        return sequence

    def step(self):
        batch = self.scheduler.schedule()
        self.num_steps += 1
        self.check()
        try:
            sampled = self.runner.forward(batch)
        except ForwardFailed:
            self.recover()
        else:
            self.done(batch, sampled)
        self.check()
        return batch

    def recover(self):
        for sequence in self.scheduler.withdraw():
            self.check()
            alone = self.scheduler.schedule_alone(sequence)
            assert len(alone.sequences) <= 1
            try:
                sampled = self.runner.forward(alone)
            except ForwardFailed:
                self.scheduler.withdraw()
                self.end(sequence, "error")
            else:
                self.done(alone, sampled)

    def done(self, batch, sampled):
        self.num_computed += batch.num_tokens
        sequences = self.scheduler.commit()
        sampled = iter(sampled)
        for sequence, item in zip(sequences, batch.sequences, strict=True):
            if sequence.request.request_id not in self.starts:
                self.starts.append(sequence.request.request_id)
            if not item.needs_logits:
                continue
            token = next(sampled)
            params = sequence.request.sampling_params
            if sequence.sample == 0 and sequence.num_tokens == sequence.num_prompt_tokens:
                for sample in range(1, params.n):
                    other, copies = self.scheduler.fork(sequence, sample)
                    self.runner.copy(copies)
                    self.scheduler.copied(other)
                    self.accept(other, (token + sample) % 7)
            self.accept(sequence, token)

    def accept(self, sequence, token):
        self.scheduler.append_token(sequence, token)
        if len(sequence.generated_token_ids) == sequence.request.sampling_params.max_tokens:
            self.end(sequence, "length")

    def end(self, sequence, reason):
        self.finished[sequence.request.request_id, sequence.sample] = (sequence.generated_token_ids.tolist(), reason)
        self.scheduler.finish(sequence)

    def abort(self, name):
        for sequence in self.scheduler.sequences(name):
            self.end(sequence, "abort")
        self.check()

    def run(self, max_steps=10_000):
        while self.scheduler.has_unfinished:
            self.step()
            assert self.num_steps < max_steps, "no progress"

    def check(self):
        self.manager.check()
        assert self.manager.sizes.num_blocks == self.num_blocks
        assert len(self.scheduler.running) <= self.scheduler.config.max_num_seqs


def expected(prompt, namespace, max_tokens, sample=0):
    tokens = list(prompt)
    for i in range(max_tokens):
        token = (next_token(histories(namespace, tokens)[-1]) + (sample if i == 0 else 0)) % 7
        tokens.append(token)
    return tokens[len(prompt) :]


def tokens(start, count):
    return list(range(start, start + count))


def test_a_prefix_that_all_share_is_computed_once():
    driver = Driver(num_blocks=4000, max_num_batched_tokens=4096)
    for member in range(22):
        for group in range(10):
            driver.add(f"{group}-{member}", [*tokens(group * 10000, 2000), 900000 + 100 * group + member])
    driver.run()
    assert driver.num_computed == 10 * 2000 + 220


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_document_behind_a_cached_system_prompt_is_computed_once(block_size):
    driver = Driver(RadixCache(block_size), num_blocks=20_000 // block_size, max_num_batched_tokens=2048)
    system, document = tokens(0, 33), tokens(1000, 5000)
    driver.add("system", system)
    driver.run()
    before = driver.num_computed
    for i in range(20):
        driver.add(i, system + document + [90_000 + i, 7])
    driver.run()
    # the document once; each its own two tokens, and what shares a block with them and is not yet computed
    assert driver.num_computed - before <= 5000 + 20 * (2 + block_size)


def test_a_prompt_longer_than_the_pool_is_refused_on_arrival():
    driver = Driver(num_blocks=4)
    other = driver.add("fits", tokens(0, 60), max_tokens=5)
    with pytest.raises(ValueError, match=r"<= 64.*61 \+ 5 - 1 = 65"):
        driver.add("long", tokens(0, 61), max_tokens=5)
    driver.run()
    assert driver.finished["fits", 0] == (expected(tokens(0, 60), None, 5), "length")
    assert other.num_preemptions == 0


def test_a_cold_request_starts_within_its_bound():
    for order in ORDERS:
        driver = Driver(num_blocks=64, order=order, max_overtakes=5, max_num_batched_tokens=64)
        hot = tokens(0, 320)
        driver.add("warm", hot)
        driver.run()
        driver.starts.clear()
        for i in range(8):
            driver.add(f"before{i}", [*hot, 1000 + i], max_tokens=4)
        driver.add("cold", tokens(50_000, 640))
        for i in range(60):
            driver.add(f"after{i}", [*hot, 5000 + i], max_tokens=4)
            driver.step()
        driver.run()
        overtaking = [name for name in driver.starts[: driver.starts.index("cold")] if name.startswith("after")]
        assert len(overtaking) <= 5, order


@pytest.mark.parametrize("order", ORDERS)
def test_no_wait_is_longer_than_stated_whatever_is_preempted(order):
    """Every wait, a first one or one after a preemption, under arrivals of higher priority that fill the pool."""
    max_overtakes, waits, num_preempted = 4, {}, 0
    driver = Driver(RadixCache(4), num_blocks=24, order=order, max_overtakes=max_overtakes, max_num_batched_tokens=64)
    queue = driver.scheduler.waiting
    add, remove = queue.add, queue.remove

    def counted_add(sequence):
        waits[sequence] = [len(queue), 0]
        add(sequence)

    def counted_remove(sequence, *, is_started):
        num_waiting, num_starts = waits.pop(sequence)
        assert not is_started or num_starts <= num_waiting + max_overtakes
        for other in waits.values():
            other[1] += is_started
        remove(sequence, is_started=is_started)

    queue.add, queue.remove = counted_add, counted_remove
    for i in range(80):
        driver.add(i, tokens(1000 * (i % 5), 12) + tokens(50_000 + 100 * i, 8), max_tokens=24, priority=i % 7)
        driver.step()
    driver.run()
    num_preempted = driver.scheduler.num_preemptions
    assert len(driver.finished) == 80 and num_preempted > 5 and not waits


def test_a_preempted_request_matches_what_it_had_computed():
    driver = Driver(num_blocks=12, max_num_batched_tokens=512)
    first, second = tokens(0, 90), tokens(1000, 60)
    driver.add("first", first, max_tokens=60)
    driver.add("second", second, max_tokens=60)
    driver.run()
    assert driver.scheduler.num_preemptions >= 1
    assert driver.sequences["first"].num_preemptions == 0  # it came first
    assert driver.finished["first", 0] == (expected(first, None, 60), "length")
    assert driver.finished["second", 0] == (expected(second, None, 60), "length")


def test_an_output_is_hit_but_for_its_last_token():
    for cache, hit in ((RadixCache(16), 149), (RadixCache(1), 149), (FlatHashCache(16), 144)):
        driver = Driver(cache, num_blocks=4000)
        driver.add("first", tokens(0, 100), max_tokens=50)
        driver.run()
        output, _ = driver.finished["first", 0]
        again = driver.add("second", [*tokens(0, 100), *output, *tokens(500, 50)])
        driver.run()
        assert again.num_cached_tokens == hit


@pytest.mark.parametrize(("order", "rate"), [("depth_first", 0.8333), ("longest_prefix", 0.8333), ("fcfs", 0.0)])
def test_orders_on_sixteen_interleaved_groups(order, rate):
    driver = Driver(RadixCache(1), 2304, order=order, max_overtakes=256, max_num_batched_tokens=10_000)
    for member in range(16):
        for group in range(16):
            driver.add(
                f"{group}-{member}", tokens(group * 1000, 256) + tokens(100_000 + 1000 * group + 32 * member, 32)
            )
    driver.run()
    hits = driver.scheduler.num_hit_tokens / (256 * 288)
    assert hits == pytest.approx(rate, abs=0.001)


def test_an_aborted_prefill_leaves_what_it_finished():
    driver = Driver(num_blocks=100, max_num_batched_tokens=64)
    prompt = tokens(0, 300)
    driver.add("gone", prompt)
    driver.step()
    driver.step()
    driver.abort("gone")
    assert driver.manager.cache.peek(prompt) == 128
    later = driver.add("later", prompt)
    driver.run()
    assert later.num_cached_tokens == 128
    assert driver.finished["later", 0][0] == expected(prompt, None, 1)


def test_one_that_fails_alone_ends_with_an_error_and_no_other():
    driver = Driver(num_blocks=200)
    shared = tokens(0, 100)
    for i in range(6):
        driver.add(i, [*shared, 500 + i], max_tokens=3)
    driver.runner.fails_on = lambda sequence: sequence.request.request_id == "0"  # the one that computes for all
    driver.run()
    for i in range(1, 6):
        assert driver.finished[str(i), 0] == (expected([*shared, 500 + i], None, 3), "length")
    assert driver.finished["0", 0] == ([], "error")
    assert driver.manager.cache.peek([*shared, 500]) == 100  # others have computed what it could not


def test_samples_share_the_prompt():
    driver = Driver(num_blocks=100)
    prompt = tokens(0, 40)
    driver.add("five", prompt, max_tokens=4, n=5)
    driver.step()
    assert driver.manager.sizes.pinned == 2 and driver.manager.sizes.private == 5
    driver.run()
    assert driver.num_computed == 40 + 5 * 3
    for sample in range(5):
        assert driver.finished["five", sample] == (expected(prompt, None, 4, sample), "length")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"order": "best"}, "order"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"max_overtakes": -1}, "max_overtakes"),
        ({"queue_aware": 1}, "queue_aware"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_limits_are_named(config, name):
    with pytest.raises(ValueError, match=name):
        Scheduler(KVManager(RadixCache(16), 10), SchedulerConfig(**config))


CACHES = {"radix": RadixCache, "flat_hash": FlatHashCache, "null": NullCache}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("block_size", few([3, 1, 16], 1))
def test_random_runs_give_every_request_its_own_tokens(name, block_size):
    met = {"preempted": 0, "hit": 0, "failed": 0, "aborted": 0, "forked": 0}
    for seed in range(30):
        rng = random.Random(seed)
        driver = Driver(
            CACHES[name](block_size),
            num_blocks=rng.choice([60, 100, 300]) // block_size + 4,
            order=rng.choice(list(ORDERS)),
            max_overtakes=rng.choice([0, 2, 256]),
            queue_aware=rng.random() < 0.5,
            max_num_batched_tokens=rng.choice([8, 33, 500]),
            max_num_seqs=rng.choice([2, 6, 256]),
        )
        texts, wanted = [[0]], {}
        capacity = driver.num_blocks * block_size
        for i in range(25):
            text = rng.choice(texts)
            text = text[: rng.randint(0, len(text))] + [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            texts = [*texts[-6:], text]
            max_tokens, n = rng.randint(1, 12), rng.choice([1, 1, 1, 3])
            namespace = rng.choice([None, None, Salt("a")])
            if len(text) + max_tokens - 1 <= capacity:
                hints = {"priority": rng.choice([0, 0, 1, -1]), "keep_steps": rng.choice([0, 0, 3, 50])}
                driver.add(i, text, max_tokens, namespace, n, **hints)
                wanted[str(i)] = (text, namespace, max_tokens, n)
            if rng.random() < 0.1:
                broken = str(rng.randrange(i + 1))
                driver.runner.fails_on = lambda s, broken=broken: s.request.request_id == broken
            for _ in range(rng.randint(0, 3)):
                driver.step()
            if rng.random() < 0.1:
                driver.abort(str(rng.randrange(i + 1)))
        driver.run()
        for (request_id, sample), (generated, reason) in driver.finished.items():
            text, namespace, max_tokens, n = wanted[request_id]
            full = expected(text, namespace, max_tokens, sample)
            assert generated == full[: len(generated)]
            assert reason != "length" or len(generated) == max_tokens
            met["failed"] += reason == "error"
            met["aborted"] += reason == "abort"
            met["forked"] += sample > 0
        met["preempted"] += driver.scheduler.num_preemptions
        met["hit"] += driver.scheduler.num_hit_tokens
        for request_id, (_, _, _, n) in wanted.items():
            samples = [key for key in driver.finished if key[0] == request_id]
            ended = {driver.finished[key][1] for key in samples}
            assert len(samples) == n or ended & {"abort", "error"}
        sizes = driver.manager.sizes
        assert sizes.private == sizes.pinned == 0
    assert all(met[what] > 5 for what in met if what != "hit"), met
    assert (met["hit"] > 100) == (name != "null")


@pytest.mark.parametrize("has_copied", [False, True])
def test_a_fork_has_computed_what_is_its_own_once_its_copies_have_run(has_copied):
    """Ended before that, it leaves nothing in the cache: its last block was never written."""
    scheduler = Scheduler(KVManager(RadixCache(16), 20))
    prompt = tuple(range(44))
    scheduler.add(Request("x", prompt, SamplingParams(n=2, max_tokens=4)))
    scheduler.schedule()
    (sequence,) = scheduler.commit()
    other, copies = scheduler.fork(sequence, 1)
    assert [copy.num_tokens for copy in copies] == [12]
    if has_copied:
        scheduler.copied(other)
    scheduler.finish(other)
    scheduler.manager.check()
    assert scheduler.manager.cache.peek(prompt) == (44 if has_copied else 32)

"""The whole engine on a shadow pool: random scripts of arrivals, steps, failures and resets, every read checked.

A slot holds (position, token, history, reset): whose KV was written there, and after how many resets. Attention is a
check that each row reads exactly the history of its own request. Logits are a number made of that history, so that
whatever was served from a foreign or a stale slot, or sampled with a foreign number, shows in the tokens as well.

`ShadowMachine` is a hypothesis state machine: a failure is shrunk to a script of its rules.
"""

import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import radixkv
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import LoRA, Media, Salt, kinds, parts
from radixkv.cache.radix.cache import RadixCache
from radixkv.engine.engine import Engine
from radixkv.engine.model.sampling import RandomNumbers, sample_tokens
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 7
MAX_POSITIONS = 10_000
POISON = object()


class WrongRead(BaseException):
    """No Exception: the engine would take it for a failed forward pass, and go on."""


def histories(namespace, tokens):
    """A number for each token that stands for it, all before it, and the parts of the namespace up to there."""
    found = parts(namespace)
    chain, history = [], 0
    for position, token in enumerate(tokens):
        marks = tuple(zlib.crc32(repr(part).encode()) for part in found if part.start == position)
        history = hash((history, int(token), marks))
        chain.append(history)
    return chain


def logits_of(history):
    return [((history >> (8 * i)) & 255) / 48 for i in range(VOCABULARY)]


def expected(tokens, namespace, params):
    """What each of n samples generates, whatever runs beside it."""
    every = []
    for sample in range(params.n):
        numbers, generated = RandomNumbers(params.seed, sample), []
        for i in range(params.max_tokens):
            row = torch.tensor([logits_of(histories(namespace, tokens + generated)[-1])])
            generated.append(sample_tokens(row, [params], [numbers[i]])[0].token_id)
        every.append(generated)
    return every


class ShadowRunner:
    """In place of `radixkv.engine.runner.Runner`.

    Attributes:
        fails_once: what the next call of forward or copy does: "garbage" (writes rubbish, then raises), "copy" (raises
            in a copy), "interrupt" (KeyboardInterrupt).
        fails_for, nan_for: ids of requests that no forward pass survives, or whose logits are no numbers.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.owner = None
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_positions=MAX_POSITIONS)
        self.block_size = scheduler.block_size
        self.num_blocks = scheduler.manager.allocator.num_blocks
        self.slots = {}
        self.resets = []  # (namespace, ids of the sequences that were running)
        self.fails_once = None
        self.fails_for, self.nan_for = set(), set()
        self.num_reads = self.num_copies = 0

    def slot(self, item, position):
        return int(item.block_table[position // self.block_size]), position % self.block_size

    def forget_plans(self):
        """All begins anew: nothing that was written so far is to be read."""
        self.slots.clear()

    def copy(self, copies):
        if copies and self.fails_once == "copy":
            self.fails_once = None
            raise MemoryError("planted in a copy")
        for copy in copies:
            self.num_copies += 1
            for row in range(copy.num_tokens):
                self.slots[copy.destination, row] = self.slots.get((copy.source, row), POISON)

    def forward(self, batch):
        free = set(self.scheduler.manager.allocator.free_ids().tolist())
        for slot in [slot for slot in self.slots if slot[0] in free]:  # a read of a free block finds poison
            del self.slots[slot]
        self.copy(batch.copies)
        running = {one.sequence.sequence_id: one.sequence for one in self.scheduler.running}
        sequences = [running[item.sequence_id] for item in batch.sequences]
        fails, self.fails_once = self.fails_once, None
        if fails == "interrupt":
            raise KeyboardInterrupt
        chains = [
            histories(sequence.request.namespace, item.token_ids[: item.end])
            for sequence, item in zip(sequences, batch.sequences, strict=True)
        ]
        for item, chain in zip(batch.sequences, chains, strict=True):
            if not (item.start < item.end and item.start <= item.write_start <= item.end):
                raise WrongRead(f"expected start < end and start <= write_start <= end, got {item}")
            for position in range(item.write_start, item.end):
                written = (position, int(item.token_ids[position]), chain[position], len(self.resets))
                self.slots[self.slot(item, position)] = POISON if fails else written
        if fails or any(sequence.request.request_id in self.fails_for for sequence in sequences):
            raise MemoryError("planted in forward")
        for sequence, item, chain in zip(sequences, batch.sequences, chains, strict=True):
            for position in range(item.end):
                self.read(sequence, item, position, chain[position])
        rows = []
        for sequence, item, chain in zip(sequences, batch.sequences, chains, strict=True):
            if item.needs_logits:
                is_nan = sequence.request.request_id in self.nan_for
                rows.append([float("nan")] * VOCABULARY if is_nan else logits_of(chain[-1]))
        return torch.tensor(rows).reshape(-1, VOCABULARY)

    def read(self, sequence, item, position, history):
        self.num_reads += 1
        wanted = (position, int(item.token_ids[position]), history)
        found = self.slots.get(self.slot(item, position), POISON)
        where = f"request {sequence.request.request_id}, position {position}, slot {self.slot(item, position)}"
        if found is POISON or found[:3] != wanted:
            raise WrongRead(f"{where}: expected {wanted}, read {found}")
        is_stale_fork = sequence.sample > 0 and sequence.running.blocks.lease.is_stale
        for number, (namespace, running) in enumerate(self.resets, 1):
            concerned = kinds(namespace)
            depends = namespace is None or any(
                part.start <= position and not concerned.isdisjoint(kinds(part))
                for part in parts(sequence.request.namespace)
            )
            if depends and found[3] < number and not is_stale_fork and sequence.sequence_id not in running:
                raise WrongRead(f"{where}: read what was written before reset {number} ({namespace})")


CACHES = {
    "radix": RadixCache,
    "radix whole": lambda block_size: RadixCache(block_size, partial_blocks=False),
    "radix cost": lambda block_size: RadixCache(block_size, policy="cost"),
    "radix capped": lambda block_size: RadixCache(block_size, policy="probation", tenant_caps={"a": 1, "b": 3}),
    "radix whole capped": lambda block_size: RadixCache(block_size, partial_blocks=False, tenant_caps=2),
    "flat_hash capped": lambda block_size: FlatHashCache(block_size, tenant_caps={"a": 1, "b": 3}),
    "flat_hash": FlatHashCache,
    "flat_hash colliding": lambda block_size: FlatHashCache(block_size, verify=True, digest_bits=4),
}
NAMESPACES = [None, None, Salt("a"), Salt("b"), Salt("a", start=5), LoRA("x"), LoRA("x", version=1)]
NAMESPACES += [Media("cat", 2, 3), (LoRA("x"), Salt("b", start=4))]
RESETS = [None, Salt("a"), LoRA("x"), Media("cat", 0, 3)]


PACKAGE = str(Path(radixkv.__file__).parent)


class PlantedError:
    """Raises at a line of the package: the `num_lines`-th of those that run inside `with` blocks, counted together."""

    def __init__(self, num_lines, error):
        self.left, self.error = num_lines, error
        self.where = None

    def __enter__(self):
        sys.settrace(self.entered)

    def __exit__(self, *_):
        sys.settrace(None)

    def entered(self, frame, event, _):
        return self.line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left < 0 and self.where is None:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.error
        return self.line if self.where is None else None


class ShadowMachine(RuleBasedStateMachine):
    """Rules are what happens to an engine. A script of them is what hypothesis prints where one goes wrong."""

    totals: ClassVar[dict] = {}  # what all runs of a process have met
    plants_errors = False

    @initialize(
        cache=st.sampled_from(sorted(CACHES)),
        block_size=st.sampled_from([1, 3, 16]),
        pool_tokens=st.sampled_from([48, 70, 120, 400]),
        budget=st.sampled_from([5, 16, 64]),
        max_num_seqs=st.sampled_from([2, 4, 64]),
        order=st.sampled_from(["fcfs", "longest_prefix", "depth_first", "random"]),
        max_overtakes=st.sampled_from([0, 2, 64]),
        queue_aware=st.booleans(),
    )
    def start(self, cache, block_size, pool_tokens, budget, max_num_seqs, order, max_overtakes, queue_aware):
        self.num_blocks = -(-pool_tokens // block_size)
        self.manager = KVManager(CACHES[cache](block_size), self.num_blocks)
        scheduler = Scheduler(self.manager, SchedulerConfig(budget, max_num_seqs, order, max_overtakes, queue_aware))
        self.runner = ShadowRunner(scheduler)
        self.engine = Engine(self.runner, scheduler)
        self.has_failed = False
        self.planted = None
        self.num_interrupted = 0
        self.texts = [([(i * i) % VOCABULARY for i in range(36)], [])]
        self.asked = {}  # by id: (generation, tokens, namespace, params)

    @rule(
        like=st.integers(0, 5),
        keep=st.sampled_from([90, 90, 90, 45, 33, 17, 16, 5, 0]),
        more=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
        namespace=st.sampled_from(NAMESPACES),
        max_tokens=st.sampled_from([1, 2, 5, 12, 24]),
        n=st.sampled_from([1, 1, 1, 3]),
        seed=st.none() | st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        keep_steps=st.sampled_from([0, 0, 0, 3, 50]),
    )
    def add(self, like, keep, more, namespace, max_tokens, n, seed, priority, keep_steps):
        """A prompt that begins as an earlier one and its answer do. With a seed it is sampled, without one greedy."""
        text, answer = self.texts[like % len(self.texts)]
        tokens = (text + answer)[:keep] + more
        params = SamplingParams(n=n, temperature=0 if seed is None else 1, seed=seed, max_tokens=max_tokens)
        if len(tokens) + max_tokens - 1 > self.num_blocks * self.runner.block_size:
            return
        name = str(len(self.asked))
        hints = {"priority": priority, "keep_steps": keep_steps}
        self.call(lambda: self.engine.add_request(tokens, params, request_id=name, namespace=namespace, **hints))
        try:
            generation = self.engine.generation(name)
        except KeyError:
            assert self.num_interrupted
            return
        self.texts = [*self.texts[-5:], (tokens, generation.samples[0].token_ids)]
        self.asked[name] = (generation, tokens, namespace, params)

    @precondition(lambda self: self.engine.has_unfinished_requests)
    @rule(count=st.sampled_from([1, 1, 2, 4, 40]))
    def step(self, count):
        for _ in range(count):
            if self.engine.has_unfinished_requests:
                self.one_step()

    def one_step(self):
        self.has_failed = True  # until it is known that it has not: no use in going on then
        try:
            stats = self.call(self.engine.step)
        except KeyboardInterrupt:
            self.count("interrupts", 1)
            stats = None
        except WrongRead as error:
            raise AssertionError(str(error)) from None
        if stats is not None:
            self.count("hits", stats.num_hit_tokens)
            self.count("preemptions", stats.num_preemptions)
            self.count("evictions", stats.num_evicted_blocks)
            self.count("errors", stats.num_failed)
        self.owners_add_up()
        self.has_failed = False

    def call(self, do):
        """Does it, with what is planted; returns its result, or None where that was raised."""
        if self.planted is None or (self.planted_in_steps and do != self.engine.step):
            return do()
        try:
            with self.planted:
                return do()
        except (KeyboardInterrupt, MemoryError) as error:
            if error is not self.planted.error:
                raise
            self.count("interrupted lines", 1)
        finally:
            if self.planted.where is not None:
                self.num_interrupted += 1
                self.planted = None

    @rule(
        # spread: hypothesis likes small numbers, and the first lines of a call are always the same
        num_lines=st.integers(0, 4095).map(lambda i: i * 2741 % 4096 // 2),
        error=st.sampled_from([KeyboardInterrupt, MemoryError]),
        in_steps=st.sampled_from([True, True, True, False]),
    )
    def interrupt(self, num_lines, error, in_steps):
        """At a line of the package that runs sooner or later in what follows."""
        if self.plants_errors and self.planted is None:
            self.planted = PlantedError(num_lines, error("planted at a line"))
            self.planted_in_steps = in_steps

    @precondition(lambda self: self.engine.has_unfinished_requests)
    @rule(index=st.integers(0, 30))
    def abort(self, index):
        self.call(lambda: self.engine.abort(str(index % (len(self.asked) + 1))))

    @precondition(lambda self: len(self.asked) > 4 * len(self.runner.nan_for | self.runner.fails_for))
    @rule(index=st.integers(0, 30), nan=st.booleans())
    def break_request(self, index, nan):
        """From now on nothing that computes this request succeeds."""
        (self.runner.nan_for if nan else self.runner.fails_for).add(str(index % (len(self.asked) + 1)))

    @precondition(lambda self: self.engine.has_unfinished_requests)
    @rule(how=st.sampled_from(["garbage", "garbage", "copy", "interrupt"]))
    def fail_once(self, how):
        self.runner.fails_once = how

    @precondition(lambda self: len(self.asked) > 3 * len(self.runner.resets))  # seldom enough to leave hits
    @rule(namespace=st.sampled_from(RESETS))
    def reset(self, namespace):
        running = {one.sequence.sequence_id for one in self.runner.scheduler.running}
        stats = self.call(lambda: self.engine.reset_cache(namespace))
        if stats is None:
            self.owners_add_up()
            return
        self.runner.resets.append((namespace, running))
        if namespace is None:
            for _, tokens, own, _ in self.asked.values():
                assert self.manager.cache.peek(tokens, own) == 0
        self.count("resets", 1)
        self.count("forgotten while pinned", stats.num_pinned_blocks)
        assert stats.num_stale_sequences <= len(running)
        self.owners_add_up()

    def owners_add_up(self):
        self.manager.check()
        assert self.manager.sizes.num_blocks == self.num_blocks

    def teardown(self):
        if not hasattr(self, "manager") or self.has_failed:
            return
        self.planted = None
        for _ in range(3000):
            if not self.engine.has_unfinished_requests:
                break
            self.one_step()
        assert not self.engine.has_unfinished_requests, "no progress"
        sizes = self.manager.sizes
        assert sizes.private == sizes.pinned == 0, sizes
        for name, (generation, tokens, namespace, params) in self.asked.items():
            self.ended_well(name, generation.output().outputs, expected(tokens, namespace, params))
        self.counted_once()
        self.count("runs", 1)
        self.count("reads", self.runner.num_reads)
        self.count("copies", self.runner.num_copies)

    def counted_once(self):
        """Metrics are what there is to show, whatever was retried, preempted or aborted."""
        generations = [generation for generation, *_ in self.asked.values()]
        started = [generation for generation in generations if generation.has_started]
        metrics, scheduler = self.engine.metrics, self.runner.scheduler
        if self.num_interrupted:  # each may have come between an event and its being counted
            assert abs(metrics.num_generated_tokens - sum(g.num_tokens for g in generations)) <= self.num_interrupted
            assert abs(sum(metrics.finished.values()) - len(generations)) <= self.num_interrupted
            return
        assert metrics.num_prompt_tokens == sum(len(g.request.prompt_token_ids) for g in started)
        assert metrics.num_hit_tokens == sum(g.num_cached_tokens for g in started)
        assert metrics.num_generated_tokens == sum(g.num_tokens for g in generations)
        assert metrics.num_preemptions == scheduler.num_preemptions
        assert metrics.num_evicted_blocks == self.manager.num_evicted_blocks
        assert sum(metrics.finished.values()) == len(generations)

    def ended_well(self, name, outputs, wanted):
        may_fail = name in self.runner.fails_for | self.runner.nan_for
        for output, tokens in zip(outputs, wanted, strict=True):
            assert output.token_ids == tokens[: len(output.token_ids)], f"request {name}: expected {tokens}"
            if output.finish_reason == "error":
                # A copy that fails at a fork is the request's own; every other planted fault names its request.
                assert may_fail or any(f"planted {at}" in output.error for at in ("in a copy", "at a line")), (
                    output.error
                )
            elif output.finish_reason != "abort":
                assert output.finish_reason == "length" and output.token_ids == tokens, f"request {name}: {output}"

    def count(self, what, number):
        self.totals[what] = self.totals.get(what, 0) + number


class InterruptedMachine(ShadowMachine):
    """The same, with errors at random lines of the package."""

    totals: ClassVar[dict] = {}
    plants_errors = True

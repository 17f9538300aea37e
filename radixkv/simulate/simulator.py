"""Simulator: the engine's scheduler, manager and cache in virtual time, with a cost model in place of the model.

    cost = Roofline.of("llama-3-8b", "h100-sxm")
    scheduler = Scheduler(KVManager(RadixCache(16), cost.num_blocks(16)))
    simulator = Simulator(scheduler, cost)
    for request in trace:                       # radixkv.traces.TraceRequest: prompt and output
        simulator.submit(request, request.timestamp_s)
    row = summarize(simulator.advance(inf))

Everything but the forward pass is real: hits, evictions, preemptions and their order are those of an engine whose steps
take so long. `radixkv.simulate.run` feeds one from a trace. A fleet steps several side by side, in the time of all:

    while True:
        now = min(next_arrival_s, *(replica.next_event_time() for replica in replicas))
        if now == inf: break
        for replica in replicas: ended = replica.advance(now)      # steps that end by now; what they cached is there
        for request in arriving(now): choose(replicas, request).submit(request, now)

What is submitted at t is in the step that begins at t: `advance(t)` begins none at t, and `next_event_time` does.
Subscribers to a cache (`simulator.cache.subscribe`) hear of what a step evicts when it begins, and of what it computed
when it ends.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from math import inf

from radixkv.cache.contract import PrefixCache
from radixkv.scheduling.batch import ScheduledBatch, StepStats
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence
from radixkv.simulate.cost_model import CostModel
from radixkv.simulate.live import Live
from radixkv.simulate.quiet import QuietSteps
from radixkv.simulate.report import Served
from radixkv.simulate.step import Step
from radixkv.simulate.step_load import StepLoad, measure_load
from radixkv.traces import TraceRequest


class Simulator:
    """Serves requests in virtual time.

    Args:
        scheduler: over a manager and a cache of any kind.
        cost: what a step takes.
        seed: of the tokens of outputs that are not given.
        on_step: called with the statistics of each step when it ends.
        on_batch: called with each batch when it has been scheduled and before its step ends. Without the two, steps in
            which nothing but decoding happens are passed over at once; all results are the same.
        clock: what the host's own time is measured with: StepStats.schedule_s, which is no part of virtual time.

    Attributes:
        now_s: virtual time.
        num_steps, num_finished: so far; busy_s: time in steps.
        schedule_s: the host's, in scheduler, manager and cache, but for steps that were passed over.
        num_kv_tokens, num_unique_kv_tokens: that decodes saw so far, and the same with what is shared counted once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        *,
        seed: int = 0,
        on_step: Callable[[StepStats], None] | None = None,
        on_batch: Callable[[ScheduledBatch], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.num_steps = self.num_finished = self.num_kv_tokens = self.num_unique_kv_tokens = 0
        self.busy_s = self.schedule_s = 0.0
        self._cost, self._seed, self._clock = cost, seed, clock
        self._on_step, self._on_batch = on_step, on_batch
        self._arriving: list[tuple[float, int, Live]] = []
        self._live: dict[str, Live] = {}
        self._step: Step | None = None
        self._quiet: QuietSteps | None = None
        self._num_submitted = self._num_copied_tokens = 0

    # ---- requests

    def submit(self, request: TraceRequest | Request, at_s: float | None = None, *, max_tokens: int = 16) -> None:
        """Has a request arrive.

        Args:
            request: a trace's, whose output is generated token by token; or an engine's, for which `max_tokens` of its
                sampling parameters are drawn, whatever would stop it. Names need not be unique.
            at_s: when, not before now; None: now.
            max_tokens: drawn where a trace's request has no output.

        Raises:
            ValueError: it is longer than the pool (see `fits`), has no tokens, or `at_s` has passed. Nothing changes.
        """
        at_s = self.now_s if at_s is None else at_s
        if not self.now_s <= at_s < inf:
            raise ValueError(f"at_s: expected a time from {self.now_s} s on, got {at_s!r}")
        number = self._num_submitted
        live = Live.of(request, str(number), at_s, (self._seed, number), max_tokens)
        self.scheduler.check_fits(live.request)
        self._num_submitted += 1
        self._live[live.request.request_id] = live
        heapq.heappush(self._arriving, (at_s, number, live))
        if self._quiet is not None:
            self._quiet.cut(at_s)

    def fits(self, request: TraceRequest, max_tokens: int = 16) -> bool:
        """Whether the pool could ever hold a request and its output; `submit` refuses what it could not."""
        num_slots = (self.scheduler.manager.allocator.num_blocks or 0) * self.scheduler.block_size
        return request.num_prompt_tokens + (request.num_output_tokens or max_tokens) - 1 <= num_slots

    @property
    def cache(self) -> PrefixCache:
        return self.scheduler.manager.cache

    @property
    def num_unfinished(self) -> int:
        """Requests that have been submitted and have not ended, those that have yet to arrive included."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, those that have arrived during the step under way included."""
        return len(self.scheduler.waiting) + sum(at_s <= self.now_s for at_s, _, _ in self._arriving)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_running_tokens(self) -> int:
        """Tokens of all sequences that run, whether computed yet or not. O(running)."""
        return sum(running.sequence.num_tokens for running in self.scheduler.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of what `num_waiting` counts, cached or not. O(waiting)."""
        arrived = sum(len(live.request.prompt_token_ids) for at_s, _, live in self._arriving if at_s <= self.now_s)
        return arrived + sum(sequence.num_tokens for sequence in self.scheduler.waiting)

    # ---- time

    def next_event_time(self) -> float:
        """Begins the step that is due now, if one is, so submit what arrives now before; returns when that ends.

        Where the next steps do nothing but decode, when the last of them ends. With nothing to run, when the next
        request arrives of those that were submitted; inf: none does.
        """
        if self._step is None and self._quiet is None and self._due_s <= self.now_s:
            self._begin(self.now_s)
        if self._quiet is not None:
            return self._quiet.ends_s[-1]
        return self._due_s if self._step is None else self._step.ends_s

    @property
    def _due_s(self) -> float:
        """When a step can begin, none being under way."""
        if self.scheduler.has_unfinished:
            return self.now_s
        return max(self._arriving[0][0], self.now_s) if self._arriving else inf

    def advance(self, until_s: float) -> list[Served]:
        """Lets time pass; returns the requests that ended, in the order of their ends.

        Steps end up to and including `until_s` and begin before it. With inf, everything is served, and the clock stops
        at the last end.

        Raises:
            ValueError: `until_s` has passed.
        """
        if not until_s >= self.now_s:
            raise ValueError(f"until_s: expected a time from {self.now_s} s on, got {until_s!r}")
        ended: list[Served] = []
        while True:
            if self._step is not None:
                if self._step.ends_s > until_s:
                    break
                self._end_step(ended)
            elif self._quiet is not None:
                self._pass_quiet(self._quiet, until_s)
                if self._quiet is not None:
                    break
            elif self._due_s < until_s:
                self._begin(self._due_s)
            else:
                break
        if until_s < inf:
            self.now_s = until_s
        return ended

    def _begin(self, at_s: float) -> None:
        """Begins a step, or as many as nothing happens in but decoding."""
        self.now_s = at_s
        arrives_s = self._arriving[0][0] if self._arriving else inf
        if arrives_s > at_s and self._on_step is None and self._on_batch is None and not self._num_copied_tokens:
            self._quiet = QuietSteps.plan(self.scheduler, self._live, self._cost, at_s, arrives_s)
        if self._quiet is None:
            self._begin_step(at_s)

    def _pass_quiet(self, quiet: QuietSteps, until_s: float) -> None:
        """Ends those of the quiet steps that end by `until_s`."""
        steps = quiet.take(until_s)
        if steps:
            sequences = [running.sequence for running in self.scheduler.running]
            running = [(sequence, self._live[sequence.request.request_id]) for sequence in sequences]
            self.scheduler.run_decode_only_steps(len(steps), [live.next_tokens(s, len(steps)) for s, live in running])
            ends_s = [end_s for _, end_s, _ in steps]
            for sequence, live in running:
                if not sequence.sample:
                    live.metrics.token_times_s += ends_s
            for begin_s, end_s, load in steps:
                self._count(begin_s, end_s, load)
        if not quiet.ends_s:
            self._quiet = None

    def _count(self, begin_s: float, end_s: float, load: StepLoad) -> None:
        """A step is over."""
        self.now_s = end_s
        self.num_steps += 1
        self.busy_s += end_s - begin_s
        self.num_kv_tokens += load.num_decode_kv_tokens
        self.num_unique_kv_tokens += load.num_unique_kv_tokens

    def _begin_step(self, at_s: float) -> None:
        scheduler, manager = self.scheduler, self.scheduler.manager
        counts = (scheduler.num_hit_tokens, scheduler.num_preemptions, manager.num_evicted_blocks)
        before_s, started = self.schedule_s, self._clock()
        while self._arriving and self._arriving[0][0] <= at_s:
            scheduler.add(heapq.heappop(self._arriving)[2].request)
        batch = scheduler.schedule()
        self.schedule_s += self._clock() - started
        if not batch.sequences:
            raise RuntimeError(f"scheduler: expected something to run of {len(scheduler.waiting)} that wait, got none")
        sequences = [running.sequence for running in scheduler.batch]
        load = measure_load(batch, scheduler)
        if self._num_copied_tokens:  # of forks since the last step
            load = load._replace(num_copied_tokens=load.num_copied_tokens + self._num_copied_tokens)
            self._num_copied_tokens = 0
        if self._on_batch is not None:
            self._on_batch(batch)
        if load.num_prefill_tokens:
            for sequence in sequences:
                metrics = self._live[sequence.request.request_id].metrics
                if metrics.first_scheduled_s is None:
                    metrics.first_scheduled_s = at_s
        self._step = Step(batch, sequences, load, at_s, at_s + self._cost.step_s(load), before_s, counts)
        if not self._step.ends_s > at_s:
            raise ValueError(f"cost: expected a step above 0 s, got {self._cost.step_s(load)!r} for {load}")

    def _end_step(self, ended: list[Served]) -> None:
        step, scheduler = self._step, self.scheduler
        assert step is not None
        self._step = None
        self._count(step.started_s, step.ends_s, step.load)
        num_ended = len(ended)
        started = self._clock()
        scheduler.commit()
        self.schedule_s += self._clock() - started
        lives = self._live
        for sequence, item in zip(step.sequences, step.batch.sequences, strict=True):
            if item.needs_logits:
                live = lives[sequence.request.request_id]
                if sequence.num_tokens == sequence.num_prompt_tokens and not sequence.sample:
                    self._first_tokens(sequence, live, ended)
                else:
                    self._token(sequence, live, ended)
        self.num_finished += len(ended) - num_ended
        if self._on_step is not None:
            self._on_step(step.stats(self.num_steps, scheduler, len(ended) - num_ended, self.schedule_s))

    def _first_tokens(self, sequence: Sequence, live: Live, ended: list[Served]) -> None:
        """The prompt is computed: a token for each sample, which run by themselves from here on."""
        live.metrics.first_token_s = self.now_s
        live.num_cached_tokens = sequence.num_cached_tokens or 0
        each = [sequence]
        for sample in range(1, len(live.outputs)):
            fork, copies = self.scheduler.fork(sequence, sample)
            self._num_copied_tokens += sum(copy.num_tokens for copy in copies)
            self.scheduler.copied(fork)
            each.append(fork)
        for fork in each:
            self._token(fork, live, ended)

    def _token(self, sequence: Sequence, live: Live, ended: list[Served]) -> None:
        output = live.outputs[sequence.sample]
        index = sequence.num_tokens - sequence.num_prompt_tokens
        self.scheduler.append_token(sequence, output[index])
        if not sequence.sample:
            live.metrics.token_times_s.append(self.now_s)
        if index + 1 < len(output):
            return
        started = self._clock()
        self.scheduler.finish(sequence)
        self.schedule_s += self._clock() - started
        metrics = live.metrics
        metrics.num_preemptions = max(metrics.num_preemptions, sequence.num_preemptions)
        live.num_output_tokens += len(output)
        live.num_left -= 1
        if not live.num_left:
            metrics.finished_s = self.now_s
            del self._live[live.request.request_id]
            num_prompt = sequence.num_prompt_tokens
            ended.append(Served(live.name, num_prompt, live.num_cached_tokens, live.num_output_tokens, metrics))

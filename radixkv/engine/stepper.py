"""A step of the engine: schedule -> run -> sample, and what becomes of the others when one of these fails.

**A step is a transaction.** What a request *is* lies outside of the scheduler: its prompt and the tokens of its samples
(`radixkv.engine.generation`). Everything below (sequences, block tables, the cache) follows from that and can be made
again. So whatever is raised has one of three answers:

- A forward pass fails: the step is withdrawn, the cache keeps what earlier steps computed. After an `Exception` each
  sequence then runs by itself; anything else (Ctrl-C) goes on up.
- A hook or the sampling of tokens fails: nothing is half done there, it goes on up or ends its own request.
- Anything is raised at any other line (no memory left): what is half done can't be known, so all of it is dropped.
  The cache is empty, every request waits again with the tokens it has, and the exception goes on up.

Signals do not come at those lines: they are held until the step has ended, but for the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from radixkv.engine.generation import Generation, Sample, described
from radixkv.engine.held_signals import HeldSignals
from radixkv.engine.metrics import Metrics
from radixkv.engine.model.sampling import SampledToken, sample_tokens
from radixkv.engine.runner import Runner
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.scheduler import Scheduler, Unfinished
from radixkv.scheduling.sequence import Sequence as Running
from radixkv.scheduling.step_stats import StepStats

T = TypeVar("T")


class Stepper:
    """Runs steps, one after the other.

    Args:
        runner: the model and the KV tensors.
        scheduler: over a manager with as many blocks as the runner.
        clock: seconds.

    Attributes:
        generations: the unfinished requests, by request_id.
        metrics: what was counted so far.
        on_logits: called with each sequence that is to be sampled, and its row of logits.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.generations: dict[str, Generation] = {}
        self.metrics = Metrics()
        self.on_logits: Callable[[Running, Tensor], None] | None = None
        self._clock = clock
        self._num_steps = self._num_ended = 0
        self._is_whole = True  # nothing is half done

    def change(self, do: Callable[[], T]) -> T:
        """Calls what changes requests, scheduler or cache between two steps. Signals wait until it has ended.

        Raises:
            BaseException: what `do` raises. Unless it was raised where nothing was half done, all begins anew.
        """
        with HeldSignals():
            return self._change(do)

    def _change(self, do: Callable[[], T]) -> T:
        if not self._is_whole:  # beginning anew was interrupted as well
            self._begin_anew()
        try:
            self._is_whole = False
            result = do()
            self._is_whole = True
        except BaseException:
            if not self._is_whole:
                self._begin_anew()
            raise
        return result

    def _begin_anew(self) -> None:
        """Makes scheduler and cache again from the requests."""
        unfinished = []
        for generation in list(self.generations.values()):
            for sample in generation.samples:
                sample.repair()
            if generation.is_finished:
                self._retire(generation)
                continue
            running = {i: s.token_ids for i, s in enumerate(generation.samples) if s.finish_reason is None}
            if not generation.num_tokens:  # the prompt is to be computed, and its first token is every sample's
                running = {0: []}
            num_cached_tokens = generation.num_cached_tokens if generation.has_started else None
            unfinished.append(Unfinished(generation.request, running, num_cached_tokens))
        self.runner.forget_plans()
        self.scheduler.restart(unfinished, self.metrics.num_hit_tokens)
        self._is_whole = True

    def step(self, take_in: Callable[[], None]) -> StepStats:
        """Runs a step, `take_in` first. Whatever is raised out of it leaves requests that go on (see above)."""
        with HeldSignals() as signals:
            before = self._counts()
            try:
                stats = self._change(lambda: self._step(take_in, before, signals))
            finally:  # what a broken step has taken from others is gone all the same
                self.metrics.took(*(now - then for now, then in zip(self._counts(), before, strict=True)))
            self.metrics.stepped(stats)
            return stats

    def _counts(self) -> tuple[int, int]:
        return self.scheduler.num_preemptions, self.scheduler.manager.num_evicted_blocks

    def _step(self, take_in: Callable[[], None], before: tuple[int, int], signals: HeldSignals) -> StepStats:
        scheduler, manager = self.scheduler, self.scheduler.manager
        num_hit_tokens, num_ended = scheduler.num_hit_tokens, self._num_ended
        started = self._clock()
        take_in()
        batch = scheduler.schedule()
        sequences = list(scheduler.batch)
        scheduled = ran = self._clock()
        for sequence in sequences:
            metrics = self.generations[sequence.request.request_id].metrics
            if metrics.first_scheduled_s is None:
                metrics.first_scheduled_s = scheduled
        num_failed = 0
        if batch.sequences:
            logits = self._forward(batch, signals)
            if isinstance(logits, Exception):  # whatever failed, a request may be fine by itself
                self.metrics.num_failed_steps += 1
                num_failed = self._run_apart(scheduler.withdraw(), signals)
                ran = self._clock()
            else:
                ran = self._clock()
                num_failed = self._accept(batch, sequences, logits)
        self._num_steps += 1
        prompts = [
            min(max(s.num_prompt_tokens - item.start, 0), item.num_tokens)
            for s, item in zip(sequences, batch.sequences, strict=True)
        ]
        num_preemptions, num_evicted_blocks = self._counts()
        return StepStats(
            step=self._num_steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=sum(prompts),
            num_decode_tokens=batch.num_tokens - sum(prompts),
            num_hit_tokens=scheduler.num_hit_tokens - num_hit_tokens,
            num_preemptions=num_preemptions - before[0],
            num_evicted_blocks=num_evicted_blocks - before[1],
            num_finished=self._num_ended - num_ended,
            num_failed=num_failed,
            sizes=manager.sizes,
            schedule_s=scheduled - started,
            forward_s=ran - scheduled,
            postprocess_s=self._clock() - ran,
        )

    def _forward(self, batch: ScheduledBatch, signals: HeldSignals) -> Tensor | Exception:
        """Runs a batch; returns its logits, or what it failed with. Anything else that is raised withdraws it."""
        try:
            with signals.let_through():
                return self.runner.forward(batch)
        except Exception as error:
            return error
        except BaseException:
            self.scheduler.withdraw()
            self._is_whole = True
            raise

    def _run_apart(self, sequences: Sequence[Running], signals: HeldSignals) -> int:
        """Runs the sequences of a failed step one by one; returns how many failed."""
        num_failed = 0
        for sequence in sequences:
            batch = self.scheduler.schedule_alone(sequence)
            if not batch.sequences:  # has to wait
                continue
            logits = self._forward(batch, signals)
            if isinstance(logits, Exception):
                self.scheduler.withdraw()
                self.end_all(sequence.request.request_id, "error", described(logits))
                num_failed += 1
            else:
                num_failed += self._accept(batch, [sequence], logits)
        return num_failed

    def _accept(self, batch: ScheduledBatch, sequences: Sequence[Running], logits: Tensor) -> int:
        """The batch has run: samples for those whose tokens are all computed. Returns how many that failed for."""
        self.scheduler.commit()
        for running in sequences:
            generation = self.generations[running.request.request_id]
            if not generation.has_started:
                generation.num_cached_tokens = running.num_cached_tokens or 0
                generation.has_started = True
                self.metrics.started(generation)
        wanted = [s for s, item in zip(sequences, batch.sequences, strict=True) if item.needs_logits]
        # What is sampled from a row: a token for its sequence, or at the end of a prompt one for each of n samples.
        samples = [self._samples_of(running) for running in wanted]
        self._is_whole = True  # a sequence that gets no token computes its last one again, and draws the same number
        if self.on_logits is not None:
            for running, row in zip(wanted, logits, strict=True):
                self.on_logits(running, row)
        tokens = iter(self._sample(wanted, samples, logits))
        self._is_whole = False
        num_failed = 0
        for running, some in zip(wanted, samples, strict=True):
            num_failed += self._take(running, some, [next(tokens) for _ in some])
        return num_failed

    def _samples_of(self, running: Running) -> list[Sample]:
        samples = self.generations[running.request.request_id].samples
        is_prompt = running.sample == 0 and running.num_tokens == running.num_prompt_tokens
        return list(samples) if is_prompt else [samples[running.sample]]

    def _sample(
        self, wanted: Sequence[Running], samples: Sequence[list[Sample]], logits: Tensor
    ) -> list[SampledToken | Exception]:
        """Returns a token for each sample, row by row; or, where sampling fails for a row, what it failed with."""
        rows = [row for row, some in enumerate(samples) for _ in some]
        numbers = [sample.next_number() for some in samples for sample in some]
        params = [wanted[row].request.sampling_params for row in rows]
        picked = logits[rows] if len(rows) > len(logits) else logits
        try:
            return list(sample_tokens(picked, params, numbers))
        except Exception:  # one of the rows is no distribution, or too much for the memory; the others are fine
            pass
        found: list[SampledToken | Exception] = []
        for row, one, number in zip(rows, params, numbers, strict=True):
            try:
                found += sample_tokens(logits[row : row + 1], [one], [number])
            except Exception as error:
                found.append(error)
        return found

    def _take(self, running: Running, samples: list[Sample], tokens: list[SampledToken | Exception]) -> int:
        """Gives tokens to a sequence and, at the end of its prompt, to its forks. Returns 1 if the request failed."""
        request_id = running.request.request_id
        if samples[0].finish_reason is not None:  # another sample of the request has just failed
            return 0
        error = next((token for token in tokens if isinstance(token, Exception)), None)
        now = self._clock()
        each = [running]
        while error is None and len(each) < len(samples):
            other, copies = self.scheduler.fork(running, len(each))
            each.append(other)
            try:
                self.runner.copy(copies)
            except Exception as failed:
                error = failed
            else:
                self.scheduler.copied(other, running)
        if error is not None:
            self.end_all(request_id, "error", described(error))
            return 1
        generation = self.generations[request_id]
        metrics = generation.metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = now
        for sequence, sample, token in zip(each, samples, tokens, strict=True):
            assert isinstance(token, SampledToken)
            self.scheduler.append_token(sequence, token.token_id)
            has_ended = sample.append(token.token_id, token.logprobs)
            if sequence.sample == 0:
                metrics.token_times_s.append(now)
            self.metrics.sampled(generation, sequence.sample)
            if sample.finish_reason == "error":
                self.end_all(request_id, "error", sample.error)
                return 1
            if has_ended:
                self._end(sequence)
        return 0

    def _end(self, sequence: Running) -> None:
        """Takes a sequence whose sample has ended out of the scheduler."""
        self.scheduler.finish(sequence)
        generation = self.generations.get(sequence.request.request_id)
        if generation is None:  # ended with all its samples
            return
        metrics = generation.metrics
        metrics.num_preemptions = max(metrics.num_preemptions, sequence.num_preemptions)
        if generation.is_finished:
            self._retire(generation)

    def _retire(self, generation: Generation) -> None:
        """A request is done."""
        if generation.metrics.finished_s is None:
            generation.metrics.finished_s = self._clock()
            self._num_ended += 1
            self.metrics.ended(generation)
        del self.generations[generation.request.request_id]

    def end_all(self, request_id: str, reason: str, error: str | None = None) -> None:
        """Ends all of a request that still runs, samples that have yet to be forked included."""
        generation = self.generations[request_id]
        for sample in generation.samples:
            if sample.finish_reason is None:
                sample.end(reason, error)
        for sequence in self.scheduler.sequences(request_id):
            self._end(sequence)

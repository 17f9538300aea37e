"""A step of the engine: schedule -> run -> sample, and what becomes of the others when one of these fails.

Called by `radixkv.engine`, between two steps of which nothing is under way: requests come in and go out there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from radixkv.batch import ScheduledBatch
from radixkv.generation import Generation, Sample
from radixkv.metrics import Metrics
from radixkv.model.sampling import SampledToken, sample_tokens
from radixkv.runner import Runner
from radixkv.scheduler import Scheduler
from radixkv.sequence import Sequence as Running
from radixkv.step_stats import StepStats


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

    def step(self, take_in: Callable[[], None]) -> StepStats:
        """Runs a step, `take_in` first. Whatever is raised out of it has left nothing behind (see `Engine.step`)."""
        before = self._counts()
        try:
            stats = self._step(take_in, before)
        except BaseException:
            self.scheduler.withdraw()
            raise
        finally:  # what a broken step has taken from others is gone all the same
            self.metrics.took(*(now - then for now, then in zip(self._counts(), before, strict=True)))
        self.metrics.stepped(stats)
        return stats

    def _counts(self) -> tuple[int, int]:
        return self.scheduler.num_preemptions, self.scheduler.manager.num_evicted_blocks

    def _step(self, take_in: Callable[[], None], before: tuple[int, int]) -> StepStats:
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
            try:
                logits = self.runner.forward(batch)
            except Exception:  # whatever failed, somebody's request may be fine by itself
                self.metrics.num_failed_steps += 1
                num_failed = self._run_apart(scheduler.withdraw())
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

    def _run_apart(self, sequences: Sequence[Running]) -> int:
        """Runs the sequences of a failed step one by one; returns how many failed."""
        num_failed = 0
        for sequence in sequences:
            batch = self.scheduler.schedule_alone(sequence)
            if not batch.sequences:  # has to wait
                continue
            try:
                logits = self.runner.forward(batch)
            except Exception as error:
                self.scheduler.withdraw()
                self.end_all(sequence.request.request_id, "error", _described(error))
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
                generation.has_started = True
                generation.num_cached_tokens = running.num_cached_tokens or 0
                self.metrics.started(generation)
        wanted = [s for s, item in zip(sequences, batch.sequences, strict=True) if item.needs_logits]
        if self.on_logits is not None:
            for running, row in zip(wanted, logits, strict=True):
                self.on_logits(running, row)
        # What is sampled from a row: a token for its sequence, or at the end of a prompt one for each of n samples.
        samples = [self._samples_of(running) for running in wanted]
        untaken = {sample: _state(sample) for some in samples for sample in some}
        try:
            tokens = iter(self._sample(wanted, samples, logits))
            num_failed = 0
            for running, some in zip(wanted, samples, strict=True):
                num_failed += self._take(running, some, [next(tokens) for _ in some])
                for sample in some:
                    del untaken[sample]
        except BaseException:  # interrupted: whoever has not got its token draws the same number again
            for sample, state in untaken.items():
                _restore(sample, state)
            raise
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
        every = [sample for some in samples for sample in some]
        params = [wanted[row].request.sampling_params for row in rows]
        picked = logits[rows] if len(rows) > len(logits) else logits
        states = [_state(sample) for sample in every]
        try:
            return list(sample_tokens(picked, params, [sample.generator for sample in every]))
        except Exception:  # one of the rows is no distribution, or too much for the memory; the others are fine
            for sample, state in zip(every, states, strict=True):
                _restore(sample, state)
        found: list[SampledToken | Exception] = []
        for row, sample, one in zip(rows, every, params, strict=True):
            try:
                found += sample_tokens(logits[row : row + 1], [one], [sample.generator])
            except Exception as error:
                found.append(error)
        return found

    def _take(self, running: Running, samples: list[Sample], tokens: list[SampledToken | Exception]) -> int:
        """Gives tokens to a sequence and, at the end of its prompt, to its forks. Returns 1 if the request failed."""
        if samples[0].finish_reason is not None:  # another sample of the request has just failed
            return 0
        try:
            self._take_tokens(running, samples, tokens)
        except Exception as error:
            self.end_all(running.request.request_id, "error", _described(error))
            return 1
        return 0

    def _take_tokens(self, running: Running, samples: list[Sample], tokens: list[SampledToken | Exception]) -> None:
        for token in tokens:
            if isinstance(token, Exception):
                raise token
        now = self._clock()
        each = [running]
        try:
            for index in range(1, len(samples)):
                other, copies = self.scheduler.fork(running, index)
                each.append(other)
                self.runner.copy(copies)
        except BaseException:
            for other in each[1:]:
                self.scheduler.finish(other)
            raise
        generation = self.generations[running.request.request_id]
        metrics = generation.metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = now
        for sequence, sample, token in zip(each, samples, tokens, strict=True):
            assert isinstance(token, SampledToken)
            self.scheduler.append_token(sequence, token.token_id)
            if sequence.sample == 0:
                metrics.token_times_s.append(now)
            self.metrics.sampled(generation, sequence.sample)
            if sample.append(token.token_id, token.logprobs):
                self._end(sequence)

    def _end(self, sequence: Running) -> None:
        """Takes a sequence whose sample has ended out of the scheduler."""
        request_id = sequence.request.request_id
        self.scheduler.finish(sequence)
        generation = self.generations.get(request_id)
        if generation is None:  # ended with all its samples
            return
        metrics = generation.metrics
        metrics.num_preemptions = max(metrics.num_preemptions, sequence.num_preemptions)
        if generation.is_finished:
            metrics.finished_s = self._clock()
            self._num_ended += 1
            self.metrics.ended(generation)
            del self.generations[request_id]

    def end_all(self, request_id: str, reason: str, error: str | None = None) -> None:
        """Ends all of a request that still runs, samples that have yet to be forked included."""
        for sample in self.generations[request_id].samples:
            if sample.finish_reason is None:
                sample.end(reason, error)
        for sequence in self.scheduler.sequences(request_id):
            self._end(sequence)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _state(sample: Sample) -> Any:
    """The state of a sample's generator; None for who draws no numbers."""
    return sample.generator.bit_generator.state if sample.is_random else None


def _restore(sample: Sample, state: Any) -> None:
    if state is not None:
        sample.generator.bit_generator.state = state

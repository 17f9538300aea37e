"""Engine: schedule -> run -> postprocess, on a prefix cache. What a caller holds in his hands.

    engine = Engine.from_pretrained("tiny_gpt")
    for output in engine.generate(["Once upon a time", "Once upon a hill"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text, output.num_cached_tokens)

One thread steps the engine. `add_request` and `abort` may be called from any other: what they say is taken in at the
next step.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from radixkv.batch import ScheduledBatch
from radixkv.cache.base import PrefixCache
from radixkv.cache.namespace import Namespace
from radixkv.generation import Generation, Sample
from radixkv.kv_manager import KVManager
from radixkv.model.checkpoint import load_checkpoint
from radixkv.model.sampling import SampledToken, make_generator, sample_tokens
from radixkv.model.tokenizer import Tokenizer
from radixkv.replay import CacheConfig
from radixkv.request import Request, RequestOutput, SamplingParams
from radixkv.runner import Runner, kv_bytes_per_block
from radixkv.scheduler import Scheduler, SchedulerConfig
from radixkv.sequence import Sequence as Running
from radixkv.step_stats import StepStats

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
DEFAULT_KV_BYTES = 2**30


class Engine:
    """Serves requests with one model on one device.

    Args:
        runner: the model and the KV tensors.
        scheduler: over a manager with as many blocks as the runner.
        tokenizer: None where prompts come as token ids and no text is wanted.
        eos_token_ids: the model's own end tokens.
        clock: seconds, for all times reported.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._arriving: deque[Generation] = deque()
        self._aborting: deque[Generation] = deque()
        self._names = itertools.count()
        self._num_steps = self._num_ended = 0
        self._adding = threading.Lock()
        self._stepping = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        path_or_preset: str | Path,
        *,
        cache: str | PrefixCache = "radix",
        block_size: int = 16,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        deterministic: bool | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        order: str = "longest_prefix",
        max_overtakes: int = 256,
        queue_aware: bool = False,
        policy: str = "lru",
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Engine:
        """Loads a checkpoint and makes an engine of it.

        Args:
            path_or_preset: a Hugging Face folder, a .gguf file, or "tiny_gpt".
            cache: radix, flat_hash, null, or a cache of your own.
            num_blocks: blocks in the pool; None: as many as fit into 1 GiB.
            policy: radix by name alone: what it evicts first (`radixkv.cache.eviction`).
            order, max_overtakes, queue_aware: as of `SchedulerConfig`.
            device: None: a GPU where there is one.
            deterministic: every logit the same bits whatever is cached, batched or chunked; None: on a CPU.
            seed: of a preset's weights.

        Raises:
            ValueError: an argument is out of range, or the checkpoint can't be used; the message says which and why.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        checkpoint = load_checkpoint(path_or_preset, dtype=dtype, device=device, seed=seed)
        config = checkpoint.model.config
        if isinstance(cache, str):
            cache = CacheConfig(cache, block_size, policy=policy).make()
        if num_blocks is None:
            dtype = checkpoint.model.weights.embedding.dtype
            num_blocks = max(DEFAULT_KV_BYTES // kv_bytes_per_block(config, cache.block_size, dtype), 1)
        runner = Runner(
            checkpoint.model,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            device=device,
            deterministic=device.type == "cpu" if deterministic is None else deterministic,
        )
        limits = SchedulerConfig(max_num_batched_tokens, max_num_seqs, order, max_overtakes, queue_aware)
        scheduler = Scheduler(KVManager(cache, num_blocks), limits)
        tokenizer = checkpoint.tokenizer
        return cls(runner, scheduler, tokenizer=tokenizer, eos_token_ids=config.eos_token_ids, clock=clock)

    # ---- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Namespace | None = None,
        priority: int = 0,
        keep_steps: int = 0,
    ) -> str:
        """Takes a request in; it is scheduled from the next step on. May be called from any thread.

        Args:
            prompt: a text, token ids, or messages for the checkpoint's chat template.
            request_id: None: a number that is not in use.
            priority: higher ones start first, within the bound on how long anything waits (`radixkv.waiting`).
            keep_steps: when it has ended, its prefix is evicted after all else for so many steps.

        Returns:
            Its request_id.

        Raises:
            ValueError: the prompt is empty, too long for the model or the pool, has tokens that the model has not, or
                needs a tokenizer that is not there; the id is in use. Nothing else is disturbed.
        """
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params: expected SamplingParams, got {params!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no stop strings, as this engine has no tokenizer")
        token_ids = self._token_ids(prompt)
        self._check_prompt(token_ids, params)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        samples = [
            Sample(
                params,
                make_generator(params.seed, sample),
                self.tokenizer.detokenizer() if self.tokenizer else None,
                stops,
            )
            for sample in range(params.n)
        ]
        with self._adding:
            if request_id is None:
                request_id = next(name for name in map(str, self._names) if name not in self._generations)
            request = Request(request_id, tuple(token_ids), params, namespace, priority, keep_steps)
            self.scheduler.check_fits(request)
            if request_id in self._generations:
                raise ValueError(f"request_id: expected one that is not in use, got {request_id!r}")
            generation = self._generations[request_id] = Generation(request, samples, self._clock())
            self._arriving.append(generation)
        return request_id

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; one that is not known, or ended, is passed over. From any thread."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._aborting.append(generation)

    def generation(self, request_id: str) -> Generation:
        """Returns what is known of an unfinished request; the object lives on when it ends."""
        return self._generations[request_id]

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._arriving) or self.scheduler.has_unfinished

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, as this engine has no tokenizer, got a text")
            return self.tokenizer.encode(prompt)
        try:
            items: list[Any] = list(prompt)
        except TypeError:
            raise ValueError(f"prompt: expected a text, token ids or messages, got {prompt!r}") from None
        if items and isinstance(items[0], dict):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, as this engine has no tokenizer, got messages")
            return self.tokenizer.encode_messages(items)
        return [int(item) if isinstance(item, Integral) else item for item in items]

    def _check_prompt(self, token_ids: list[int], params: SamplingParams) -> None:
        config = self.runner.config
        bad = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t < config.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt: expected token ids in 0..{config.vocab_size - 1}, got {bad!r}")
        if not token_ids:
            raise ValueError("prompt: expected at least one token, got none")
        if len(token_ids) + params.max_tokens - 1 > config.max_positions:
            raise ValueError(
                f"prompt: expected prompt + max_tokens - 1 <= {config.max_positions}, the model's positions, got "
                f"{len(token_ids)} + {params.max_tokens} - 1"
            )

    # ---- a step

    def step(self) -> StepStats:
        """Takes in what has arrived, schedules, runs, samples. A second thread waits until the first has finished.

        A forward pass that fails is withdrawn, and each of its sequences runs by itself; one that fails alone ends
        with finish_reason "error", and nobody else notices. An interruption (Ctrl-C) withdraws the step and goes on up.
        """
        with self._stepping:
            try:
                return self._step()
            except BaseException:
                self.scheduler.withdraw()
                raise

    def _step(self) -> StepStats:
        scheduler, manager = self.scheduler, self.scheduler.manager
        before = (scheduler.num_hit_tokens, scheduler.num_preemptions, manager.num_evicted_blocks, self._num_ended)
        started = self._clock()
        self._take_in()
        batch = scheduler.schedule()
        sequences = list(scheduler.batch)
        scheduled = ran = self._clock()
        for sequence in sequences:
            metrics = self._generations[sequence.request.request_id].metrics
            if metrics.first_scheduled_s is None:
                metrics.first_scheduled_s = scheduled
        num_failed = 0
        if batch.sequences:
            try:
                logits = self.runner.forward(batch)
            except Exception:  # whatever failed, somebody's request may be fine by itself
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
        return StepStats(
            step=self._num_steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=sum(prompts),
            num_decode_tokens=batch.num_tokens - sum(prompts),
            num_hit_tokens=scheduler.num_hit_tokens - before[0],
            num_preemptions=scheduler.num_preemptions - before[1],
            num_evicted_blocks=manager.num_evicted_blocks - before[2],
            num_finished=self._num_ended - before[3],
            num_failed=num_failed,
            sizes=manager.sizes,
            schedule_s=scheduled - started,
            forward_s=ran - scheduled,
            postprocess_s=self._clock() - ran,
        )

    def _take_in(self) -> None:
        # Whoever is aborted by now has been added by now.
        aborting = [self._aborting.popleft() for _ in range(len(self._aborting))]
        for _ in range(len(self._arriving)):
            self.scheduler.add(self._arriving.popleft().request)
        for generation in aborting:
            if self._generations.get(generation.request.request_id) is generation:
                self._end_all(generation.request.request_id, "abort")

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
                self._end_all(sequence.request.request_id, "error", _described(error))
                num_failed += 1
            else:
                num_failed += self._accept(batch, [sequence], logits)
        return num_failed

    def _accept(self, batch: ScheduledBatch, sequences: Sequence[Running], logits: torch.Tensor) -> int:
        """The batch has run: samples for those whose tokens are all computed. Returns how many that failed for."""
        self.scheduler.commit()
        wanted = [s for s, item in zip(sequences, batch.sequences, strict=True) if item.needs_logits]
        for running in sequences:
            generation = self._generations[running.request.request_id]
            if not generation.metrics.token_times_s:
                generation.num_cached_tokens = running.num_cached_tokens or 0
        # What is sampled from a row: a token for its sequence, or at the end of a prompt one for each of n samples.
        samples = [self._samples_of(running) for running in wanted]
        rows = [row for row, some in enumerate(samples) for _ in some]
        every = [sample for some in samples for sample in some]
        params = [wanted[row].request.sampling_params for row in rows]
        picked = logits[rows] if len(rows) > len(logits) else logits
        try:
            tokens = iter(sample_tokens(picked, params, [sample.generator for sample in every]))
        except ValueError:
            # One of the rows is no distribution; the others are.
            each = zip(wanted, samples, logits.split(1), strict=True)
            return sum(self._sample(running, some, row) for running, some, row in each)
        return sum(self._take(s, some, [next(tokens) for _ in some]) for s, some in zip(wanted, samples, strict=True))

    def _samples_of(self, running: Running) -> list[Sample]:
        samples = self._generations[running.request.request_id].samples
        is_prompt = running.sample == 0 and running.num_tokens == running.num_prompt_tokens
        return list(samples) if is_prompt else [samples[running.sample]]

    def _sample(self, running: Running, samples: list[Sample], row: torch.Tensor) -> int:
        """Samples from one row by itself; ends the request if that fails. Returns 1 if it did."""
        params = [running.request.sampling_params] * len(samples)
        try:
            tokens = sample_tokens(row[[0] * len(samples)], params, [sample.generator for sample in samples])
        except ValueError as error:
            self._end_all(running.request.request_id, "error", _described(error))
            return 1
        return self._take(running, samples, tokens)

    def _take(self, running: Running, samples: list[Sample], tokens: list[SampledToken]) -> int:
        """Gives tokens to a sequence and, at the end of its prompt, to its forks. Returns 1 if forking failed."""
        generation = self._generations[running.request.request_id]
        now = self._clock()
        each = [running]
        try:
            for index in range(1, len(samples)):
                other, copies = self.scheduler.fork(running, index)
                each.append(other)
                self.runner.copy(copies)
        except Exception as error:
            self._end_all(running.request.request_id, "error", _described(error))
            return 1
        metrics = generation.metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = now
        for sequence, sample, token in zip(each, samples, tokens, strict=True):
            self.scheduler.append_token(sequence, token.token_id)
            if sequence.sample == 0:
                metrics.token_times_s.append(now)
            if sample.append(token.token_id, token.logprobs):
                self._end(sequence)
        return 0

    def _end(self, sequence: Running) -> None:
        """Takes a sequence whose sample has ended out of the scheduler."""
        request_id = sequence.request.request_id
        self.scheduler.finish(sequence)
        generation = self._generations.get(request_id)
        if generation is None:  # ended with all its samples
            return
        metrics = generation.metrics
        metrics.num_preemptions = max(metrics.num_preemptions, sequence.num_preemptions)
        if generation.is_finished:
            metrics.finished_s = self._clock()
            self._num_ended += 1
            del self._generations[request_id]

    def _end_all(self, request_id: str, reason: str, error: str | None = None) -> None:
        """Ends all of a request that still runs, samples that have yet to be forked included."""
        for sample in self._generations[request_id].samples:
            if sample.finish_reason is None:
                sample.end(reason, error)
        for sequence in self.scheduler.sequences(request_id):
            self._end(sequence)

    # ---- whole requests

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Serves prompts to their ends; returns what became of each, in order.

        Args:
            sampling_params: for all, or one for each.

        Raises:
            ValueError: a prompt can't be served; then none is.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        each = [sampling_params] * len(prompts) if not isinstance(sampling_params, Sequence) else list(sampling_params)
        if len(each) != len(prompts):
            raise ValueError(f"sampling_params: expected one, or {len(prompts)}, got {len(each)}")
        generations = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                generations.append(self._generations[self.add_request(prompt, params)])
        except BaseException:
            for generation in generations:
                self.abort(generation.request.request_id)
            self._settle()
            raise
        while not all(generation.is_finished for generation in generations):
            self.step()
        return [generation.output() for generation in generations]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Serves one request, yielding what there is of it after each of its tokens. Leaving the loop aborts it.

        Steps the engine for everybody: several streams may be read in turn.
        """
        generation = self._generations[self.add_request(prompt, sampling_params, **options)]
        seen = 0
        try:
            while True:
                count = sum(len(sample.token_ids) for sample in generation.samples)
                if count > seen or generation.is_finished:
                    seen = count
                    yield generation.output()
                if generation.is_finished:
                    return
                self.step()
        finally:
            if not generation.is_finished:
                self.abort(generation.request.request_id)
                self._settle()

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for coroutines: steps run in a thread, one at a time, for all streams together."""
        generation = self._generations[self.add_request(prompt, sampling_params, **options)]
        seen = 0
        try:
            while True:
                count = sum(len(sample.token_ids) for sample in generation.samples)
                if count > seen or generation.is_finished:
                    seen = count
                    yield generation.output()
                if generation.is_finished:
                    return
                # The step goes on in its thread when this task is cancelled; the next one waits for it (`step`).
                await asyncio.to_thread(self._step_unless, generation, seen)
        finally:
            if not generation.is_finished:
                self.abort(generation.request.request_id)
                self._settle()

    def _step_unless(self, generation: Generation, seen: int) -> None:
        """Steps, unless another stream's step has brought something in the meantime."""
        with self._stepping:
            if generation.is_finished or sum(len(sample.token_ids) for sample in generation.samples) > seen:
                return
        self.step()

    def _settle(self) -> None:
        """Takes aborts in now, where no step is under way; else the next one does."""
        if self._stepping.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._stepping.release()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

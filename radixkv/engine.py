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
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixkv.batch import ScheduledBatch
from radixkv.cache.base import PrefixCache
from radixkv.cache.namespace import Namespace
from radixkv.generation import Generation, Sample
from radixkv.kv_manager import KVManager, PoolSizes
from radixkv.model.checkpoint import load_checkpoint
from radixkv.model.sampling import make_generator, sample_tokens
from radixkv.model.tokenizer import Tokenizer
from radixkv.replay import CacheConfig
from radixkv.request import Request, RequestOutput, SamplingParams
from radixkv.runner import Runner, kv_bytes_per_block
from radixkv.scheduler import Scheduler, SchedulerConfig
from radixkv.sequence import Sequence as Running

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
DEFAULT_KV_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what ran, what waits, where the time went.

    Attributes:
        num_prefill_tokens, num_decode_tokens: computed in it.
        num_hit_tokens: of prompts first admitted in it, found in the cache.
        num_finished: requests that ended in it.
        num_failed: sequences that ended in it with an error.
        schedule_s: scheduler, manager and cache; forward_s: the model; postprocess_s: sampling and text.
    """

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_evicted_blocks: int
    num_finished: int
    num_failed: int
    sizes: PoolSizes
    schedule_s: float
    forward_s: float
    postprocess_s: float


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
        self._aborting: deque[str] = deque()
        self._names = itertools.count()
        self._num_steps = 0

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
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Engine:
        """Loads a checkpoint and makes an engine of it.

        Args:
            path_or_preset: a Hugging Face folder, a .gguf file, or "tiny_gpt".
            cache: radix, flat_hash, null, or a cache of your own.
            num_blocks: blocks in the pool; None: as many as fit into 1 GiB.
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
            cache = CacheConfig(cache, block_size).make()
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
        limits = SchedulerConfig(max_num_batched_tokens, max_num_seqs, order, max_overtakes)
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
    ) -> str:
        """Takes a request in; it is scheduled from the next step on. May be called from any thread.

        Args:
            prompt: a text, token ids, or messages for the checkpoint's chat template.
            request_id: None: a number that is not in use.

        Returns:
            Its request_id.

        Raises:
            ValueError: the prompt is empty, too long for the model or the pool, has tokens that the model has not, or
                needs a tokenizer that is not there; the id is in use. Nothing else is disturbed.
        """
        params = sampling_params or SamplingParams()
        token_ids = self._token_ids(prompt)
        self._check_prompt(token_ids, params)
        if request_id is None:
            request_id = next(name for name in map(str, self._names) if name not in self._generations)
        request = Request(request_id, tuple(token_ids), params, namespace)
        self.scheduler.check_fits(request)
        if request_id in self._generations:
            raise ValueError(f"request_id: expected one that is not in use, got {request_id!r}")
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no stop strings, as this engine has no tokenizer")
        samples = [
            Sample(
                params,
                make_generator(params.seed, sample),
                self.tokenizer.detokenizer() if self.tokenizer else None,
                stops,
            )
            for sample in range(params.n)
        ]
        generation = Generation(request, samples, self._clock())
        self._generations[request_id] = generation
        self._arriving.append(generation)
        return request_id

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; one that is not known, or ended, is passed over. From any thread."""
        self._aborting.append(request_id)

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
        items = list(prompt)
        if items and isinstance(items[0], dict):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, as this engine has no tokenizer, got messages")
            return self.tokenizer.encode_messages(items)  # type: ignore[arg-type]
        return items  # type: ignore[return-value]

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
        """Takes in what has arrived, schedules, runs, samples. One thread at a time.

        A forward pass that fails is withdrawn, and each of its sequences runs by itself; one that fails alone ends
        with finish_reason "error", and nobody else notices.
        """
        scheduler, manager = self.scheduler, self.scheduler.manager
        before = (scheduler.num_hit_tokens, scheduler.num_preemptions, manager.num_evicted_blocks)
        unfinished = len(self._generations)
        started = self._clock()
        self._take_in()
        batch = scheduler.schedule()
        sequences = list(scheduler.batch)
        scheduled = self._clock()
        num_failed = 0
        ran = scheduled
        if batch.sequences:
            try:
                logits = self.runner.forward(batch)
            except Exception:  # whatever failed, somebody's request may be fine by itself
                num_failed = self._run_apart(scheduler.withdraw())
                ran = self._clock()
            else:
                ran = self._clock()
                self._accept(batch, sequences, logits)
        self._num_steps += 1
        num_decodes = sum(item.num_tokens == 1 for item in batch.sequences)
        return StepStats(
            step=self._num_steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=batch.num_tokens - num_decodes,
            num_decode_tokens=num_decodes,
            num_hit_tokens=scheduler.num_hit_tokens - before[0],
            num_preemptions=scheduler.num_preemptions - before[1],
            num_evicted_blocks=manager.num_evicted_blocks - before[2],
            num_finished=unfinished - len(self._generations),
            num_failed=num_failed,
            sizes=manager.sizes,
            schedule_s=scheduled - started,
            forward_s=ran - scheduled,
            postprocess_s=self._clock() - ran,
        )

    def _take_in(self) -> None:
        while self._arriving:
            self.scheduler.add(self._arriving.popleft().request)
        while self._aborting:
            request_id = self._aborting.popleft()
            for sequence in self.scheduler.sequences(request_id):
                self._end(sequence, "abort")

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
                self._end(sequence, "error", f"{type(error).__name__}: {error}")
                num_failed += 1
            else:
                self._accept(batch, [sequence], logits)
        return num_failed

    def _accept(self, batch: ScheduledBatch, sequences: Sequence[Running], logits: torch.Tensor) -> None:
        """The batch has run: samples for those whose tokens are all computed."""
        self.scheduler.commit()
        now = self._clock()
        rows: list[tuple[Running, int]] = []  # a sequence, and its row of logits
        for running, item in zip(sequences, batch.sequences, strict=True):
            generation = self._generations[running.request.request_id]
            if generation.metrics.first_scheduled_s is None:
                generation.metrics.first_scheduled_s = now
                generation.num_cached_tokens = running.num_cached_tokens or 0
            if item.needs_logits:
                rows.append((running, len(rows)))
        for running, row in list(rows):
            num_samples = running.request.sampling_params.n
            if num_samples > 1 and running.sample == 0 and running.num_tokens == running.num_prompt_tokens:
                for index in range(1, num_samples):
                    other, copies = self.scheduler.fork(running, index)
                    self.runner.copy(copies)
                    rows.append((other, row))
        samples = [self._generations[running.request.request_id].samples[running.sample] for running, _ in rows]
        picked = logits[[row for _, row in rows]] if len(rows) > len(logits) else logits
        params = [running.request.sampling_params for running, _ in rows]
        tokens = sample_tokens(picked, params, [sample.generator for sample in samples])
        now = self._clock()
        for (running, _), sample, token in zip(rows, samples, tokens, strict=True):
            self.scheduler.append_token(running, token.token_id)
            metrics = self._generations[running.request.request_id].metrics
            if metrics.first_token_s is None:
                metrics.first_token_s = now
            if running.sample == 0:
                metrics.token_times_s.append(now)
            metrics.num_preemptions = max(metrics.num_preemptions, running.num_preemptions)
            if sample.append(token.token_id, token.logprobs):
                self._end(running, sample.finish_reason or "stop")

    def _end(self, sequence: Running, reason: str, error: str | None = None) -> None:
        generation = self._generations[sequence.request.request_id]
        self.scheduler.finish(sequence)
        samples = generation.samples
        own = samples[sequence.sample]
        ended = [own]
        if reason in ("abort", "error") and sequence.num_tokens == sequence.num_prompt_tokens:
            ended = list(samples)  # not forked yet
        for sample in ended:
            if sample.finish_reason is None:
                sample.end(reason, error)
        if generation.is_finished:
            generation.metrics.finished_s = self._clock()
            del self._generations[sequence.request.request_id]

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
        except ValueError:
            for generation in generations:
                self.abort(generation.request.request_id)
            self._take_in()
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
                self._take_in()

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
                async with self._stepping():
                    now = sum(len(sample.token_ids) for sample in generation.samples)
                    if now == seen and not generation.is_finished:
                        await asyncio.to_thread(self.step)
        finally:
            if not generation.is_finished:
                self.abort(generation.request.request_id)

    def _stepping(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if getattr(self, "_lock_loop", None) is not loop:
            self._lock_loop, self._lock = loop, asyncio.Lock()
        return self._lock

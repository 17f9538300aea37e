"""Engine: schedule -> run -> sample, on a prefix cache. The whole API of serving with one model.

One thread steps the engine at a time. `add_request`, `abort`, `reset_cache` and `metrics.text()` may be called from any
other: requests and aborts are taken in at the next step, a reset waits for the one under way ("Threads" in
docs/internals.md).

**A step is a transaction.** What a request *is* lies outside of the scheduler: its prompt and the tokens of its samples
(`radixkv.engine.generation`). Everything below (sequences, block tables, the cache) follows from that and can be made
again. So each exception has one of three answers:

- A forward pass fails: the step is withdrawn, the cache keeps what earlier steps computed. After an `Exception` each
  sequence then runs by itself; anything else (Ctrl-C) goes on up.
- A hook or the sampling of tokens fails: nothing is half done there, it goes on up or ends its own request.
- Anything is raised at any other line (no memory left): what is half done can't be known, so all of it is dropped.
  The cache is empty, every request waits again with the tokens it has, and the exception goes on up.

Signals do not come at those lines: they are held until the step has ended, except in the forward pass.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

import radixkv.scheduling.sequence as scheduling
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager, ResetStats
from radixkv.cache.contract import PrefixCache, take_over
from radixkv.cache.namespace import Namespace, kinds
from radixkv.engine.generation import Generation, Sample, Stream, described
from radixkv.engine.held_signals import HeldSignals
from radixkv.engine.metrics import Metrics
from radixkv.engine.model.checkpoint import load_checkpoint
from radixkv.engine.model.sampling import RandomNumbers, SampledToken, sample_tokens
from radixkv.engine.model.tokenizer import Tokenizer
from radixkv.engine.prompts import Prompt, PromptReader
from radixkv.engine.runner import Runner, kv_bytes_per_block
from radixkv.scheduling.batch import ScheduledBatch, StepStats
from radixkv.scheduling.request import Request, RequestOutput, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig, Unfinished

DEFAULT_KV_BYTES = 2**30
T = TypeVar("T")


class Engine:
    """Serves requests with one model on one device.

    Args:
        runner: the model and the KV tensors.
        scheduler: over a manager with as many blocks as the runner. Both are this engine's alone from now on.
        tokenizer: None where prompts come as token ids and no text is wanted.
        eos_token_ids: the model's own end tokens.
        clock: seconds, for all times reported.

    Attributes:
        generations: the unfinished requests that a step has taken in, by request_id.
        metrics: what was counted so far; `engine.metrics.text()` is for Prometheus. May be read from any thread.
        on_logits: called with each sequence that is to be sampled, and its row of logits [vocab_size].

    Raises:
        ValueError: the pools differ in their number of blocks or in block_size, or another engine has one of the two.

    >>> from radixkv import Engine, SamplingParams
    >>> engine = Engine.from_pretrained("tiny_gpt", num_blocks=64, seed=0)
    >>> params = SamplingParams(max_tokens=4, ignore_eos=True)
    >>> story = "Once upon a time there was a radix tree."
    >>> for ending in (" It grew.", " It fell."):
    ...     (output,) = engine.generate(story + ending, params)
    ...     print(len(output.prompt_token_ids), output.num_cached_tokens, len(output.outputs[0].token_ids))
    49 0 4
    49 44 4
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
        for name, wanted, got in (
            ("num_blocks", runner.num_blocks, scheduler.manager.allocator.num_blocks),
            ("block_size", runner.block_size, scheduler.block_size),
        ):
            if wanted != got:
                raise ValueError(f"scheduler: expected a pool with {name} {wanted}, the runner's, got {got}")
        take_over(scheduler, "scheduler", self)
        take_over(runner, "runner", self)
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.generations: dict[str, Generation] = {}
        self.metrics = Metrics()
        self.on_logits: Callable[[scheduling.Sequence, torch.Tensor], None] | None = None
        self._prompts = PromptReader(tokenizer, runner.config.vocab_size, runner.config.max_positions)
        self._arriving: dict[str, Generation] = {}  # not known to the scheduler yet
        self._aborting: deque[Generation] = deque()
        self._names = itertools.count()
        self._num_steps = self._num_ended = 0
        self._is_whole = True  # nothing is half done
        self._adding = threading.Lock()
        self._stepping = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        path_or_preset: str | Path,
        *,
        cache: CacheConfig | PrefixCache | None = None,
        scheduler: SchedulerConfig | None = None,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        deterministic: bool | None = None,
        tree_attention: str = "auto",
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Engine:
        """Loads a checkpoint and makes an engine of it.

        Args:
            path_or_preset: a Hugging Face folder, a .gguf file, or "tiny_gpt".
            cache: which cache to make; or a cache of your own, which no other engine has. None: `CacheConfig()`.
            scheduler: limits of a step and the order of admissions. None: `SchedulerConfig()`.
            num_blocks: blocks in the pool. None: as many as `cache` says, or else as fit into 1 GiB.
            dtype: of weights and KV; None: the checkpoint's.
            device: None: a GPU where there is one.
            deterministic: every logit the same bits whatever is cached, batched or chunked; None: on a CPU.
            tree_attention: on, off or auto: whether KV that sequences share is read once a step; the same tokens.
            seed: of a preset's weights.
            clock: seconds, for all times reported.

        Raises:
            ValueError: an argument is out of range, or the checkpoint can't be used; the message says which and why.
        """
        if cache is None:
            cache = CacheConfig()
        if isinstance(cache, CacheConfig):
            if num_blocks is not None and cache.num_blocks is not None:
                raise ValueError(f"num_blocks: expected None, as {cache} says it, got {num_blocks}")
            num_blocks = cache.num_blocks if num_blocks is None else num_blocks
            cache = cache.make()
        elif not callable(getattr(cache, "acquire", None)):
            raise ValueError(f"cache: expected a CacheConfig or a PrefixCache, got {cache!r}")
        if not isinstance(scheduler, SchedulerConfig | None):
            raise ValueError(f"scheduler: expected a SchedulerConfig, got {scheduler!r}")
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        checkpoint = load_checkpoint(path_or_preset, dtype=dtype, device=device, seed=seed)
        config = checkpoint.model.config
        if num_blocks is None:
            dtype = checkpoint.model.weights.embedding.dtype
            num_blocks = max(DEFAULT_KV_BYTES // kv_bytes_per_block(config, cache.block_size, dtype), 1)
        runner = Runner(
            checkpoint.model,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            device=device,
            deterministic=device.type == "cpu" if deterministic is None else deterministic,
            tree_attention=tree_attention,
        )
        made = Scheduler(KVManager(cache, num_blocks), scheduler)
        tokenizer = checkpoint.tokenizer
        return cls(runner, made, tokenizer=tokenizer, eos_token_ids=config.eos_token_ids, clock=clock)

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
            priority: higher ones start first, within the bound on how long a request waits (`SchedulerConfig`).
            keep_steps: when it has ended, its prefix is evicted after all else for so many steps.

        Returns:
            Its request_id.

        Raises:
            ValueError: the prompt is empty, too long for the model or the pool, has tokens that the model has not, or
                needs a tokenizer that is not there; the id is in use. Nothing else is disturbed.
        """
        generation = self._add(prompt, sampling_params, request_id, namespace, priority, keep_steps)
        return generation.request.request_id

    def _add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        namespace: Namespace | None = None,
        priority: int = 0,
        keep_steps: int = 0,
        *,
        into: list[Generation] | None = None,
    ) -> Generation:
        """`add_request`; the generation is in `into` as soon as an interruption could leave it behind."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params: expected SamplingParams, got {params!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no stop strings, as this engine has no tokenizer")
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id: expected a str or None, got {request_id!r}")
        token_ids = self._prompts.read(prompt, params.max_tokens)
        samples = [self._make_sample(params, index) for index in range(params.n)]

        def register() -> Generation:
            name = request_id
            if name is None:
                name = next(number for number in map(str, self._names) if self._known(number) is None)
            request = Request(name, tuple(token_ids), params, namespace, priority, keep_steps)
            self.scheduler.check_fits(request)
            if self._known(name) is not None:
                raise ValueError(f"request_id: expected one that is not in use, got {name!r}")
            generation = Generation(request, samples, self._clock())
            if into is not None:
                into.append(generation)
            self._arriving[name] = generation
            return generation

        with HeldSignals():
            return _alone(self._adding, register)

    def _known(self, request_id: str) -> Generation | None:
        """An unfinished request, or None. What is taken in stands in both places for a moment, never in none."""
        return self._arriving.get(request_id) or self.generations.get(request_id)

    def _make_sample(self, params: SamplingParams, index: int) -> Sample:
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        make_detokenizer = self.tokenizer.detokenizer if self.tokenizer else None
        return Sample(params, RandomNumbers(params.seed, index), make_detokenizer, stops)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step. An id that is not known, or has ended, is ignored. From any thread."""
        generation = self._known(request_id)
        if generation is not None:
            self._aborting.append(generation)

    def generation(self, request_id: str) -> Generation:
        """Returns what is known of an unfinished request; the object lives on when it ends.

        Raises:
            KeyError: no unfinished request has that id.
        """
        generation = self._known(request_id)
        if generation is None:
            raise KeyError(request_id)
        return generation

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request has arrived that has not ended. May be read from any thread."""
        return bool(self._arriving) or self.scheduler.has_unfinished

    def reset_cache(self, namespace: Namespace | None = None) -> ResetStats:
        """Forgets everything cached so far, between two steps. May be called from any thread, while requests run.

        Requests that run go on with the KV they have and give the tokens they would have given; what they compute is
        not shared. Those that wait, those preempted later and all to come compute anew: hits count from 0.

        Args:
            namespace: a tenant, adapter or image: forget only what depends on it (of several, on one of them).

        Returns:
            How many blocks it freed at once, and how many later.

        Raises:
            ValueError: `namespace` is none.

        Cost: as `PrefixCache.reset`, after the step under way.
        """
        kinds(namespace)  # refuses what is no namespace
        return _alone(self._stepping, lambda: self._change(lambda: self._reset(namespace)))

    def _reset(self, namespace: Namespace | None) -> ResetStats:
        stats = self.scheduler.manager.reset(namespace)
        self.metrics.num_resets += 1
        return stats

    # ---- a step

    def step(self) -> StepStats:
        """Takes in what has arrived, schedules, runs, samples. A second thread waits until the first has finished.

        A forward pass that fails is withdrawn, and each of its sequences runs by itself; one that fails alone ends
        with finish_reason "error", and no other request notices. An interruption (Ctrl-C) withdraws the step and goes
        on up. Whatever else is raised, at any line, empties the cache and goes on up: with the next step every request
        goes on from the tokens it has, and gives the tokens it would have given (see the module's docstring).

        Returns:
            What the step did; of zeros where there was nothing to do.
        """
        return _alone(self._stepping, self._step)

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
            BaseException: whatever a step raises. The prompts are aborted; other requests are as they were.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        each = [sampling_params] * len(prompts) if not isinstance(sampling_params, Sequence) else list(sampling_params)
        if len(each) != len(prompts):
            raise ValueError(f"sampling_params: expected one, or {len(prompts)}, got {len(each)}")
        generations: list[Generation] = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                self._add(prompt, params, into=generations)
            while not all(generation.is_finished for generation in generations):
                self.step()
        except BaseException:
            self._abort(generations)
            raise
        return [generation.output() for generation in generations]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Serves one request, yielding what there is of it after each of its tokens. Leaving the loop aborts it.

        Steps the engine for all of its requests: several streams may be read in turn.

        Args:
            prompt, sampling_params, options: as `add_request` takes them.
        """
        with self._followed(prompt, sampling_params, options) as stream:
            while not stream.is_over:
                if stream.has_news:
                    yield stream.read()
                else:
                    self.step()

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for coroutines: steps run in a thread, one at a time, for all streams together."""
        with self._followed(prompt, sampling_params, options) as stream:
            while not stream.is_over:
                if stream.has_news:
                    yield stream.read()
                else:
                    # The step goes on in its thread when this task is cancelled; the next one waits for it.
                    await asyncio.to_thread(self._step_for, stream)

    @contextmanager
    def _followed(
        self, prompt: Prompt, sampling_params: SamplingParams | None, options: dict[str, Any]
    ) -> Iterator[Stream]:
        """Adds a request, and aborts it when the block is left before it has ended."""
        followed: list[Generation] = []
        try:
            yield Stream(self._add(prompt, sampling_params, **options, into=followed))
        finally:
            self._abort(followed)

    def _abort(self, generations: list[Generation]) -> None:
        """Ends those that have not ended: now, where no step is under way; else the next one does."""
        unfinished = [generation for generation in generations if not generation.is_finished]
        self._aborting.extend(unfinished)
        if unfinished and not self._stepping.locked():  # by another thread, whose next step takes them in
            _alone(self._stepping, lambda: self._change(self._take_in))

    def _step_for(self, stream: Stream) -> None:
        """Steps, unless another stream's step has brought this one something in the meantime."""
        _alone(self._stepping, lambda: None if stream.has_news else self._step())

    # ---- inside a step

    def _step(self) -> StepStats:
        with HeldSignals() as signals:
            before = self._counts()
            try:
                stats = self._transact(lambda: self._run_step(before, signals))
            finally:  # what a broken step has taken from others is gone all the same
                self.metrics.took(*(now - then for now, then in zip(self._counts(), before, strict=True)))
            self.metrics.stepped(stats)
            return stats

    def _take_in(self) -> None:
        # A request that is aborted by now has been added by now. Each is taken out of its queue last, so that an
        # interruption loses none.
        num_aborting = len(self._aborting)
        for request_id, generation in _alone(self._adding, lambda: list(self._arriving.items())):
            self.generations[request_id] = generation
            if not self.scheduler.sequences(request_id):
                self.scheduler.add(generation.request)
            del self._arriving[request_id]
        for _ in range(num_aborting):
            request_id = self._aborting[0].request.request_id
            if self.generations.get(request_id) is self._aborting[0]:
                self._end_all(request_id, "abort")
            self._aborting.popleft()

    def _change(self, do: Callable[[], T]) -> T:
        """Calls what changes requests, scheduler or cache between two steps. Signals wait until it has ended.

        Raises:
            BaseException: what `do` raises. Unless it was raised where nothing was half done, all begins anew.
        """
        with HeldSignals():
            return self._transact(do)

    def _transact(self, do: Callable[[], T]) -> T:
        """As `_change`, for a caller that holds the signals."""
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

    def _counts(self) -> tuple[int, int]:
        return self.scheduler.num_preemptions, self.scheduler.manager.num_evicted_blocks

    def _run_step(self, before: tuple[int, int], signals: HeldSignals) -> StepStats:
        scheduler, manager = self.scheduler, self.scheduler.manager
        num_hit_tokens, num_ended = scheduler.num_hit_tokens, self._num_ended
        started = self._clock()
        self._take_in()
        batch = scheduler.schedule()
        sequences = [running.sequence for running in scheduler.batch]
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
                num_failed = self._accept(batch, logits)
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

    def _forward(self, batch: ScheduledBatch, signals: HeldSignals) -> torch.Tensor | Exception:
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

    def _run_apart(self, sequences: Sequence[scheduling.Sequence], signals: HeldSignals) -> int:
        """Runs the sequences of a failed step one by one; returns how many failed."""
        num_failed = 0
        for sequence in sequences:
            batch = self.scheduler.schedule_alone(sequence)
            if not batch.sequences:  # has to wait
                continue
            logits = self._forward(batch, signals)
            if isinstance(logits, Exception):
                self.scheduler.withdraw()
                self._end_all(sequence.request.request_id, "error", described(logits))
                num_failed += 1
            else:
                num_failed += self._accept(batch, logits)
        return num_failed

    def _accept(self, batch: ScheduledBatch, logits: torch.Tensor) -> int:
        """The batch has run: samples for those whose tokens are all computed. Returns how many that failed for."""
        sequences = self.scheduler.commit()
        for sequence in sequences:
            generation = self.generations[sequence.request.request_id]
            if not generation.has_started:
                generation.num_cached_tokens = sequence.num_cached_tokens or 0
                generation.has_started = True
                self.metrics.started(generation)
        wanted = [s for s, item in zip(sequences, batch.sequences, strict=True) if item.needs_logits]
        # What is sampled from a row: a token for its sequence, or at the end of a prompt one for each of n samples.
        samples = [self._samples_of(sequence) for sequence in wanted]
        self._is_whole = True  # a sequence that gets no token computes its last one again, and draws the same number
        if self.on_logits is not None:
            for sequence, row in zip(wanted, logits, strict=True):
                self.on_logits(sequence, row)
        tokens = iter(self._draw(wanted, samples, logits))
        self._is_whole = False
        num_failed = 0
        for sequence, some in zip(wanted, samples, strict=True):
            num_failed += self._take(sequence, some, [next(tokens) for _ in some])
        return num_failed

    def _samples_of(self, sequence: scheduling.Sequence) -> list[Sample]:
        samples = self.generations[sequence.request.request_id].samples
        is_prompt = sequence.sample == 0 and sequence.num_tokens == sequence.num_prompt_tokens
        return list(samples) if is_prompt else [samples[sequence.sample]]

    def _draw(
        self, wanted: Sequence[scheduling.Sequence], samples: Sequence[list[Sample]], logits: torch.Tensor
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

    def _take(
        self, sequence: scheduling.Sequence, samples: list[Sample], tokens: list[SampledToken | Exception]
    ) -> int:
        """Gives tokens to a sequence and, at the end of its prompt, to its forks. Returns 1 if the request failed."""
        request_id = sequence.request.request_id
        if samples[0].finish_reason is not None:  # another sample of the request has just failed
            return 0
        error = next((token for token in tokens if isinstance(token, Exception)), None)
        drawn = [token for token in tokens if isinstance(token, SampledToken)]
        now = self._clock()
        each = [sequence]
        while error is None and len(each) < len(samples):
            other, copies = self.scheduler.fork(sequence, len(each))
            each.append(other)
            try:
                self.runner.copy(copies)
            except Exception as failed:
                error = failed
            else:
                self.scheduler.copied(other)
        if error is not None:
            self._end_all(request_id, "error", described(error))
            return 1
        generation = self.generations[request_id]
        metrics = generation.metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = now
        for one, sample, token in zip(each, samples, drawn, strict=True):
            self.scheduler.append_token(one, token.token_id)
            has_ended = sample.append(token.token_id, token.logprobs)
            if one.sample == 0:
                metrics.token_times_s.append(now)
            self.metrics.sampled(generation, one.sample)
            if sample.finish_reason == "error":
                self._end_all(request_id, "error", sample.error)
                return 1
            if has_ended:
                self._end(one)
        return 0

    def _end(self, sequence: scheduling.Sequence) -> None:
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

    def _end_all(self, request_id: str, reason: str, error: str | None = None) -> None:
        """Ends all of a request that still runs, samples that have yet to be forked included."""
        generation = self.generations[request_id]
        for sample in generation.samples:
            if sample.finish_reason is None:
                sample.end(reason, error)
        for sequence in self.scheduler.sequences(request_id):
            self._end(sequence)


def _alone(lock: threading.Lock, do: Callable[[], T]) -> T:
    """Calls while it holds a lock."""
    # On one line, so that a tracer that raises at a line can't come between the call and the lock's release.
    with lock: return do()  # fmt: skip  # noqa: E701

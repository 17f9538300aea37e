"""Engine: schedule -> run -> postprocess, on a prefix cache. What a caller holds in his hands.

    engine = Engine.from_pretrained("tiny_gpt")
    for output in engine.generate(["Once upon a time", "Once upon a hill"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text, output.num_cached_tokens)

One thread steps the engine at a time. `add_request`, `abort`, `reset_cache` and `metrics.text()` may be called from any
other: requests and aborts are taken in at the next step, a reset waits for the one under way (see ARCHITECTURE.md).
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

from radixkv.blocks.kv_manager import KVManager
from radixkv.blocks.replay import CacheConfig
from radixkv.blocks.sequence_blocks import ResetStats
from radixkv.cache.contract import PrefixCache, take_over
from radixkv.cache.namespace import Namespace, kinds
from radixkv.engine.generation import Generation, Sample, Stream
from radixkv.engine.held_signals import HeldSignals
from radixkv.engine.metrics import Metrics
from radixkv.engine.model.checkpoint import load_checkpoint
from radixkv.engine.model.sampling import RandomNumbers
from radixkv.engine.model.tokenizer import Tokenizer
from radixkv.engine.prompts import Prompt, PromptReader
from radixkv.engine.runner import Runner, kv_bytes_per_block
from radixkv.engine.stepper import Stepper
from radixkv.scheduling.request import Request, RequestOutput, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.scheduling.step_stats import StepStats

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

    Raises:
        ValueError: the pools differ in their number of blocks or in block_size, or another engine has one of the two.
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
        self.stepper = Stepper(runner, scheduler, clock)
        self._prompts = PromptReader(tokenizer, runner.config.vocab_size, runner.config.max_positions)
        self._generations = self.stepper.generations
        self._arriving: dict[str, Generation] = {}  # not known to the scheduler yet
        self._aborting: deque[Generation] = deque()
        self._names = itertools.count()
        self._adding = threading.Lock()
        self._stepping = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        path_or_preset: str | Path,
        *,
        cache: str | PrefixCache = "radix",
        block_size: int | None = None,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        deterministic: bool | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        order: str = "longest_prefix",
        max_overtakes: int = 256,
        queue_aware: bool = False,
        policy: str | None = None,
        tree_attention: str = "auto",
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Engine:
        """Loads a checkpoint and makes an engine of it.

        Args:
            path_or_preset: a Hugging Face folder, a .gguf file, or "tiny_gpt".
            cache: radix, flat_hash, null, or a cache of your own, which no other engine has.
            block_size: tokens in a block, 16 unless said; not beside a cache of your own, which has one.
            num_blocks: blocks in the pool; None: as many as fit into 1 GiB.
            policy: radix by name alone: what it evicts first (`radixkv.cache.radix.policies`), lru unless said.
            order, max_overtakes, queue_aware: as of `SchedulerConfig`.
            device: None: a GPU where there is one.
            deterministic: every logit the same bits whatever is cached, batched or chunked; None: on a CPU.
            tree_attention: on, off or auto: whether KV that sequences share is read once a step; the same tokens.
            seed: of a preset's weights.

        Raises:
            ValueError: an argument is out of range, or the checkpoint can't be used; the message says which and why.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        checkpoint = load_checkpoint(path_or_preset, dtype=dtype, device=device, seed=seed)
        config = checkpoint.model.config
        if isinstance(cache, str):
            cache = CacheConfig(cache, 16 if block_size is None else block_size, policy=policy or "lru").make()
        else:
            for name, value in (("block_size", block_size), ("policy", policy)):
                if value is not None:
                    raise ValueError(f"{name}: expected None beside a cache of your own, got {value!r}")
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
        samples = [self._sample(params, index) for index in range(params.n)]

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
        return self._arriving.get(request_id) or self._generations.get(request_id)

    def _sample(self, params: SamplingParams, index: int) -> Sample:
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        make_detokenizer = self.tokenizer.detokenizer if self.tokenizer else None
        return Sample(params, RandomNumbers(params.seed, index), make_detokenizer, stops)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; one that is not known, or ended, is passed over. From any thread."""
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
        return bool(self._arriving) or self.scheduler.has_unfinished

    def reset_cache(self, namespace: Namespace | None = None) -> ResetStats:
        """Forgets everything cached so far, between two steps. May be called from any thread, while requests run.

        Requests that run go on with the KV they have and give the tokens they would have given; what they compute is
        shared with nobody. Those that wait, those preempted later and all to come compute anew: hits count from 0.

        Args:
            namespace: a tenant, adapter or image: forget only what depends on it (of several, on one of them).

        Returns:
            What it did.

        Raises:
            ValueError: no namespace.
        """
        kinds(namespace)  # refuses what is no namespace
        return _alone(self._stepping, lambda: self.stepper.change(lambda: self._reset(namespace)))

    def _reset(self, namespace: Namespace | None) -> ResetStats:
        stats = self.scheduler.manager.reset(namespace)
        self.metrics.num_resets += 1
        return stats

    @property
    def metrics(self) -> Metrics:
        """What was counted so far; `engine.metrics.text()` is for Prometheus. May be read from any thread."""
        return self.stepper.metrics

    # ---- a step

    def step(self) -> StepStats:
        """Takes in what has arrived, schedules, runs, samples. A second thread waits until the first has finished.

        A forward pass that fails is withdrawn, and each of its sequences runs by itself; one that fails alone ends
        with finish_reason "error", and no other request notices. An interruption (Ctrl-C) withdraws the step and goes
        on up. So does whatever else is raised, at any line: every request goes on from the tokens it has with the next
        step, and gives the tokens it would have given (see `radixkv.engine.stepper`).
        """
        return _alone(self._stepping, lambda: self.stepper.step(self._take_in))

    def _take_in(self) -> None:
        # A request that is aborted by now has been added by now. Each is taken out of its queue last, so that an
        # interruption loses none.
        num_aborting = len(self._aborting)
        for request_id, generation in _alone(self._adding, lambda: list(self._arriving.items())):
            self._generations[request_id] = generation
            if not self.scheduler.sequences(request_id):
                self.scheduler.add(generation.request)
            del self._arriving[request_id]
        for _ in range(num_aborting):
            request_id = self._aborting[0].request.request_id
            if self._generations.get(request_id) is self._aborting[0]:
                self.stepper.end_all(request_id, "abort")
            self._aborting.popleft()

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

        Steps the engine for everybody: several streams may be read in turn.

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
            _alone(self._stepping, lambda: self.stepper.change(self._take_in))

    def _step_for(self, stream: Stream) -> None:
        """Steps, unless another stream's step has brought this one something in the meantime."""
        _alone(self._stepping, lambda: None if stream.has_news else self.stepper.step(self._take_in))


def _alone(lock: threading.Lock, do: Callable[[], T]) -> T:
    """Calls while it holds a lock."""
    # On one line, so that a tracer that raises at a line can't come between the call and the lock's release.
    with lock: return do()  # fmt: skip  # noqa: E701

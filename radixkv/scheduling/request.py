"""What a caller asks for and what it gets: SamplingParams, Request, RequestOutput. Names as vLLM's users know them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixkv.cache.namespace import Namespace

# Of one request; more is a mistake that would take the machine's memory before anything could refuse it.
MAX_SAMPLES = 16_384


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Attributes:
        n: samples per request; they share the prompt's KV. Sample i uses seed + i.
        temperature: 0 is greedy.
        top_k: keep the k most likely; 0 keeps all.
        top_p: keep the smallest set whose probability reaches top_p.
        min_p: keep what is at least min_p times as likely as the most likely.
        seed: of this request's own random generator, so its tokens do not depend on what runs beside it; None: random.
        max_tokens: generated at most.
        stop: end where one of these strings appears in the text; it is not part of the text returned.
        stop_token_ids: end at one of these tokens, besides the model's own end token; it is not part of the text.
        ignore_eos: go on past the model's end token.
        logprobs: report the log probabilities of this many most likely tokens, and of the one chosen; None: none.

    Raises:
        ValueError: a value is out of range, by name.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, () if value is None else tuple(value))
            except (TypeError, RuntimeError):  # no sequence, or a tensor that is not on the CPU
                raise ValueError(f"{name}: expected a sequence or None, got {value!r}") from None
        _check("n", self.n, f"an int in 1..{MAX_SAMPLES}", _is_int(self.n) and 1 <= self.n <= MAX_SAMPLES)
        _check("temperature", self.temperature, "a number >= 0", _is_number(self.temperature) and self.temperature >= 0)
        _check("top_k", self.top_k, "an int >= 0", _is_int(self.top_k) and self.top_k >= 0)
        _check("top_p", self.top_p, "0 < top_p <= 1", _is_number(self.top_p) and 0 < self.top_p <= 1)
        _check("min_p", self.min_p, "0 <= min_p <= 1", _is_number(self.min_p) and 0 <= self.min_p <= 1)
        _check("seed", self.seed, "an int >= 0 or None", self.seed is None or (_is_int(self.seed) and self.seed >= 0))
        _check("max_tokens", self.max_tokens, "an int >= 1", _is_int(self.max_tokens) and self.max_tokens >= 1)
        is_text = all(isinstance(text, str) and text for text in self.stop)
        _check("stop", self.stop, "strings that are not empty", is_text)
        _check("stop_token_ids", self.stop_token_ids, "ints", all(_is_int(token) for token in self.stop_token_ids))
        _check("ignore_eos", self.ignore_eos, "True or False", isinstance(self.ignore_eos, bool))
        is_count = self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= 0)
        _check("logprobs", self.logprobs, "an int >= 0 or None", is_count)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one generated token: of the one chosen, and of the most likely."""

    chosen: float
    top: dict[int, float]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock; None: not yet.

    Attributes:
        token_times_s: of each token of the first sample.
        arrival_s, first_scheduled_s, first_token_s, finished_s: of the request.
        num_preemptions: times that it was preempted; of several samples, the most.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        token_ids: generated, a final stop token included.
        text: of the tokens, up to a stop string and without a stop token; "" where the engine has no tokenizer.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        logprobs: for each token, where they were asked for.
        error: what failed, with finish_reason "error".
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of a request.

    Attributes:
        outputs: one for each of n samples.
        num_cached_tokens: of the prompt's tokens, those whose KV was found in the cache when it was first scheduled.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt on its way to the engine.

    Attributes:
        request_id: unique among the unfinished ones.
        prompt_token_ids: [>= 1]; an array is not copied to Python's numbers.
        namespace: what its KV depends on, or is to be kept apart by.
        priority: higher ones start first, within the bound on how long anything waits (`radixkv.scheduling.waiting`).
        keep_steps: when it has ended, its prefix is evicted after all else for so many steps; but evicted all the same
            where only such is left.

    Raises:
        ValueError: a hint is out of range, by name.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] | np.ndarray
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace | None = None
    priority: int = 0
    keep_steps: int = 0

    def __post_init__(self) -> None:
        _check("priority", self.priority, "an int", _is_int(self.priority))
        _check("keep_steps", self.keep_steps, "an int >= 0", _is_int(self.keep_steps) and self.keep_steps >= 0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _check(name: str, value: Any, expected: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")

"""What became of a request so far: tokens, text, why it ended. Called by `radixkv.engine` for each token sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from radixkv.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


class Detokenizer(Protocol):
    """Text of a growing sequence; never half a character."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Sample:
    """One of n samples of a request.

    Attributes:
        generator: its own, so that its tokens do not depend on what runs beside it.
        finish_reason: None while it runs.
    """

    def __init__(
        self,
        params: SamplingParams,
        generator: np.random.Generator,
        detokenizer: Detokenizer | None,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.generator = generator
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._params = params
        self._detokenizer = detokenizer
        self._stop_token_ids = stop_token_ids
        self._longest_stop = max(map(len, params.stop), default=0)
        self.token_ids: list[int] = []
        self.text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []

    @property
    def is_random(self) -> bool:
        """Whether its generator is used at all."""
        return self._params.temperature > 0

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Takes a sampled token in. Returns whether the sample has ended."""
        self.token_ids.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        if token_id in self._stop_token_ids:
            self.end("stop")
        else:
            if self._detokenizer is not None:
                self._add_text(self._detokenizer.push(token_id))
            if self.finish_reason is None and len(self.token_ids) == self._params.max_tokens:
                self.end("length")
        return self.finish_reason is not None

    def _add_text(self, piece: str) -> None:
        searched = max(len(self.text) - self._longest_stop, 0)
        self.text += piece
        found = [at for stop in self._params.stop if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the sample, whatever it was doing."""
        rest = self._detokenizer.finish() if self._detokenizer is not None and reason != "error" else ""
        if rest:
            self._add_text(rest)
        if self.finish_reason is None or reason != "length":
            self.finish_reason = reason
        self.error = error

    def output(self) -> CompletionOutput:
        logprobs = None if self._logprobs is None else list(self._logprobs)
        return CompletionOutput(list(self.token_ids), self._shown_text(), self.finish_reason, logprobs, self.error)

    def _shown_text(self) -> str:
        """The text, but for an end that may be the beginning of a stop string: a stream never takes anything back."""
        if self.finish_reason is not None or not self._longest_stop:
            return self.text
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._params.stop):
                return self.text[:-length]
        return self.text


class Generation:
    """A request in the engine's hands."""

    def __init__(self, request: Request, samples: Sequence[Sample], arrival_s: float) -> None:
        self.request = request
        self.samples = tuple(samples)
        self.num_cached_tokens = 0
        self.has_started = False  # its first step has run
        self.metrics = RequestMetrics(arrival_s)

    @property
    def num_tokens(self) -> int:
        """Generated so far, of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        """What there is by now."""
        return RequestOutput(
            self.request.request_id,
            list(self.request.prompt_token_ids),
            [sample.output() for sample in self.samples],
            self.num_cached_tokens,
            replace(self.metrics, token_times_s=list(self.metrics.token_times_s)),
        )


class Stream:
    """What a reader has seen of a request."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_seen = 0
        self.is_over = False  # the end was read

    @property
    def has_news(self) -> bool:
        return self._generation.is_finished or self._generation.num_tokens > self._num_seen

    def read(self) -> RequestOutput:
        """What there is by now."""
        self.is_over = self._generation.is_finished
        self._num_seen = self._generation.num_tokens
        return self._generation.output()

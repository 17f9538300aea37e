"""What became of a request so far: tokens, text, why it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from radixkv.engine.model.sampling import RandomNumbers
from radixkv.scheduling.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


class Detokenizer(Protocol):
    """Text of a growing sequence; never half a character."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain by now."""
        ...

    def finish(self) -> str:
        """Ends the sequence; returns the rest of the text."""
        ...


class Sample:
    """One of n samples of a request.

    Its tokens are the truth; text and the end that they bring follow from them. So an interruption at any line leaves
    nothing that `repair` can't make good.

    Args:
        numbers: its own, so that its tokens do not depend on what runs beside it.
        make_detokenizer: None where no text is wanted.

    Attributes:
        token_ids: sampled so far.
        finish_reason: None while it runs.
        error: what failed, where that is the reason.
    """

    def __init__(
        self,
        params: SamplingParams,
        numbers: RandomNumbers,
        make_detokenizer: Callable[[], Detokenizer] | None,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._params = params
        self._numbers = numbers
        self._make_detokenizer = make_detokenizer
        self._stop_token_ids = stop_token_ids
        self._longest_stop = max(map(len, params.stop), default=0)
        self._begin_text()

    def _begin_text(self) -> None:
        self.text = ""
        self._num_read = 0  # tokens that text and finish_reason know of
        self._detokenizer = self._make_detokenizer() if self._make_detokenizer is not None else None

    def next_number(self) -> float:
        """The random number of its next token: the same until that is appended. 0 for greedy samples."""
        return self._numbers[len(self.token_ids)] if self._params.temperature > 0 else 0.0

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Takes a sampled token in. Returns whether the sample has ended; with "error" where detokenizing failed."""
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        self.token_ids.append(token_id)
        self._read()
        return self.finish_reason is not None

    def repair(self) -> None:
        """Makes all of it agree with the tokens again, after an interruption. O(tokens)."""
        if self._logprobs is not None:
            del self._logprobs[len(self.token_ids) :]
        if self.finish_reason is None:
            self._begin_text()
            while self._num_read < len(self.token_ids) and self.finish_reason is None:
                self._read()

    def _read(self) -> None:
        """Goes on by one token with the text."""
        token_id = self.token_ids[self._num_read]
        self._num_read += 1
        if token_id in self._stop_token_ids:
            self.end("stop")
            return
        if self._detokenizer is not None:
            try:
                piece = self._detokenizer.push(token_id)
            except Exception as error:
                self.end("error", described(error))
                return
            self._add_text(piece)
        if self.finish_reason is None and self._num_read == self._params.max_tokens:
            self.end("length")

    def _add_text(self, piece: str) -> None:
        searched = max(len(self.text) - self._longest_stop, 0)
        self.text += piece
        found = [at for stop in self._params.stop if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the sample, whatever it was doing. A detokenizer that fails now makes an error of a stop."""
        if self._detokenizer is not None and reason != "error":
            try:
                rest = self._detokenizer.finish()
            except Exception as failed:
                error = described(failed)
                reason = reason if reason == "abort" else "error"
            else:
                self._add_text(rest)
        self.error = error
        if self.finish_reason is None or reason != "length":
            self.finish_reason = reason

    def output(self) -> CompletionOutput:
        """Returns what there is by now; of text, only what no later token can take back."""
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
    """An unfinished request as the engine keeps it: what it is, apart from any schedule.

    Attributes:
        samples: [n] of the request.
        num_cached_tokens: tokens of the prompt found in the cache at its first admission.
        has_started: whether its first step has run.
    """

    def __init__(self, request: Request, samples: Sequence[Sample], arrival_s: float) -> None:
        self.request = request
        self.samples = tuple(samples)
        self.num_cached_tokens = 0
        self.has_started = False
        self.metrics = RequestMetrics(arrival_s)

    @property
    def num_tokens(self) -> int:
        """Generated so far, of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
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
    """How much of a request a reader has seen.

    Attributes:
        is_over: whether its end was read.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_seen = 0
        self.is_over = False

    @property
    def has_news(self) -> bool:
        """Whether there are tokens, or an end, that `read` has not returned."""
        return self._generation.is_finished or self._generation.num_tokens > self._num_seen

    def read(self) -> RequestOutput:
        """What there is by now."""
        self.is_over = self._generation.is_finished
        self._num_seen = self._generation.num_tokens
        return self._generation.output()


def described(error: Exception) -> str:
    """What a request that failed of it says."""
    return f"{type(error).__name__}: {error}"

"""A row of logits -> a token.

A token depends on its row, its SamplingParams and one random number alone. The number of a sample's i-th token is a
function of seed, sample and i (`RandomNumbers`): a token that is sampled again, after whatever failed, is the same.
Filters are applied in the order temperature, min_p, top_k, top_p, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from radixkv.scheduling.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """logprobs: of the model itself, before temperature and filters; None where they were not asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


class RandomNumbers:
    """The random numbers of one sample: its i-th, uniform in [0, 1), is the same however often it is asked for.

    Args:
        seed: seed + sample begins the sequence; None: one that differs from process to process.

    Cost: O(1) in order, O(log i) else.

    >>> numbers = RandomNumbers(7)
    >>> [numbers[i] for i in range(3)] == [numbers[i] for i in range(3)]
    True
    """

    def __init__(self, seed: int | None, sample: int = 0) -> None:
        self._bits = np.random.PCG64(None if seed is None else seed + sample)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)
        self._next: int | None = 0  # what the generator gives next; None while that is not known

    def __getitem__(self, i: int) -> float:
        if i != self._next:
            self._bits.state = self._start
            self._bits.advance(i)
        self._next = None  # an interruption from here on leaves the generator at a place that is not known
        number = self._generator.random()
        self._next = i + 1
        return number


def sample_tokens(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[SampledToken]:
    """A token for each row.

    Args:
        logits: [num_rows, vocab_size] float32, on any device.
        params: [num_rows].
        numbers: [num_rows] in [0, 1), what each row draws its token with; not looked at where it is greedy.

    Raises:
        ValueError: the lengths differ, or a row holds NaN.

    Cost: one argmax for greedy rows together; O(vocab_size) for others, O(vocab_size log vocab_size) with top_p.
    """
    if not len(params) == len(numbers) == logits.shape[0]:
        raise ValueError(f"params, numbers: expected {logits.shape[0]} of each, got {len(params)} and {len(numbers)}")
    if not len(params):
        return []
    greedy = logits.argmax(dim=-1).tolist()
    chosen: list[SampledToken] = []
    largest = logits.gather(-1, logits.argmax(dim=-1, keepdim=True)).squeeze(-1).tolist()
    for row, value in enumerate(largest):
        if value != value:  # torch's argmax takes NaN for the largest
            raise ValueError(f"logits: expected numbers, got NaN in row {row}")
    for row, (one, number) in enumerate(zip(params, numbers, strict=True)):
        if one.temperature == 0 and one.logprobs is None:
            chosen.append(SampledToken(greedy[row], None))
        else:
            chosen.append(sample_token(logits[row].cpu().numpy(), one, number))
    return chosen


def sample_token(logits: np.ndarray, params: SamplingParams, number: float) -> SampledToken:
    """One token; see `sample_tokens`. logits: [vocab_size] float32."""
    if params.temperature == 0:
        token_id = int(logits.argmax())
    else:
        kept, probabilities = distribution(logits, params)
        reached = np.cumsum(probabilities)
        place = int(np.searchsorted(reached, number * reached[-1], side="right"))
        token_id = int(kept[min(place, len(kept) - 1)])
    return SampledToken(token_id, None if params.logprobs is None else _logprobs(logits, token_id, params.logprobs))


def distribution(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """What a token is drawn from: ids that are kept, ascending, and their probabilities, float64, which sum to 1.

    Of equally likely tokens at the edge of top_k or top_p, those with lower ids are kept. temperature must be above 0.
    """
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    weights = np.exp(scaled)
    kept = np.flatnonzero(weights >= params.min_p) if params.min_p > 0 else np.arange(len(weights))
    weights = weights[kept]
    if 0 < params.top_k < len(kept):
        first = _largest(weights, params.top_k)
        kept, weights = kept[first], weights[first]
    if params.top_p < 1:
        reached = np.cumsum(-np.sort(-weights))
        num_kept = int(np.searchsorted(reached, params.top_p * reached[-1], side="left")) + 1
        if num_kept < len(kept):
            first = _largest(weights, num_kept)
            kept, weights = kept[first], weights[first]
    return kept, weights / weights.sum()


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest, ascending; of equal ones the first. O(n)."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _logprobs(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    shifted = logits.astype(np.float64) - logits.max()
    values = shifted - np.log(np.exp(shifted).sum())
    places = _largest(values, min(num_top, len(values))) if num_top else np.empty(0, np.int64)
    best_first = places[np.argsort(-values[places], kind="stable")]
    return TokenLogprobs(float(values[token_id]), {int(token): float(values[token]) for token in best_first})

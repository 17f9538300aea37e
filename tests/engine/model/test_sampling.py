"""Tokens from logits: filters against their definitions, frequencies, and independence of the batch."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixkv.engine.model.sampling import RandomNumbers, distribution, sample_token, sample_tokens
from radixkv.scheduling.request import SamplingParams

LOGITS = st.lists(st.integers(-8, 8), min_size=1, max_size=30).map(lambda values: np.array(values, np.float32) / 2)


def softmax(values):
    weights = np.exp(values.astype(np.float64) - values.max())
    return weights / weights.sum()


def by_definition(logits, params):
    """Ids kept by sorting everything: likelier first, then lower ids."""
    probabilities = softmax(logits / np.float64(params.temperature))
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = [token for token in order if probabilities[token] >= params.min_p * probabilities.max() * (1 - 1e-12)]
    if params.top_k:
        order = order[: params.top_k]
    total = sum(probabilities[order])
    reached = list(itertools.accumulate(probabilities[order] / total))
    assume(all(abs(value - params.top_p) > 1e-9 for value in reached[:-1]))  # else rounding decides
    num_kept = next((n for n, value in enumerate(reached, 1) if value >= params.top_p), len(order))
    return sorted(order[:num_kept])


@settings(max_examples=200, deadline=None)
@given(LOGITS, st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 6), st.sampled_from([0.05, 0.5, 0.83, 1.0]), st.data())
def test_filters_keep_what_their_definitions_say(logits, temperature, top_k, top_p, data):
    min_p = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept, probabilities = distribution(logits, params)
    assert kept.tolist() == by_definition(logits, params)
    assert probabilities.sum() == pytest.approx(1)
    np.testing.assert_allclose(probabilities, softmax(logits[kept] / np.float64(temperature)), atol=1e-12)
    token = sample_token(logits, params, RandomNumbers(1)[0]).token_id
    assert token in kept


def test_frequencies_are_the_distribution():
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5, -9.0], np.float32)
    params = SamplingParams(temperature=0.8, top_k=4)
    kept, probabilities = distribution(logits, params)
    numbers = RandomNumbers(0)
    counts = np.zeros(6)
    for i in range(4000):
        counts[sample_token(logits, params, numbers[i]).token_id] += 1
    assert counts[[3, 5]].sum() == 0 and kept.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(counts[kept] / 4000, probabilities, atol=0.03)


def test_greedy_is_the_first_of_the_largest_and_looks_at_no_number():
    logits = torch.tensor([[0.0, 3.0, 3.0], [9.0, -1.0, 2.0]])
    chosen = sample_tokens(logits, [SamplingParams(), SamplingParams(logprobs=1)], [np.nan, np.nan])
    assert [one.token_id for one in chosen] == [1, 0]
    assert chosen[0].logprobs is None and list(chosen[1].logprobs.top) == [0]


def test_a_row_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    logits = torch.randn(40, 50)
    params = [
        SamplingParams(temperature=0.1 * (i % 4), top_k=i % 7, top_p=1 - 0.1 * (i % 3), logprobs=2) for i in range(40)
    ]
    batched = [RandomNumbers(11, i) for i in range(40)]
    alone = [RandomNumbers(11 + i) for i in range(40)]
    for token in range(3):
        together = sample_tokens(logits, params, [numbers[token] for numbers in batched])
        apart = [sample_tokens(logits[[i]], [params[i]], [alone[i][token]])[0] for i in range(40)]
        assert together == apart
    assert len({one.token_id for one in together}) > 10


def test_the_number_of_a_token_is_its_own_however_often_it_is_drawn():
    """So that a token that is sampled again, after an interruption or another sample's failure, is the same."""
    wanted = np.random.default_rng(12).random(50).tolist()
    numbers = RandomNumbers(9, 3)
    places = np.random.default_rng(0).integers(0, 50, 300).tolist()
    assert [numbers[i] for i in range(50)] == wanted
    assert [numbers[i] for i in places] == [wanted[i] for i in places]
    unseeded = RandomNumbers(None)
    assert (
        [unseeded[i] for i in range(5)] == [unseeded[i] for i in range(5)] != [RandomNumbers(None)[i] for i in range(5)]
    )


def test_an_interruption_while_a_number_is_drawn_leaves_the_next_ones_alone():
    numbers, wanted = RandomNumbers(1), [RandomNumbers(1)[i] for i in range(4)]
    generator = numbers._generator

    class Interrupted:
        def random(self):
            generator.random()
            raise KeyboardInterrupt

    assert numbers[0] == wanted[0]
    numbers._generator = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        numbers[1]
    numbers._generator = generator
    assert [numbers[i] for i in (2, 1, 3)] == [wanted[i] for i in (2, 1, 3)]


def test_logprobs_are_the_models_own():
    torch.manual_seed(0)
    logits = torch.randn(1, 20)
    (one,) = sample_tokens(logits, [SamplingParams(temperature=2.0, top_k=3, logprobs=4)], [0.5])
    expected = logits[0].log_softmax(-1)
    assert one.logprobs.chosen == pytest.approx(float(expected[one.token_id]), abs=1e-5)
    best = expected.topk(4)
    assert list(one.logprobs.top) == best.indices.tolist()
    assert list(one.logprobs.top.values()) == pytest.approx(best.values.tolist(), abs=1e-5)
    (none,) = sample_tokens(logits, [SamplingParams(logprobs=0)], [0.5])
    assert none.logprobs.top == {}


def test_extremes():
    logits = np.array([-np.inf, 500.0, -np.inf], np.float32)
    assert sample_token(logits, SamplingParams(temperature=1e-4), 0.99).token_id == 1
    assert sample_token(logits, SamplingParams(temperature=50.0), 0.0).token_id == 1
    assert sample_token(np.zeros(1, np.float32), SamplingParams(temperature=1.0, top_p=1e-9), 0.99).token_id == 0


def test_what_is_refused():
    with pytest.raises(ValueError, match="got 1 and 2"):
        sample_tokens(torch.zeros(2, 3), [SamplingParams()], [0.5] * 2)
    with pytest.raises(ValueError, match="NaN in row 1"):
        logits = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
        sample_tokens(logits, [SamplingParams(temperature=1.0)] * 2, [0.5] * 2)
    assert sample_tokens(torch.zeros(0, 3), [], []) == []

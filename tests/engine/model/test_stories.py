"""A small trained Llama: greedy tokens and logits of an independent float64 forward pass, and its text."""

import json

import numpy as np
import pytest

from radixkv.engine.model.checkpoint import load_checkpoint
from tests.engine.model.sequences import Sequence, greedy, runner_of, step
from tests.sampling import few
from tests.shared_files import shared_file

CASES = range(4)


@pytest.fixture(scope="module")
def stories():
    return load_checkpoint(shared_file("models/stories260k"))


@pytest.fixture(scope="module")
def cases():
    return json.loads(shared_file("models/stories260k/golden.json").read_text())["cases"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("chunks", [(), (1, 4, 2)])
@pytest.mark.parametrize("number", few(CASES, 1))
def test_greedy_tokens_and_first_logits(stories, cases, number, chunks, deterministic):
    case = cases[number]
    runner = runner_of(stories.model, deterministic=deterministic)
    ids = case["greedy_token_ids"]
    generated, rows = greedy(runner, case["prompt_token_ids"], len(ids), chunks=chunks)
    assert generated == ids
    np.testing.assert_allclose(rows[0].numpy(), case["first_logits"], atol=1e-4)


def test_all_prompts_in_one_batch(stories, cases):
    runner = runner_of(stories.model, block_size=1, num_blocks=512)
    sequences = [
        Sequence(case["prompt_token_ids"], range(number, 512, len(cases))) for number, case in enumerate(cases)
    ]
    for _ in cases[0]["greedy_token_ids"]:
        rows = step(runner, [(sequence, sequence.left) for sequence in sequences])
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.token_ids.append(int(row.argmax()))
    for sequence, case in zip(sequences, cases, strict=True):
        expected = case["prompt_token_ids"] + case["greedy_token_ids"]
        assert sequence.token_ids == expected[: len(sequence.token_ids)]


@pytest.mark.parametrize("number", CASES)
def test_text(stories, cases, number):
    case, tokenizer = cases[number], stories.tokenizer
    assert tokenizer.encode(case["text"]) == case["prompt_token_ids"]
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["prompt_token_ids"][1:]
    text = case["decoded"].replace("<0x0A>", "\n")
    assert tokenizer.decode(case["greedy_token_ids"]) == text
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, case["greedy_token_ids"])) + detokenizer.finish() == text
    assert tokenizer.decode(tokenizer.encode("naïve 日本 €")) == " naïve 日本 €"

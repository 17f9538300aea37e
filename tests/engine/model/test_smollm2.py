"""SmolLM2-135M-Instruct from its GGUF file (`make model` fetches it): text that makes sense, the same cold and warm."""

import os
import random
from pathlib import Path

import pytest

from radixkv.engine.model import fetch
from radixkv.engine.model.checkpoint import load_checkpoint
from tests.engine.model.sequences import Sequence, greedy, runner_of, step

FOLDER = Path(os.environ.get("RADIXKV_MODELS", Path(__file__).parents[3] / "models"))


@pytest.fixture(scope="module")
def smollm2():
    path = FOLDER / fetch.FILE_NAME
    if not path.exists():
        pytest.skip(f"needs {path}; `make model` fetches it")
    return load_checkpoint(path)


def prompt_of(checkpoint, question, system="You are a helpful assistant."):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return checkpoint.tokenizer.encode_messages(messages)


def answered(checkpoint, prompt, num_tokens):
    runner = runner_of(checkpoint.model, num_blocks=len(prompt) // 16 + 8)
    generated, rows = greedy(runner, prompt, num_tokens)
    ends = [i for i, token in enumerate(generated) if token in checkpoint.model.config.eos_token_ids]
    return checkpoint.tokenizer.decode(generated[: ends[0] if ends else num_tokens]), rows


@pytest.mark.slow
def test_it_answers(smollm2):
    assert smollm2.model.config.num_parameters == 134_515_008
    assert smollm2.model.config.eos_token_ids == (2,)
    text, _ = answered(smollm2, prompt_of(smollm2, "What is the capital of France?"), 10)
    assert text == "The capital of France is Paris."


@pytest.mark.slow
def test_tokenizer_of_the_file(smollm2):
    tokenizer = smollm2.tokenizer
    text = "It's 2024: naïve café, 東京 🙂\n\n  def f(x):\n\treturn x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # Digits stand alone, and a chat begins with the token that the template names.
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]
    assert prompt_of(smollm2, "Hi")[:2] == [1, 9690]


@pytest.mark.slow
def test_a_shared_system_prompt_changes_no_bit(smollm2):
    """The first question computes the system prompt, the second finds it: the same logits as from nothing."""
    rng = random.Random(0)
    words = ["the", "answer", "must", "be", "short", "and", "polite", "never", "mention", "prices", "always", "cite"]
    system = "You are a helpful assistant. " + " ".join(rng.choices(words, k=280))
    first, second = (prompt_of(smollm2, text, system) for text in ("What is the capital of France?", "Name a colour."))
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared > 280
    num_blocks = -(-(len(first) + 8) // 16)
    runner = runner_of(smollm2.model, num_blocks=3 * num_blocks)
    step(runner, [(Sequence(first, range(num_blocks)), len(first))])

    whole = shared // 16
    table = [*range(whole), *range(num_blocks, 2 * num_blocks)]
    warm = Sequence(second, table, computed=shared)
    copies = [(whole, num_blocks, shared % 16)] if shared % 16 else []
    _, cold = answered(smollm2, second, 6)
    rows = []
    for _ in range(6):
        rows.extend(step(runner, [(warm, warm.left)], copies))
        copies = []
        warm.token_ids.append(int(rows[-1].argmax()))
    for row, expected in zip(rows, cold, strict=True):
        assert row.equal(expected)

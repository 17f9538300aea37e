"""Random tiny checkpoints: the same logits and greedy tokens as transformers, cold, chunked and decoded."""

import pytest
import torch

from radixkv.engine.model.checkpoint import load_checkpoint
from tests.engine.model.sequences import every_row, greedy, runner_of
from tests.engine.model.tiny_checkpoints import KINDS, checkpoint, tokens

NUM_TOKENS = 48


@pytest.mark.parametrize(
    ("kind", "deterministic"), [*((kind, True) for kind in KINDS), ("llama_linear", False), ("qwen3", False)]
)
def test_logits_and_greedy_tokens_equal_transformers(kind, deterministic):
    folder, theirs = checkpoint(kind)
    model = load_checkpoint(folder).model
    ids = tokens(NUM_TOKENS)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3  # logits that could be wrong
    ours = every_row(runner_of(model, deterministic=deterministic), ids)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)

    prompt = ids[:21]
    with torch.inference_mode():
        full = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    generated, _ = greedy(runner_of(model, deterministic=deterministic), prompt, 24, chunks=(5, 1, 9))
    assert generated == full[0, len(prompt) :].tolist()

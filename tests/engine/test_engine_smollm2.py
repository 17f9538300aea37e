"""The engine with a real model: SmolLM2-135M-Instruct behind a long system prompt. Needs `make model`; slow."""

import os
from pathlib import Path

import pytest
import torch

from radixkv.blocks.config import CacheConfig
from radixkv.engine.engine import Engine
from radixkv.engine.model.fetch import FILE_NAME
from radixkv.scheduling.request import SamplingParams

pytestmark = pytest.mark.slow
MODEL = Path(os.environ.get("RADIXKV_MODELS", Path(__file__).parents[2] / "models")) / FILE_NAME
SYSTEM = " ".join(
    f"Rule {i}: answer question number {i} in one short sentence, name no sources, and stay polite whatever happens."
    for i in range(60)
)
QUESTIONS = ["What is the capital of France?", "How many legs has a spider?", "Name a primary color."]


@pytest.fixture(scope="module")
def messages():
    return [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in QUESTIONS]


def make(cache):
    if not MODEL.exists():
        pytest.skip(f"needs {MODEL}: make model, or RADIXKV_MODELS")
    torch.set_num_threads(os.cpu_count() or 1)
    return Engine.from_pretrained(MODEL, cache=CacheConfig(cache, num_blocks=512))


def test_a_long_system_prompt_is_computed_once(messages):
    params = SamplingParams(max_tokens=12)
    engine = make("radix")
    cold = [engine.generate([one], params)[0] for one in messages[:1]]
    warm = engine.generate(messages, params)  # the same again, and others behind the same system prompt
    assert len(cold[0].prompt_token_ids) > 1300 and cold[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens > 1300 for output in warm)
    assert warm[0].outputs[0].text == cold[0].outputs[0].text and "Paris" in cold[0].outputs[0].text
    alone = make("null").generate([messages[1]], params)[0]
    assert warm[1].outputs[0].token_ids == alone.outputs[0].token_ids
    again = engine.generate([messages[2]], params)[0]
    first_token = [o.metrics.first_token_s - o.metrics.arrival_s for o in (cold[0], again)]
    assert first_token[0] / first_token[1] >= 10, first_token

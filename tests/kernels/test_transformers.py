"""attn_implementation="radixkv" against "eager" on tiny random models: logits, generate, padding, and the refusals."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import UnsupportedImplementation

transformers = pytest.importorskip("transformers", minversion="5.0")

from radixkv_kernels.integrations.transformers import register, visible_intervals  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3": ("Gemma3Text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
}


def model_pair(kind):
    register()
    name, extra = KINDS[kind]
    stem = name.removesuffix("Text")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    eager = getattr(transformers, f"{stem}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    ours = getattr(transformers, f"{stem}ForCausalLM")._from_config(config, attn_implementation="radixkv").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "radixkv"
    return eager, ours


def padded(side):
    """Three prompts of 19, 3 and 11 tokens."""
    torch.manual_seed(1)
    ids, mask = torch.zeros(3, 19, dtype=torch.long), torch.zeros(3, 19, dtype=torch.long)
    for row, n in enumerate((19, 3, 11)):
        where = slice(19 - n, 19) if side == "left" else slice(0, n)
        ids[row, where] = torch.randint(2, 97, (n,))
        mask[row, where] = 1
    return ids, mask


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@torch.no_grad()
def test_logits(kind):
    eager, ours = model_pair(kind)
    ids = torch.randint(2, 97, (2, 23))
    assert torch.allclose(ours(ids).logits, eager(ids).logits, atol=2e-5)


@kinds
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_logits(kind, side):
    eager, ours = model_pair(kind)
    ids, mask = padded(side)
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    got = ours(ids, attention_mask=mask, position_ids=position_ids).logits
    want = eager(ids, attention_mask=mask, position_ids=position_ids).logits
    real = mask.bool()
    assert torch.allclose(got[real], want[real], atol=2e-5)
    if "gemma" not in kind and side == "left":
        alone = ours(ids[1:2, -3:]).logits
        assert torch.allclose(got[1, -3:], alone[0], atol=1e-6)


@kinds
@torch.no_grad()
def test_generate(kind):
    eager, ours = model_pair(kind)
    ids, mask = padded("left")
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    options["attention_mask"] = torch.ones(1, 19, dtype=torch.long)
    assert torch.equal(ours.generate(ids[:1], **options), eager.generate(ids[:1], **options))


def test_refusals():
    _, ours = model_pair("llama")
    ids = torch.randint(2, 97, (1, 6))
    with pytest.raises(UnsupportedImplementation, match="forward only"):
        ours(ids)
    hole = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(UnsupportedImplementation, match="gap"), torch.no_grad():
        ours(ids, attention_mask=hole)
    whole = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(UnsupportedImplementation, match="mask function"), torch.no_grad():
        ours(ids, attention_mask=whole)


def test_intervals_of_a_window():
    from transformers.masking_utils import sliding_window_causal_mask_function

    got = visible_intervals(
        batch_size=1, q_length=4, kv_length=6, q_offset=2, mask_function=sliding_window_causal_mask_function(3)
    )
    assert got.tolist() == [[[0, 3], [1, 4], [2, 5], [3, 6]]]

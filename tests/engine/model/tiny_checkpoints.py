"""Tiny random checkpoints, saved by transformers as people's own are, and what transformers computes with them."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
KINDS = {
    "llama": ("Llama", {}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_heads": ("Llama", {"head_dim": 32, "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": LINEAR, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@functools.cache
def checkpoint(kind):
    """(Folder, transformers model). Weights are large enough for attention to matter; biases and norms are random."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    name, extra = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5 * 1.5)
    folder = Path(tempfile.mkdtemp(prefix="radixkv-tests-")) / kind
    atexit.register(shutil.rmtree, folder.parent)
    model.save_pretrained(folder)
    return folder, model


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator).tolist()


def as_transformers_4(values):
    """A config.json of transformers 5 as version 4 wrote it."""
    values = dict(values)
    rope = dict(values.pop("rope_parameters"))
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    values.pop("layer_types", None)
    return values


def config_values(folder):
    return json.loads((folder / "config.json").read_text())

"""GGUF files: config, tensors and vocabulary of Llama-like, Qwen2 and Qwen3 models.

Tensors are dequantised to float32 as they are read. Of architecture "llama" (Mistral too), GGUF stores query and key
weights with each head's rows reordered for interleaved rotation; `GgufTensors.read` puts them back.
Source: the GGUF specification and llama.cpp's converter (`permute`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from radixkv.engine.model.config import MAX_LAYERS, ModelConfig, RopeConfig, check_size
from radixkv.engine.model.reading import reading

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """An open file: its key-value fields and its tensors. Opening parses all fields: seconds for a large vocabulary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._reader = GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, name: str, default: Any = None) -> Any:
        """A field as Python values, lists for arrays."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def require(self, name: str) -> Any:
        """A field; raises ValueError where there is none."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"{name}: expected this field in the GGUF file, found none")
        return value


def gguf_config(file: GgufFile) -> ModelConfig:
    """The file's fields -> ModelConfig.

    Raises:
        ValueError: an architecture or rope scaling that is not supported (the message lists those that are), or a
            field that is missing.
    """
    kind = file.require("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"general.architecture: supported are {', '.join(ARCHITECTURES)}, got {kind!r}")
    num_layers = check_size(f"{kind}.block_count", file.require(f"{kind}.block_count"), MAX_LAYERS)
    num_q_heads = file.require(f"{kind}.attention.head_count")
    hidden_size = file.require(f"{kind}.embedding_length")
    head_dim = file.get(f"{kind}.attention.key_length", hidden_size // num_q_heads)
    rotated = file.get(f"{kind}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{kind}.rope.dimension_count: expected all {head_dim} of a head, got {rotated}")
    window = file.get(f"{kind}.attention.sliding_window")
    eos = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    first_layer = {name.removeprefix("blk.0.") for name in file.tensors if name.startswith("blk.0.")}
    return ModelConfig(
        architecture=kind,
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden_size,
        intermediate_size=file.require(f"{kind}.feed_forward_length"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=file.get(f"{kind}.attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        max_positions=file.require(f"{kind}.context_length"),
        rms_norm_eps=file.require(f"{kind}.attention.layer_norm_rms_epsilon"),
        rope=_rope(file, kind),
        windows=(window or None,) * num_layers,
        qkv_bias="attn_q.bias" in first_layer,
        o_bias="attn_output.bias" in first_layer,
        mlp_bias="ffn_gate.bias" in first_layer,
        qk_norm="attn_q_norm.weight" in first_layer,
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(sorted({token for token in eos if token is not None})),
    )


def _rope(file: GgufFile, kind: str) -> RopeConfig:
    scaling = file.get(f"{kind}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{kind}.rope.scaling.type: supported are none and linear, got {scaling!r}")
    factor = file.require(f"{kind}.rope.scaling.factor") if scaling == "linear" else 1.0
    divisors = file.tensors.get(_ROPE_DIVISORS)
    return RopeConfig(
        theta=float(file.get(f"{kind}.rope.freq_base", 10000.0)),
        linear_factor=float(factor),
        divisors=None if divisors is None else tuple(divisors.data.tolist()),
    )


class GgufTensors:
    """The file's tensors by their Hugging Face names. A TensorSource for `weights`."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._config = config
        self._path = file.path
        self._tensors = {_hf_name(name): tensor for name, tensor in file.tensors.items() if name != _ROPE_DIVISORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """O(tensors). GGUF lists dimensions innermost first."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """float32. O(size of the tensor)."""
        tensor = self._tensors[name]
        with reading(self._path):
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        if self._config.architecture == "llama":
            if ".q_proj." in name:
                return _by_halves(values, self._config.num_q_heads)
            if ".k_proj." in name:
                return _by_halves(values, self._config.num_kv_heads)
        return values


def _by_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (0, d/2, 1, d/2 + 1, ..), which rotate together, back to 0, 1, 2, .."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """A name that is not known stays as it is, and is reported as unknown."""
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name

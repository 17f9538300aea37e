"""config.json of Hugging Face folders -> ModelConfig, in the forms of transformers 4 and 5.

The forms differ in `rope_theta` + `rope_scaling` against `rope_parameters`, and `torch_dtype` against `dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.engine.model.config import MAX_LAYERS, Llama3Scaling, ModelConfig, RopeConfig, check_size
from radixkv.engine.model.reading import json_object, reading

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Where transformers does not write a value that its class has by default.
_DEFAULT_THETA = {"llama": 10000.0, "mistral": 10000.0, "qwen2": 10000.0, "qwen3": 10000.0}
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_hf_config(folder: Path) -> ModelConfig:
    """Reads config.json, and generation_config.json's end tokens where there is one.

    Raises:
        ValueError: see `hf_config`; or there is no config.json.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a model folder with a config.json, found none")
    values = json_object(path)
    generation = folder / "generation_config.json"
    with reading(path):
        if generation.is_file():
            more = json_object(generation).get("eos_token_id")
            values["eos_token_id"] = sorted({*_ids(values.get("eos_token_id")), *_ids(more)})
        return hf_config(values)


def hf_config(values: Mapping[str, Any]) -> ModelConfig:
    """A config.json's contents -> ModelConfig.

    Raises:
        ValueError: an architecture, rope scaling or activation that is not supported (the message lists those that
            are), or a value that is missing or does not fit.
    """
    architecture = _architecture(values)
    num_layers = check_size("num_hidden_layers", _required(values, "num_hidden_layers"), MAX_LAYERS)
    num_q_heads = _required(values, "num_attention_heads")
    hidden_size = _required(values, "hidden_size")
    head_dim = values.get("head_dim") or _DEFAULT_HEAD_DIM.get(architecture)
    if head_dim is None:
        if hidden_size % num_q_heads:
            raise ValueError(f"hidden_size: expected a multiple of {num_q_heads} heads, got {hidden_size}; no head_dim")
        head_dim = hidden_size // num_q_heads
    attention_bias = _flag(values, "attention_bias") if architecture in ("llama", "qwen3") else False
    activation = values.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act: expected one of {sorted(_ACTIVATIONS)}, got {activation!r}")
    max_positions = values.get("max_position_embeddings", _DEFAULT_MAX_POSITIONS[architecture])
    return ModelConfig(
        architecture=architecture,
        vocab_size=_required(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(values, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_q_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=_rope(values, architecture, max_positions),
        windows=_windows(values, architecture, num_layers),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_flag(values, "mlp_bias") and architecture == "llama",
        qk_norm=architecture == "qwen3",
        tied_embeddings=_flag(values, "tie_word_embeddings"),
        activation=_ACTIVATIONS[activation],
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch."),
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=tuple(_ids(values.get("eos_token_id"))),
    )


def _architecture(values: Mapping[str, Any]) -> str:
    named = list(values.get("architectures") or [])
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not named and values.get("model_type") in ARCHITECTURES.values():
        return values["model_type"]
    got = named or values.get("model_type")
    raise ValueError(f"architectures: supported are {', '.join(ARCHITECTURES)}, got {got!r}")


def _required(values: Mapping[str, Any], name: str) -> int:
    if values.get(name) is None:
        raise ValueError(f"{name}: expected it in config.json, found none")
    return check_size(name, values[name])


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return bool(value)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _rope(values: Mapping[str, Any], architecture: str, max_positions: int) -> RopeConfig:
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or values.get("rope_theta") or _DEFAULT_THETA[architecture])
    if scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor: expected 1 (all of a head is rotated), got another")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        nested = [name for name, value in scaling.items() if isinstance(value, Mapping)]
        if nested:
            raise ValueError(f"rope_parameters: expected one set for all layers, got one for each of {nested}")
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=float(_scaling_value(scaling, "factor")))
    if kind == "llama3":
        return RopeConfig(
            theta,
            llama3=Llama3Scaling(
                factor=float(_scaling_value(scaling, "factor")),
                low_freq_factor=float(_scaling_value(scaling, "low_freq_factor")),
                high_freq_factor=float(_scaling_value(scaling, "high_freq_factor")),
                original_max_positions=int(scaling.get("original_max_position_embeddings") or max_positions),
            ),
        )
    raise ValueError(f"rope scaling: supported are default, linear and llama3, got {kind!r}")


def _scaling_value(scaling: Mapping[str, Any], name: str) -> float:
    if scaling.get(name) is None:
        raise ValueError(f"rope scaling: expected {name!r} in it, got {sorted(scaling)}")
    return scaling[name]


def _windows(values: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """A layer's window: of all layers in Mistral; in Qwen of those named, or from `max_window_layers` on, if in use."""
    window = values.get("sliding_window")
    if architecture == "llama" or window is None:
        return (None,) * num_layers
    if architecture == "mistral":
        return (int(window),) * num_layers
    if not values.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.get("max_window_layers", 28)
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    known = {"full_attention": None, "sliding_attention": int(window)}
    unknown = sorted(set(kinds) - known.keys())
    if unknown:
        raise ValueError(f"layer_types: supported are {sorted(known)}, got {unknown}")
    return tuple(known[kind] for kind in kinds)

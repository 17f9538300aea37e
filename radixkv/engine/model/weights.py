"""A decoder's tensors: which a checkpoint must have, and how they are put together. Names as in Hugging Face files.

`assemble` is called by `checkpoint` with a source of tensors: `hf_files.HfFiles`, `gguf.GgufTensors`, or random ones.
Query, key and value weights are stored as one matrix, gate and up weights as another: fewer, larger products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.engine.model.config import ModelConfig

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, all tensors of the model's dtype. q, k, v: rows of query heads, then of key heads, then of values."""

    attention_norm: Tensor
    qkv: Tensor
    """[(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]."""
    o: Tensor
    """[hidden_size, num_q_heads * head_dim]."""
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 * intermediate_size, hidden_size]."""
    down: Tensor
    """[hidden_size, intermediate_size]."""
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    """[head_dim], as k_norm."""
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All layers, the embedding [vocab_size, hidden_size], the last norm, and the output layer of the same shape."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    def to(self, dtype: torch.dtype, device: torch.device) -> ModelWeights:
        """These weights in another form; the same tensors where it is theirs already."""
        return self.mapped(lambda tensor: tensor.to(device, dtype))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelWeights:
        """`change` of every tensor; a head that is the embedding stays so."""
        embedding = change(self.embedding)
        head = embedding if self.head is self.embedding else change(self.head)
        layers = tuple(_mapped(layer, change) for layer in self.layers)
        return ModelWeights(embedding, layers, change(self.norm), head)

    def with_products(self, change: Callable[[Tensor, Tensor | None], Tensor]) -> ModelWeights:
        """`change(weight, bias)` of every matrix that rows are multiplied with; a head that is the embedding too, which
        then are two.
        """
        layers = tuple(
            replace(
                layer,
                qkv=change(layer.qkv, layer.qkv_bias),
                o=change(layer.o, layer.o_bias),
                gate_up=change(layer.gate_up, layer.gate_up_bias),
                down=change(layer.down, layer.down_bias),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, head=change(self.head, None))


@dataclass(frozen=True, slots=True)
class Model:
    """What `radixkv.engine.runner` runs."""

    config: ModelConfig
    weights: ModelWeights


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by its Hugging Face name."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, of any float dtype."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must have, `lm_head.weight` only where it is not tied."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (size,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q)
        if config.o_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for part, shape in (
            ("gate", (intermediate, hidden)),
            ("up", (intermediate, hidden)),
            ("down", (hidden, intermediate)),
        ):
            shapes[f"{prefix}mlp.{part}_proj.weight"] = shape
            if config.mlp_bias:
                shapes[f"{prefix}mlp.{part}_proj.bias"] = shape[:1]
    return shapes


def assemble(config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Reads, checks and joins all tensors.

    Raises:
        ValueError: tensors are missing, of a wrong shape, or unknown; the message names them.

    Cost: the model's size, and one layer beside it.
    """
    _check(config, source)

    def read(name: str) -> Tensor:
        return source.read(name).to(device, dtype)

    def joined(prefix: str, parts: tuple[str, ...], kind: str) -> Tensor:
        return torch.cat([read(f"{prefix}{part}_proj.{kind}") for part in parts])

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            attention_norm=read(prefix + "input_layernorm.weight"),
            qkv=joined(attention, ("q", "k", "v"), "weight"),
            o=read(attention + "o_proj.weight"),
            mlp_norm=read(prefix + "post_attention_layernorm.weight"),
            gate_up=joined(mlp, ("gate", "up"), "weight"),
            down=read(mlp + "down_proj.weight"),
            qkv_bias=joined(attention, ("q", "k", "v"), "bias") if config.qkv_bias else None,
            o_bias=read(attention + "o_proj.bias") if config.o_bias else None,
            gate_up_bias=joined(mlp, ("gate", "up"), "bias") if config.mlp_bias else None,
            down_bias=read(mlp + "down_proj.bias") if config.mlp_bias else None,
            q_norm=read(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=read(attention + "k_norm.weight") if config.qk_norm else None,
        )

    embedding = read(_EMBEDDING)
    layers = tuple(layer(index) for index in range(config.num_layers))
    head = embedding if config.tied_embeddings else read(_HEAD)
    return ModelWeights(embedding, layers, read(_NORM), head)


def _check(config: ModelConfig, source: TensorSource) -> None:
    wanted, found = expected_shapes(config), source.shapes()
    # A table that old files carry along; it follows from the config.
    found = {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings and _HEAD in found and torch.equal(source.read(_HEAD), source.read(_EMBEDDING)):
        del found[_HEAD]
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(found.keys() - wanted.keys())
    wrong = [f"{n} {found[n]}, not {wanted[n]}" for n in sorted(wanted.keys() & found.keys()) if found[n] != wanted[n]]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unknown", unknown), ("of a wrong shape", wrong))
        if names
    ]
    if problems:
        raise ValueError(f"tensors: expected those of {config.architecture} with this config; {'; '.join(problems)}")


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _mapped(layer: LayerWeights, change: Callable[[Tensor], Tensor]) -> LayerWeights:
    tensors: dict[str, Any] = {}
    for field in fields(layer):
        tensor = getattr(layer, field.name)
        tensors[field.name] = None if tensor is None else change(tensor)
    return LayerWeights(**tensors)

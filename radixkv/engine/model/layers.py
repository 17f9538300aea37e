"""The arithmetic of a layer, in two manners: invariant (a row's bits depend on that row alone) and plain.

On a CPU the bits of a row of a product depend on how many rows go into it, and those of torch's silu and GELU on
whether the row is at the end of a buffer or in its middle. Invariant arithmetic computes products by measured rules of
rows (`row_linear`), and writes activations by `exp` and `erf`, which do not differ. RMSNorm is invariant as it is. On a
GPU, libraries choose a matrix product's kernel by its number of rows, so rows are computed in tiles of one size.

That of activations was found by trial, not promised by torch: tests/engine/model/test_invariance.py tries it on this
machine.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from radixkv.engine.model import row_linear
from radixkv.engine.model.weights import ModelWeights

GPU_TILE_ROWS = 128
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)


class Arithmetic(Protocol):
    """How rows are computed; stateless."""

    def prepared(self, weights: ModelWeights) -> ModelWeights:
        """The weights as `linear` wants them; the same tensors where they are."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in], weight [out, in], bias [out] -> [rows, out], all of one dtype."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [rows, 2 * n], the gate first -> activation(gate) * up, [rows, n] of its dtype."""
        ...


class PlainArithmetic:
    """torch's own operations on as many rows as there are."""

    def prepared(self, weights: ModelWeights) -> ModelWeights:
        """On a CPU that has a product with packed weights, copies in that layout; else the same tensors."""
        if weights.embedding.device.type != "cpu" or not row_linear.packs(weights.embedding.dtype):
            return weights
        return weights.with_products(lambda weight, _: row_linear.packed(weight))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One product of all rows."""
        return row_linear.product(x, weight, bias)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """torch's silu or GELU of all rows."""
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


class InvariantArithmetic:
    """A row's bits are the same in every batch, at every place in it."""

    def prepared(self, weights: ModelWeights) -> ModelWeights:
        """On a CPU, copies: packed where rows of such products keep their bits, else beginning where a product expects
        it. Elsewhere the same tensors.
        """
        if weights.embedding.device.type != "cpu":
            return weights
        return weights.mapped(row_linear.aligned).with_products(_packed_by_rule)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Products of as many rows as were measured to keep bits; on a GPU, of 128."""
        if x.device.type == "cpu":
            return row_linear.linear(x, weight, bias)
        result = x.new_empty(x.shape[0], weight.shape[0])
        for start in range(0, x.shape[0], GPU_TILE_ROWS):
            rows = x[start : start + GPU_TILE_ROWS]
            tile = F.pad(rows, (0, 0, 0, GPU_TILE_ROWS - rows.shape[0]))
            result[start : start + GPU_TILE_ROWS] = F.linear(tile, weight, bias)[: rows.shape[0]]
        return result

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """By `exp` and `erf` in float32, whose bits do not depend on the place of a row."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation == "silu":
            active = _by_exp(gate, gate)
        elif activation == "gelu_tanh":
            active = _by_exp(gate, _GELU_SLOPE * (gate + 0.044715 * gate * gate * gate))
        else:
            active = 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5)))
        return (active * up).to(gate_up.dtype)


def _packed_by_rule(weight: Tensor, bias: Tensor | None) -> Tensor:
    product = row_linear.Product.of(weight, bias)._replace(is_packed=True)
    is_better = row_linear.packs(weight.dtype) and row_linear.linear_rule(product).holds
    return row_linear.packed(weight) if is_better else weight


def _by_exp(x: Tensor, z: Tensor) -> Tensor:
    """x * sigmoid(z)."""
    return x / (1 + torch.exp(-z))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., n] over its last dimension, weight [n]; the statistics in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)

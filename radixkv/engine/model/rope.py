"""Rotary position embedding: a table of cosines and sines by integer position. Used by `transformer`.

Everything is computed once, in float32, when the model is made. A row's values are looked up, so they cannot depend on
which other rows are in the batch, and a position gives the same bits on every path.
Source: Su et al., RoFormer (2021), in the form that rotates a head's halves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from radixkv.engine.model.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, in radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.llama3 is not None:
        scaling = rope.llama3
        wavelengths = 2 * math.pi / frequencies
        ramp = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        keep = ramp.clamp(0.0, 1.0)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    return frequencies / rope.linear_factor


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, Tensor]:
    """(cosines, sines), each [max_positions, head_dim / 2] float32. O(max_positions * head_dim)."""
    positions = torch.arange(max_positions, dtype=torch.int64).float()
    angles = torch.outer(positions, rope_frequencies(rope, head_dim))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates heads by their rows' positions, in float32.

    Args:
        x: [num_rows, num_heads, head_dim] any float dtype.
        cosines, sines: [num_rows, 1, head_dim / 2] float32.

    Returns [num_rows, num_heads, head_dim] x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)

"""What the layers of a model keep of a sequence, in bytes: all that a cache needs to know of a model.

Layers that keep the same are a *group*. Full attention keeps KV of every token, a window the KV of the last tokens, a
recurrent layer a state, which stands for all tokens before a position, and *rows*, what each token since then adds.
What the groups without full attention need to go on at a position is a *checkpoint*.
"""

from __future__ import annotations

from dataclasses import dataclass

CELL = 64  # tokens between the positions at which recurrent layers have a state of their own; rows fill the gap


@dataclass(frozen=True, slots=True)
class FullAttention:
    """A layer that reads the KV of every token before.

    Attributes:
        token_bytes: of KV, a token.
    """

    token_bytes: int


@dataclass(frozen=True, slots=True)
class Window:
    """A layer that reads the KV of the last tokens alone.

    Attributes:
        token_bytes: of KV, a token.
        num_tokens: that a token sees, itself included: it needs the KV of `num_tokens - 1` before it.
    """

    token_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer that reads a state and what tokens have added since.

    Attributes:
        state_bytes: of the state at one position, that of the convolution in front of it included.
        row_bytes: of what a token adds, until a state stands for it.
    """

    state_bytes: int
    row_bytes: int


Layer = FullAttention | Window | Recurrent
Layers = tuple[Layer, ...]  # of a model, first to last


def token_bytes(layers: Layers) -> int:
    """Returns bytes of KV a token in all full-attention layers."""
    return sum(layer.token_bytes for layer in layers if isinstance(layer, FullAttention))


def checkpoint_bytes(layers: Layers, position: int) -> int:
    """Returns bytes of a checkpoint at a position: states at the cell's border, rows since, windows.

    Args:
        layers: of the model.
        position: number of tokens before it.
    """
    num_rows = position % CELL
    total = 0
    for layer in layers:
        if isinstance(layer, Recurrent):
            total += layer.state_bytes * (position >= CELL) + layer.row_bytes * num_rows
        elif isinstance(layer, Window):
            total += layer.token_bytes * min(position, layer.num_tokens - 1)
    return total


def needs_checkpoints(layers: Layers) -> bool:
    """Returns whether KV of full attention alone is not enough to go on from a position."""
    return not all(isinstance(layer, FullAttention) for layer in layers)

"""tiny_gpt: a small decoder with seeded random weights and a vocabulary of bytes, so that all runs without a download.

Its text means nothing; its time and memory behave as a real model's do.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from radixkv.engine.model.chat import ChatML
from radixkv.engine.model.config import ModelConfig, RopeConfig
from radixkv.engine.model.tokenizer import Tokenizer
from radixkv.engine.model.vocabulary import Vocabulary
from radixkv.engine.model.weights import expected_shapes

END_OF_TEXT, IM_START, IM_END, PADDING = 256, 257, 258, 259
SPECIAL_TOKENS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|padding|>": PADDING}
TINY_GPT = ModelConfig(
    architecture="llama",
    vocab_size=260,
    hidden_size=384,
    intermediate_size=880,
    num_layers=4,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_positions=32768,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    windows=(None,) * 4,
    eos_token_ids=(END_OF_TEXT, IM_END),
)
"""5.8 million parameters."""
PRESETS = {"tiny_gpt": TINY_GPT}


class RandomTensors:
    """Normal weights that keep the size of what passes through; norms are 1. A TensorSource for `weights`.

    Each tensor is drawn from a generator of its own, seeded by `seed` and its place in the list of names, so it does
    not depend on the order in which they are read.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._shapes = expected_shapes(config)
        self._seed_of = {name: seed * len(self._shapes) + index for index, name in enumerate(sorted(self._shapes))}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a model of this config has, by name."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Returns one tensor, float32; norms are ones."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(self._seed_of[name])
        return torch.randn(shape, generator=generator) * shape[1] ** -0.5


class ByteEncoder:
    """A token a byte, and the special tokens where a text names them."""

    def __init__(self) -> None:
        self._special = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Texts begin with no token of their own, so `add_special_tokens` adds none."""
        token_ids: list[int] = []
        for part in self._special.split(text):
            token_ids.extend([SPECIAL_TOKENS[part]] if part in SPECIAL_TOKENS else part.encode())
        return token_ids


def byte_tokenizer() -> Tokenizer:
    """Ids 0 .. 255 are bytes, the special tokens follow."""
    vocabulary = Vocabulary({byte: bytes([byte]) for byte in range(256)}, SPECIAL_TOKENS.values())
    return Tokenizer(ByteEncoder(), vocabulary, ChatML())

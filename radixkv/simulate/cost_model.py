"""Seconds that a step takes: a roofline of a model's shape on a GPU, or times fitted to a machine at hand.

The rooflines are models and not measurements: they say which of two ways of serving reads or computes less, and by
about how much, and nothing about kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from radixkv.cache.contract import check_block_size
from radixkv.cache.layers import Layer, Recurrent, Window
from radixkv.simulate.gpus import GPUS, Gpu
from radixkv.simulate.model_shapes import (
    MODEL_SHAPES,
    Attention,
    DeltaNet,
    LatentAttention,
    Mamba2,
    Mixer,
    ModelShape,
)
from radixkv.simulate.step_load import StepLoad


class CostModel(Protocol):
    """What the simulator needs to know."""

    def step_s(self, load: StepLoad) -> float:
        """Returns the seconds of a step, above 0."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Linear layers, attention of prompts and of decodes, states: each takes as long as its operations or its bytes.

    Recurrent layers compute their state a token at a time in this count: what chunked kernels add within a chunk, and
    states that they store inside a pass, are not in it.

    Attributes:
        num_gpus: tensor parallel; weights, KV and operations are split evenly, and every mixer and feed-forward layer
            has an all-reduce.
        tree_attention: KV that decodes share is read once; else once for each sequence, from the L2 cache where what is
            shared of a layer fits in half of it.
        linear_efficiency: of the peak, large matrix products (assumed).
        attention_efficiency: of the peak; FlashAttention-3 (2407.08608) reports up to 75 % at head_dim 128.
        memory_efficiency: of the peak, reading (assumed).
        l2_speedup: of the L2 cache over memory (assumed).
        tree_overhead: bytes that tree attention moves over unique KV bytes, partial results included: 1.20 is the mean
            of this package's plans over 35 trees.
        step_overhead_s: of a step, whatever is in it: launches, sampling, what the host does (assumed).
        all_reduce_latency_s: of one all-reduce, besides its bytes (assumed).
    """

    shape: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    tree_attention: bool = False
    linear_efficiency: float = 0.7
    attention_efficiency: float = 0.6
    memory_efficiency: float = 0.85
    l2_speedup: float = 2.0
    tree_overhead: float = 1.2
    step_overhead_s: float = 1e-3
    all_reduce_latency_s: float = 8e-6

    @classmethod
    def of(cls, shape: str, gpu: str, num_gpus: int = 1, *, tree_attention: bool = False) -> "Roofline":
        """Returns the roofline of a model and a GPU by their names.

        Raises:
            ValueError: there is no such name, or the weights do not fit.
        """
        if shape not in MODEL_SHAPES:
            raise ValueError(f"shape: expected one of {', '.join(MODEL_SHAPES)}, got {shape!r}")
        if gpu not in GPUS:
            raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {gpu!r}")
        made = cls(MODEL_SHAPES[shape], GPUS[gpu], num_gpus, tree_attention)
        made.num_blocks(1)
        return made

    def pool_bytes(self, memory_share: float = 0.9) -> float:
        """Returns the bytes that the weights leave of this share of the memory; below 0 where they do not fit.

        Raises:
            ValueError: no such share.
        """
        if not 0 < memory_share <= 1:
            raise ValueError(f"memory_share: expected a number over 0, up to 1, got {memory_share!r}")
        return self.num_gpus * self.gpu.memory_bytes * memory_share - self.shape.memory_bytes

    def num_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """Returns how many blocks of full attention fit beside the weights, into this share of the memory.

        What windows and recurrent layers keep is not taken off: a pool for all of it is `pool_bytes`.

        Raises:
            ValueError: none does; or no such block size, or share.
        """
        check_block_size(block_size)
        num_blocks = int(self.pool_bytes(memory_share) // (self.shape.kv_bytes_per_token * block_size))
        if num_blocks < 1:
            raise ValueError(
                f"num_gpus: expected enough for {self.shape.name}'s {self.shape.memory_bytes / 1e9:.0f} GB of weights "
                f"and KV, got {self.num_gpus} of {self.gpu.memory_bytes / 1e9:.0f} GB"
            )
        return num_blocks

    def step_s(self, load: StepLoad) -> float:
        flops = self.gpu.flops_per_s * self.num_gpus
        speed = self.gpu.bytes_per_s * self.memory_efficiency * self.num_gpus
        return (
            self.step_overhead_s
            + self._linear_s(load, flops * self.linear_efficiency, speed)
            + sum(
                count * self._mixer_s(load, mixer, layer, flops * self.attention_efficiency, speed)
                for mixer, layer, count in self.shape.kinds
            )
            + self._communication_s(load)
        )

    def _linear_s(self, load: StepLoad, flops: float, speed: float) -> float:
        shape = self.shape
        layers = max(2 * load.num_tokens * shape.num_layer_weights / flops, shape.weight_bytes(load.num_tokens) / speed)
        if not load.num_logits:
            return layers
        output = shape.num_output_weights
        return layers + max(2 * load.num_logits * output / flops, output * shape.element_bytes / speed)

    def _mixer_s(self, load: StepLoad, mixer: Mixer, layer: Layer, flops: float, speed: float) -> float:
        """Of one layer, that keeps `layer`."""
        if isinstance(layer, Recurrent):
            assert isinstance(mixer, DeltaNet | Mamba2)
            # A decode and a chunk of a prompt read the state that they go on from, and write the one at their end.
            moved = 2 * (load.num_decode_tokens + load.num_prefill_seqs) * layer.state_bytes
            return max(moved / speed, load.num_tokens * mixer.flops_per_token / flops)
        assert isinstance(mixer, Attention | LatentAttention)
        if isinstance(layer, Window):
            load = load.within(layer.num_tokens)
        prefill = load.num_prefill_pairs * mixer.prefill_flops_per_pair / flops
        decode = load.num_decode_kv_tokens * mixer.decode_flops_per_pair / flops
        read = self._num_read_tokens(load, layer.token_bytes) * layer.token_bytes / speed
        written = (load.num_tokens + 2 * load.num_copied_tokens) * layer.token_bytes / speed
        return prefill + max(decode, read) + written

    def _num_read_tokens(self, load: StepLoad, token_bytes: int) -> float:
        """Tokens of KV of a layer that decodes read from memory, or that take as long."""
        unique, logical = load.num_unique_kv_tokens, load.num_decode_kv_tokens
        if self.tree_attention:
            return min(unique * self.tree_overhead, logical)
        again = logical - unique
        # What is shared is no more than what there is, and no more than what is read again.
        fits = min(unique, again) * token_bytes <= self.gpu.l2_bytes * self.num_gpus / 2
        return unique + again / (self.l2_speedup if fits else 1.0)

    def _communication_s(self, load: StepLoad) -> float:
        if self.num_gpus == 1:
            return 0.0
        num_bytes = load.num_tokens * self.shape.hidden_size * 2
        each = 2 * (self.num_gpus - 1) / self.num_gpus * num_bytes / self.gpu.link_bytes_per_s
        return (len(self.shape.mixers) + len(self.shape.feed_forwards)) * (self.all_reduce_latency_s + each)


FEATURES = (
    "step",
    "num_prefill_seqs",
    "num_decode_tokens",
    "num_prefill_tokens",
    "num_prefill_pairs",
    "num_decode_kv_tokens",
    "num_logits",
    "num_copied_tokens",
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A machine at hand: seconds a step, and for each of a load's counts, not negative, fitted to measured steps.

    Attributes:
        seconds: [len(FEATURES)], for one of each.
    """

    seconds: tuple[float, ...]

    @classmethod
    def to(cls, loads: Sequence[StepLoad], times_s: Sequence[float], num_rounds: int = 2000) -> "Fitted":
        """Fits to steps of which both are known; relative errors count, so that small steps do as much as large ones.

        Raises:
            ValueError: fewer steps than FEATURES, or not as many times.
        """
        if len(loads) != len(times_s) or len(loads) < len(FEATURES):
            raise ValueError(f"times_s: expected one for each of >= {len(FEATURES)} loads, got {len(times_s)}")
        rows = np.array([_features(load) for load in loads]) / np.array(times_s)[:, None]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
        return cls(tuple((_non_negative(rows / scale, num_rounds) / scale).tolist()))

    def step_s(self, load: StepLoad) -> float:
        return sum(s * count for s, count in zip(self.seconds, _features(load), strict=True))


def _features(load: StepLoad) -> tuple[int, ...]:
    return (1, *(getattr(load, name) for name in FEATURES[1:]))


def _non_negative(rows: np.ndarray, num_rounds: int) -> np.ndarray:
    """Least squares of rows @ x = 1 with x >= 0, one coordinate after the other."""
    gram, target = rows.T @ rows, rows.sum(axis=0)
    x = np.zeros(len(gram))
    for _ in range(num_rounds):
        for i in range(len(x)):
            if gram[i, i]:
                x[i] = max(x[i] + (target[i] - gram[i] @ x) / gram[i, i], 0.0)
    return x

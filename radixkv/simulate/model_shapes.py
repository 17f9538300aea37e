"""Shapes of models that people run, as data: what their layers keep, weights that a step reads, operations it takes.

A model is a list of *mixers*, the layers in which tokens meet, and a list of feed-forward layers. Weights of norms,
biases, routers and convolutions are left out: under 1 % of any model here.

Source of every number: the model's published config.json; of Qwen3.5, Qwen3-Next, gpt-oss-120b and Kimi Linear also the
defaults of their configurations in transformers 5.24.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from radixkv.cache.layers import FullAttention, Layer, Layers, Recurrent, Window, token_bytes

DECAY_BYTES = 4  # of an element of a recurrent layer's log decays, which are summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention.

    Attributes:
        window: tokens that a token sees, itself included; None: all.
        is_gated: whether each head's output is multiplied by a gate of its width, a product of its own.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    is_gated: bool = False

    def num_weights(self, hidden_size: int) -> int:
        num_heads = (2 + self.is_gated) * self.num_q_heads + 2 * self.num_kv_heads
        return hidden_size * num_heads * self.head_dim

    def keeps(self, kv_element_bytes: int, state_element_bytes: int) -> Layer:
        num_bytes = 2 * self.num_kv_heads * self.head_dim * kv_element_bytes
        return FullAttention(num_bytes) if self.window is None else Window(num_bytes, self.window)

    @property
    def prefill_flops_per_pair(self) -> int:
        """Of one query token with one token of KV: q k and p v."""
        return 4 * self.num_q_heads * self.head_dim

    @property
    def decode_flops_per_pair(self) -> int:
        return self.prefill_flops_per_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention, after DeepSeek-V3 (2412.19437).

    KV is one latent vector and one rotary key a token. Prefill expands it to heads, decode absorbs the expansion into
    the queries.

    Attributes:
        head_dim: of queries and keys without the rotary part, and of values.
        q_rank: of the queries' own latent vector; None: they have none.
    """

    num_heads: int
    head_dim: int
    kv_rank: int
    rotary_dim: int
    q_rank: int | None

    window = None

    def num_weights(self, hidden_size: int) -> int:
        q_size = self.num_heads * (self.head_dim + self.rotary_dim)
        return (
            (hidden_size * q_size if self.q_rank is None else self.q_rank * (hidden_size + q_size))
            + hidden_size * (self.kv_rank + self.rotary_dim)
            + self.kv_rank * self.num_heads * 2 * self.head_dim
            + self.num_heads * self.head_dim * hidden_size
        )

    def keeps(self, kv_element_bytes: int, state_element_bytes: int) -> Layer:
        return FullAttention((self.kv_rank + self.rotary_dim) * kv_element_bytes)

    @property
    def prefill_flops_per_pair(self) -> int:
        return 2 * self.num_heads * (2 * self.head_dim + self.rotary_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        return 2 * self.num_heads * (2 * self.kv_rank + self.rotary_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The gated delta rule (2412.06464): a state of key_dim x value_dim a value head, a decay a head.

    Attributes:
        num_key_heads: of queries and keys.
        conv_size: tokens that the convolution in front sees; its state is the tokens before.
        gate_rank: KDA's (Kimi Linear, 2510.26692): decays are one a channel of the keys, and they and the output's gate
            come out of two products of this rank; None: a decay a head, and a gate of full rank.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    gate_rank: int | None = None

    @property
    def _key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def _value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    def num_weights(self, hidden_size: int) -> int:
        in_and_out = hidden_size * (2 * self._key_size + 2 * self._value_size + self.num_value_heads)  # and beta
        if self.gate_rank is None:
            return in_and_out + hidden_size * (self._value_size + self.num_value_heads)
        return in_and_out + self.gate_rank * (2 * hidden_size + self._key_size + self._value_size)

    def keeps(self, kv_element_bytes: int, state_element_bytes: int) -> Layer:
        conv = (2 * self._key_size + self._value_size) * (self.conv_size - 1)
        num_decays = self.num_value_heads if self.gate_rank is None else self._key_size
        return Recurrent(
            state_bytes=self.num_value_heads * self.key_dim * self.value_dim * state_element_bytes + 2 * conv,
            row_bytes=2 * (self._key_size + self._value_size) + DECAY_BYTES * num_decays,
        )

    @property
    def flops_per_token(self) -> int:
        """Of the state: what a key reads of it, what is added, what a query reads."""
        return 6 * self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A state space layer (2405.21060): a state of head_dim x state_size a head; keys and queries are a group's.

    Attributes:
        conv_size: tokens that the convolution in front sees; its state is the tokens before.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_size: int = 4

    def num_weights(self, hidden_size: int) -> int:
        inner = self.num_heads * self.head_dim
        return hidden_size * (3 * inner + 2 * self.num_groups * self.state_size + self.num_heads)

    def keeps(self, kv_element_bytes: int, state_element_bytes: int) -> Layer:
        inner, group = self.num_heads * self.head_dim, self.num_groups * self.state_size
        conv = (inner + 2 * group) * (self.conv_size - 1)
        return Recurrent(
            state_bytes=inner * self.state_size * state_element_bytes + 2 * conv,
            row_bytes=2 * (inner + group) + DECAY_BYTES * self.num_heads,
        )

    @property
    def flops_per_token(self) -> int:
        """Of the state: what is added, what a query reads."""
        return 4 * self.num_heads * self.head_dim * self.state_size


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward layer: gated (three matrices) or not (two)."""

    size: int
    num_matrices: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of gated feed-forward layers. Each token picks its experts evenly and independently of the others.

    Neither the traffic between experts on different GPUs nor an uneven choice is in it.

    Attributes:
        size: of one expert.
        num_chosen: experts that a token goes through.
        shared_size: of the part that every token goes through.
        element_bytes: of the experts that are chosen; None: as the model's other weights.
    """

    size: int
    num_experts: int
    num_chosen: int
    shared_size: int = 0
    element_bytes: float | None = None


Mixer = Attention | LatentAttention | DeltaNet | Mamba2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder.

    Attributes:
        mixers: layers in which tokens meet, first to last.
        feed_forwards: the other layers, in any order.
        element_bytes: of weights.
        kv_element_bytes, state_element_bytes: of what attention and recurrent layers keep. The convolution in front of
            the latter, and rows, are two bytes an element.
        is_tied: whether the output layer is the embedding, so that it takes memory once.
    """

    name: str
    hidden_size: int
    vocab_size: int
    mixers: tuple[Mixer, ...]
    feed_forwards: tuple[Mlp | Experts, ...]
    element_bytes: int = 2
    kv_element_bytes: int = 2
    state_element_bytes: int = 2
    is_tied: bool = False

    @cached_property
    def layers(self) -> Layers:
        """What each mixer keeps of a sequence."""
        return tuple(mixer.keeps(self.kv_element_bytes, self.state_element_bytes) for mixer in self.mixers)

    @cached_property
    def kinds(self) -> tuple[tuple[Mixer, Layer, int], ...]:
        """Each kind of mixer, what one of it keeps, and how many there are."""
        counts = Counter(zip(self.mixers, self.layers, strict=True))
        return tuple((mixer, layer, count) for (mixer, layer), count in counts.items())

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Of full attention: what a sequence grows by."""
        return token_bytes(self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """Of a sequence's recurrent states, at one position."""
        return sum(layer.state_bytes for layer in self.layers if isinstance(layer, Recurrent))

    @property
    def num_layer_weights(self) -> int:
        """Multiplied with every token, in all layers."""
        chosen = sum(
            count * experts.num_chosen * self._num_weights_of_one(experts) for experts, count in self._experts.items()
        )
        return self._num_shared_weights + chosen

    @property
    def num_output_weights(self) -> int:
        """Multiplied with every token that is sampled from."""
        return self.hidden_size * self.vocab_size

    @property
    def memory_bytes(self) -> float:
        """All weights."""
        num_vocabularies = 1 if self.is_tied else 2
        experts = sum(
            count * experts.num_experts * self._bytes_of_one(experts) for experts, count in self._experts.items()
        )
        return (self._num_shared_weights + num_vocabularies * self.num_output_weights) * self.element_bytes + experts

    def weight_bytes(self, num_tokens: int) -> float:
        """Returns what a step of so many tokens reads of the layers' weights: experts that are chosen once or more."""
        total = float(self._num_shared_weights * self.element_bytes)
        for experts, count in self._experts.items():
            missed = (1 - experts.num_chosen / experts.num_experts) ** num_tokens
            total += count * self._bytes_of_one(experts) * experts.num_experts * (1 - missed)
        return total

    @cached_property
    def _experts(self) -> Counter[Experts]:
        return Counter(layer for layer in self.feed_forwards if isinstance(layer, Experts))

    @cached_property
    def _num_shared_weights(self) -> int:
        """Of all layers, but for experts that are chosen."""
        mixers = sum(count * mixer.num_weights(self.hidden_size) for mixer, _, count in self.kinds)
        return mixers + self.hidden_size * sum(
            3 * layer.shared_size if isinstance(layer, Experts) else layer.num_matrices * layer.size
            for layer in self.feed_forwards
        )

    def _num_weights_of_one(self, experts: Experts) -> int:
        return 3 * self.hidden_size * experts.size

    def _bytes_of_one(self, experts: Experts) -> float:
        size = self.element_bytes if experts.element_bytes is None else experts.element_bytes
        return self._num_weights_of_one(experts) * size


def _dense(name: str, layers: int, q: int, kv: int, head: int, hidden: int, mlp: int, vocab: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden_size=hidden,
        vocab_size=vocab,
        mixers=(Attention(num_q_heads=q, num_kv_heads=kv, head_dim=head),) * layers,
        feed_forwards=(Mlp(mlp),) * layers,
        is_tied=name.startswith("smollm2"),
    )


def _gated_delta_nets(name: str, num_layers: int, vocab: int, experts: Experts, state_element_bytes: int) -> ModelShape:
    """Qwen3-Next and what came of it: of four layers the last is attention."""
    state = DeltaNet(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    attention = Attention(num_q_heads=16, num_kv_heads=2, head_dim=256, is_gated=True)
    return ModelShape(
        name=name,
        hidden_size=2048,
        vocab_size=vocab,
        mixers=(state, state, state, attention) * (num_layers // 4),
        feed_forwards=(experts,) * num_layers,
        state_element_bytes=state_element_bytes,
    )


def _gpt_oss(name: str, num_layers: int, num_experts: int) -> ModelShape:
    """Every other layer sees 128 tokens. Experts are MXFP4: four bits an element, and eight for each 32 of them."""
    attention = Attention(num_q_heads=64, num_kv_heads=8, head_dim=64)
    return ModelShape(
        name=name,
        hidden_size=2880,
        vocab_size=201088,
        mixers=(replace(attention, window=128), attention) * (num_layers // 2),
        feed_forwards=(Experts(size=2880, num_experts=num_experts, num_chosen=4, element_bytes=4.25 / 8),) * num_layers,
    )


def _gemma_3_27b() -> ModelShape:
    """Of six layers the last sees all tokens, the others 1,024."""
    attention = Attention(num_q_heads=32, num_kv_heads=16, head_dim=128)
    window = replace(attention, window=1024)
    return ModelShape(
        name="gemma-3-27b",
        hidden_size=5376,
        vocab_size=262208,
        mixers=((window,) * 5 + (attention,)) * 10 + (window,) * 2,
        feed_forwards=(Mlp(21504),) * 62,
        is_tied=True,
    )


def _nemotron_nano_9b_v2() -> ModelShape:
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"  # hybrid_override_pattern
    mixers: dict[str, Mixer] = {
        "M": Mamba2(num_heads=128, head_dim=80, state_size=128, num_groups=8),
        "*": Attention(num_q_heads=40, num_kv_heads=8, head_dim=128),
    }
    return ModelShape(
        name="nemotron-nano-9b-v2",
        hidden_size=4480,
        vocab_size=131072,
        mixers=tuple(mixers[letter] for letter in pattern if letter in mixers),
        feed_forwards=(Mlp(15680, num_matrices=2),) * pattern.count("-"),
        state_element_bytes=4,  # mamba_ssm_cache_dtype
    )


def _kimi_linear_48b_a3b() -> ModelShape:
    """Of four layers the last is latent attention; so is the 27th and last."""
    state = DeltaNet(num_key_heads=32, num_value_heads=32, key_dim=128, value_dim=128, gate_rank=128)
    attention = LatentAttention(num_heads=32, head_dim=128, kv_rank=512, rotary_dim=64, q_rank=None)
    return ModelShape(
        name="kimi-linear-48b-a3b",
        hidden_size=2304,
        vocab_size=163840,
        mixers=(*(state, state, state, attention) * 6, state, state, attention),
        feed_forwards=(Mlp(9216), *(Experts(size=1024, num_experts=256, num_chosen=8, shared_size=1024),) * 26),
        state_element_bytes=4,  # as vLLM and the reference kernels keep it
    )


def _deepseek_v3() -> ModelShape:
    return ModelShape(
        name="deepseek-v3",
        hidden_size=7168,
        vocab_size=129280,
        mixers=(LatentAttention(num_heads=128, head_dim=128, kv_rank=512, rotary_dim=64, q_rank=1536),) * 61,
        feed_forwards=(
            *(Mlp(18432),) * 3,
            *(Experts(size=2048, num_experts=256, num_chosen=8, shared_size=2048),) * 58,
        ),
        element_bytes=1,  # published in float8
    )


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        _dense("llama-3-8b", 32, 32, 8, 128, 4096, 14336, 128256),
        _dense("llama-3-70b", 80, 64, 8, 128, 8192, 28672, 128256),
        _dense("llama-2-7b", 32, 32, 32, 128, 4096, 11008, 32000),
        _dense("qwen3-32b", 64, 64, 8, 128, 5120, 25600, 151936),
        _dense("smollm2-135m", 30, 9, 3, 64, 576, 1536, 49152),
        _gated_delta_nets(
            "qwen3.5-35b-a3b",
            40,
            248320,
            Experts(size=512, num_experts=256, num_chosen=8, shared_size=512),
            state_element_bytes=4,  # mamba_ssm_dtype
        ),
        _gated_delta_nets(
            "qwen3-next-80b-a3b",
            48,
            151936,
            Experts(size=512, num_experts=512, num_chosen=10, shared_size=512),
            state_element_bytes=2,
        ),
        _nemotron_nano_9b_v2(),
        _kimi_linear_48b_a3b(),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
        _gemma_3_27b(),
        _deepseek_v3(),
    )
}

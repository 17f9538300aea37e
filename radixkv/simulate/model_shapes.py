"""Shapes of models that people run, as data: bytes of KV a token, weights that a step reads, operations it takes.

Source of every number: the model's published config.json.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP.

    Attributes:
        element_bytes: of weights and KV alike.
        is_tied: whether the output layer is the embedding, so that it takes memory once.
    """

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    element_bytes: int = 2
    is_tied: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def num_attention_weights(self) -> int:
        """Of one layer."""
        return 2 * self.hidden_size * (self.num_q_heads + self.num_kv_heads) * self.head_dim

    @property
    def num_layer_weights(self) -> int:
        """Multiplied with every token, in all layers."""
        return self.num_layers * (self.num_attention_weights + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_output_weights(self) -> int:
        """Multiplied with every token that is sampled from."""
        return self.hidden_size * self.vocab_size

    @property
    def memory_bytes(self) -> int:
        """All weights."""
        num_vocabularies = 1 if self.is_tied else 2
        return (self.num_layer_weights + num_vocabularies * self.num_output_weights) * self.element_bytes

    def weight_bytes(self, num_tokens: int) -> float:
        """Returns what a step of so many tokens reads of the layers' weights."""
        return self.num_layer_weights * self.element_bytes

    @property
    def prefill_flops_per_pair(self) -> int:
        """Of one query token with one token of KV, in all layers: q k and p v."""
        return 4 * self.num_layers * self.num_q_heads * self.head_dim

    @property
    def decode_flops_per_pair(self) -> int:
        return self.prefill_flops_per_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoeShape(ModelShape):
    """Multi-head latent attention and a mixture of experts, after DeepSeek-V3 (2412.19437): an approximation.

    KV is one latent vector and one rotary key a token. Prefill expands it to heads, decode absorbs the expansion into
    the queries. Each token picks its experts evenly and independently of the others; shared experts count as chosen
    always. `head_dim` is that of queries and keys without the rotary part, and of values. Neither the traffic between
    experts on different GPUs nor an uneven choice is in it.
    """

    num_dense_layers: int
    dense_intermediate_size: int
    num_experts: int
    num_chosen_experts: int
    num_shared_experts: int
    q_rank: int
    kv_rank: int
    rotary_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * (self.kv_rank + self.rotary_dim) * self.element_bytes

    @property
    def num_attention_weights(self) -> int:
        heads = self.num_q_heads
        return (
            self.hidden_size * (self.q_rank + self.kv_rank + self.rotary_dim)
            + self.q_rank * heads * (self.head_dim + self.rotary_dim)
            + self.kv_rank * heads * 2 * self.head_dim
            + heads * self.head_dim * self.hidden_size
        )

    @property
    def _num_weights_outside_experts(self) -> int:
        dense = self.num_dense_layers * 3 * self.hidden_size * self.dense_intermediate_size
        return self.num_layers * self.num_attention_weights + dense

    @property
    def _num_weights_of_an_expert(self) -> int:
        """The expert of one number in all layers that have experts."""
        return (self.num_layers - self.num_dense_layers) * 3 * self.hidden_size * self.intermediate_size

    @property
    def num_layer_weights(self) -> int:
        num_active = self.num_chosen_experts + self.num_shared_experts
        return self._num_weights_outside_experts + num_active * self._num_weights_of_an_expert

    @property
    def memory_bytes(self) -> int:
        num_experts = self.num_experts + self.num_shared_experts
        weights = self._num_weights_outside_experts + num_experts * self._num_weights_of_an_expert
        return (weights + 2 * self.num_output_weights) * self.element_bytes

    def weight_bytes(self, num_tokens: int) -> float:
        missed = (1 - self.num_chosen_experts / self.num_experts) ** num_tokens
        num_read = self.num_experts * (1 - missed) + self.num_shared_experts
        return (self._num_weights_outside_experts + num_read * self._num_weights_of_an_expert) * self.element_bytes

    @property
    def prefill_flops_per_pair(self) -> int:
        return 2 * self.num_layers * self.num_q_heads * (2 * self.head_dim + self.rotary_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        return 2 * self.num_layers * self.num_q_heads * (2 * self.kv_rank + self.rotary_dim)


def _dense(name: str, layers: int, q: int, kv: int, head: int, hidden: int, mlp: int, vocab: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        num_q_heads=q,
        num_kv_heads=kv,
        head_dim=head,
        hidden_size=hidden,
        intermediate_size=mlp,
        vocab_size=vocab,
        is_tied=name.startswith("smollm2"),
    )


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        _dense("llama-3-8b", 32, 32, 8, 128, 4096, 14336, 128256),
        _dense("llama-3-70b", 80, 64, 8, 128, 8192, 28672, 128256),
        _dense("llama-2-7b", 32, 32, 32, 128, 4096, 11008, 32000),
        _dense("qwen3-32b", 64, 64, 8, 128, 5120, 25600, 151936),
        _dense("smollm2-135m", 30, 9, 3, 64, 576, 1536, 49152),
        LatentMoeShape(
            name="deepseek-v3-like",
            num_layers=61,
            num_q_heads=128,
            num_kv_heads=1,
            head_dim=128,
            hidden_size=7168,
            intermediate_size=2048,
            vocab_size=129280,
            element_bytes=1,  # published in float8
            num_dense_layers=3,
            dense_intermediate_size=18432,
            num_experts=256,
            num_chosen_experts=8,
            num_shared_experts=1,
            q_rank=1536,
            kv_rank=512,
            rotary_dim=64,
        ),
    )
}

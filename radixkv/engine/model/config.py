"""What a decoder looks like, whatever file said so."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies of Llama 3.1: long waves slowed down by `factor`, short ones kept, a ramp between them.

    Source: Llama 3.1's published code, `apply_scaling`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


# Beyond any model: a file that says more is wrong, and must not make us allocate by what it says.
MAX_SIZE = 2**27
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: the base.
        linear_factor: positions are divided by it.
        llama3: Llama 3.1's scaling, or None.
        divisors: [head_dim / 2], what each frequency is divided by, as GGUF files store a scaling; None: by nothing.
    """

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None


def check_size(name: str, value: int, most: int = MAX_SIZE) -> int:
    """Returns value; raises ValueError that names it unless it is an int in 1..most."""
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name}: expected a number >= 1 (and at most {most}), got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder's shape and features.

    Attributes:
        architecture: "llama", "mistral", "qwen2", "qwen3": what the features below come from; for messages only.
        max_positions: positions 0 .. max_positions - 1 may be used.
        windows: [num_layers], tokens that a row of the layer sees, itself included; None: all.
        qkv_bias, o_bias, mlp_bias: which linear layers have biases.
        qk_norm: query and key heads are normalised before rotation.
        tied_embeddings: the output layer is the embedding.
        activation: of the gated MLP, one of ACTIVATIONS.
        dtype: the checkpoint's own, by torch's name.
        bos_token_id: None where there is none.
        eos_token_ids: any of them ends an output.

    Raises:
        ValueError: sizes do not fit together, by name.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    activation: str = "silu"
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_size("num_layers", self.num_layers, MAX_LAYERS)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            check_size(name, getattr(self, name))
        for name, value in (("rms_norm_eps", self.rms_norm_eps), ("rope.theta", self.rope.theta)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        for token in (*self.eos_token_ids, 0 if self.bos_token_id is None else self.bos_token_id):
            if type(token) is not int or not 0 <= token < MAX_SIZE:
                raise ValueError(f"bos_token_id, eos_token_ids: expected ids of tokens, got {token!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of {self.num_kv_heads} KV heads, got {self.num_q_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, for rotation by halves, got {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows: expected one for each of {self.num_layers} layers, got {len(self.windows)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {self.activation!r}")
        divisors = self.rope.divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ValueError(f"rope.divisors: expected {self.head_dim // 2} numbers, got {len(divisors)}")

    @property
    def num_parameters(self) -> int:
        """Weights and biases, a tied embedding counted once."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
        layer += self.qkv_bias * (q + 2 * kv) + self.o_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

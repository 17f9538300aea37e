"""Shapes of models that people run, as data: how many bytes of KV a token takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size of a KV cache depends on. Source: each model's published config.json."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3-8b", 32, 8, 128),
        ModelShape("llama-3-70b", 80, 8, 128),
        ModelShape("qwen3-32b", 64, 8, 128),
        ModelShape("smollm2-135m", 30, 3, 64),
    )
}

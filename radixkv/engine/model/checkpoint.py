"""A model with its tokenizer, in one call.

What reads files comes with the `models` extra, and is imported only for a checkpoint that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from radixkv.engine.model.config import ModelConfig
from radixkv.engine.model.presets import PRESETS, RandomTensors, byte_tokenizer
from radixkv.engine.model.reading import reading
from radixkv.engine.model.tokenizer import Tokenizer
from radixkv.engine.model.weights import Model, TensorSource, assemble

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """tokenizer: None where a folder holds weights only."""

    model: Model
    tokenizer: Tokenizer | None


def load_checkpoint(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    seed: int | None = None,
) -> Checkpoint:
    """Loads a preset by name, a Hugging Face folder, or a .gguf file.

    Args:
        dtype: of the weights; None: float32 on a CPU, where nothing else is fast everywhere, and the checkpoint's own
            on a GPU.
        max_positions: use fewer than the model's; the rotary table takes 4 * head_dim bytes each.
        seed: of a preset's weights (None: 0); only for presets.

    Raises:
        ValueError: there is no such preset or file, it is not supported, it lacks something (the message says what),
            `max_positions` exceeds the model's, or a seed was given for a checkpoint that has weights.
    """
    device = torch.device(device)
    config, tensors, tokenizer = _opened(source, seed)
    if max_positions is not None:
        if not 1 <= max_positions <= config.max_positions:
            raise ValueError(f"max_positions: expected 1 to {config.max_positions}, got {max_positions}")
        config = replace(config, max_positions=max_positions)
    if dtype is None:
        if config.dtype not in _DTYPES:
            raise ValueError(f"dtype: supported are {', '.join(_DTYPES)}, got {config.dtype!r}")
        dtype = torch.float32 if device.type == "cpu" else _DTYPES[config.dtype]
    return Checkpoint(Model(config, assemble(config, tensors, dtype, device)), tokenizer)


def _opened(source: str | Path, seed: int | None) -> tuple[ModelConfig, TensorSource, Tokenizer | None]:
    path = Path(source)
    if str(source) in PRESETS:
        config = PRESETS[str(source)]
        return config, RandomTensors(config, seed or 0), byte_tokenizer()
    if seed is not None:
        raise ValueError(f"seed: expected None for {source}, whose weights are not random, got {seed}")
    if path.is_dir():
        from radixkv.engine.model.hf_config import read_hf_config
        from radixkv.engine.model.hf_files import HfFiles
        from radixkv.engine.model.vocabulary_files import tokenizer_of_folder

        config = read_hf_config(path)
        tensors = HfFiles(path)
        with reading(path):
            return config, tensors, tokenizer_of_folder(path, config.bos_token_id)
    if path.is_file() and path.suffix == ".gguf":
        from radixkv.engine.model.gguf import GgufFile, GgufTensors, gguf_config
        from radixkv.engine.model.vocabulary_files import tokenizer_of_gguf

        file = GgufFile(path)
        with reading(path):
            config = gguf_config(file)
            return config, GgufTensors(file, config), tokenizer_of_gguf(file)
    raise ValueError(f"source: expected a preset ({', '.join(PRESETS)}), a folder or a .gguf file, got {source}")

"""Folders of safetensors: single, sharded, and the ways in which they can be wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixkv.engine.model.checkpoint import load_checkpoint
from radixkv.engine.model.config import ModelConfig
from radixkv.engine.model.presets import TINY_GPT, RandomTensors
from radixkv.engine.model.weights import ModelWeights, assemble
from tests.engine.model.tiny_checkpoints import checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"


def copied(kind, tmp_path, change=None):
    folder = tmp_path / kind
    shutil.copytree(checkpoint(kind)[0], folder)
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def flat(weights: ModelWeights):
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__dataclass_fields__]
    return [weights.embedding, weights.norm, weights.head, *(tensor for tensor in layers if tensor is not None)]


def test_sharded_equals_single(tmp_path):
    folder, tensors = copied("qwen2", tmp_path)
    single = load_checkpoint(folder).model
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for ours, theirs in zip(flat(load_checkpoint(folder).model.weights), flat(single.weights), strict=True):
        assert torch.equal(ours, theirs)

    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing: model-1\.safetensors"):
        load_checkpoint(folder)
    save_file({"other": torch.ones(1)}, folder / "model-1.safetensors")
    with pytest.raises(ValueError, match="which does not have it"):
        load_checkpoint(folder)


def test_tensors_that_are_missing_unknown_or_misshapen_are_named(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.surprise"] = torch.ones(3)
        tensors[Q] = torch.ones(4, 4)

    with pytest.raises(ValueError) as caught:
        load_checkpoint(copied("llama", tmp_path, change)[0])
    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "unknown: model.layers.0.surprise" in message
    assert f"{Q} (4, 4), not (64, 64)" in message


def test_many_missing_tensors_are_not_all_listed(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]

    with pytest.raises(ValueError, match="and 1 more"):
        load_checkpoint(copied("llama", tmp_path, change)[0])


def test_a_tied_head_may_be_stored_too_if_it_is_the_embedding(tmp_path):
    def same(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    def another(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    weights = load_checkpoint(copied("qwen3", tmp_path / "same", same)[0]).model.weights
    assert weights.head is weights.embedding
    assert weights.to(torch.bfloat16, torch.device("cpu")).head.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"unknown: lm_head\.weight"):
        load_checkpoint(copied("qwen3", tmp_path / "another", another)[0])


def test_pickled_weights_are_refused(tmp_path):
    folder, _ = copied("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, which are pickled"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="found neither"):
        load_checkpoint(folder)


def test_dtypes(tmp_path):
    folder, _ = copied("llama", tmp_path)
    assert load_checkpoint(folder).model.weights.norm.dtype == torch.float32
    assert load_checkpoint(folder, dtype=torch.bfloat16).model.weights.norm.dtype == torch.bfloat16
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "int8"}))
    with pytest.raises(ValueError, match="dtype: supported"):
        load_checkpoint(folder)


def test_presets_are_the_same_for_a_seed():
    first, again = load_checkpoint("tiny_gpt", seed=3), load_checkpoint("tiny_gpt", seed=3)
    other = load_checkpoint("tiny_gpt")
    assert torch.equal(first.model.weights.layers[2].down, again.model.weights.layers[2].down)
    assert not torch.equal(first.model.weights.layers[2].down, other.model.weights.layers[2].down)
    assert sum(tensor.numel() for tensor in flat(first.model.weights)) == TINY_GPT.num_parameters


def test_what_load_checkpoint_refuses(tmp_path):
    folder, _ = copied("llama", tmp_path)
    with pytest.raises(ValueError, match=r"preset \(tiny_gpt\), a folder or a \.gguf file"):
        load_checkpoint("no_such_model")
    with pytest.raises(ValueError, match="seed: expected None"):
        load_checkpoint(folder, seed=1)
    with pytest.raises(ValueError, match="max_positions: expected 1 to 512, got 513"):
        load_checkpoint(folder, max_positions=513)
    assert load_checkpoint(folder, max_positions=100).model.config.max_positions == 100


@pytest.mark.parametrize("features", [{}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True}])
def test_every_feature_has_its_tensors(features):
    config = ModelConfig(**{**{n: getattr(TINY_GPT, n) for n in TINY_GPT.__dataclass_fields__}, **features})
    weights = assemble(config, RandomTensors(config, 0), torch.float32, torch.device("cpu"))
    assert sum(tensor.numel() for tensor in flat(weights)) == config.num_parameters

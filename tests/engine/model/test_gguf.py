"""GGUF files written as llama.cpp's converter writes them: the same logits and text as the folder they came from."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixkv.engine.model.checkpoint import load_checkpoint
from radixkv.engine.model.gguf import _LAYER_NAMES, _NAMES
from radixkv.engine.model.rope import rope_frequencies
from tests.engine.model.sequences import every_row, runner_of
from tests.engine.model.tiny_checkpoints import checkpoint, tokens

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
BYTE_LEVEL = ["<|end|>", "<|user|>", *(chr(c) for c in [*range(0x21, 0x7F), 0x120]), "Ġt", "he", "Ġthe"]


def written(path, kind, *, architecture=None, fields=(), vocabulary="gpt2", pre="smollm"):
    folder, theirs = checkpoint(kind)
    config = theirs.config
    name = architecture or kind.split("_")[0]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for key, value in fields:
        getattr(writer, key)(value)
    _write_vocabulary(writer, vocabulary, pre)
    ours_of = {theirs_name: ours for ours, theirs_name in _NAMES.items()}
    part_of = {theirs_name: ours for ours, theirs_name in _LAYER_NAMES.items()}
    for tensor_name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if name == "llama" and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            heads = config.num_attention_heads if ".q_proj." in tensor_name else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        if tensor_name in ours_of:
            writer.add_tensor(ours_of[tensor_name], values)
        else:
            _, _, layer, *part, end = tensor_name.split(".")
            writer.add_tensor(f"blk.{layer}.{part_of['.'.join(part)]}.{end}", values)
    if kind == "llama_llama3":
        divisors = 1.0 / (rope_frequencies_of(folder) * 500000.0 ** (np.arange(0, 16, 2) / 16))
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, path


def rope_frequencies_of(folder):
    return rope_frequencies(load_checkpoint(folder).model.config.rope, 16).double().numpy()


def _write_vocabulary(writer, vocabulary, pre):
    writer.add_tokenizer_model(vocabulary)
    if vocabulary == "llama":
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "t", "h", "e", "he", "▁t", "▁the"]
        kinds = [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * 7
        writer.add_token_scores([0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:
        pieces, kinds = BYTE_LEVEL, [CONTROL, USER_DEFINED] + [NORMAL] * (len(BYTE_LEVEL) - 2)
        writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
        writer.add_tokenizer_pre(pre)
        writer.add_eos_token_id(0)
        writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)


@pytest.mark.parametrize("kind", ["llama", "llama_biases", "llama_llama3", "qwen2", "qwen3"])
def test_the_same_logits_as_the_folder(kind, tmp_path):
    folder, path = written(tmp_path / "model.gguf", kind)
    ids = tokens(40)
    theirs, ours = load_checkpoint(folder).model, load_checkpoint(path).model
    assert ours.config.num_parameters == theirs.config.num_parameters
    expected, rows = every_row(runner_of(theirs), ids), every_row(runner_of(ours), ids)
    tolerance = 1e-4 if kind == "llama_llama3" else 0
    torch.testing.assert_close(rows, expected, atol=tolerance, rtol=tolerance)


def test_mistral_is_written_as_llama_with_a_window(tmp_path):
    fields = [("add_sliding_window", 7)]
    folder, path = written(tmp_path / "model.gguf", "mistral_window", architecture="llama", fields=fields)
    ids = tokens(30)
    theirs, ours = load_checkpoint(folder).model, load_checkpoint(path).model
    assert ours.config.windows == (7, 7, 7)
    assert torch.equal(every_row(runner_of(ours), ids), every_row(runner_of(theirs), ids))


def test_byte_level_text(tmp_path):
    _, path = written(tmp_path / "model.gguf", "llama")
    loaded = load_checkpoint(path)
    tokenizer = loaded.tokenizer
    assert loaded.model.config.eos_token_ids == (0,)
    ids = tokenizer.encode("<|user|>the the<|end|>")
    assert [BYTE_LEVEL[token] for token in ids] == ["<|user|>", "t", "he", "Ġthe", "<|end|>"]
    assert tokenizer.decode(ids) == "<|user|>the the"
    assert tokenizer.encode_messages([{"role": "user", "content": "the the"}]) == ids
    assert [BYTE_LEVEL[token] for token in tokenizer.encode("12")] == ["1", "2"]


def test_sentencepiece_text(tmp_path):
    _, path = written(tmp_path / "model.gguf", "llama", vocabulary="llama")
    tokenizer = load_checkpoint(path).tokenizer
    assert tokenizer.encode("the") == [1, 265]
    assert tokenizer.encode("the é", add_special_tokens=False) == [265, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([1, 265, 259, 3 + 0xC3, 3 + 0xA9, 2]) == " the é"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gpt2"}, "general.architecture: supported are llama, qwen2, qwen3, got 'gpt2'"),
        ({"vocabulary": "wpm"}, "tokenizer.ggml.model: supported are gpt2 and llama, got 'wpm'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: supported are .*got 'tekken'"),
        ({"fields": [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]}, "none and linear, got 'yarn'"),
        ({"fields": [("add_rope_dimension_count", 8)]}, "expected all 16 of a head, got 8"),
    ],
)
def test_what_is_refused_and_why(options, message, tmp_path):
    _, path = written(tmp_path / "model.gguf", "llama", **options)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_a_missing_field_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"llama\.block_count: expected this field"):
        load_checkpoint(tmp_path / "model.gguf")

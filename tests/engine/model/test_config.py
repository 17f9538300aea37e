"""config.json in both forms, and what is refused."""

import json

import pytest

from radixkv.engine.model.config import ModelConfig
from radixkv.engine.model.hf_config import hf_config, read_hf_config
from radixkv.engine.model.presets import TINY_GPT
from tests.engine.model.tiny_checkpoints import KINDS, as_transformers_4, checkpoint, config_values

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 512,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_forms_of_transformers_4_and_5_say_the_same(kind):
    folder, theirs = checkpoint(kind)
    values = config_values(folder)
    assert "rope_parameters" in values and "dtype" in values
    config = hf_config(values)
    assert config == hf_config(as_transformers_4(values))
    assert config.num_parameters == theirs.num_parameters()


def test_defaults_and_what_is_derived():
    config = hf_config(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.max_positions) == (8, 8, 2048)
    assert config.rope.theta == 10000.0 and config.windows == (None, None)
    assert not config.tied_embeddings and config.eos_token_ids == () and config.dtype == "float32"
    assert hf_config({**LLAMA, "architectures": None, "model_type": "mistral"}).architecture == "mistral"
    assert hf_config({**LLAMA, "torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({"sliding_window": 9}, (None, None)),  # Qwen2 writes it even where it is not in use
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9)),
        (
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (9, None),
        ),
    ],
)
def test_windows_of_qwen2(extra, windows):
    config = hf_config({**LLAMA, "architectures": ["Qwen2ForCausalLM"], **extra})
    assert config.windows == windows and config.qkv_bias


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported are LlamaForCausalLM, Mistral.*got .*GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gemma"}, "architectures: supported are .*got 'gemma'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "default, linear and llama3, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "expected 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one for each of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "hidden_act: .*got 'relu'"),
        ({"vocab_size": None}, "vocab_size: expected it in config.json"),
        ({"num_attention_heads": 7}, "hidden_size: expected a multiple of 7"),
        ({"num_key_value_heads": 3}, "num_q_heads: expected a multiple of 3"),
        ({"head_dim": 5}, "head_dim: expected an even number"),
        ({"hidden_size": 0, "head_dim": 8}, "hidden_size: expected a number >= 1"),
    ],
)
def test_what_is_refused_and_why(extra, message):
    with pytest.raises(ValueError, match=message):
        hf_config({**LLAMA, **extra})


def test_layer_types_that_are_not_known_are_named():
    extra = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 2}
    with pytest.raises(ValueError, match="chunked_attention"):
        hf_config({**LLAMA, "architectures": ["Qwen2ForCausalLM"], **extra})


def test_end_tokens_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_hf_config(tmp_path).eos_token_ids == (2, 5)
    with pytest.raises(ValueError, match=r"config\.json, found none"):
        read_hf_config(tmp_path / "nowhere")


def test_tiny_gpt_has_5_8_million_parameters():
    assert 5.7e6 < TINY_GPT.num_parameters < 5.9e6
    assert isinstance(TINY_GPT, ModelConfig)

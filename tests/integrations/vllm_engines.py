"""A tiny random model in vLLM, with vLLM's own index or with the tree."""

import gc
import os
import shutil
from pathlib import Path

from experiments.inside_vllm import save_random_llama

# vLLM reads these when it is imported: no look-ups on the net, a pool of a gigabyte, the engine in this process.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0", OMP_NUM_THREADS="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

RADIX = "radixkv.integrations.vllm.RadixScheduler"
VOCABULARY = 512
MAX_LEN = 1024


def save_tiny_llama(folder: Path) -> str:
    """Saves a Llama with random weights, wide enough that its tokens depend on all that it has read."""
    return save_random_llama(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LEN,
    )


def save_tiny_model(folder: Path, kind: str) -> str:
    """Saves a random model of another kind: "gemma2", "mistral" or "bloom"."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.25,
    }
    if kind == "gemma2":
        config = transformers.Gemma2Config(
            **sizes, sliding_window=100, attn_logit_softcapping=1.0, query_pre_attn_scalar=16
        )
    elif kind == "mistral":
        config = transformers.MistralConfig(**sizes, sliding_window=100)
    else:
        names = ("vocab_size", "hidden_size", "initializer_range")
        config = transformers.BloomConfig(**{name: sizes[name] for name in names}, n_layer=2, n_head=2)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "post_attention_layernorm" in name and kind == "gemma2":  # or its tied embeddings repeat the last token
            weight.data.fill_(8.0)
    model.save_pretrained(folder)
    return str(folder)


def with_tokenizer(model: str, folder: Path) -> str:
    """Copies a model, with a tokenizer whose token n is the character 29 + n (as far as that is printable)."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(29 + i): i for i in range(3, 98)}
    words |= {f"<{i}>": i for i in range(98, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return str(folder)


def engine_args(model: str, *, tree: bool, block_size: int = 32, num_blocks: int = 200, **options) -> dict:
    """Arguments of vLLM's EngineArgs and LLM."""
    return {
        "model": model,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "enforce_eager": True,
        "scheduler_cls": RADIX if tree else None,
        **options,
    }


class Engine:
    """vLLM's engine in this process, step by step; one at a time, in a `with` block.

    Attributes:
        engine: vLLM's LLMEngine.
        scheduler: its scheduler.
    """

    def __init__(self, model: str, **options) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(model, **options), disable_log_stats=False))
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.engine, self.scheduler
        gc.collect()  # an engine that is collected while the next one runs takes its process group down
        cleanup_dist_env_and_memory()

    def add(self, name: str, prompt: list[int], *, priority: int = 0, salt=None, ends=False, **sampling) -> None:
        """Queues a request, greedy unless told otherwise; `ends`: a token may end it before max_tokens."""
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0, "ignore_eos": not ends, "detokenize": False} | sampling)
        request = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        self.engine.add_request(name, request, params, priority=priority)

    def step(self) -> list:
        """Returns the requests that ended in this step."""
        return [output for output in self.engine.step() if output.finished]

    def finish(self) -> dict:
        """Runs until nothing is left: name -> output."""
        done = {}
        while self.engine.has_unfinished_requests():
            done |= {output.request_id: output for output in self.step()}
        return done

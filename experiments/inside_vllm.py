"""What does the tree buy inside vLLM, in place of vLLM's own index of KV?

The same requests through vLLM with its own KVCacheManager ("plain"), with `radixkv.integrations.vllm.RadixScheduler`
without partial blocks ("whole_blocks") and with them ("tree"), and with our attention besides ("attention"), group by
group in alternation, so that a busy machine slows all alike. Expected: the same tokens; as many computed with whole
blocks as by plain vLLM, fewer by the tree where requests part inside a block, the more so the larger vLLM's blocks are
(16 on GPUs, 128 on CPUs by default); no difference where nothing is shared; our attention dearer than vLLM's own on a
CPU. Needs vLLM (`pip install 'radixkv[vllm]'`). The random model says nothing about any model's speed, only that all
sides run the same one.

    python -m experiments.inside_vllm
    python -m experiments.inside_vllm --model Qwen/Qwen3-0.6B --dtype bfloat16   # on a GPU
    python -m experiments.inside_vllm --trace my.jsonl --sides plain tree
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, console, parser, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.cache.tokens import pack, unpack
from radixkv.traces.trace import open_trace
from radixkv.traces.workload import open_workload

ENTRY = Entry("serving", seconds=120, place=8)

TREE = {"scheduler_cls": "radixkv.integrations.vllm.RadixScheduler"}
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole_blocks": TREE | {"additional_config": {"radixkv": {"partial_blocks": False}}},
    "tree": TREE,
    "attention": TREE,
}
SIZES: dict[str, dict[str, int]] = {
    "tree_of_thought": {"num_problems": 4},
    "multi_turn": {"num_conversations": 12, "num_turns": 4, "min_output_tokens": 8, "max_output_tokens": 24},
    "uniform": {},
}


@dataclass(frozen=True)
class Config:
    """What is served, and by what."""

    workloads: tuple[str, ...] = tuple(SIZES)
    sides: tuple[str, ...] = tuple(SIDES)
    trace: str | None = None
    model: str = "random"
    """ "random" for a random Llama of 4 layers, or what `vllm serve` takes."""
    dtype: str = "float32"
    block_size: int | None = None
    """None for vLLM's own choice."""
    max_requests: int = 120
    num_at_once: int = 8
    max_tokens: int = 8
    max_model_len: int = 2048
    gpu_memory: float = 0.2
    """Share of a GPU's memory for each side."""
    seed: int = 0


def cells(config: Config) -> Iterator[Cell]:
    """A cell a workload."""
    for workload in (config.trace,) if config.trace else config.workloads:
        yield workload, partial(measure, config, workload)


def prompts(config: Config, workload: str, vocab_size: int) -> list[list[int]]:
    """Returns the prompts that fit; ids past the vocabulary are folded into it, which keeps what is shared."""
    if config.trace:
        requests: Any = open_trace(config.trace, limit=config.max_requests)
    else:
        requests = open_workload(workload, seed=config.seed, **SIZES.get(workload, {}))
    found = []
    for request in islice(requests, config.max_requests):
        tokens = unpack(pack(request.prompt)) % (vocab_size - 3) + 3  # the first ids are often special
        if 0 < len(tokens) <= config.max_model_len - config.max_tokens:
            found.append(tokens.tolist())
    return found


class Side:
    """One vLLM, its engine in this process, and what it has done so far."""

    def __init__(self, config: Config, model: str, name: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        options = dict(SIDES[name])
        if name == "attention":
            from radixkv_kernels.integrations.vllm import register, unregister

            register()
            if not current_platform.is_cpu():
                options["attention_backend"] = "CUSTOM"
        arguments = EngineArgs(
            model=model,
            dtype=config.dtype,
            skip_tokenizer_init=True,
            max_model_len=config.max_model_len,
            enable_prefix_caching=True,
            block_size=config.block_size,
            gpu_memory_utilization=config.gpu_memory,
            disable_log_stats=True,
            **options,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        if name == "attention":
            unregister()  # its layers have it
        self.vocab_size = self.engine.model_config.get_vocab_size()
        self.block_size = self.engine.vllm_config.cache_config.block_size
        self.start_over()

    def start_over(self) -> None:
        """Forgets what is cached, and what was counted."""
        self.engine.reset_prefix_cache()
        self.tokens: dict[str, list[int]] = {}
        self.num_cached_tokens = 0
        self.ttft_s: list[float] = []
        self.cpu_s = self.wall_s = 0.0

    def serve(self, requests: dict[str, list[int]], max_tokens: int) -> None:
        """Serves requests that arrive at once."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        for name, prompt in requests.items():
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        waiting = set(requests)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.request_id in waiting and output.outputs[0].token_ids:
                    waiting.remove(output.request_id)
                    self.ttft_s.append(time.perf_counter() - began_s)
                if output.finished:
                    self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                    self.num_cached_tokens += output.num_cached_tokens or 0
        self.cpu_s += time.process_time() - cpu_s
        self.wall_s += time.perf_counter() - began_s

    def close(self) -> None:
        """Ends the engine."""
        self.engine.engine_core.shutdown()


@contextmanager
def started(config: Config) -> Iterator[dict[str, Side]]:
    """Starts a vLLM for each side, and ends all."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # CPU time is this process's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.distributed import cleanup_dist_env_and_memory

    with ExitStack() as stack:
        model = config.model
        if model == "random":
            model = save_random_llama(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        sides: dict[str, Side] = {}
        try:
            for name in config.sides:
                sides[name] = Side(config, model, name)
            yield sides
        finally:
            for side in sides.values():
                side.close()
            sides.clear()
            gc.collect()
            cleanup_dist_env_and_memory()


def save_random_llama(folder: Path, **sizes: int) -> str:
    """Saves a Llama with random weights, wide enough that a token depends on all that was read; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    LlamaForCausalLM(LlamaConfig(**shape | sizes, initializer_range=0.25)).save_pretrained(folder)
    return str(folder)


def measure(config: Config, workload: str) -> list[Row]:
    """Serves one workload by each side."""
    with started(config) as sides:
        first = sides[config.sides[0]]
        requests = prompts(config, workload, first.vocab_size)
        # The first round is not counted: what is compiled or measured once, for these numbers of rows.
        for is_counted in (False, True):
            for side in sides.values():
                side.start_over()
            for turn, start in enumerate(range(0, len(requests), config.num_at_once)):
                group = {str(i): requests[i] for i in range(start, min(start + config.num_at_once, len(requests)))}
                for name in list(sides) if turn % 2 else reversed(sides):
                    sides[name].serve(
                        {f"{key} {is_counted}": prompt for key, prompt in group.items()}, config.max_tokens
                    )
        num_prompt_tokens = sum(map(len, requests))
        return [
            {
                "workload": Path(workload).stem,
                "side": name,
                "block_size": side.block_size,
                "num_requests": len(requests),
                "num_prompt_tokens": num_prompt_tokens,
                "num_computed_tokens": num_prompt_tokens - side.num_cached_tokens,
                "ttft_p50_ms": statistics.median(side.ttft_s) * 1e3,
                "cpu_s": side.cpu_s,
                "wall_s": side.wall_s,
                "num_same": sum(side.tokens[key] == tokens for key, tokens in first.tokens.items()),
            }
            for name, side in sides.items()
        ]


COLUMNS = {
    "workload": "{workload}",
    "side": "{side}",
    "block size": "{block_size}",
    "prompt tokens": "{num_prompt_tokens:,}",
    "computed": "{num_computed_tokens:,}",
    "TTFT p50 ms": "{ttft_p50_ms:.1f}",
    "CPU s": "{cpu_s:.2f}",
    "wall s": "{wall_s:.2f}",
    "same tokens": "{num_same} of {num_requests}",
}


def show(data: Data) -> None:
    """Prints a line a workload and side."""
    print_table(f"vLLM with its own index and with the tree, {data['config']['model']} model", COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the tokens computed."""
    return bars(data["rows"], "workload", "side", "num_computed_tokens", "prompt tokens computed", "Inside vLLM")


def answer(data: Data) -> str:
    """A sentence a workload."""
    told = [f"Blocks of {data['rows'][0]['block_size']}"]
    for workload, rows in by_workload(data).items():
        first, *others = rows.values()
        beside = (
            f"{row['side']} {row['num_computed_tokens'] / first['num_computed_tokens']:.2f} of the tokens computed, "
            f"{row['cpu_s'] / first['cpu_s']:.2f} of the CPU time, {row['num_same']} of {row['num_requests']} the same"
            for row in others
        )
        told.append(f"{workload} beside {first['side']}: {'; '.join(beside)}")
    return f"{'. '.join(told)}."


def by_workload(data: Data) -> dict[str, dict[str, Row]]:
    """Rows by workload and side, in the order in which they were asked for."""
    found: dict[str, dict[str, Row]] = {}
    for row in data["rows"]:
        found.setdefault(row["workload"], {})[row["side"]] = row
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the workloads, or a trace."""
    options = parser("inside_vllm", __doc__)
    add = options.add_argument
    add("--trace", help="a trace of any format that radixkv reads, in place of the workloads")
    add("--sides", nargs="+", choices=tuple(SIDES), default=list(Config.sides), help="the others beside the first")
    add("--model", default=Config.model, help='"random", or a model as `vllm serve` takes it')
    add("--dtype", default=Config.dtype)
    add("--block-size", type=int, help="default: vLLM's own choice")
    add("--max-requests", type=int, default=Config.max_requests)
    add("--at-once", type=int, default=Config.num_at_once, help="requests that arrive together")
    add("--max-tokens", type=int, default=Config.max_tokens)
    add("--max-model-len", type=int, default=Config.max_model_len)
    add("--gpu-memory", type=float, default=Config.gpu_memory, help="share of a GPU's memory for each side")
    given = options.parse_args(arguments)
    if find_spec("vllm") is None:
        console.print("inside_vllm: vLLM is not installed here, nothing to do (pip install 'radixkv[vllm]')")
        return
    config = Config(
        ("tree_of_thought",) if given.smoke else Config.workloads,
        tuple(given.sides),
        given.trace,
        given.model,
        given.dtype,
        given.block_size,
        24 if given.smoke else given.max_requests,
        given.at_once,
        given.max_tokens,
        given.max_model_len,
        given.gpu_memory,
    )
    run_experiment("inside_vllm", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

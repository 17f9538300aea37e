"""How much faster does a whole engine decode if KV that requests share is read once?

Requests on one long prompt, each with a few tokens of its own, all decoding at once; the same engine with tree
attention off, on and auto, step by step in turns, so that a busy machine slows all alike. Every token has to be the
same. Expected: with 32 requests on 4,096 tokens attention takes most of a step without it and little with it, so
decoding gets several times as fast; where nothing is shared nothing changes.

    python -m experiments.tree_serving                              # some minutes
    python -m experiments.tree_serving --model SmolLM2-135M-Instruct.Q4_1.gguf --prefix 1024
    python -m experiments.tree_serving --smoke                      # does it run?
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from radixkv_kernels.tree_plans import MODES

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, grouped, parser, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from radixkv.blocks.config import CacheConfig
from radixkv.engine.engine import Engine
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import SchedulerConfig

ENTRY = Entry("serving", seconds=45, place=6)


@dataclass(frozen=True)
class Config:
    """Sizes in tokens; goes into the JSON as it is."""

    model: str = "tiny_gpt"
    num_requests: int = 32
    prefixes: tuple[int, ...] = (0, 1024, 4096)
    own_tokens: int = 32
    output_tokens: int = 48
    block_size: int = 16
    clock: str = "wall"
    """"wall", or "cpu": CPU time of this thread, which a busy neighbour hardly changes."""
    seed: int = 0


def make_engine(config: Config, mode: str, prefix: int) -> Engine:
    """An engine with room for all requests, the prompt's common part being cached already."""
    tokens = prefix + config.num_requests * (max(config.own_tokens, 1) + config.output_tokens + 2 * config.block_size)
    if not prefix:
        tokens += config.num_requests * 1024
    num_blocks = -(-tokens // config.block_size) + 64
    engine = Engine.from_pretrained(
        config.model,
        cache=CacheConfig(block_size=config.block_size, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=512),
        tree_attention=mode,
    )
    rng = np.random.default_rng(config.seed)
    vocab_size = min(engine.runner.config.vocab_size, 250)
    root = rng.integers(0, vocab_size, prefix).tolist()
    if root:
        engine.generate([root], SamplingParams(max_tokens=1, ignore_eos=True))
    params = SamplingParams(max_tokens=config.output_tokens, ignore_eos=True)
    for _ in range(config.num_requests):
        # with no common part, 1,024 tokens of its own
        own = rng.integers(0, vocab_size, config.own_tokens if prefix else 1024).tolist()
        engine.add_request([*root, *own], params)
    return engine


def decode(config: Config, prefix: int) -> list[Row]:
    """Steps one engine a mode in turns; a row a mode, of the steps in which all requests decode."""
    clock = time.perf_counter if config.clock == "wall" else time.thread_time
    engines = {mode: make_engine(config, mode, prefix) for mode in MODES}
    kept = {mode: list(engine.generations.values()) for mode, engine in engines.items()}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    while any(engine.has_unfinished_requests for engine in engines.values()):
        for mode, engine in engines.items():
            start = clock()
            stats = engine.step()
            if stats.num_decode_tokens == config.num_requests and not stats.num_prefill_tokens:
                times[mode].append(clock() - start)
    tokens = {mode: [g.output().outputs[0].token_ids for g in some] for mode, some in kept.items()}
    if any(given != tokens["off"] for given in tokens.values()):
        raise AssertionError(f"prefix {prefix}: tokens differ")
    ratios = {m: [off / own for off, own in zip(times["off"], times[m], strict=True)] for m in MODES}
    return [
        {
            "prefix": prefix,
            "mode": mode,
            "num_steps": len(taken),
            "step_ms": statistics.median(taken) * 1e3,
            "tokens_per_s": config.num_requests / statistics.median(taken),
            "faster_than_off": statistics.median(ratios[mode]),
            "planned_steps": engines[mode].runner.tree_plans.num_planned_steps,
        }
        for mode, taken in times.items()
    ]


def cells(config: Config) -> Iterator[Cell]:
    """A cell a prefix."""
    for prefix in config.prefixes:
        yield f"prefix {prefix}", partial(decode, config, prefix)


COLUMNS = {
    "shared tokens": "{prefix:,}",
    "tree attention": "{mode}",
    "decode step ms": "{step_ms:.1f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "times as fast as off": "{faster_than_off:.2f}",
    "steps": "{num_steps}",
    "with a plan": "{planned_steps}",
}


def plot(data: Data) -> Figure:
    """Decode throughput against the shared prefix, a line a mode."""
    figure, axes = pyplot().subplots()
    prefixes = list(grouped(data["rows"], "prefix"))
    for mode, rows in grouped(data["rows"], "mode").items():
        axes.plot(range(len(prefixes)), [row["tokens_per_s"] for row in rows], "o-", label=mode)
    axes.set_xticks(range(len(prefixes)), [f"{p:,}" for p in prefixes])
    axes.set(xlabel="tokens that all requests share", ylabel="decoded tokens a second", ylim=(0, None))
    axes.legend()
    return figure


def show(data: Data) -> None:
    """Prints a line a prefix and mode."""
    sizes = data["config"]
    print_table(f"{sizes['num_requests']} requests decoding on one prompt, {sizes['model']}", COLUMNS, data["rows"])


def answer(data: Data) -> str:
    """One sentence."""
    longest = max(row["prefix"] for row in data["rows"])
    faster = {row["mode"]: row["faster_than_off"] for row in data["rows"] if row["prefix"] == longest}
    return (
        f"{data['config']['num_requests']} requests on {longest:,} shared tokens decode {faster['on']:.2f} times as "
        "fast where shared KV is read once, the same tokens."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("tree_serving", __doc__)
    add = options.add_argument
    add("--model", default=Config.model, help="a preset, a Hugging Face folder or a .gguf file")
    add("--prefix", nargs="+", type=int, default=list(Config.prefixes), metavar="N", help="tokens that all share")
    add("--num-requests", type=int, default=Config.num_requests)
    add("--output-tokens", type=int, default=Config.output_tokens)
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time of the stepping thread")
    given = options.parse_args(arguments)
    config = Config(
        given.model,
        4 if given.smoke else given.num_requests,
        (0, 512) if given.smoke else tuple(given.prefix),
        output_tokens=6 if given.smoke else given.output_tokens,
        clock=given.clock,
    )
    run_experiment("tree_serving", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

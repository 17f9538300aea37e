"""What does prefix caching do for an assistant: one system prompt, unique questions, Poisson arrivals?

The measurement of the book chapter this project grew from, on a model of the same size (tiny_gpt, 5.8 M parameters,
random weights): no cache, flat hash and radix under the same arrivals at several loads, then the same load of uniform
random prompts that share nothing. Expected: three quarters of the prompt tokens and more come from the cache, median
TTFT falls to about half or less at every load, throughput does not fall; on random prompts all three compute the same.

    python -m experiments.chat                       about two minutes
    python -m experiments.chat --smoke               a few seconds, too short to quote
    python -m experiments.chat --rates 4 8 inf
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from radixkv_kernels.tree_plans import MODES

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, parser, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.serving import COLUMNS, Arrival, poisson, serve, summarize, warm_up
from radixkv.blocks.config import CACHES, CacheConfig
from radixkv.engine.engine import Engine

ENTRY = Entry("serving", seconds=80, place=1, report=("--rates", "4", "8"))


@dataclass(frozen=True)
class Config:
    """Sizes of the traffic; goes into the JSON as it is."""

    model: str = "tiny_gpt"
    rates_per_s: tuple[float, ...] = (2.0, 4.0, 8.0)
    num_requests: int = 40
    system_tokens: int = 512
    question_tokens: tuple[int, int] = (16, 64)
    output_tokens: tuple[int, int] = (16, 48)
    block_size: int = 16
    num_blocks: int = 2048
    seed: int = 7
    caches: tuple[str, ...] = CACHES
    deterministic: bool = True
    tree_attention: str = "auto"


def arrivals(config: Config, workload: str, rate_per_s: float, vocab_size: int) -> list[Arrival]:
    """Returns the traffic: the same for every cache; at another rate, the same prompts at other times."""
    rng, clock = np.random.default_rng(config.seed), np.random.default_rng(config.seed + 1)
    system = rng.integers(0, vocab_size, config.system_tokens)
    found = []
    for at in poisson(rate_per_s, config.num_requests, clock):
        question = rng.integers(0, vocab_size, rng.integers(*config.question_tokens, endpoint=True))
        first = system if workload == "chat" else rng.integers(0, vocab_size, config.system_tokens)
        max_tokens = int(rng.integers(*config.output_tokens, endpoint=True))
        found.append(Arrival(float(at), (*first.tolist(), *question.tolist()), max_tokens))
    return found


def cells(config: Config) -> Iterator[Cell]:
    """A cell a workload and load, with every cache."""
    for rate in config.rates_per_s:
        yield f"chat {rate:g}", partial(measure, config, "chat", rate)
    yield f"uniform {config.rates_per_s[0]:g}", partial(measure, config, "uniform", config.rates_per_s[0])


def measure(config: Config, workload: str, rate: float) -> list[Row]:
    """Serves the traffic once with each cache; a warm-up before each is not counted.

    Raises:
        AssertionError: two caches gave different tokens.
    """
    rows, answers = [], []
    for cache in config.caches:
        engine = Engine.from_pretrained(
            config.model,
            cache=CacheConfig(cache, config.block_size, num_blocks=config.num_blocks),
            deterministic=config.deterministic,
            tree_attention=config.tree_attention,
        )
        vocab_size = engine.runner.config.vocab_size
        warm_up(engine)
        outputs = serve(engine, arrivals(config, workload, rate, vocab_size))
        rows.append({"workload": workload, "rate_per_s": rate, "cache": cache, **summarize(outputs)})
        answers.append([output.outputs[0].token_ids for output in outputs])
    # A speed is worth nothing where the answers differ.
    if config.deterministic and any(answer != answers[0] for answer in answers):
        raise AssertionError(f"{workload} at {rate}/s: the caches gave different tokens")
    return rows


CHAT_COLUMNS = {"workload": "{workload}", "load/s": "{rate_per_s:g}", **COLUMNS}


def plot(data: Data) -> Figure:
    """Draws median and p99 TTFT against load, and the distribution of TTFT at the highest load."""
    rows: list[dict[str, Any]] = data["rows"]
    plt = pyplot()
    chat = [row for row in rows if row["workload"] == "chat"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    highest = max(row["rate_per_s"] for row in chat)
    for cache in dict.fromkeys(row["cache"] for row in chat):
        mine = [row for row in chat if row["cache"] == cache]
        rates = [str(row["rate_per_s"]) for row in mine]
        (line,) = left.plot(rates, [row["ttft_p50_ms"] for row in mine], "o-", label=cache)
        left.plot(rates, [row["ttft_p99_ms"] for row in mine], "o:", color=line.get_color(), markersize=3)
        (last,) = (row for row in mine if row["rate_per_s"] == highest)
        values = sorted(last["ttfts_ms"])
        right.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=cache)
    left.set(
        xlabel="requests per second", ylabel="TTFT, ms", title="TTFT against load: median, p99 dotted", yscale="log"
    )
    right.set(
        xlabel="TTFT, ms", ylabel="share of requests", title=f"TTFT at {highest:g} requests per second", xscale="log"
    )
    left.legend()
    return figure


def show(data: Data) -> None:
    """Prints a line a workload, load and cache."""
    print_table(f"Serving {data['config']['model']}; times in ms", CHAT_COLUMNS, data["rows"])


def answer(data: Data) -> str:
    """One sentence, of the highest load."""
    chat = [row for row in data["rows"] if row["workload"] == "chat"]
    highest = max(row["rate_per_s"] for row in chat)
    by_cache = {row["cache"]: row for row in chat if row["rate_per_s"] == highest}
    radix, without = by_cache.get("radix"), by_cache.get("null")
    if radix is None or without is None:
        return "Nothing to compare: it needs radix and null."
    times = [row["ttft_p50_ms"] for row in (radix, without)]
    return (
        f"{radix['hit_rate']:.0%} of the prompt tokens come from the cache; at {highest:g} requests a second the "
        f"median time to the first token is {times[0]:,.0f} ms for {times[1]:,.0f} without a cache."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("chat", __doc__)
    add = options.add_argument
    add("--rates", nargs="+", type=float, metavar="N", help="arrivals a second, or inf (2 4 8)")
    add("--model", default=Config.model, help="a preset, a Hugging Face folder or a .gguf file")
    add("--cache", nargs="+", choices=CACHES, default=list(CACHES))
    add("--tree-attention", choices=MODES, default=Config.tree_attention, help="read shared KV once (auto)")
    add("--seed", type=int, default=Config.seed)
    given = options.parse_args(arguments)
    config = Config(
        model=given.model,
        rates_per_s=tuple(given.rates or ((8.0,) if given.smoke else Config.rates_per_s)),
        num_requests=6 if given.smoke else Config.num_requests,
        caches=tuple(given.cache),
        seed=given.seed,
        tree_attention=given.tree_attention,
    )
    run_experiment("chat", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

"""Open-loop serving: requests arrive by the clock, whether the engine keeps up or not. For the serving experiments.

What the metrics are is said in `radixkv.simulate.report`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.lab.harness import Row
from radixkv.scheduling.batch import StepStats
from radixkv.scheduling.request import RequestOutput, SamplingParams
from radixkv.simulate import Served, report

if TYPE_CHECKING:  # it loads torch
    from radixkv.engine.engine import Engine


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds from the start."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def poisson(rate_per_s: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns [count] float64 arrival times in seconds; infinite rate: all at once."""
    if rate_per_s == float("inf"):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1 / rate_per_s, count))


def serve(
    engine: Engine, arrivals: Sequence[Arrival], on_step: Callable[[StepStats], None] = lambda stats: None
) -> list[RequestOutput]:
    """Serves arrivals to their ends, each added when its time has come; greedy, end tokens ignored.

    Returns one output an arrival. TTFT counts from the time of arrival, also where a step was under way then.
    """
    started = time.perf_counter()
    waiting = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_s)[::-1]
    generations = {}
    while waiting or engine.has_unfinished_requests:
        now = time.perf_counter() - started
        while waiting and waiting[-1][1].at_s <= now:
            index, arrival = waiting.pop()
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
            request_id = engine.add_request(arrival.prompt, params)
            generation = engine.generation(request_id)
            generation.metrics.arrival_s = started + arrival.at_s
            generations[index] = generation
        if engine.has_unfinished_requests:
            on_step(engine.step())
        elif waiting:
            time.sleep(max(min(waiting[-1][1].at_s - now, 0.01), 0))
    return [generations[index].output() for index in range(len(arrivals))]


def warm_up(engine: Engine) -> None:
    """Makes the first calls of everything, so that no measurement has them."""
    serve(engine, [Arrival(0.0, tuple(range(40)), 4)] * 2)


COLUMNS = {
    "cache": "{cache}",
    "hit rate": "{hit_rate:.1%}",
    "computed": "{num_computed_tokens:,}",
    "TTFT p50": "{ttft_p50_ms:.0f}",
    "p99": "{ttft_p99_ms:.0f}",
    "TPOT p50": "{tpot_p50_ms:.1f}",
    "p99 ": "{tpot_p99_ms:.1f}",
    "ITL p50": "{itl_p50_ms:.1f}",
    "p99  ": "{itl_p99_ms:.1f}",
    "out tok/s": "{output_throughput:.0f}",
}


def summarize(outputs: Sequence[RequestOutput]) -> Row:
    """Returns the serving metrics of finished requests, times in milliseconds; `ttfts_ms` of each."""
    served = [
        Served(
            output.request_id,
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            sum(len(completion.token_ids) for completion in output.outputs),
            output.metrics,
        )
        for output in outputs
    ]
    first = [m.first_token_s - m.arrival_s for m in (s.metrics for s in served) if m.first_token_s is not None]
    return report.summarize(served) | {"ttfts_ms": [round(value * 1e3, 3) for value in first]}

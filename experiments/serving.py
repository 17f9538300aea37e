"""Open-loop serving: requests arrive by the clock, whether the engine keeps up or not. For the serving experiments.

Metrics and percentiles as in `vllm bench serve`: TTFT from arrival to first token; TPOT (last - first token) /
(tokens - 1); ITL between neighbouring tokens; throughput over the time from first arrival to last token.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.harness import Row
from radixkv.engine import Engine, StepStats
from radixkv.request import RequestOutput, SamplingParams


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
    """Returns the serving metrics of finished requests, times in milliseconds."""
    metrics = [output.metrics for output in outputs]
    ttft = [m.first_token_s - m.arrival_s for m in metrics if m.first_token_s is not None]
    times = [np.array(m.token_times_s) for m in metrics]
    itl = np.concatenate([np.diff(t) for t in times]) if times else np.zeros(0)
    tpot = [(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]
    duration = max(t[-1] for t in times) - min(m.arrival_s for m in metrics)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    row: Row = {
        "num_requests": len(outputs),
        "duration_s": duration,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": num_cached,
        "num_computed_tokens": num_prompt - num_cached,
        "hit_rate": num_cached / num_prompt,
        "request_throughput": len(outputs) / duration,
        "output_throughput": sum(len(t) for t in times) / duration,
        "num_preemptions": sum(m.num_preemptions for m in metrics),
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        for q in (50, 99):
            row[f"{name}_p{q}_ms"] = float(np.percentile(values, q)) * 1e3 if len(values) else 0.0
    row["ttfts_ms"] = [round(value * 1e3, 3) for value in ttft]
    return row

"""What became of served requests, and the figures that serving is judged by; of the engine and the simulator alike.

Metrics and percentiles as in `vllm bench serve`: TTFT from arrival to first token; TPOT (last - first token) /
(tokens - 1); ITL between neighbouring tokens; throughput over the time from first arrival to last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.scheduling.request import RequestMetrics


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has ended, without its tokens.

    Attributes:
        num_cached_tokens: of the prompt, found in the cache when it was first scheduled.
        num_output_tokens: of all samples.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    metrics: RequestMetrics


def summarize(served: Sequence[Served]) -> dict[str, Any]:
    """Returns the serving metrics of finished requests, times in milliseconds.

    Raises:
        ValueError: there are none.
    """
    if not served:
        raise ValueError("served: expected at least one request, got none")
    metrics = [each.metrics for each in served]
    times = [np.array(m.token_times_s) for m in metrics]
    duration = float(max(t[-1] for t in times if len(t))) - min(m.arrival_s for m in metrics)
    num_prompt = sum(each.num_prompt_tokens for each in served)
    num_cached = sum(each.num_cached_tokens for each in served)
    row: dict[str, Any] = {
        "num_requests": len(served),
        "duration_s": duration,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": num_cached,
        "num_computed_tokens": num_prompt - num_cached,
        "hit_rate": num_cached / num_prompt,
        "request_throughput": len(served) / duration,
        "output_throughput": sum(each.num_output_tokens for each in served) / duration,
        "num_preemptions": sum(m.num_preemptions for m in metrics),
    }
    samples = {
        "ttft": np.array([m.first_token_s - m.arrival_s for m in metrics if m.first_token_s is not None]),
        "tpot": np.array([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]),
        "itl": np.concatenate([np.diff(t) for t in times]),
        "latency": np.array([m.finished_s - m.arrival_s for m in metrics if m.finished_s is not None]),
    }
    for name, values in samples.items():
        for q in (50, 99):
            row[f"{name}_p{q}_ms"] = float(np.percentile(values, q)) * 1e3 if len(values) else 0.0
    return row

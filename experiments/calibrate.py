"""Does the simulator say what the engine does on this machine?

The engine serves one set of requests, each step's load and CPU time are noted, and `Fitted` makes a cost model of them.
Then other requests, of other shapes and with other arrivals, are served by the engine and by the simulator with that
cost model: per step the error of the cost model alone, per run that of all together. Times are CPU time of the thread
that runs torch (one thread), and a request arrives by that clock, so that other processes disturb little; they still
share caches and memory with it. Expected: the same hits; busy time within 10 %, percentiles of TTFT within 20 %.

    python -m experiments.calibrate                                     tiny_gpt, about a minute
    python -m experiments.calibrate --models tiny_gpt SmolLM2.gguf      a checkpoint besides
    python -m experiments.calibrate --models SmolLM2.gguf --requests 6  of fewer requests
    python -m experiments.calibrate --smoke                             too short to quote
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.calibrate_report import METRICS, answer, plot, show
from experiments.lab.harness import Row, fail, parser
from experiments.lab.run import conduct
from experiments.measured_engine import MeasuredEngine, arrival_s
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate import FEATURES, Fitted, Simulator, StepLoad, report
from radixkv.traces import TraceRequest, open_workload

__all__ = ["answer", "plot", "show"]  # what shows the rows


@dataclass(frozen=True)
class Config:
    """What is fitted to, what is compared; tokens of prompts are drawn below `vocab_size`."""

    models: tuple[str, ...] = ("tiny_gpt",)
    num_fitted: int = 24
    num_compared: int = 16
    vocab_size: int = 250
    num_blocks: int = 1024
    max_num_batched_tokens: int = 256
    num_repeats: int = 2
    seed: int = 0


def simulate(requests: Sequence[TraceRequest], cost: Fitted, config: Config, cache: str) -> Row:
    """Returns the metrics of the same requests in virtual time."""
    limits = SchedulerConfig(max_num_batched_tokens=config.max_num_batched_tokens)
    simulator = Simulator(Scheduler(KVManager(CacheConfig(cache).make(), config.num_blocks), limits), cost)
    for request in requests:
        simulator.submit(request, arrival_s(request))
    row = report.summarize(simulator.advance(inf))
    return row | {"busy_s": simulator.busy_s, "num_steps": simulator.num_steps}


def workload(name: str, config: Config, count: int, seed: int, rate_per_s: float | None, **sizes: Any) -> list[Any]:
    """Returns the first requests of a workload, small enough for a CPU."""
    sizes = {"vocab_size": config.vocab_size, "rate_per_s": rate_per_s} | sizes
    return list(open_workload(name, seed=seed, limit=count, **sizes))


def fit_cost(measured: MeasuredEngine, config: Config) -> tuple[Fitted, float, float]:
    """Returns a cost model, the seconds of a request of these by itself, and the fit's median relative error."""
    prompts = {"min_prompt_tokens": 8, "max_prompt_tokens": 500}
    rest = {"output_tokens": 24}
    uniform = workload("uniform", config, config.num_fitted, config.seed, None, **prompts, **rest)
    alone, chat = uniform[:3], workload("chat", config, config.num_fitted, config.seed, None, **rest)
    measured.serve(alone)  # first calls of everything
    loads: list[StepLoad] = []
    times: list[float] = []
    each_s = inf
    for _ in range(config.num_repeats):
        for requests in (*([request] for request in alone), uniform, chat):
            row, _ = measured.serve(requests)
            each_s = min(each_s, row["busy_s"]) if len(requests) == 1 else each_s
            loads += measured.loads
            times += measured.times_s
    cost = Fitted.to(loads, times)
    errors = [abs(cost.step_s(load) / seconds - 1) for load, seconds in zip(loads, times, strict=True)]
    return cost, each_s, float(np.median(errors))


def compare(model: str, config: Config) -> list[Row]:
    """Fits a cost model to an engine; returns a row of it, and one for each workload and cache that both served."""
    torch.set_num_threads(1)
    limits = config.num_blocks, config.max_num_batched_tokens
    name = Path(model).stem.split(".")[0]
    cost, each_s, error = fit_cost(MeasuredEngine(model, *limits), config)
    seconds = dict(zip(FEATURES, cost.seconds, strict=True))
    rows: list[Row] = [{"part": "fit", "model": name, "median_error": error, "seconds": seconds}]
    shapes: dict[str, dict[str, Any]] = {
        "few_shot": {"num_tasks": 2, "output_tokens": 12},
        "multi_turn": {"num_conversations": 4, "max_output_tokens": 64},
    }
    for shape, sizes in shapes.items():
        for cache in ("null", "flat_hash", "radix"):
            requests = workload(shape, config, config.num_compared, config.seed + 1, 1.0 / each_s, **sizes)
            measured = MeasuredEngine(model, *limits, cache)
            found, answered = measured.serve(requests)
            pairs = zip(measured.loads, measured.times_s, strict=True)
            errors = [abs(cost.step_s(load) / seconds_ - 1) for load, seconds_ in pairs]
            expected = simulate(answered, cost, config, cache)
            row: Row = {"part": "compared", "model": name, "workload": shape, "cache": cache}
            row["step_error"] = float(np.median(errors))
            for key in METRICS:
                row[f"{key}_measured"], row[f"{key}_simulated"] = found[key], expected[key]
                row[f"{key}_error"] = expected[key] / found[key] - 1 if found[key] else 0.0
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("calibrate", __doc__)
    options.add_argument("--models", nargs="+", default=["tiny_gpt"], help="presets, folders, .gguf files (tiny_gpt)")
    options.add_argument("--requests", type=int, default=Config.num_compared, help="of a workload, compared (16)")
    given = options.parse_args(arguments)
    if given.requests < 4:
        fail(f"--requests: expected at least 4, got {given.requests}")
    config = Config(tuple(given.models), num_fitted=3 * given.requests // 2, num_compared=given.requests)
    if given.smoke:
        config = replace(config, num_fitted=6, num_compared=4, num_repeats=1)
    cells = ((model, partial(compare, model, config)) for model in config.models)
    conduct("calibrate", given.out, config, cells, sys.modules[__name__])


if __name__ == "__main__":
    main()

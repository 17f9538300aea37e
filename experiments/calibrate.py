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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.lab.catalog import Entry
from experiments.lab.harness import Row, fail, parser, print_table
from experiments.lab.plots import Figure, pyplot
from experiments.lab.run import Cell, Data, run_experiment
from experiments.serving import summarize
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.tokens import pack, unpack
from radixkv.engine.engine import Engine
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.simulate import FEATURES, Fitted, Simulator, StepLoad, measure_load, report
from radixkv.traces import TraceRequest, open_workload

ENTRY = Entry("serving", seconds=37, place=7)


METRICS = ("num_steps", "busy_s", "num_cached_tokens", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "latency_p50_ms")


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


class Clock:
    """CPU seconds of this thread, and what was skipped because nothing was to be done."""

    def __init__(self) -> None:
        self._skipped_s = -time.thread_time()

    def __call__(self) -> float:
        return time.thread_time() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        self._skipped_s += max(at_s - self(), 0.0)


class MeasuredEngine:
    """An engine whose steps are noted: their loads, and their seconds with everything in them."""

    def __init__(self, model: str, num_blocks: int, max_num_batched_tokens: int, cache: str = "radix") -> None:
        self.clock = Clock()
        self.engine = Engine.from_pretrained(
            model,
            cache=CacheConfig(cache, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens),
            tree_attention="off",  # what is fitted knows nothing of shared reads
            clock=self.clock,
        )
        self.loads: list[StepLoad] = []
        self.times_s: list[float] = []
        self._forward = self.engine.runner.forward
        self.engine.runner.forward = self._noted  # type: ignore[method-assign]

    def _noted(self, batch: ScheduledBatch) -> torch.Tensor:
        self.loads.append(measure_load(batch, self.engine.scheduler))
        return self._forward(batch)

    def serve(self, requests: Sequence[TraceRequest]) -> tuple[Row, list[TraceRequest]]:
        """Serves requests by their timestamps; returns the metrics, and the requests with what was generated."""
        self.loads.clear()
        self.times_s.clear()
        self.clock.skip_to(self.clock() + 1.0)
        origin, waiting, generations = self.clock(), list(requests)[::-1], []
        while waiting or self.engine.has_unfinished_requests:
            if waiting and not self.engine.has_unfinished_requests:
                self.clock.skip_to(origin + arrival_s(waiting[-1]))
            while waiting and origin + arrival_s(waiting[-1]) <= self.clock():
                request = waiting.pop()
                params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
                name = self.engine.add_request(unpack(request.prompt).tolist(), params)
                generations.append(self.engine.generation(name))
                generations[-1].metrics.arrival_s = origin + arrival_s(request)
            stats = self.engine.step()
            self.times_s.append(stats.schedule_s + stats.forward_s + stats.postprocess_s)
        outputs = [generation.output() for generation in generations]
        answered = [
            replace(request, output=pack(output.outputs[0].token_ids))
            for request, output in zip(requests, outputs, strict=True)
        ]
        return summarize(outputs) | {"busy_s": sum(self.times_s), "num_steps": len(self.times_s)}, answered


def arrival_s(request: TraceRequest) -> float:
    """When a request comes, in seconds."""
    return request.timestamp_s or 0.0


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


COLUMNS = {
    "model": "{model}",
    "workload": "{workload}",
    "cache": "{cache}",
    "steps": "{num_steps_simulated}/{num_steps_measured}",
    "hits": "{num_cached_tokens_simulated}/{num_cached_tokens_measured}",
    "a step": "{step_error:.0%}",
    "busy s": "{busy_s_measured:.2f}",
    "busy": "{busy_s_error:+.0%}",
    "TTFT p50": "{ttft_p50_ms_error:+.0%}",
    "p99": "{ttft_p99_ms_error:+.0%}",
    "TPOT p50": "{tpot_p50_ms_error:+.0%}",
    "latency": "{latency_p50_ms_error:+.0%}",
}


def cells(config: Config) -> Iterator[Cell]:
    """A cell a model."""
    for model in config.models:
        yield model, partial(compare, model, config)


def show(data: Data) -> None:
    """Prints a line for each model, workload and cache."""
    rows = [row for row in data["rows"] if row["part"] == "compared"]
    print_table("Simulated against measured: errors of a step's time (median) and of each metric", COLUMNS, rows)


def plot(data: Data) -> Figure:
    """Draws simulated over measured times."""
    rows = [row for row in data["rows"] if row["part"] == "compared"]
    figure, axis = pyplot().subplots()
    for key, marker in (("busy_s", "o"), ("ttft_p50_ms", "^"), ("ttft_p99_ms", "v"), ("tpot_p50_ms", "s")):
        scale = 1e3 if key == "busy_s" else 1
        points = [(row[f"{key}_measured"] * scale, row[f"{key}_simulated"] * scale) for row in rows]
        axis.plot(*zip(*points, strict=True), marker, label=key.removesuffix("_ms").removesuffix("_s"))
    low, high = axis.get_xlim()
    axis.plot([max(low, 1), high], [max(low, 1), high], color="gray", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured (ms of CPU)", ylabel="simulated (ms)")
    axis.legend()
    return figure


def answer(data: Data) -> str:
    """One sentence, of the largest errors."""
    rows = [row for row in data["rows"] if row["part"] == "compared"]
    same = all(row["num_cached_tokens_simulated"] == row["num_cached_tokens_measured"] for row in rows)
    busy, ttft = (max(abs(row[f"{key}_error"]) for row in rows) for key in ("busy_s", "ttft_p50_ms"))
    return (
        f"Hits are {'the same' if same else 'NOT the same'}; busy time is off by {busy:.0%} at most, "
        f"median TTFT by {ttft:.0%}."
    )


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
    run_experiment("calibrate", given.out, config, sys.modules[__name__])


if __name__ == "__main__":
    main()

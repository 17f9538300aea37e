"""An engine that counts CPU seconds and notes the load and the time of each step: for `experiments.calibrate`."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.lab.harness import Row
from experiments.serving import summarize
from radixkv.blocks.config import CacheConfig
from radixkv.cache.tokens import pack, unpack
from radixkv.engine.engine import Engine
from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import SchedulerConfig
from radixkv.simulate import StepLoad, measure_load
from radixkv.traces import TraceRequest


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

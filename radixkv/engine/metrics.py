"""What an engine counts, in Prometheus' text form: `Engine.metrics.text()`. Filled by `radixkv.engine.engine`.

The names are those that vLLM's users know (`vllm:prefix_cache_hits` is `radixkv:prefix_cache_hits_total` here, as
Prometheus' own clients write a counter). A token is counted once, when a step with it has succeeded, whatever was
retried, preempted or withdrawn. docs/metrics.md has an alert for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from radixkv.engine.generation import Generation
from radixkv.scheduling.batch import StepStats

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Observations by upper bounds, each bound inclusive."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)

    def lines(self, name: str) -> Iterator[str]:
        """Yields it in Prometheus' text form: a line for each bound, then the sum and the count."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), list(self.counts), strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """Everything counted since the engine was made. Written by the thread that steps; read it from any.

    Attributes:
        num_prompt_tokens: of requests whose first step has run; num_hit_tokens of them came from the cache.
        num_generated_tokens: of all samples.
        num_failed_steps: forward passes that failed for a whole batch.
        finished: requests by finish_reason (of their first sample).
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.num_evicted_blocks = 0
        self.num_failed_steps = 0
        self.num_resets = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.time_to_first_token_s = Histogram(LATENCY_BUCKETS_S)
        self.inter_token_latency_s = Histogram(LATENCY_BUCKETS_S)
        self.queue_time_s = Histogram(REQUEST_BUCKETS_S)
        self.request_latency_s = Histogram(REQUEST_BUCKETS_S)
        self._num_running = self._num_waiting = 0
        self._usage = 0.0

    def started(self, generation: Generation) -> None:
        """A request's first step has run."""
        self.num_prompt_tokens += len(generation.request.prompt_token_ids)
        self.num_hit_tokens += generation.num_cached_tokens
        times = generation.metrics
        assert times.first_scheduled_s is not None
        self.queue_time_s.observe(times.first_scheduled_s - times.arrival_s)

    def sampled(self, generation: Generation, sample: int) -> None:
        """A sample of a request has got a token."""
        self.num_generated_tokens += 1
        times = generation.metrics.token_times_s
        if sample == 0 and len(times) == 1:
            self.time_to_first_token_s.observe(times[0] - generation.metrics.arrival_s)
        elif sample == 0:
            self.inter_token_latency_s.observe(times[-1] - times[-2])

    def ended(self, generation: Generation) -> None:
        """A request is done, however that came."""
        self.finished[generation.samples[0].finish_reason or "error"] += 1
        assert generation.metrics.finished_s is not None
        self.request_latency_s.observe(generation.metrics.finished_s - generation.metrics.arrival_s)

    def took(self, num_preemptions: int, num_evicted_blocks: int) -> None:
        """A step has taken this from others, whether it was finished or not."""
        self.num_preemptions += num_preemptions
        self.num_evicted_blocks += num_evicted_blocks

    def stepped(self, stats: StepStats) -> None:
        """A step is over."""
        self._num_running, self._num_waiting = stats.num_running, stats.num_waiting
        self._usage = (stats.sizes.private + stats.sizes.pinned) / max(stats.sizes.num_blocks, 1)

    def text(self) -> str:
        """Returns all of it, as a scrape is answered (content type `text/plain; version=0.0.4`)."""
        lines: list[str] = []
        for name, kind, help_text, value in self._families():
            full = f"radixkv:{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
            if isinstance(value, Histogram):
                lines += value.lines(full)
            elif isinstance(value, dict):
                lines += [f'{full}{{finished_reason="{reason}"}} {count}' for reason, count in value.items()]
            else:
                lines.append(f"{full} {value}")
        return "\n".join(lines) + "\n"

    def _families(self) -> Iterator[tuple[str, str, str, int | float | dict[str, int] | Histogram]]:
        yield "num_requests_running", "gauge", "Sequences in the running batch.", self._num_running
        yield "num_requests_waiting", "gauge", "Sequences that wait for their admission.", self._num_waiting
        yield "kv_cache_usage_perc", "gauge", "Blocks that running requests hold, 1 is all of them.", self._usage
        yield "prefix_cache_queries_total", "counter", "Prompt tokens looked up.", self.num_prompt_tokens
        yield "prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", self.num_hit_tokens
        yield "prefix_cache_resets_total", "counter", "Resets of the cache, or of a tenant in it.", self.num_resets
        yield "kv_cache_evicted_blocks_total", "counter", "Cached blocks given up for room.", self.num_evicted_blocks
        yield "num_preemptions_total", "counter", "Sequences taken out of the running batch.", self.num_preemptions
        yield "prompt_tokens_total", "counter", "Prompt tokens taken in, cached ones included.", self.num_prompt_tokens
        yield "generation_tokens_total", "counter", "Tokens generated.", self.num_generated_tokens
        yield "failed_steps_total", "counter", "Steps whose batch failed and was run apart.", self.num_failed_steps
        yield "request_success_total", "counter", "Requests ended, by reason.", dict(self.finished)
        yield "time_to_first_token_seconds", "histogram", "From arrival to the first token.", self.time_to_first_token_s
        yield "inter_token_latency_seconds", "histogram", "Between two tokens.", self.inter_token_latency_s
        yield "request_queue_time_seconds", "histogram", "From arrival to the first step.", self.queue_time_s
        yield "e2e_request_latency_seconds", "histogram", "From arrival to the end.", self.request_latency_s

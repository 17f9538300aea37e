"""Traces through replicas one request at a time: hits and balance, without a clock. For `experiments.routing`."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.lab.harness import Row, shared_traces
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.events import Callback
from radixkv.fleet.routing.policies import make_router
from radixkv.fleet.routing.router import Router
from radixkv.traces import TraceRequest, open_trace, open_workload

ROUTERS = ("round_robin", "random", "least_loaded", "consistent_hash", "longest_match", "cache_aware")
INDEXED = ("longest_match", "cache_aware")


@dataclass(frozen=True)
class Source:
    """Where requests come from, in what blocks their KV lies, and how many each replica has in the bounded pool."""

    name: str
    file: str | None
    pool_blocks: int
    block_size: int = 16
    limit: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is made here, or its file is there."""
        return self.file is None or bool(shared_traces(self.file))

    def requests(self, seed: int = 0) -> Iterable[TraceRequest]:
        """Returns its requests, again each time."""
        if self.file is None:
            return open_workload("chat", seed=seed, limit=self.limit, num_requests=2000)
        return open_trace(shared_traces(self.file), limit=self.limit)


SOURCES = {
    source.name: source
    for source in (
        Source("tau_bench", "tau_bench_airline.conversations.jsonl", 16_000),
        Source("mini_swe", "mini_swe_agent.conversations.jsonl", 16_000),
        Source("mooncake", "mooncake_conversation.jsonl", 10_000, 512),
        Source("bbh", "bbh_3shot.requests.jsonl", 3_000),
        Source("chat", None, 2_000),
    )
}


def replay(source: Source, requests: Iterable[TraceRequest], router: str, count: int, num_blocks: int | None) -> Row:
    """Serves requests in order, each before the next one comes.

    Args:
        count: replicas.
        num_blocks: of each replica; None: without bound.

    Returns:
        Hits in prompts, prompts cached; the most that a replica computed over the mean; time of the routing alone.
    """
    now = 0.0
    options: dict[str, Any] = {"block_size": source.block_size} if router in INDEXED else {}
    names = [f"replica{i}" for i in range(count)]
    made = make_router(router, names, clock=lambda: now, **options)
    replays = {name: Replay(CacheConfig("radix", source.block_size, num_blocks=num_blocks)) for name in names}
    if router in INDEXED:
        for name in names:
            replays[name].cache.subscribe(_listener(made, name))
    routing_s = 0.0
    for request in requests:
        now += 1.0
        started = time.thread_time()
        assignment = made.route(request.prompt, request.namespace)
        routing_s += time.thread_time() - started
        num_cached = replays[assignment.replica].feed(request.prompt, b"", request.namespace)
        made.prefilled(assignment, num_cached)
        made.finish(assignment)
    computed = [each.num_prompt_tokens - each.num_cached_tokens for each in replays.values()]
    num_requests = sum(each.num_requests for each in replays.values())
    num_prompt = sum(each.num_prompt_tokens for each in replays.values())
    return {
        "trace": source.name,
        "router": router,
        "num_replicas": count,
        "num_blocks": num_blocks,
        "num_requests": num_requests,
        "num_prompt_tokens": num_prompt,
        "num_computed_tokens": sum(computed),
        "hit_rate": 1 - sum(computed) / num_prompt,
        "load_ratio": max(computed) * count / sum(computed),
        "route_us": routing_s * 1e6 / num_requests,
    }


def _listener(router: Router, name: str) -> Callback:
    return lambda _, event: router.apply(name, event)

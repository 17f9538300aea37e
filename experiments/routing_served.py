"""The same traces against the clock: a fleet of simulated GPUs in virtual time. For `experiments.routing`.

Each replica is the real scheduler, manager and cache; a roofline of Llama-3-8B on an H100 says how long a step takes.
Conversations and agents run closed loop (a turn comes when the one before has ended), 12 at once on each replica;
Mooncake arrives by its own clock; questions and chats arrive by a Poisson process. Outputs are cut to 64 tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from experiments.lab.harness import Row
from experiments.routing_replay import INDEXED, Source
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.fleet.simulated import Fleet
from radixkv.scheduling.scheduler import Scheduler
from radixkv.simulate import Arrivals, ClosedLoop, OpenLoop, Roofline, Simulator, poisson, run, summarize
from radixkv.traces import TraceRequest

MODEL, GPU = "llama-3-8b", "h100-sxm"
MAX_OUTPUT_TOKENS = 64
OPEN_PER_REPLICA = 12
RATE_PER_REPLICA = {"bbh": 4.0, "chat": 12.0}  # a second
NO_BOUND = 2**26  # blocks: more than any trace fills


def serve(source: Source, requests: Iterable[TraceRequest], router: str, count: int, num_blocks: int | None) -> Row:
    """Serves requests with a fleet.

    Args:
        count: replicas.
        num_blocks: of each replica; None: without bound.
    """
    options: dict[str, Any] = {"block_size": source.block_size} if router in INDEXED else {}
    cost = Roofline.of(MODEL, GPU)

    def make_simulator(**hooks: Any) -> Simulator:
        manager = KVManager(RadixCache(source.block_size), num_blocks or NO_BOUND)
        return Simulator(Scheduler(manager), cost, **hooks)

    fleet = Fleet(router, make_simulator, num_replicas=count, **options)
    result = run(fleet, _arrivals(source, requests, count))
    found = summarize(result.served)
    busy = [fleet.simulator(name).busy_s for name in fleet.names]
    work = [replica.work_tokens for replica in fleet.router.replicas]
    kept = ("num_requests", "hit_rate", "duration_s", "output_throughput", "request_throughput")
    times = ("ttft_p50_ms", "ttft_p99_ms", "latency_p50_ms", "latency_p99_ms")
    return {
        "trace": source.name,
        "router": router,
        "num_replicas": count,
        "num_blocks": num_blocks,
        **{name: found[name] for name in (*kept, *times)},
        "num_refused": result.num_refused,
        "load_ratio": max(work) * count / sum(work),
        "busy_ratio": max(busy) * count / sum(busy),
    }


def pool_blocks(block_size: int) -> int:
    """Returns the blocks that fit beside the model."""
    return Roofline.of(MODEL, GPU).num_blocks(block_size)


def _arrivals(source: Source, requests: Iterable[TraceRequest], count: int) -> Arrivals:
    cut = _cut(requests)
    if source.name in RATE_PER_REPLICA:
        return poisson(cut, RATE_PER_REPLICA[source.name] * count)
    if source.name == "mooncake":
        return OpenLoop(cut)
    return ClosedLoop(cut, OPEN_PER_REPLICA * count)


def _cut(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    for request in requests:
        yield replace(request, output=request.output[: MAX_OUTPUT_TOKENS * TOKEN_BYTES])

"""A router over replicas: it follows what each cache holds, and sends a request where it costs least."""

from radixkv import CacheConfig, Replay, make_router, open_workload

NAMES = [f"replica{i}" for i in range(4)]
requests = list(open_workload("few_shot", seed=0))


def follow(router, name, cache):
    """Tells a router of everything that a replica's cache holds, and of each change."""
    cache.subscribe(lambda number, event: router.apply(name, event))


for policy in ("round_robin", "longest_match", "cache_aware"):
    replicas = {name: Replay(CacheConfig("radix", block_size=16, num_blocks=2_000)) for name in NAMES}
    options = {} if policy == "round_robin" else {"block_size": 16}
    router = make_router(policy, NAMES, **options)
    for name, replica in replicas.items():  # in one process; `radixkv.fleet.routing.zmq` does it over a network
        follow(router, name, replica.cache)
    for request in requests:
        sent = router.route(request.prompt, request.namespace)
        num_cached = replicas[sent.replica].feed(request.prompt, namespace=request.namespace)
        router.prefilled(sent, num_cached)  # its first token came
        router.finish(sent)  # it has ended
    computed = [replica.num_prompt_tokens - replica.num_cached_tokens for replica in replicas.values()]
    hit_rate = sum(r.num_cached_tokens for r in replicas.values()) / sum(r.num_prompt_tokens for r in replicas.values())
    print(f"{policy:>13}: {hit_rate:6.1%} hit, the busiest computes {max(computed) / sum(computed):.0%} of all")

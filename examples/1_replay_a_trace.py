"""What would a radix tree buy me? Replays a trace through both caches, in pools of three sizes.

python examples/1_replay_a_trace.py                 # a synthetic few-shot workload
python examples/1_replay_a_trace.py trace.jsonl     # conversations, requests, block ids: see the README
"""

import sys

from radixkv import CacheConfig, Replay, open_trace, open_workload

requests = list(open_trace(sys.argv[1]) if len(sys.argv) > 1 else open_workload("few_shot", seed=0))
print(f"{len(requests):,} requests, {sum(request.num_prompt_tokens for request in requests):,} prompt tokens")

for num_blocks in (300, 1_000, None):
    for cache in ("flat_hash", "radix"):
        replay = Replay(CacheConfig(cache, block_size=16, num_blocks=num_blocks), cache_outputs=True)
        for request in requests:
            replay.feed(request.prompt, request.output, request.namespace)
        pool = "no bound" if num_blocks is None else f"{num_blocks:,} blocks"
        print(f"{pool:>12}  {cache:>9}  {replay.hit_rate:7.2%} hit  {replay.num_evicted_blocks:,} blocks evicted")

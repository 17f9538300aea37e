"""The engine: requests that share a prefix, a stream, several samples, and what was counted.

python examples/3_the_engine.py                    # a small random model
python examples/3_the_engine.py path/to/folder     # a Hugging Face folder, or a .gguf file
"""

import sys

from radixkv import CacheConfig, Engine, SamplingParams, SchedulerConfig

engine = Engine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "tiny_gpt",
    cache=CacheConfig("radix", block_size=16, num_blocks=512),
    scheduler=SchedulerConfig(max_num_batched_tokens=256),
)
story = "Once upon a time there was a radix tree that shared to the token. " * 4
greedy = SamplingParams(max_tokens=8, ignore_eos=True)
for output in engine.generate([story + "It grew", story + "It fell"], greedy):
    print(f"{len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} cached: {output.outputs[0].text!r}")

for output in engine.stream(story + "It was", greedy):
    print(output.num_cached_tokens, output.outputs[0].token_ids)

sampled = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
(output,) = engine.generate(story, sampled)  # three samples share the prompt's blocks
print([sample.token_ids for sample in output.outputs])
print(next(line for line in engine.metrics.text().splitlines() if line.startswith("radixkv:prefix_cache_hits_total")))

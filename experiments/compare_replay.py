"""Every cache of `experiments.compare` on one trace, side by side; and the engine with each of them."""

import gc
from typing import Any

from experiments.compare_options import EMBEDDED, Config
from experiments.compare_report import SERVED_REQUESTS, SERVING_TITLE
from experiments.lab.harness import Row, print_table, progress
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.tokens import unpack
from radixkv.simulate.model_shapes import MODEL_SHAPES
from radixkv.traces import open_workload

SERVED_PROMPT_BYTES = 1000


def replay(trace: Any, name: str, config: Config) -> list[Row]:
    """Feeds a trace to every cache, each request to all before the next, so that they share the machine's moods."""
    # An unbounded tree that shares to the token hits all there is to hit: the optimum that the others are held against.
    best = CacheConfig("radix", max(config.block_size), partial_blocks=max(config.block_size) > 1)
    replays = {cache: Replay(cache, cache_outputs=config.cache_outputs) for cache in (*config.caches(), best)}
    gc.collect()
    gc.disable()  # a collection in the middle of one cache's turn would be charged to it
    try:
        with progress(name, None) as bar:
            for request in trace:
                for each in replays.values():
                    each.feed(request.prompt, request.output, request.namespace)
                bar.advance(bar.task_ids[0])
    finally:
        gc.enable()
    optimum = replays[best].num_cached_tokens
    if trace.tokenizer is not None:
        tokens = trace.tokenizer.name
    else:
        tokens = "random" if not trace.formats else "block ids" if trace.sharing_known else "lengths"
    formats = ", ".join(dict.fromkeys(trace.formats))
    more = {"tokens": tokens, "format": formats, "remarks": trace.counts.remarks()}
    return [_row(name, replays[cache], optimum, config) | more for cache in config.caches()]


def _row(trace: str, replayed: Replay, optimum: int, config: Config) -> Row:
    cache = replayed.config
    num_requests = max(replayed.num_requests, 1)
    kv_bytes = MODEL_SHAPES[config.model_shape].kv_bytes_per_token
    return {
        "trace": trace,
        "cache": cache.cache,
        "block_size": cache.block_size,
        "partial_blocks": cache.partial_blocks,
        "num_blocks": cache.num_blocks,
        "policy": cache.policy,
        "cache_outputs": config.cache_outputs,
        "num_requests": replayed.num_requests,
        "num_refused_requests": replayed.num_refused_requests,
        "num_prompt_tokens": replayed.num_prompt_tokens,
        "num_cached_tokens": replayed.num_cached_tokens,
        "num_computed_tokens": replayed.num_prompt_tokens - replayed.num_cached_tokens,
        "hit_rate": replayed.hit_rate,
        "share_of_optimum": replayed.num_cached_tokens / optimum if optimum else 1.0,
        "num_evicted_blocks": replayed.num_evicted_blocks,
        "peak_blocks": replayed.peak_blocks,
        "peak_kv_bytes": replayed.peak_blocks * cache.block_size * kv_bytes,
        "model_shape": config.model_shape,
        "index_us_per_request": (replayed.index_ns - replayed.hash_ns) / 1e3 / num_requests,
        "hash_us_per_request": replayed.hash_ns / 1e3 / num_requests,
        "index_bytes_per_token": replayed.index_bytes_per_token(),
    }


def serve_embedded(config: Config) -> list[Row]:
    """Serves short requests of the embedded workload on tiny_gpt, all at once, with each cache; prints a table.

    Raises:
        AssertionError: two caches gave different tokens.
    """
    # These load torch, which a trace's comparison does without.
    from experiments.serving import COLUMNS, Arrival, serve, summarize
    from radixkv.engine.engine import Engine

    arrivals: list[Arrival] = []
    for request in open_workload(EMBEDDED, seed=config.seed):
        if 0 < request.num_prompt_tokens <= SERVED_PROMPT_BYTES and len(arrivals) < SERVED_REQUESTS:
            arrivals.append(Arrival(0.0, tuple(unpack(request.prompt).tolist()), 16))
    rows, answers = [], []
    with progress("serving on tiny_gpt", len(config.cache)) as bar:
        for cache in config.cache:
            engine = Engine.from_pretrained("tiny_gpt", cache=CacheConfig(cache, num_blocks=4096))
            serve(engine, [Arrival(0.0, tuple(range(40)), 4)] * 2)  # first calls of everything
            outputs = serve(engine, arrivals)
            rows.append({"cache": cache, **summarize(outputs)})
            answers.append([output.outputs[0].token_ids for output in outputs])
            bar.advance(bar.task_ids[0])
    assert all(answer == answers[0] for answer in answers), "the caches gave different tokens"
    print_table(SERVING_TITLE, COLUMNS, rows)
    return rows

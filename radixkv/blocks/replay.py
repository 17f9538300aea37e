"""Replays a trace of requests through the real manager and cache, one request at a time: what would be hit?

With requests of your own::

    replay = Replay(CacheConfig(cache="radix", block_size=16, num_blocks=10_000))
    for request in requests:
        replay.feed(request.prompt, request.output)
    print(replay.num_cached_tokens / replay.num_prompt_tokens)
"""

import gc
import sys
import time
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.config import CacheConfig
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.contract import PrefixCache
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


class Replay:
    """One cache under a trace, and what came of it so far.

    Attributes:
        num_requests, num_prompt_tokens, num_cached_tokens: of all requests fed; hits are counted in prompts alone, and
            at least one token of a prompt is always computed.
        num_refused_requests: those longer than the pool; computed without the cache, nothing of them is kept.
        peak_blocks: most blocks in use at once, cached ones included.
        index_ns: nanoseconds spent in manager and cache, hashing included.
    """

    def __init__(
        self, config: CacheConfig, *, cache_outputs: bool = False, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """Makes an empty cache.

        Args:
            config: which.
            cache_outputs: publish outputs too, as an engine does; else prompts alone.
            clock_ns: what time is measured with.
        """
        self.config = config
        self.cache_outputs = cache_outputs
        self.cache = config.make()
        self.manager = KVManager(self.cache, config.num_blocks)
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_refused_requests = 0
        self.peak_blocks = 0
        self.index_ns = 0
        self._clock_ns = clock_ns

    def feed(self, prompt: TokenIds, output: TokenIds = b"", namespace: Namespace | None = None) -> int:
        """Serves one request.

        An empty prompt is counted and does not reach the cache: no engine serves one.

        Args:
            prompt, output: [any number] tokens.
            namespace: what its KV depends on, or is to be kept apart by.

        Returns:
            How many of the prompt's tokens were cached.

        Raises:
            ValueError: tokens are bad.
        """
        prompt = pack(prompt)
        if not prompt:
            self.num_requests += 1
            return 0
        tokens = prompt + pack(output) if self.cache_outputs else prompt
        manager = self.manager
        started = self._clock_ns()
        sequence = manager.begin(prompt, namespace)
        try:
            manager.grow(sequence, len(tokens) // TOKEN_BYTES)
        except OutOfBlocks:
            manager.cancel(sequence)
            self.num_refused_requests += 1
            num_cached = 0
        else:
            num_cached = sequence.num_cached_tokens
            self.peak_blocks = max(self.peak_blocks, manager.allocator.num_used)
            manager.publish(sequence, tokens)
            manager.commit()
            manager.end(sequence, tokens)
        self.index_ns += self._clock_ns() - started
        self.num_requests += 1
        self.num_prompt_tokens += len(prompt) // TOKEN_BYTES
        self.num_cached_tokens += num_cached
        return num_cached

    @property
    def hash_ns(self) -> int:
        """Of index_ns, the nanoseconds spent in hashing; 0 for a cache that does not hash."""
        return getattr(self.cache, "hash_ns", 0)

    @property
    def num_evicted_blocks(self) -> int:
        """So far."""
        return self.manager.num_evicted_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached, 0 .. 1; 0 before the first."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def index_bytes_per_token(self) -> float:
        """Returns the memory of the index over the tokens cached in its blocks; 0 for an empty one. O(index)."""
        num_tokens = self.cache.num_cached_tokens
        return index_bytes(self.cache) / num_tokens if num_tokens else 0.0


def index_bytes(cache: PrefixCache) -> int:
    """Returns the bytes of every object that a cache reaches, each counted once. O(index)."""
    seen: set[int] = set()
    waiting: list[Any] = [cache]
    total = 0
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        waiting.extend(gc.get_referents(thing))
    return total

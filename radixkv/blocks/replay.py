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
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.contract import PrefixCache
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import Namespace
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack

CACHES = ("null", "flat_hash", "radix")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A cache and its pool.

    Attributes:
        cache: null, flat_hash (vLLM's rules: its free queue is its policy, whole blocks only) or radix.
        block_size: tokens in a block.
        partial_blocks: radix alone: share to the token.
        num_blocks: blocks in the pool; None without bound.
        policy: radix alone: an eviction policy's name.
        hash_algorithm: flat_hash alone.
        tenant_cap: blocks that are held at most of each tenant (a `Salt`) while nobody uses them; None: no cap.
    """

    cache: str = "radix"
    block_size: int = 16
    partial_blocks: bool = True
    num_blocks: int | None = None
    policy: str = "lru"
    hash_algorithm: str = "sha256"
    tenant_cap: int | None = None

    def make(self) -> PrefixCache:
        """Returns the cache.

        Raises:
            ValueError: a name is not known, or a number out of range.
        """
        if self.cache == "radix":
            return RadixCache(
                self.block_size,
                partial_blocks=self.partial_blocks,
                policy=self.policy,
                tenant_caps=self.tenant_cap,
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.cache == "flat_hash":
            return FlatHashCache(
                self.block_size,
                hash_algorithm=self.hash_algorithm,
                accept_collisions=True,
                tenant_caps=self.tenant_cap,
            )
        if self.cache == "null":
            return NullCache(self.block_size)
        raise ValueError(f"cache: expected one of {', '.join(CACHES)}, got {self.cache!r}")


class Replay:
    """One cache under a trace, and what came of it so far.

    Attributes:
        num_requests, num_prompt_tokens, num_cached_tokens: of all requests fed; hits are counted in prompts alone, and
            at least one token of a prompt is always computed.
        num_refused_requests: those longer than the pool; computed without the cache, nothing of them is kept.
        peak_blocks: most blocks in use at once, cached ones included.
        index_ns: time spent in manager and cache, hashing included; hash_ns: in hashing.
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
        """Serves one request; returns how many of its prompt's tokens were cached.

        An empty prompt is counted, and goes past the cache: no engine serves one.

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
        return getattr(self.cache, "hash_ns", 0)

    @property
    def num_evicted_blocks(self) -> int:
        return self.manager.num_evicted_blocks

    @property
    def hit_rate(self) -> float:
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

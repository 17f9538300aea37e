"""Replays a trace through the cache and the pool of a hybrid model, one request at a time: what would be hit?"""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.blocks.hybrid_manager import HybridManager
from radixkv.blocks.pages import OutOfPages
from radixkv.cache.hybrid.cache import HybridCache
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


class HybridReplay:
    """One cache under a trace, and what came of it so far.

    Args:
        cache: that holds nothing.
        num_bytes: of the pool, for all that layers keep and all that runs; None without bound.
        cache_outputs: leave checkpoints at the ends of outputs too, where the placement asks for them.

    Attributes:
        manager: of the cache and its pool.
        num_requests, num_prompt_tokens, num_cached_tokens: of all requests fed.
        num_passes: forward passes over prompts.
        num_refused_requests: those longer than the pool; computed without the cache, nothing of them is kept.
        num_kv_tokens: tokens computed again although their KV was there.
        peak_bytes: most in use at once.
    """

    def __init__(self, cache: HybridCache, num_bytes: int | None = None, *, cache_outputs: bool = False) -> None:
        self.cache = cache
        self.manager = HybridManager(cache, num_bytes)
        self.cache_outputs = cache_outputs
        self.num_requests = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_passes = self.num_refused_requests = self.num_kv_tokens = self.peak_bytes = 0

    def feed(
        self,
        prompt: TokenIds,
        output: TokenIds = b"",
        namespace: Namespace | None = None,
        *,
        turns: Iterable[int] = (),
        named: Iterable[int] = (),
    ) -> int:
        """Serves one request; returns how many of the prompt's tokens were cached (see `HybridManager.begin`)."""
        prompt = pack(prompt)
        self.num_requests += 1
        if not prompt:
            return 0
        manager = self.manager
        num_prompt = len(prompt) // TOKEN_BYTES
        tokens = prompt + pack(output) if self.cache_outputs else prompt
        num_tokens = len(tokens) // TOKEN_BYTES
        self.num_prompt_tokens += num_prompt
        sequence = manager.begin(prompt, namespace, turns=turns, named=named)
        stops = dict.fromkeys((*sequence.lease.stops, num_prompt, num_tokens))
        kept = {*sequence.lease.stops, *((num_tokens,) if self.cache.placement.keeps_output else ())}
        num_cached = sequence.lease.num_tokens
        try:
            for end in sorted(stops):
                manager.grow(sequence, end)
                self.peak_bytes = max(self.peak_bytes, manager.pool.num_used * manager.layout.page_bytes)
                if end in kept:
                    manager.publish(sequence, tokens, end)
                    manager.commit()
                self.num_passes += end <= num_prompt
        except OutOfPages:
            self.num_refused_requests += 1
            num_cached = 0
        else:
            self.num_kv_tokens += sequence.lease.num_kv_tokens - num_cached
        manager.end(sequence, tokens if num_tokens > num_prompt else None)
        self.num_cached_tokens += num_cached
        return num_cached

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached, 0 .. 1; 0 before the first."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

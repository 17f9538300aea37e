"""Replays a trace through vLLM's rules for models of several groups, one request at a time: what would be hit?

With requests of your own::

    replay = GroupedReplay(GroupLayout.of(MODEL_SHAPES["qwen3.5-35b-a3b"].layers))
    for request in requests:
        replay.feed(request.prompt)
    print(replay.num_cached_tokens / replay.num_prompt_tokens)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.grouped_manager import GroupedKVManager
from radixkv.cache.flat_hash.grouped import GroupedHashCache
from radixkv.cache.flat_hash.groups import GroupLayout
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


class GroupedReplay:
    """One pool under a trace, and what came of it so far. Prompts alone are cached.

    Attributes:
        num_requests, num_prompt_tokens, num_cached_tokens: of all requests fed.
        num_passes: forward passes that computed prompts.
        num_refused_requests: those that did not fit into the pool; counted as computed.
        peak_blocks: most blocks in use at once, cached ones included.
        index_ns: nanoseconds spent in manager and cache, hashing included.
    """

    def __init__(
        self,
        layout: GroupLayout,
        num_blocks: int | None = None,
        *,
        budget: int = 8192,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Makes an empty pool.

        Args:
            layout: of the model.
            num_blocks: in the pool; None: without bound.
            budget: most tokens in a forward pass.
            clock_ns: what time is measured with.
        """
        self.cache = GroupedHashCache(layout, clock_ns=clock_ns)
        self.manager = GroupedKVManager(self.cache, num_blocks)
        self.budget = budget
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_passes = 0
        self.num_refused_requests = 0
        self.peak_blocks = 0
        self.index_ns = 0
        self._clock_ns = clock_ns

    def feed(self, prompt: TokenIds, namespace: Namespace | None = None) -> int:
        """Serves one request; an empty prompt is counted and does not reach the cache.

        Returns:
            How many of the prompt's tokens were cached.

        Raises:
            ValueError: tokens are bad.
        """
        prompt = pack(prompt)
        num_tokens = len(prompt) // TOKEN_BYTES
        num_cached = 0
        if prompt:
            started = self._clock_ns()
            sequence = self.manager.begin(prompt, namespace)
            num_cached = sequence.num_cached_tokens
            try:
                while sequence.num_computed < num_tokens:
                    self.manager.compute(sequence, self.budget)
                    self.peak_blocks = max(self.peak_blocks, self.manager.allocator.num_used)
            except OutOfBlocks:
                num_cached = 0
                self.num_refused_requests += 1
            self.manager.end(sequence)
            self.num_passes += sequence.num_passes
            self.index_ns += self._clock_ns() - started
        self.num_requests += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        return num_cached

    @property
    def hash_ns(self) -> int:
        """Of index_ns, the nanoseconds spent in hashing."""
        return self.cache.hash_ns

    @property
    def num_evicted_blocks(self) -> int:
        """So far."""
        return self.manager.num_evicted_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached, 0 .. 1; 0 before the first."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

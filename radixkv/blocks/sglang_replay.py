"""Replays a trace by SGLang's rules for recurrent models, in a pool without bound: what would be hit?

KV lies in a radix tree of pages. A state stands at the end of a node, and a match ends at the deepest one. Each forward
pass leaves one state, so where it leaves it is all that matters here; pools, of which SGLang has one a kind of layer,
are not modelled. Source: SGLang 0.5.23, `python/sglang/srt/mem_cache`.
"""

from __future__ import annotations

import numpy as np
from sortedcontainers import SortedList

from radixkv.cache.contract import check_block_size
from radixkv.cache.layers import CELL
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack

STATES = ("extra_buffer", "no_buffer", "none")


class SGLangReplay:
    """What has been cached so far.

    Attributes:
        num_requests, num_prompt_tokens, num_cached_tokens: of all requests fed.
        num_states: kept.
    """

    def __init__(self, states: str = "extra_buffer", *, page_size: int = 1, budget: int = 8192) -> None:
        """Makes an empty cache.

        Args:
            states: where a pass leaves its state. "extra_buffer": at the last multiple of 64 tokens from its start on,
                or where the prompt left all before it (in multiples of 64), if it was not hit to there; KV after that
                state is not cached. "no_buffer": at its end. "none": there are no states. Without bound a model with
                windows is served so: what full attention matches is hit.
            page_size: tokens in a page.
            budget: most tokens in a forward pass.

        Raises:
            ValueError: a bad argument.
        """
        if states not in STATES:
            raise ValueError(f"states: expected one of {', '.join(STATES)}, got {states!r}")
        if states == "no_buffer" and page_size != 1:
            raise ValueError(f"page_size: expected 1 with no_buffer, got {page_size}")
        if type(budget) is not int or budget < 1:
            raise ValueError(f"budget: expected an integer >= 1, got {budget!r}")
        self.states = states
        self.page_size = check_block_size(page_size)
        self.budget = budget
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._kv = _Prefixes()
        self._states = _Prefixes()

    @property
    def num_states(self) -> int:
        return len(self._states)

    def feed(self, prompt: TokenIds) -> int:
        """Serves one request; returns how many of its tokens were hit.

        Raises:
            ValueError: tokens are bad.

        Cost: O(log requests) comparisons of prompts.
        """
        prompt = pack(prompt)
        num_tokens = len(prompt) // TOKEN_BYTES
        full = min(self._kv.longest_common(prompt), max(num_tokens - 1, 0)) // self.page_size * self.page_size
        hit = full if self.states == "none" else self._states.longest_prefix(prompt, full)
        branch = full // CELL * CELL
        for start in range(hit, num_tokens, self.budget):
            end = min(start + self.budget, num_tokens)
            kept = end
            if self.states == "extra_buffer":
                kept = branch if start < branch <= end else start + (end - start) // CELL * CELL
            if kept > start:
                self._kv.add(prompt[: kept * TOKEN_BYTES])
                if self.states != "none":
                    self._states.add(prompt[: kept * TOKEN_BYTES])
        self.num_requests += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += hit
        return hit


class _Prefixes:
    """Token sequences in byte order, in which those that share most with one stand next to it."""

    def __init__(self) -> None:
        self._sorted: SortedList[bytes] = SortedList()
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, tokens: bytes) -> None:
        if tokens not in self._known:
            self._known.add(tokens)
            self._sorted.add(tokens)

    def longest_common(self, tokens: bytes) -> int:
        """Returns the most tokens that one of the sequences shares with this one."""
        at = self._sorted.bisect_left(tokens)
        return max((_num_common(tokens, other) for other in self._sorted[max(at - 1, 0) : at + 1]), default=0)

    def longest_prefix(self, tokens: bytes, limit: int) -> int:
        """Returns the length in tokens of the longest sequence that this one begins with, of those up to a limit."""
        while limit > 0:
            at = self._sorted.bisect_right(tokens[: limit * TOKEN_BYTES])
            if not at:
                return 0
            before = self._sorted[at - 1]
            common = _num_common(tokens, before)
            if common * TOKEN_BYTES == len(before) and common <= limit:
                return common
            limit = min(common, limit - 1)  # whatever the sequence begins with, the one before it begins with too
        return 0


def _num_common(tokens: bytes, other: bytes) -> int:
    num_bytes = min(len(tokens), len(other))
    pair = (np.frombuffer(packed[:num_bytes], np.int32) for packed in (tokens, other))
    different = np.flatnonzero(np.not_equal(*pair))
    return int(different[0]) if different.size else num_bytes // TOKEN_BYTES

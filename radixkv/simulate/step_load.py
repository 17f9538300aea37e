"""StepLoad: what a scheduled batch makes a device do, in counts. Measured by the simulator, priced by a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.scheduler import Scheduler


class StepLoad(NamedTuple):
    """Counts of one step. Tokens of KV are of all layers; a *pair* is one query token with one token that it sees.

    Attributes:
        num_prefill_tokens, num_decode_tokens: computed; a decode is one token after a prompt's end.
        num_logits: rows that a token is sampled from.
        num_prefill_seqs: chunks of prompts.
        num_prefill_pairs: the quadratic part.
        num_decode_kv_tokens: that decodes see, each sequence by itself: what attention reads without sharing.
        num_unique_kv_tokens: the same, tokens in shared blocks counted once: the least that can be read.
        num_copied_tokens: rows of partial matches and forks, copied before the step.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_logits: int = 0
    num_prefill_seqs: int = 0
    num_prefill_pairs: int = 0
    num_decode_kv_tokens: int = 0
    num_unique_kv_tokens: int = 0
    num_copied_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    def within(self, window: int) -> StepLoad:
        """Returns the load of layers whose tokens see so many at most, themselves included.

        Sums over sequences are limited and not each sequence, so this is at most what it says: exact where all of a
        kind are longer than the window, or none is.
        """
        return self._replace(
            num_prefill_pairs=min(self.num_prefill_pairs, self.num_prefill_tokens * window),
            num_decode_kv_tokens=min(self.num_decode_kv_tokens, self.num_decode_tokens * window),
            num_unique_kv_tokens=min(self.num_unique_kv_tokens, self.num_decode_tokens * window),
        )


def measure_load(batch: ScheduledBatch, scheduler: Scheduler) -> StepLoad:
    """Counts what a scheduled batch takes.

    Args:
        batch: as `Scheduler.schedule` returned it, not committed yet.

    Cost: O(sequences) where all that run decode and nothing is copied; else O(blocks of those that decode).
    """
    block_size = scheduler.block_size
    num_prefill = num_prefill_seqs = num_pairs = num_logits = 0
    num_kv = num_own_blocks = num_empty = 0
    decoding = []
    for running, item in zip(scheduler.batch, batch.sequences, strict=True):
        end = item.end
        num_logits += item.needs_logits
        if end > running.sequence.num_prompt_tokens and end - item.start == 1:
            num_kv += end
            num_blocks = -(-end // block_size)
            num_empty += num_blocks * block_size - end
            num_own_blocks += num_blocks - running.blocks.lease.num_tokens // block_size
            decoding.append((item.block_table, num_blocks))
        else:
            count = end - item.start
            num_prefill += count
            num_prefill_seqs += 1
            num_pairs += count * item.start + count * (count + 1) // 2
    if not decoding:
        num_blocks = 0
    elif not batch.copies and len(decoding) == len(scheduler.running):
        # Nothing else is pinned, so what the cache has pinned is what these sequences share or hold alone.
        num_blocks = scheduler.manager.cache.sizes.pinned + num_own_blocks
    else:
        num_blocks = _num_distinct(decoding, scheduler.manager.allocator.num_blocks or 0)
    return StepLoad(
        num_prefill,
        len(decoding),
        num_logits,
        num_prefill_seqs,
        num_pairs,
        num_kv,
        # A block that is not full is its sequence's own, so what is empty in it is counted once.
        num_blocks * block_size - num_empty,
        sum(copy.num_tokens for copy in batch.copies),
    )


def num_pinned_kv_tokens(scheduler: Scheduler) -> tuple[int, int]:
    """Returns the KV tokens that a step would see in which all that run decode: of each by itself, and distinct ones.

    O(running).
    """
    block_size = scheduler.block_size
    logical = own = 0
    for running in scheduler.running:
        num_tokens = running.sequence.num_tokens
        logical += num_tokens
        own += num_tokens - running.blocks.lease.num_tokens
    return logical, own + scheduler.manager.cache.sizes.pinned * block_size


def _num_distinct(tables: Sequence[tuple[np.ndarray, int]], pool_size: int) -> int:
    seen = np.zeros(pool_size, bool)
    seen[np.concatenate([table[:num_blocks] for table, num_blocks in tables])] = True
    return int(np.count_nonzero(seen))

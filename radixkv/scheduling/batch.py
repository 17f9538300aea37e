"""A step as plain data, without tensors: what is to be computed (`ScheduledBatch`), and what it did (`StepStats`)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixkv.blocks.kv_manager import BlockCopy, PoolSizes


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: tokens to compute, and where their KV goes.

    Attributes:
        sequence_id: the scheduler's number of the sequence; a request with n samples is n sequences after its prompt.
        token_ids: [>= end] int32, all tokens of the sequence so far; those at start .. end are to be computed.
        start: tokens before it have their KV in blocks, from the cache or from earlier steps.
        end: one past the last token to compute.
        write_start: tokens before it are not written: the cache's blocks, which took the place of the sequence's own,
            hold their KV already. (They are computed all the same; start <= write_start <= end.)
        block_table: [>= ceil(end / block_size)] int32.
        needs_logits: whether a token is sampled after the last of them.
    """

    sequence_id: int
    token_ids: np.ndarray
    start: int
    end: int
    write_start: int
    block_table: np.ndarray
    needs_logits: bool

    @property
    def num_tokens(self) -> int:
        """To compute in this step."""
        return self.end - self.start


class ScheduledBatch(NamedTuple):
    """What a step computes, and in which order.

    First all copies; then in each layer all writes before any read, as sequences of one batch share what it computes;
    then logits where they are needed.

    Attributes:
        sequences: in the order of `Scheduler.batch`; each at most once.
        copies: of rows, in all layers, from cached blocks into sequences' own.
    """

    sequences: list[ScheduledSequence]
    copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        """To compute in this step, of all sequences. O(sequences)."""
        return sum(sequence.end - sequence.start for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step did: of an engine, or of a simulator in virtual time.

    Attributes:
        step: its number, from 1.
        num_running, num_waiting: sequences after it.
        num_prefill_tokens, num_decode_tokens: computed in it.
        num_hit_tokens: of prompts first admitted in it, found in the cache.
        num_finished: requests that ended in it.
        num_failed: sequences that ended in it with an error.
        num_preemptions, num_evicted_blocks: in it.
        sizes: blocks of the pool after it, by owner.
        schedule_s: seconds in scheduler, manager and cache; forward_s: in the model; postprocess_s: in sampling, text.
    """

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_evicted_blocks: int
    num_finished: int
    num_failed: int
    sizes: PoolSizes
    schedule_s: float
    forward_s: float
    postprocess_s: float

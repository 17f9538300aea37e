"""What the scheduler hands to whoever runs a step: plain numbers, no tensors, no caches."""

from typing import NamedTuple

import numpy as np

from radixkv.blocks.kv_manager import BlockCopy


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
        return self.end - self.start


class ScheduledBatch(NamedTuple):
    """A step: first all copies, then in each layer all writes before any read, then logits where they are needed."""

    sequences: list[ScheduledSequence]
    copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.end - sequence.start for sequence in self.sequences)

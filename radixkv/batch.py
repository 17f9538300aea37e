"""What the scheduler hands to whoever runs a step: plain numbers, no tensors, no caches.

Made by `radixkv.scheduler`, read by `radixkv.runner` and `radixkv.simulate`.
"""

from dataclasses import dataclass

import numpy as np

from radixkv.kv_manager import BlockCopy


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: tokens to compute, and where their KV goes.

    Attributes:
        sequence_id: the scheduler's number of the sequence; a request with n samples is n sequences after its prompt.
        token_ids: [num_tokens] int32, the tokens to compute.
        start: position of the first of them: tokens before it are in the cache or were computed.
        block_table: [>= ceil((start + num_tokens) / block_size)] int32.
        slot_mapping: [num_tokens] int64, block * block_size + row for each token; -1 where nothing may be written,
            because the block holds this token's KV already.
        needs_logits: whether a token is sampled after the last of them.
    """

    sequence_id: int
    token_ids: np.ndarray
    start: int
    block_table: np.ndarray
    slot_mapping: np.ndarray
    needs_logits: bool

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: first all copies, then in each layer all writes before any read, then logits where they are needed."""

    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

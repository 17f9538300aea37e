"""One sample of a request in the scheduler: its tokens, and what it has while it waits and while it runs.

A `Sequence` is the same object from its request's arrival to its end. While it waits, the queue has a `WaitingSequence`
of it; while it runs, the scheduler has a `RunningSequence`, made when it is admitted and dropped when it ends or is
preempted. So what runs always has blocks, and what waits never does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.blocks.kv_manager import SequenceBlocks
from radixkv.cache.contract import Watch
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.scheduling.request import Request


class Sequence:
    """One sample of a request, and its tokens so far. Read it; the scheduler alone changes it.

    Args:
        sequence_id: unique in its scheduler.
        arrival: (request, sample), by which sequences are older or younger.
        request: whose sample it is.
        sample: its number, from 0.

    Attributes:
        prompt: the prompt's tokens, packed int32.
        token_ids: [num_prompt_tokens + max_tokens] int32; the first num_tokens of them are the prompt and what was
            generated.
        running: what it has while it runs; None while it waits, and after its end.
        num_cached_tokens: tokens of the prompt found in the cache at its first admission; None before that.
        num_preemptions: so far.
    """

    __slots__ = (
        "_packed",
        "arrival",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prompt",
        "request",
        "running",
        "sample",
        "sequence_id",
        "token_ids",
    )

    def __init__(self, sequence_id: int, arrival: tuple[int, int], request: Request, sample: int) -> None:
        prompt = np.array(request.prompt_token_ids, np.int32)
        self.sequence_id = sequence_id
        self.arrival = arrival
        self.request = request
        self.sample = sample
        self.token_ids = np.empty(len(prompt) + request.sampling_params.max_tokens, np.int32)
        self.token_ids[: len(prompt)] = prompt
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self.running: RunningSequence | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self._packed = self.prompt = prompt.tobytes()

    @property
    def generated_token_ids(self) -> np.ndarray:
        """[num_tokens - num_prompt_tokens] int32, a view."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    def packed(self, start: int = 0, end: int | None = None) -> bytes:
        """Returns tokens start .. end as packed int32. O(tokens returned); all of them are packed once a length."""
        if start == 0 and end is None:
            if len(self._packed) != TOKEN_BYTES * self.num_tokens:
                self._packed = self.token_ids[: self.num_tokens].tobytes()
            return self._packed
        return self.token_ids[start : self.num_tokens if end is None else end].tobytes()


@dataclass(eq=False, slots=True)
class WaitingSequence:
    """A sequence in the waiting queue.

    Attributes:
        number: how many sequences began to wait before it.
        watch: follows how many of its tokens are cached; None where neither the order nor the eviction asks.
    """

    sequence: Sequence
    number: int
    watch: Watch | None = None

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that are cached now, in whole blocks; 0 without a watch."""
        return self.watch.num_tokens if self.watch is not None else 0


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A sequence with blocks.

    Attributes:
        blocks: what it holds.
        num_computed: tokens whose KV is in its blocks, computed by an earlier step or copied.
        target: num_computed once the step under way is committed.
        step: the last in which it was scheduled; -1: none yet.
    """

    sequence: Sequence
    blocks: SequenceBlocks
    num_computed: int = 0
    target: int = 0
    step: int = -1

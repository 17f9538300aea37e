"""Sequence: one sample of a request, as the scheduler sees it."""

from __future__ import annotations

import numpy as np

from radixkv.blocks.kv_manager import SequenceBlocks
from radixkv.cache.contract import Watch
from radixkv.scheduling.request import Request


class Sequence:
    """One sample of a request: its tokens so far, and what it holds. Read it; the scheduler alone changes it.

    Attributes:
        sequence_id: unique in its scheduler.
        arrival: (request, sample), by which sequences are older or younger.
        prompt: its prompt, packed.
        token_ids: [capacity] int32; the first num_tokens of them are the prompt and what was generated.
        num_computed: tokens whose KV an earlier step computed, or the cache had.
        blocks: None while it waits.
        watch: while it waits, how much of it is cached; None where nobody asks.
        num_cached_tokens: of the prompt, found in the cache at its first admission; None before it.
    """

    __slots__ = (
        "_packed",
        "arrival",
        "blocks",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prompt",
        "request",
        "sample",
        "sequence_id",
        "step",
        "target",
        "token_ids",
        "watch",
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
        self.num_computed = 0
        self.target = 0  # num_computed once the present step is committed
        self.blocks: SequenceBlocks | None = None
        self.watch: Watch | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.step = -1  # the last in which it was scheduled
        self._packed = self.prompt = prompt.tobytes()

    @property
    def generated_token_ids(self) -> np.ndarray:
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    def packed(self, start: int = 0, end: int | None = None) -> bytes:
        """Returns tokens start .. end packed; all of them are packed once for each length."""
        if start == 0 and end is None:
            if len(self._packed) != 4 * self.num_tokens:
                self._packed = self.token_ids[: self.num_tokens].tobytes()
            return self._packed
        return self.token_ids[start : self.num_tokens if end is None else end].tobytes()

"""A request in the simulator's hands. Its outputs are known from the start and come out token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from radixkv.cache.tokens import pack, unpack
from radixkv.scheduling.request import Request, RequestMetrics, SamplingParams
from radixkv.scheduling.sequence import Sequence
from radixkv.traces import TraceRequest


class Live:
    """What is known of an unfinished request.

    Attributes:
        name: the caller's; need not be unique.
        request: as the scheduler has it, under a name of the simulator's own.
        outputs: the tokens of each sample.
        num_left: samples that have not ended.
    """

    __slots__ = ("metrics", "name", "num_cached_tokens", "num_left", "num_output_tokens", "outputs", "request")

    def __init__(self, name: str, request: Request, outputs: list[list[int]], arrival_s: float) -> None:
        self.name = name
        self.request = request
        self.outputs = outputs
        self.metrics = RequestMetrics(arrival_s)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_left = len(outputs)

    @classmethod
    def of(
        cls, request: TraceRequest | Request, own_name: str, at_s: float, seed: tuple[int, ...], max_tokens: int
    ) -> Live:
        """Makes one of a trace's request, with its output if it has any, or of an engine's; other outputs are drawn."""
        outputs = []
        if isinstance(request, TraceRequest):
            outputs = [unpack(request.output).tolist()] if request.output else []
            params = SamplingParams(max_tokens=len(outputs[0]) if outputs else max_tokens, ignore_eos=True)
            name, inner = request.id, Request(own_name, unpack(request.prompt), params, request.namespace)
        else:
            prompt = unpack(pack(request.prompt_token_ids))
            name, inner = request.request_id, replace(request, request_id=own_name, prompt_token_ids=prompt)
        if not outputs:
            params = inner.sampling_params
            outputs = np.random.default_rng(seed).integers(0, 2**31 - 1, (params.n, params.max_tokens)).tolist()
        return cls(name, inner, outputs, at_s)

    def next_tokens(self, sequence: Sequence, count: int) -> list[int]:
        """Returns the next tokens of one of its samples, fewer where its output ends."""
        index = sequence.num_tokens - sequence.num_prompt_tokens
        return self.outputs[sequence.sample][index : index + count]

    def num_left_tokens(self, sequence: Sequence) -> int:
        """Returns how many tokens one of its samples has yet to generate."""
        return len(self.outputs[sequence.sample]) + sequence.num_prompt_tokens - sequence.num_tokens

"""A request in the simulator's hands. Its outputs are known from the start and come out token by token."""

from __future__ import annotations

import numpy as np

from radixkv.request import Request, RequestMetrics, SamplingParams
from radixkv.tokens import pack, unpack
from radixkv.workloads import TraceRequest


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
        if isinstance(request, TraceRequest):
            outputs = [unpack(request.output).tolist()] if request.output else []
            params = SamplingParams(max_tokens=len(outputs[0]) if outputs else max_tokens, ignore_eos=True)
            name, prompt = request.id, unpack(request.prompt)
        else:
            outputs = []
            params, name = request.sampling_params, request.request_id
            prompt = unpack(pack(request.prompt_token_ids))
        if not outputs:
            drawn = np.random.default_rng(seed).integers(0, 2**31 - 1, (params.n, params.max_tokens))
            outputs = drawn.tolist()
        return cls(name, Request(own_name, prompt, params, request.namespace), outputs, at_s)

"""Decode batches of a trace: what the real scheduler and cache would run, without a model. For `tree_bytes.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.radix.cache import RadixCache
from radixkv.scheduling.request import Request, SamplingParams
from radixkv.scheduling.scheduler import Scheduler, SchedulerConfig
from radixkv.scheduling.sequence import Sequence
from radixkv.traces import open_trace
from radixkv.traces.request import TraceRequest


@dataclass(frozen=True)
class Serving:
    """How a trace is served; sizes in tokens."""

    tokenizer: str = "qwen3"
    num_requests: int = 400
    max_prompt_tokens: int = 32_768
    """Longer prompts are left out, and empty ones."""
    output_tokens: int = 64
    """At most, and where the trace has no outputs."""
    pool_tokens: int = 1 << 21
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    every_steps: int = 16
    min_seqs: int = 8
    """Batches of fewer decoding sequences are not looked at."""


def snapshots(path: str, serving: Serving, block_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Block tables [num_seqs, max_blocks] int32 and lengths [num_seqs] of the sequences that decode in a step."""
    manager = KVManager(RadixCache(block_size), serving.pool_tokens // block_size)
    limits = SchedulerConfig(serving.max_num_batched_tokens, serving.max_num_seqs)
    scheduler = Scheduler(manager, limits)
    outputs: dict[str, np.ndarray] = {}
    for number, request in enumerate(_first(path, serving)):
        output = np.frombuffer(request.output, np.int32)[: serving.output_tokens]
        length = len(output) or serving.output_tokens
        name = str(number)
        outputs[name] = output
        prompt = tuple(np.frombuffer(request.prompt, np.int32).tolist())
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        scheduler.add(Request(name, prompt, params, request.namespace))
    step = 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        step += 1
        decoding = [item for item in batch.sequences if item.num_tokens == 1]
        if step % serving.every_steps == 0 and len(decoding) >= serving.min_seqs:
            lens = np.array([item.end for item in decoding])
            table = np.full((len(decoding), -(-int(lens.max()) // block_size)), -1, np.int32)
            for row, item in zip(table, decoding, strict=True):
                row[: len(item.block_table)] = item.block_table[: len(row)]
            yield table, lens
        for sequence, item in zip(scheduler.commit(), batch.sequences, strict=True):
            if item.needs_logits:
                scheduler.append_token(sequence, _next_token(sequence, outputs[sequence.request.request_id]))
                if len(sequence.generated_token_ids) == sequence.request.sampling_params.max_tokens:
                    scheduler.finish(sequence)


def _first(path: str, serving: Serving) -> Iterator[TraceRequest]:
    """The first requests that are short enough, and have a prompt."""
    count = 0
    for request in open_trace(path, tokenizer=serving.tokenizer):
        if 0 < request.num_prompt_tokens <= serving.max_prompt_tokens:
            yield request
            count += 1
            if count == serving.num_requests:
                return


def _next_token(sequence: Sequence, output: np.ndarray) -> int:
    """The trace's, or where it has none one that no other sequence has: samples of one prompt differ."""
    position = len(sequence.generated_token_ids)
    return int(output[position]) if len(output) else (sequence.sequence_id * 1009 + position) % 100_003

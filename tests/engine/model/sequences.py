"""A scheduler for tests: sequences of known tokens, in any chunks, batches and blocks, through a Runner."""

import numpy as np
import torch

from radixkv.blocks.kv_manager import BlockCopy
from radixkv.engine.runner import Runner
from radixkv.scheduling.batch import ScheduledBatch, ScheduledSequence


def runner_of(model, *, deterministic=True, block_size=16, num_blocks=64, dtype=None):
    """A runner whose KV is NaN wherever nothing was written, as what is read there must not matter."""
    runner = Runner(model, num_blocks=num_blocks, block_size=block_size, dtype=dtype, deterministic=deterministic)
    runner.k_cache.fill_(torch.nan)
    runner.v_cache.fill_(torch.nan)
    return runner


class Sequence:
    """Tokens, the blocks they are to lie in, and how far they are computed. `read_only` tokens are not written."""

    def __init__(self, token_ids, block_table, *, computed=0, read_only=0):
        self.token_ids = list(token_ids)
        self.block_table = np.array(block_table, dtype=np.int32)
        self.computed = computed
        self.read_only = read_only

    @property
    def left(self):
        return len(self.token_ids) - self.computed

    def scheduled(self, num_tokens, needs_logits=True):
        tokens = np.array(self.token_ids, dtype=np.int32)
        end = self.computed + num_tokens
        write_start = min(max(self.computed, self.read_only), end)
        return ScheduledSequence(7, tokens, self.computed, end, write_start, self.block_table, needs_logits)


def step(runner, parts, copies=()):
    """Computes the next tokens of each (sequence, number); their last tokens' logits, in order."""
    scheduled = [sequence.scheduled(count) for sequence, count in parts]
    logits = runner.forward(ScheduledBatch(scheduled, [BlockCopy(*copy) for copy in copies]))
    for sequence, count in parts:
        sequence.computed += count
    return logits.clone()


def every_row(runner, token_ids, block_table=None):
    """Logits after each token, computed alone, one token a step: [num_tokens, vocab_size]."""
    table = range(-(-len(token_ids) // runner.block_size)) if block_table is None else block_table
    sequence = Sequence(token_ids, table)
    return torch.cat([step(runner, [(sequence, 1)]) for _ in token_ids])


def greedy(runner, prompt, num_tokens, *, chunks=(), block_table=None):
    """(Generated ids, logits before each): the prompt in chunks of these sizes and the rest of it at once."""
    total = len(prompt) + num_tokens
    table = range(-(-total // runner.block_size)) if block_table is None else block_table
    sequence = Sequence(prompt, table)
    for count in chunks:
        step(runner, [(sequence, count)])
    rows, generated = [], []
    for _ in range(num_tokens):
        rows.append(step(runner, [(sequence, sequence.left)])[0])
        generated.append(int(rows[-1].argmax()))
        sequence.token_ids.append(generated[-1])
    return generated, torch.stack(rows)

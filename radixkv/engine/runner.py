"""Runner: owns the KV tensors and runs a scheduled batch through the model.

A step, in this order: the copies of partly matching blocks, then the forward pass, in which each layer writes all of
the batch's KV before any row reads. Plain numbers come in; logits go out. Nothing is global, and nothing but the KV
tensors outlives a call; what `tree_plans` remembers of block tables only saves time, and `forget_plans` drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from radixkv_kernels import TreePlans, copy_blocks
from torch import Tensor

from radixkv.blocks.kv_manager import BlockCopy
from radixkv.engine.model.config import ModelConfig
from radixkv.engine.model.row_linear import Product
from radixkv.engine.model.transformer import Decoder, ForwardInput
from radixkv.engine.model.weights import Model
from radixkv.scheduling.batch import ScheduledBatch, ScheduledSequence

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Runner:
    """A model with its KV.

    Args:
        model: from `radixkv.engine.model.checkpoint`; its weights are converted where they differ from what follows.
        num_blocks: blocks in the pool.
        block_size: tokens a block.
        dtype: of weights, activations and KV; None: the weights' own. float16 on a GPU only: no CPU is fast at it.
        device: None: the weights' own.
        deterministic: a row's bits are the same in every batch, whatever was cached; costs some time (see `layers`).
        tree_attention: "on": KV that sequences of a batch share is read once; "off": by each; "auto": once where that
            saves enough to pay. Attention gives the same bits either way.

    Attributes:
        k_cache, v_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim]; anything at first.
        tree_plans: what was found to be shared.

    Raises:
        ValueError: a size below 1, a dtype that does not work here, another `tree_attention`, or `deterministic` on a
            CPU whose libraries have no number of rows at which a row's bits are its own; the message has the remedy.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        deterministic: bool,
        tree_attention: str = "auto",
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {value}")
        config, weights = model.config, model.weights
        self.device = torch.device(device) if device is not None else weights.embedding.device
        self.dtype = dtype or weights.embedding.dtype
        usable = DTYPES if self.device.type != "cpu" else DTYPES[:2]
        if self.dtype not in usable:
            raise ValueError(f"dtype: expected one of {usable} on {self.device.type}, got {self.dtype}")
        self.config = config
        self.owner: Any = None  # the engine that it belongs to
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tree_plans = TreePlans(
            config.windows,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
            mode=tree_attention,
        )
        self._decoder = Decoder(Model(config, weights.to(self.dtype, self.device)), deterministic=deterministic)
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k_cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.v_cache = torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def deterministic(self) -> bool:
        """Whether a row's bits are the same in every batch."""
        return self._decoder.deterministic

    def products(self) -> list[Product]:
        """Every kind of product with weights, each once."""
        return self._decoder.products()

    @property
    def kv_bytes_per_block(self) -> int:
        """Keys and values of one block, in all layers."""
        return kv_bytes_per_block(self.config, self.block_size, self.dtype)

    def forget_plans(self) -> None:
        """Drops what is known of earlier steps' tables: for recovery. O(1), and right at any time.

        No result depends on it: a call that was interrupted, wherever, has dropped it already.
        """
        self.tree_plans.forget()

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch) -> Tensor:
        """Runs one step.

        Returns:
            [number of sequences with needs_logits, vocab_size] float32 on the device: logits after each such
            sequence's last token, in the batch's order.

        Raises:
            ValueError: a token, position or block that does not exist, or too few of them. Copies have run by then, and
                after any other failure in here KV may be half written. Or: the number of threads has changed to one at
                which bits can't be promised; nothing has been done then.

        Cost: O(num_tokens * num_parameters) and the attention.
        """
        self._decoder.check_rows()
        self.copy(batch.copies)
        if not batch.sequences:
            return torch.empty((0, self.config.vocab_size), dtype=torch.float32, device=self.device)
        return self._decoder.forward(self._input(batch.sequences), self.k_cache, self.v_cache)

    @torch.inference_mode()
    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Runs copies of rows between blocks, in all layers. `forward` begins with this.

        Raises:
            ValueError: a block does not exist, or is written and read or written twice.
        """
        if not copies:
            return
        pairs = np.array([(copy.source, copy.destination) for copy in copies], dtype=np.int64)
        if pairs.min() < 0 or pairs.max() >= self.num_blocks:  # or it would be another layer's
            raise ValueError(f"copies: expected blocks in [0, {self.num_blocks}), got {pairs.tolist()}")
        # In one call: layer l's block b is block l * num_blocks + b of the tensors seen as one layer.
        layers = np.arange(self.config.num_layers, dtype=np.int64)
        in_all_layers = (pairs + layers[:, None, None] * self.num_blocks).reshape(-1, 2)
        num_tokens = np.array([copy.num_tokens for copy in copies], dtype=np.int64)
        copy_blocks(
            self.k_cache.flatten(0, 1),
            self.v_cache.flatten(0, 1),
            self._tensor(in_all_layers[:, 0].copy()),
            self._tensor(in_all_layers[:, 1].copy()),
            self._tensor(np.tile(num_tokens, len(layers))),
        )

    def _input(self, sequences: Sequence[ScheduledSequence]) -> ForwardInput:
        starts, ends, write_starts = np.array([(s.start, s.end, s.write_start) for s in sequences], np.int64).T
        self._check(sequences, starts, ends, write_starts)
        counts = ends - starts
        row_ends = np.cumsum(counts)
        token_ids = np.concatenate([s.token_ids[s.start : s.end] for s in sequences]).astype(np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            bad = token_ids[(token_ids < 0) | (token_ids >= self.config.vocab_size)][0]
            raise ValueError(f"token_ids: expected values in [0, {self.config.vocab_size}), got {bad}")
        num_blocks = -(-ends // self.block_size)
        table = np.zeros((len(sequences), num_blocks.max()), dtype=np.int32)
        for row, used, sequence in zip(table, num_blocks, sequences, strict=True):
            row[:used] = sequence.block_table[:used]
        if table.min() < 0 or table.max() >= self.num_blocks:
            bad = table[(table < 0) | (table >= self.num_blocks)][0]
            raise ValueError(f"block_table: expected blocks in [0, {self.num_blocks}), got {bad}")
        positions = np.arange(len(token_ids)) + np.repeat(starts - (row_ends - counts), counts)
        blocks = table[np.repeat(np.arange(len(sequences)), counts), positions // self.block_size]
        slots = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        slots[positions < np.repeat(write_starts, counts)] = -1
        cu_seqlens_q = np.concatenate([[0], row_ends])
        wanted = row_ends[np.array([s.needs_logits for s in sequences], dtype=bool)] - 1
        return ForwardInput(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            block_table=self._tensor(table),
            seq_lens=self._tensor(ends.astype(np.int32)),
            cu_seqlens_q=self._tensor(cu_seqlens_q.astype(np.int32)),
            logit_rows=self._tensor(wanted),
            plans=self.tree_plans.of(
                [s.sequence_id for s in sequences], [s.block_table for s in sequences], ends, cu_seqlens_q
            ),
        )

    def _check(
        self, sequences: Sequence[ScheduledSequence], starts: np.ndarray, ends: np.ndarray, write_starts: np.ndarray
    ) -> None:
        """What a GPU would answer with an abort, or not at all."""
        wrong = (starts < 0) | (starts >= ends) | (write_starts < starts) | (write_starts > ends)
        if wrong.any():
            bad = sequences[int(wrong.argmax())]
            raise ValueError(
                "sequences: expected 0 <= start < end and start <= write_start <= end, "
                f"got start {bad.start}, end {bad.end}, write_start {bad.write_start}"
            )
        if ends.max() > self.config.max_positions:
            raise ValueError(f"end: expected at most {self.config.max_positions}, the model's, got {ends.max()}")
        for sequence in sequences:
            needed = -(-sequence.end // self.block_size)
            if len(sequence.token_ids) < sequence.end or len(sequence.block_table) < needed:
                raise ValueError(
                    f"sequence {sequence.sequence_id}: expected {sequence.end} tokens and {needed} blocks, "
                    f"got {len(sequence.token_ids)} and {len(sequence.block_table)}"
                )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers: what a pool of so many bytes is divided by."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize

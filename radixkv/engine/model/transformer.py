"""The decoder's forward pass over a flat list of rows.

Rows of all sequences stand one after the other, without padding between them. KV state comes in as an argument and is
written in place: in each layer the keys and values of all rows are written before any row reads, so that a row may read
what another sequence of the batch computes in this very step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from radixkv_kernels import TreePlan, attention_row_rule, paged_attention, store_kv
from radixkv_kernels.row_rules import measured, settings
from torch import Tensor

from radixkv.engine.model.layers import Arithmetic, InvariantArithmetic, PlainArithmetic, rms_norm
from radixkv.engine.model.rope import rope_table, rotate
from radixkv.engine.model.row_linear import Product, linear_rule
from radixkv.engine.model.weights import LayerWeights, Model

_log = logging.getLogger("radixkv")


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step's rows, all tensors on the model's device. Half-open intervals: sequence s has rows
    [cu_seqlens_q[s], cu_seqlens_q[s + 1]).

    Attributes:
        token_ids, positions: [num_rows] int64.
        slot_mapping: [num_rows] int64, block * block_size + row of the block; -1 is not written.
        block_table: [num_seqs, max_blocks] int32.
        seq_lens: [num_seqs] int32, this step's rows included.
        cu_seqlens_q: [num_seqs + 1] int32.
        logit_rows: [num_logits] int64, the rows whose logits are wanted.
        plans: by window of a layer, which rows read which shared KV together.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    logit_rows: Tensor
    plans: Mapping[int | None, TreePlan] = field(default_factory=dict)


class Decoder:
    """A model ready to run. Holds weights and the rotary table; no KV, no state between calls.

    Args:
        model: its weights on one device, of one dtype.
        deterministic: every row's bits are independent of the batch (see `layers`); else the plain operations.

    Raises:
        ValueError: deterministic, and this CPU's libraries have no number of rows at which that is so.
    """

    def __init__(self, model: Model, *, deterministic: bool) -> None:
        config, weights = model.config, model.weights
        self.config = config
        self.deterministic = deterministic
        self._arithmetic: Arithmetic = InvariantArithmetic() if deterministic else PlainArithmetic()
        self.weights = weights = self._arithmetic.prepared(weights)
        self._checked: Hashable = None
        self.check_rows()
        # Made on the CPU, whatever the device: the same table everywhere.
        tables = rope_table(config.rope, config.head_dim, config.max_positions)
        self._cosines, self._sines = (table.to(weights.embedding.device)[:, None] for table in tables)

    def check_rows(self) -> None:
        """Sees to it that all products have rules of rows for the present number of threads, where bits are promised.

        Raises:
            ValueError: one has none, and the remedy.

        O(1), but the first time for a number of threads, when shapes are measured that no model of this process had.
        """
        if not self.deterministic or self.weights.embedding.device.type != "cpu" or settings() == self._checked:
            return
        began, known = time.perf_counter(), len(measured())
        for product in self.products():
            linear_rule(product).require()
        attention_row_rule(self.weights.embedding.dtype, self.config.head_dim).require()
        self._checked = settings()
        _log.info("rules of rows: %d measured in %.2f s", len(measured()) - known, time.perf_counter() - began)

    def products(self) -> list[Product]:
        """Every kind of product with weights, each once."""
        found = {Product.of(self.weights.head, None)}
        for layer in self.weights.layers:
            found |= {Product.of(layer.qkv, layer.qkv_bias), Product.of(layer.o, layer.o_bias)}
            found |= {Product.of(layer.gate_up, layer.gate_up_bias), Product.of(layer.down, layer.down_bias)}
        return sorted(found, key=str)

    def forward(self, step: ForwardInput, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Computes all rows, writes their KV, and returns the wanted logits.

        Args:
            k_cache, v_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim] the weights' dtype. Mutated.

        Returns:
            [num_logits, vocab_size] float32, in the order of `logit_rows`.

        Ids, slots and lengths are the caller's to check, once for all layers.

        Cost: O(num_rows * num_parameters + rows * visible KV).
        """
        x = F.embedding(step.token_ids, self.weights.embedding)  # [num_rows, hidden]
        angles = self._cosines[step.positions], self._sines[step.positions]
        attended = x.new_empty(x.shape[0], self.config.num_q_heads, self.config.head_dim)
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attention(index, layer, x, angles, step, (k_cache[index], v_cache[index]), attended)
            x = x + self._mlp(layer, x)
        return self._logits(x, step.logit_rows)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        step: ForwardInput,
        caches: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> Tensor:
        config = self.config
        hidden = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        heads = self._arithmetic.linear(hidden, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
        num_rotated = config.num_q_heads + config.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = heads.split((config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            q = rotate(rms_norm(q, layer.q_norm, config.rms_norm_eps), *angles)
            k = rotate(rms_norm(k, layer.k_norm, config.rms_norm_eps), *angles)
        else:
            rotated, v = rotate(heads[:, :num_rotated], *angles), heads[:, num_rotated:]
            q, k = rotated[:, : config.num_q_heads], rotated[:, config.num_q_heads :]
        store_kv(k, v, *caches, step.slot_mapping, validate=False)
        paged_attention(
            q,
            *caches,
            cu_seqlens_q=step.cu_seqlens_q,
            block_table=step.block_table,
            seq_lens=step.seq_lens,
            window=config.windows[index],
            out=out,
            plan=step.plans.get(config.windows[index]),
            validate=False,
        )
        return self._arithmetic.linear(out.view(x.shape[0], -1), layer.o, layer.o_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        hidden = rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps)
        gate_up = self._arithmetic.linear(hidden, layer.gate_up, layer.gate_up_bias)
        gated = self._arithmetic.gated(gate_up, self.config.activation)
        return self._arithmetic.linear(gated, layer.down, layer.down_bias)

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        if not rows.shape[0]:
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        hidden = rms_norm(x[rows], self.weights.norm, self.config.rms_norm_eps)
        return self._arithmetic.linear(hidden, self.weights.head, None).float()

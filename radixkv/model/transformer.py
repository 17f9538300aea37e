"""The decoder's forward pass over a flat list of rows. Called by `radixkv.runner`.

Rows of all sequences stand one after the other, without padding between them. KV state comes in as an argument and is
written in place: in each layer the keys and values of all rows are written before any row reads, so that a row may read
what another sequence of the batch computes in this very step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from radixkv_kernels import TreePlan, paged_attention, store_kv
from torch import Tensor

from radixkv.model.layers import Arithmetic, InvariantArithmetic, PlainArithmetic, rms_norm
from radixkv.model.rope import rope_table, rotate
from radixkv.model.weights import LayerWeights, Model


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
        plans: by window of a layer, who reads what where sequences share KV.
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
    """

    def __init__(self, model: Model, *, deterministic: bool) -> None:
        config, weights = model.config, model.weights
        self.config = config
        self.weights = weights
        self.deterministic = deterministic
        self._arithmetic: Arithmetic = InvariantArithmetic() if deterministic else PlainArithmetic()
        # Made on the CPU, whatever the device: the same table everywhere.
        tables = rope_table(config.rope, config.head_dim, config.max_positions)
        self._cosines, self._sines = (table.to(weights.embedding.device)[:, None] for table in tables)

    def forward(self, step: ForwardInput, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Computes all rows, writes their KV, and returns the wanted logits.

        Args:
            k_cache, v_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim] the weights' dtype. Mutated.

        Returns:
            [num_logits, vocab_size] float32, in the order of `logit_rows`.

        Ids, slots and lengths are the caller's to check, once for all layers.

        Cost: O(num_rows * num_parameters + rows * visible KV).
        """
        num_rows = step.token_ids.shape[0]
        more = self._arithmetic.padded(num_rows) - num_rows
        token_ids, positions = F.pad(step.token_ids, (0, more)), F.pad(step.positions, (0, more))
        x = F.embedding(token_ids, self.weights.embedding)  # [padded rows, hidden]
        angles = self._cosines[positions], self._sines[positions]
        # Rows of the padding belong to no sequence, so attention leaves them at zero in every layer.
        attended = x.new_zeros(x.shape[0], self.config.num_q_heads, self.config.head_dim)
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
        config, num_rows = self.config, step.token_ids.shape[0]
        hidden = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        heads = self._arithmetic.linear(hidden, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = rotate(q, *angles), rotate(k, *angles)
        store_kv(k[:num_rows], v[:num_rows], *caches, step.slot_mapping, validate=False)
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
        num_logits = rows.shape[0]
        if not num_logits:
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        chosen = F.pad(x[rows], (0, 0, 0, self._arithmetic.padded(num_logits) - num_logits))
        hidden = rms_norm(chosen, self.weights.norm, self.config.rms_norm_eps)
        return self._arithmetic.linear(hidden, self.weights.head, None)[:num_logits].float()

"""What `api.py` hands to an implementation, and what every implementation must do with it.

An implementation is a module (`reference`, `torch_impl`, `triton_impl`) with seven functions:

    unsupported(spec, tensors) -> str | None
        Why this implementation can't run the call, or None where it can. Looks at values of `spec`, and at dtypes,
        shapes and devices of `tensors`, never at their contents. `api` raises UnsupportedImplementation with it.
    paged_attention(spec, tensors, out, lse) -> None
        Writes `out` [num_tokens, num_q_heads, v_head_dim] (q's dtype, any strides) and, unless it is None, `lse`
        [num_tokens, num_q_heads] float32 (any strides).
    tree_attention(spec, tensors, plan, workspace, out, lse) -> None
        `paged_attention` with a plan made for this call: a `plan.TreePlan` (its work list: `plan_items.WorkList`), or
        the same as `plan_tensors.PlanTensors`. The same bits; only who reads KV differs. ValueError where the plan's
        cells or tiles are not this implementation's. `workspace`: None, or float32 scratch [>= plan.workspace_size]
        for an implementation that would else allocate.
    plan_tile(dtype, kv_dtype, head_dim, v_head_dim, softcap, device) -> (cell_size, tile_rows)
        How a plan has to be made for such calls; tile_rows is an upper bound.
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None
        k [num_tokens, num_kv_heads, head_dim], v [.., v_head_dim]; slot_mapping [num_tokens] int64, block * block_size
        + offset, negative: skip the token. Scales as in AttentionTensors: the cache holds value / scale (divided in
        float32), saturated to the finite range where the cache is fp8.
    copy_blocks(k_cache, v_cache, src, dst, num_tokens) -> None
        src, dst, num_tokens [num_pairs] int64: the first num_tokens[i] rows of block src[i] go to the same rows of
        dst[i]. No block is both a source and a destination, none is a destination twice.
    merge_states(outs, lses, out, lse) -> None
        outs [num_states, num_tokens, num_heads, v_head_dim], lses [num_states, num_tokens, num_heads] float32; the
        left fold over states of the merge formula, in float32. A state with lse -inf is the identity, whatever its out
        holds (NaN included); with lse NaN the result is NaN, out and lse; lse is never +inf. `lse` may be None.

Nothing else is validated again: shapes, dtypes, devices and, on the CPU, contents have been checked.

The arithmetic of paged attention. Row i of sequence s (tokens cu_seqlens_q[s] + i) has position
p = seq_lens[s] - q_len[s] + i and sees key t where 0 <= t < seq_lens[s], t <= p if `causal`, and t > p - window if
`window` is given. With h the KV head of query head g (h = g // (num_q_heads // num_kv_heads)):

    x = (q[g] . k[t, h]) * (scale * k_scale[h])
    x = softcap * tanh(x / softcap)                if softcap
    x = x - alibi_slopes[g] * abs(p - t)           if alibi_slopes
    lse = log(sum_t exp(x_t)  (+ exp(sinks[g])))   natural log, the sink included
    out = v_scale[h] * sum_t exp(x_t - lse) v[t, h]

A row that sees no key has out 0 and lse -inf, sinks or not; where causal, rows with p < 0 are such rows. Rows of q from
cu_seqlens_q[-1] on belong to no sequence: their out and lse are not written. Slots that no row sees may hold anything
(NaN included), and block ids of blocks that no row of the sequence sees may be anything (-1, stale): don't dereference
them.

The sum over t follows the cell rule: cells of a fixed number of tokens from position 0, runs of a fixed number of
cells, a run is the left fold of its cells, the result the left fold of its runs, with one merge formula, an empty state
being the exact identity; the sink enters once, after the last merge, then v_scale. So a row's result depends on that
row's q, p, and the KV it sees: not on the batch, not on the other rows, not on where the blocks lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .plan.tensors import PlanTensors
    from .plan.tree_plan import TreePlan


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The plain values of one call: hashable, the same for every call of a layer except `max_blocks`.

    Block j of sequence s is `block_ids[(block_indptr[s] if block_indptr is not None else s * block_stride) + j]`.
    """

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    max_blocks: int
    """An upper bound of the blocks of any sequence, known without a synchronisation: sizes grids and scratch."""
    block_stride: int

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """The tensors of one call, all on q's device."""

    q: Tensor
    """[num_tokens, num_q_heads, head_dim] float32, float16 or bfloat16, any strides."""
    k_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim] q's dtype or float8_e4m3fn, any strides."""
    v_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, v_head_dim] k_cache's dtype, any strides."""
    block_ids: Tensor
    """[n] int32, stride 1."""
    block_indptr: Tensor | None
    """[num_seqs + 1] int32, stride 1; None where the caller gave a rectangular table."""
    seq_lens: Tensor
    """[num_seqs] int32, stride 1."""
    cu_seqlens_q: Tensor
    """[num_seqs + 1] int32, stride 1."""
    sinks: Tensor | None
    """[num_q_heads] float32, stride 1."""
    alibi_slopes: Tensor | None
    """[num_q_heads] float32, stride 1."""
    k_scale: Tensor | None
    """[num_kv_heads] float32; stride 0 where one scale serves all heads."""
    v_scale: Tensor | None
    """As k_scale."""

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


class Implementation(Protocol):
    """The seven functions that the module's docstring describes."""

    def unsupported(self, spec: AttentionSpec, tensors: AttentionTensors) -> str | None: ...

    def paged_attention(
        self, spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None
    ) -> None: ...

    def tree_attention(
        self,
        spec: AttentionSpec,
        tensors: AttentionTensors,
        plan: TreePlan | PlanTensors,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None: ...

    def plan_tile(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        head_dim: int,
        v_head_dim: int,
        softcap: bool,
        device: torch.device,
    ) -> tuple[int, int]: ...

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None: ...

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None: ...

    def merge_states(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None: ...

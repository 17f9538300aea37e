"""The public calls. Each validates once, brings its arguments to one form, allocates, and calls an implementation.

What an implementation receives and must compute is in `interface.py`; which one is picked, in `selection.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import block_tables
from . import validate as checks
from .contract import AttentionSpec, AttentionTensors
from .errors import UnsupportedImplementation
from .plan.tensors import PlanTensors, check_plan
from .plan.tree_plan import TreePlan
from .selection import select_implementation


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    last_block_len: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    plan: TreePlan | PlanTensors | None = None,
    workspace: Tensor | None = None,
    implementation: str = "auto",
    validate: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's new tokens over its KV in blocks: prefill, chunked prefill, decode or all at once.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float32, float16 or bfloat16; the new tokens, sequence by sequence.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim] q's dtype or float8_e4m3fn; any strides. Holds the new
            tokens' keys already (`store_kv`).
        v_cache: [num_blocks, block_size, num_kv_heads, v_head_dim] k_cache's dtype; any strides.
        cu_seqlens_q: [num_seqs + 1] int32; sequence s has rows [cu_seqlens_q[s], cu_seqlens_q[s + 1]). Rows of q
            after the last are padding: what the output holds for them is not defined.
        block_table: [num_seqs, max_blocks] int32; ids of blocks that no row sees may be anything.
        seq_lens: [num_seqs] int32, this call's tokens included; 0 for a padding row. With fewer keys than queries the
            first queries come before the first key, and see none where causal.
        kv_indptr, kv_indices, last_block_len: [num_seqs + 1], [n], [num_seqs] int32; instead of the two above.
        scale: of the scores; None: head_dim ** -0.5.
        causal: row i of q_len sees keys up to seq_len - q_len + i; False: all keys.
        window: W sees the keys p - W + 1 .. p of position p (flash-attn's (W - 1, 0)).
        softcap: c * tanh(score / c).
        sinks: [num_q_heads]; a logit that takes part in the softmax and has no value.
        alibi_slopes: [num_q_heads]; adds -slope * distance.
        k_scale, v_scale: a number, or [num_kv_heads] float32: what to multiply cached keys and values by.
        out: [num_tokens, num_q_heads, v_head_dim] q's dtype, any strides; None: allocated.
        return_lse: also return the natural-log sum of exp of each row's scores, sink included.
        plan: who reads what, made from the same block tables, lengths and options, with `plan_tile`'s cell_size and
            tile_rows: KV that sequences share is read once. The results have the same bits as without.
        workspace: [>= plan.workspace_size(v_head_dim)] float32, contiguous: scratch for a call with a plan; None:
            allocated.
        implementation: "auto" (by device), "reference", "torch" or "triton".
        validate: check lengths and ids too; None: where they are on the CPU. On a GPU True synchronises.

    Returns:
        out, or (out, lse) with lse [num_tokens, num_q_heads] float32. A row that sees no key: 0 and -inf, sinks or not.

    Raises:
        ValueError: names the argument, what was expected and what was given.
        UnsupportedImplementation: the implementation asked for can't do it.

    Mutates `out` and `workspace`. Cost: O(rows * visible keys * num_q_heads * head_dim); reads each sequence's KV once.
    """
    device = checks.device_of("q", q)
    checks.check_tensor("q", q, (None, None, None), checks.FLOAT_DTYPES, device)
    checks.check_caches(k_cache, v_cache, (q.dtype, checks.FP8), device)
    num_tokens, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, v_head_dim = v_cache.shape
    checks.expect(k_cache.shape[3] == head_dim, "k_cache", f"head_dim (dim 3) {head_dim}, as q has", k_cache.shape[3])
    checks.check_heads(num_q_heads, num_kv_heads, head_dim, v_head_dim)
    scale = head_dim**-0.5 if scale is None else scale
    checks.check_options(scale, window, softcap)
    look = device.type == "cpu" if validate is None else validate

    if block_table is not None:
        ragged = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "last_block_len": last_block_len}
        given = [name for name, value in ragged.items() if value is not None]
        checks.expect(not given, "block_table", "a block table or kv_indptr, not both", given)
        if seq_lens is None:
            raise ValueError("seq_lens: expected a tensor beside block_table, got None")
        lists = block_tables.from_table(block_table, seq_lens, device)
    else:
        if kv_indptr is None or kv_indices is None or last_block_len is None:
            raise ValueError("block_table: expected it, or kv_indptr, kv_indices and last_block_len together, got None")
        checks.expect(seq_lens is None, "seq_lens", "None beside kv_indptr (last_block_len says it)", "a tensor")
        lists = block_tables.from_indices(kv_indptr, kv_indices, last_block_len, block_size, device, look)
    checks.check_tensor("cu_seqlens_q", cu_seqlens_q, (lists.seq_lens.numel() + 1,), checks.INT_DTYPES, device)

    spec = AttentionSpec(
        scale=float(scale),
        causal=bool(causal),
        window=window,
        softcap=None if softcap is None else float(softcap),
        block_size=block_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        max_blocks=lists.max_blocks,
        block_stride=lists.block_stride,
    )
    tensors = AttentionTensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_ids=lists.block_ids,
        block_indptr=lists.block_indptr,
        seq_lens=lists.seq_lens,
        cu_seqlens_q=checks.as_int32(cu_seqlens_q).contiguous(),
        sinks=checks.normalise_per_head("sinks", sinks, num_q_heads, device),
        alibi_slopes=checks.normalise_per_head("alibi_slopes", alibi_slopes, num_q_heads, device),
        k_scale=checks.normalise_scale("k_scale", k_scale, num_kv_heads, device),
        v_scale=checks.normalise_scale("v_scale", v_scale, num_kv_heads, device),
    )
    if look:
        checks.check_attention_contents(spec, tensors)
    if out is None:
        out = torch.empty(num_tokens, num_q_heads, v_head_dim, dtype=q.dtype, device=device)
    else:
        checks.check_tensor("out", out, (num_tokens, num_q_heads, v_head_dim), (q.dtype,), device)
        checks.check_written("out", out)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=device) if return_lse else None

    chosen = select_implementation(implementation, device)
    reason = chosen.unsupported(spec, tensors)
    if reason is not None:
        raise UnsupportedImplementation(reason)
    if plan is None:
        checks.expect(workspace is None, "workspace", "None without a plan", type(workspace).__name__)
        chosen.paged_attention(spec, tensors, out, lse)
    else:
        made = isinstance(plan, TreePlan | PlanTensors)
        checks.expect(made, "plan", "a TreePlan or PlanTensors", type(plan).__name__)
        check_plan(plan, spec, tensors, look)
        if workspace is not None:
            checks.check_tensor("workspace", workspace, (None,), (torch.float32,), device)
            checks.expect(workspace.is_contiguous(), "workspace", "a contiguous tensor", workspace.stride())
        chosen.tree_attention(spec, tensors, plan, workspace, out, lse)
    return out if lse is None else (out, lse)


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, plan: TreePlan | PlanTensors, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` that reads KV which several sequences share once a step; the same arguments, the same bits.

    plan: from `TreePlan.from_block_table` or a `TreePlanner`; made once a step, it serves every layer. `PlanTensors`,
    for calls whose launches a CUDA graph repeats: neither their lengths nor their number of sequences are looked at.
    Raises as `paged_attention`, and ValueError where the plan was made for other shapes, options or lengths.
    Cost: O(rows * visible keys * num_q_heads * head_dim); reads plan.stats.num_kv_tokens_read tokens of KV.
    """
    return paged_attention(q, k_cache, v_cache, plan=plan, **arguments)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    implementation: str = "auto",
    validate: bool | None = None,
) -> None:
    """Writes new tokens' keys and values into their slots, dividing by the scales and quantising for an fp8 cache.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16, any strides.
        v: [num_tokens, num_kv_heads, v_head_dim] k's dtype.
        k_cache, v_cache: as for `paged_attention`; any float dtype or float8_e4m3fn. Mutated.
        slot_mapping: [num_tokens] int64 or int32, block * block_size + offset; negative: the token is skipped. Slots
            are distinct (not checked).
        k_scale, v_scale: a number, or [num_kv_heads]: the cache holds value / scale. fp8 saturates at +-448.
        implementation, validate: as for `paged_attention`.

    Raises ValueError naming the argument. Cost: O(num_tokens * num_kv_heads * head_dim).
    """
    device = checks.device_of("k_cache", k_cache)
    checks.check_caches(k_cache, v_cache, (*checks.FLOAT_DTYPES, checks.FP8), device)
    checks.check_written("k_cache", k_cache)
    checks.check_written("v_cache", v_cache)
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    checks.check_tensor("k", k, (None, num_kv_heads, head_dim), checks.FLOAT_DTYPES, device)
    checks.check_tensor("v", v, (k.shape[0], num_kv_heads, v_cache.shape[3]), (k.dtype,), device)
    checks.check_tensor("slot_mapping", slot_mapping, (k.shape[0],), checks.INT_DTYPES, device)
    if (device.type == "cpu" if validate is None else validate) and slot_mapping.numel():
        top, slots = int(slot_mapping.max()), num_blocks * block_size
        checks.expect(top < slots, "slot_mapping", f"slots below num_blocks * block_size = {slots}", top)
    select_implementation(implementation, device).store_kv(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping.long().contiguous(),
        checks.normalise_scale("k_scale", k_scale, num_kv_heads, device),
        checks.normalise_scale("v_scale", v_scale, num_kv_heads, device),
    )


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    src_blocks: Tensor,
    dst_blocks: Tensor,
    num_tokens: Tensor | None = None,
    *,
    implementation: str = "auto",
    validate: bool | None = None,
) -> None:
    """Copies the first tokens of blocks onto other blocks of the same caches: the rows of a partly matching block.

    Args:
        k_cache, v_cache: as for `paged_attention`. Mutated.
        src_blocks, dst_blocks: [num_pairs] int64 or int32. No block is both a source and a destination, none is a
            destination twice.
        num_tokens: [num_pairs] int64 or int32, rows to copy, 0 to block_size; None: whole blocks.
        implementation, validate: as for `paged_attention`.

    Raises ValueError naming the argument. Cost: O(sum of num_tokens * num_kv_heads * head_dim).
    """
    device = checks.device_of("k_cache", k_cache)
    checks.check_caches(k_cache, v_cache, (*checks.FLOAT_DTYPES, checks.FP8), device)
    checks.check_written("k_cache", k_cache)
    checks.check_written("v_cache", v_cache)
    num_blocks, block_size = k_cache.shape[:2]
    checks.check_tensor("src_blocks", src_blocks, (None,), checks.INT_DTYPES, device)
    checks.check_tensor("dst_blocks", dst_blocks, tuple(src_blocks.shape), checks.INT_DTYPES, device)
    if num_tokens is None:
        num_tokens = torch.full_like(src_blocks, block_size)
    checks.check_tensor("num_tokens", num_tokens, tuple(src_blocks.shape), checks.INT_DTYPES, device)
    if (device.type == "cpu" if validate is None else validate) and src_blocks.numel():
        checks.check_copy_contents(src_blocks, dst_blocks, num_tokens, num_blocks, block_size)
    select_implementation(implementation, device).copy_blocks(
        k_cache, v_cache, src_blocks.long().contiguous(), dst_blocks.long().contiguous(), num_tokens.long().contiguous()
    )


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over several parts of the keys -> attention over their union, by a left fold over the parts.

    Args:
        outs: [num_states, num_tokens, num_heads, v_head_dim] float32, float16 or bfloat16, or a sequence of num_states
            tensors (which costs a copy). Each is a softmax over its own part.
        lses: [num_states, num_tokens, num_heads] float32, natural log, or a sequence. -inf, or +inf as flash-attn 2
            has it: an empty part, the exact identity whatever its out holds. NaN: the result is NaN there.
        out: [num_tokens, num_heads, v_head_dim] outs' dtype; None: allocated.
        implementation: as for `paged_attention`.

    Returns (out, lse [num_tokens, num_heads] float32). All parts empty: 0 and -inf. One not empty: that one, bit for
    bit. Raises ValueError naming the argument. Cost: O(size of outs).
    """
    outs, lses = checks.stacked("outs", outs), checks.stacked("lses", lses)
    device = outs.device
    checks.check_tensor("outs", outs, (None, None, None, None), checks.FLOAT_DTYPES, device)
    num_states, num_tokens, num_heads, v_head_dim = outs.shape
    checks.expect(num_states >= 1, "outs", "at least one state (dim 0)", num_states)
    checks.check_tensor("lses", lses, (num_states, num_tokens, num_heads), (torch.float32,), device)
    if out is None:
        out = torch.empty(num_tokens, num_heads, v_head_dim, dtype=outs.dtype, device=device)
    else:
        checks.check_tensor("out", out, (num_tokens, num_heads, v_head_dim), (outs.dtype,), device)
        checks.check_written("out", out)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    select_implementation(implementation, device).merge_states(outs, lses, out, lse)
    return out, lse

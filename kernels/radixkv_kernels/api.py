"""The public calls. Each checks its arguments once, brings them to one form, allocates, and calls an implementation.

What an implementation receives and must compute is in `contract.py`; which one runs, in `selection.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments as checks
from .contract import (
    FLOAT_DTYPES,
    AttentionSpec,
    AttentionTensors,
    Implementation,
    PlanTensors,
    UnsupportedImplementation,
    expect,
)
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
        plan: which rows read which cells, made from the same block tables, lengths and options, with `plan_tile`'s
            cell_size and tile_rows: KV that sequences share is read once. The results have the same bits as without.
        workspace: [>= plan.workspace_size(v_head_dim)] float32, contiguous: scratch for a call with a plan; None:
            allocated.
        implementation: "auto" (by device), or a name of `selection.IMPLEMENTATIONS`: "triton", "torch" or "reference".
        validate: check lengths and ids too; None: where they are on the CPU. On a GPU True synchronises.

    Returns:
        out, or (out, lse) with lse [num_tokens, num_q_heads] float32. A row that sees no key: 0 and -inf, sinks or not.

    Raises:
        ValueError: names the argument, what was expected and what was given.
        UnsupportedImplementation: the implementation asked for can't do it.

    Mutates `out` and `workspace`. Cost: O(rows * visible keys * num_q_heads * head_dim); reads each sequence's KV once.

    A decode step of one sequence and the prefill of another, in blocks of 16:

    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)
    >>> out, lse = paged_attention(
    ...     torch.randn(19, 8, 64),
    ...     k_cache,
    ...     v_cache,
    ...     cu_seqlens_q=torch.tensor([0, 1, 19]),
    ...     block_table=torch.tensor([[3, 0], [5, 1]]),
    ...     seq_lens=torch.tensor([21, 18]),
    ...     return_lse=True,
    ... )
    >>> out.shape, lse.shape
    (torch.Size([19, 8, 64]), torch.Size([19, 8]))
    """
    device = checks.check_query(q, k_cache, v_cache)
    (num_tokens, num_q_heads, head_dim), (_, block_size, num_kv_heads, v_head_dim) = q.shape, v_cache.shape
    scale = head_dim**-0.5 if scale is None else scale
    checks.check_options(scale, window, softcap)
    look = device.type == "cpu" if validate is None else validate
    lists = checks.block_lists(block_table, seq_lens, kv_indptr, kv_indices, last_block_len, block_size, device, look)
    checks.check_tensor("cu_seqlens_q", cu_seqlens_q, (lists.seq_lens.numel() + 1,), checks.INT_DTYPES, device)
    spec = AttentionSpec(
        float(scale), bool(causal), window, None if softcap is None else float(softcap), block_size,
        num_q_heads, num_kv_heads, head_dim, v_head_dim, lists.max_blocks, lists.block_stride,
    )  # fmt: skip
    tensors = AttentionTensors(
        q, k_cache, v_cache, lists.block_ids, lists.block_indptr, lists.seq_lens,
        checks.as_int32(cu_seqlens_q).contiguous(),
        checks.normalise_per_head("sinks", sinks, num_q_heads, device),
        checks.normalise_per_head("alibi_slopes", alibi_slopes, num_q_heads, device),
        checks.normalise_scale("k_scale", k_scale, num_kv_heads, device),
        checks.normalise_scale("v_scale", v_scale, num_kv_heads, device),
    )  # fmt: skip
    if look:
        checks.check_attention_contents(spec, tensors)
    out = checks.output("out", out, (num_tokens, num_q_heads, v_head_dim), q.dtype, device)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=device) if return_lse else None
    _attend(select_implementation(implementation, device), spec, tensors, plan, workspace, out, lse, look)
    return out if lse is None else (out, lse)


def _attend(
    chosen: Implementation,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    plan: TreePlan | PlanTensors | None,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    look: bool,
) -> None:
    """Runs a call in its normal form, with its plan or without."""
    reason = chosen.unsupported(spec, tensors)
    if reason is not None:
        raise UnsupportedImplementation(reason)
    if plan is None:
        expect(workspace is None, "workspace", "None without a plan", type(workspace).__name__)
        chosen.paged_attention(spec, tensors, out, lse)
        return
    _check_plan(plan, spec, tensors, look)
    if workspace is not None:
        checks.check_tensor("workspace", workspace, (None,), (torch.float32,), tensors.q.device)
        expect(workspace.is_contiguous(), "workspace", "a contiguous tensor", workspace.stride())
    chosen.tree_attention(spec, tensors, plan, workspace, out, lse)


def _check_plan(plan: TreePlan | PlanTensors, spec: AttentionSpec, tensors: AttentionTensors, look: bool) -> None:
    """The plan was made for this call. That its block tables are the call's is taken on trust."""
    expect(isinstance(plan, TreePlan | PlanTensors), "plan", "a TreePlan or PlanTensors", type(plan).__name__)
    config = plan.config
    for name in ("block_size", "num_q_heads", "num_kv_heads", "causal", "window"):
        want, have = getattr(spec, name), getattr(config, name)
        expect(have == want, "plan", f"one made with {name} {want}", have)
    if isinstance(plan, PlanTensors):
        lengths = (
            len(x) if isinstance(x, Tensor) and x.dim() else 0 for x in (plan.items, plan.row_token, plan.row_slots)
        )
        shapes = PlanTensors.shapes(*lengths)
        for name, tensor, shape in zip(PlanTensors.NAMES, plan.tensors, shapes, strict=True):
            checks.check_tensor(name, tensor, shape, (torch.int32,), tensors.q.device)
            expect(tensor.is_contiguous(), name, "a contiguous tensor", tensor.stride())
        return
    expect(plan.num_seqs == tensors.num_seqs, "plan", f"one of {tensors.num_seqs} sequences", plan.num_seqs)
    if look:
        plan.check_fits(tensors.seq_lens.cpu().numpy(), tensors.cu_seqlens_q.cpu().numpy())


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, plan: TreePlan | PlanTensors, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` that reads KV which several sequences share once a step; the same arguments, the same bits.

    plan: from `TreePlan.from_block_table` or a `TreePlanner`; made once a step, it serves every layer. `PlanTensors`,
    for calls whose launches a CUDA graph repeats: neither their lengths nor their number of sequences are looked at.
    Raises as `paged_attention`, and ValueError where the plan was made for other shapes, options or lengths.
    Cost: O(rows * visible keys * num_q_heads * head_dim); reads plan.stats.num_kv_tokens_read tokens of KV.

    >>> table = torch.arange(80, dtype=torch.int32).view(2, 40)
    >>> table[1, :32] = table[0, :32]
    >>> lens, cu = torch.tensor([530, 600]), torch.tensor([0, 1, 2])
    >>> plan = TreePlan.from_block_table(table, lens, cu, block_size=16, num_q_heads=8, num_kv_heads=2)
    >>> q, (k, v) = torch.randn(2, 8, 64), torch.randn(2, 80, 16, 2, 64)
    >>> batch = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": cu}
    >>> torch.equal(tree_attention(q, k, v, plan=plan, **batch), paged_attention(q, k, v, **batch))
    True
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

    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)
    >>> k, v = torch.randn(2, 3, 2, 64)
    >>> store_kv(k, v, k_cache, v_cache, torch.tensor([2 * 16 + 5, -1, 7]))
    >>> torch.equal(k_cache[2, 5], k[0]), torch.equal(v_cache[0, 7], v[2]), int(k_cache.count_nonzero())
    (True, True, 256)
    """
    device = checks.check_written_caches(k_cache, v_cache)
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    checks.check_tensor("k", k, (None, num_kv_heads, head_dim), FLOAT_DTYPES, device)
    checks.check_tensor("v", v, (k.shape[0], num_kv_heads, v_cache.shape[3]), (k.dtype,), device)
    checks.check_tensor("slot_mapping", slot_mapping, (k.shape[0],), checks.INT_DTYPES, device)
    if (device.type == "cpu" if validate is None else validate) and slot_mapping.numel():
        top, slots = int(slot_mapping.max()), num_blocks * block_size
        expect(top < slots, "slot_mapping", f"slots below num_blocks * block_size = {slots}", top)
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

    >>> k_cache, v_cache = torch.randn(2, 4, 16, 2, 64)
    >>> copy_blocks(k_cache, v_cache, torch.tensor([0]), torch.tensor([3]), torch.tensor([5]))
    >>> torch.equal(k_cache[3, :5], k_cache[0, :5]), torch.equal(v_cache[3], v_cache[0])
    (True, False)
    """
    device = checks.check_written_caches(k_cache, v_cache)
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

    >>> outs, lses = torch.randn(3, 7, 8, 64), torch.randn(3, 7, 8)
    >>> lses[1:, 4] = -torch.inf  # token 4 saw keys of the first part alone
    >>> out, lse = merge_states(outs, lses)
    >>> torch.equal(out[4], outs[0, 4]), torch.equal(lse[4], lses[0, 4])
    (True, True)
    """
    outs, lses = checks.stacked("outs", outs), checks.stacked("lses", lses)
    device = outs.device
    checks.check_tensor("outs", outs, (None, None, None, None), FLOAT_DTYPES, device)
    num_states, num_tokens, num_heads, v_head_dim = outs.shape
    expect(num_states >= 1, "outs", "at least one state (dim 0)", num_states)
    checks.check_tensor("lses", lses, (num_states, num_tokens, num_heads), (torch.float32,), device)
    out = checks.output("out", out, (num_tokens, num_heads, v_head_dim), outs.dtype, device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    select_implementation(implementation, device).merge_states(outs, lses, out, lse)
    return out, lse

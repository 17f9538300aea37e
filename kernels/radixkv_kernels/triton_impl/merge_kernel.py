"""merge_states: folds attention results over parts of the keys into the result over all of them.

States are softmaxes with natural-log lse, so (lse, 1, out) is a partial result in natural units, and `numerics.merge`
folds them as it folds cells.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .numerics import LN2, LOG2E, merge


@triton.jit
def merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr,
    stride_outs_state, stride_outs_token, stride_outs_head, stride_outs_dim,
    stride_lses_state, stride_lses_token, stride_lses_head,
    stride_out_token, stride_out_head, stride_out_dim, stride_lse_token, stride_lse_head, num_states, num_heads,
    V_HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One token and BLOCK_H of its heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    head_mask = heads < num_heads
    mask = head_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :]
    m_all = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_all = tl.zeros([BLOCK_H], tl.float32)
    acc_all = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for state in range(num_states):
        index = tl.zeros([BLOCK_H], tl.int64) + state
        lse_ptrs = lses_ptr + index * stride_lses_state + token * stride_lses_token + heads * stride_lses_head
        m = tl.load(lse_ptrs, mask=head_mask, other=float("-inf"))
        rows = index * stride_outs_state + token * stride_outs_token + heads * stride_outs_head
        # An empty state is not read: its out may hold anything.
        here = mask & (m > float("-inf"))[:, None]
        acc = tl.load(outs_ptr + rows[:, None] + (offs_v * stride_outs_dim)[None, :], mask=here, other=0.0)
        l = tl.where(m > float("-inf"), 1.0, 0.0)
        m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc.to(tl.float32), LOG2E)
    # A NaN counts as seen: the maximum drops it, the sum has it from the weights.
    total = tl.where(l_all != 0.0, l_all, 1.0)
    out_rows = token * stride_out_token + heads * stride_out_head
    out_ptrs = out_ptr + out_rows[:, None] + (offs_v * stride_out_dim)[None, :]
    tl.store(out_ptrs, (acc_all / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        # log2(1) is 0, so a single state's lse comes back bit for bit.
        lse_ptrs = lse_ptr + token * stride_lse_token + heads * stride_lse_head
        tl.store(lse_ptrs, m_all + tl.math.log2(total) * LN2, mask=head_mask)


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """See `contract.py`. One launch."""
    num_states, num_tokens, num_heads, v_head_dim = outs.shape
    if num_tokens == 0 or num_heads == 0:
        return
    block_h = min(8, triton.next_power_of_2(num_heads))
    merge_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        outs, lses, out, lse if lse is not None else lses, *outs.stride(), *lses.stride(), *out.stride(),
        *(lse.stride() if lse is not None else (0, 0)), num_states, num_heads,
        V_HEAD_DIM=v_head_dim, BLOCK_H=block_h, BLOCK_V=triton.next_power_of_2(v_head_dim), LSE=lse is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip

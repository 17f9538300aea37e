"""The reduction: folds each row's partials in order, applies the sink once and v_scale last, writes out and lse.

Launched by `attention.py` after the attention kernel. Everything here is per element, so how rows and heads are dealt
out to programs can't change a bit.
"""

import triton
import triton.language as tl

from .attention_kernel import cells_per_partial, find_sequence, visible_range
from .numerics import CELL_SIZE, LN2, LOG2E, RUN_CELLS, merge


@triton.jit(do_not_specialize=["num_seqs", "num_q_heads", "num_rows_total", "num_splits", "num_partials", "window"])
def reduce_kernel(
    acc_ptr, ml_ptr, out_ptr, lse_ptr, seq_lens_ptr, cu_seqlens_q_ptr, sinks_ptr, v_scale_ptr,
    row_partials_ptr, row_partials_indptr_ptr, partial_cell_ptr, row_token_ptr,
    num_seqs, num_q_heads, num_rows_total, num_splits, num_partials, window,
    stride_out_token, stride_out_head, stride_out_dim, stride_lse_token, stride_lse_head, stride_v_scale,
    GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_DV: tl.constexpr,
    V_SLICES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr, WORK_LIST: tl.constexpr,
):  # fmt: skip
    """One program a query token and BLOCK_H of its heads. Workspace and work lists: `attention.py`."""
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_v = tl.arange(0, BLOCK_DV)
    head_mask = heads < num_q_heads
    mask = head_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :]
    kv_heads = heads // GROUP
    # Workspace rows of this token's heads, before the part that depends on the partial.
    rows = kv_heads.to(tl.int64) * num_partials * num_rows_total + heads % GROUP
    if WORK_LIST:
        row = tl.program_id(0)
        token = tl.load(row_token_ptr + row)
        first = tl.load(row_partials_indptr_ptr + row)
        last = tl.load(row_partials_indptr_ptr + row + 1)
        cells = 1
        belongs = token >= 0  # rows past the plan's own
    else:
        token = tl.program_id(0)
        seq = find_sequence(cu_seqlens_q_ptr, num_seqs, token, GROUP, 0)
        seq_end = tl.load(cu_seqlens_q_ptr + seq + 1)
        seq_len = tl.load(seq_lens_ptr + seq)
        belongs = token < seq_end  # rows after the last sequence are not ours to write
        begin, end = visible_range(seq_len - seq_end + token, seq_len, window, CAUSAL, WINDOW)
        cells = cells_per_partial(seq_len, num_splits)
        seen = belongs & (end > begin)
        first = tl.where(seen, begin // (CELL_SIZE * cells), 0)
        last = tl.where(seen, (end + CELL_SIZE * cells - 1) // (CELL_SIZE * cells), 0)
        rows += token.to(tl.int64) * GROUP

    m_all = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_all = tl.zeros([BLOCK_H], tl.float32)
    acc_all = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    m_run = m_all
    l_run = l_all
    acc_run = acc_all
    for part in range(first, last):
        if WORK_LIST:
            row_offset = tl.load(row_partials_ptr + part).to(tl.int64)
            starts_run = tl.load(partial_cell_ptr + part) % RUN_CELLS == 0
        else:
            row_offset = num_rows_total.to(tl.int64) * part
            starts_run = (part * cells) % RUN_CELLS == 0
        ml_ptrs = ml_ptr + (rows + row_offset) * (2 * V_SLICES)
        m = tl.load(ml_ptrs, mask=head_mask, other=float("-inf"))
        l = tl.load(ml_ptrs + 1, mask=head_mask, other=0.0)
        acc_ptrs = acc_ptr + (rows + row_offset)[:, None] * V_HEAD_DIM + offs_v[None, :]
        acc = tl.load(acc_ptrs, mask=mask, other=0.0)
        if starts_run:
            m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m_run, l_run, acc_run, 1.0)
            m_run = m
            l_run = l
            acc_run = acc
        else:
            m_run, l_run, acc_run = merge(m_run, l_run, acc_run, m, l, acc, 1.0)
    m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m_run, l_run, acc_run, 1.0)

    visible = m_all > float("-inf")
    if SINKS:
        # A sink is one more key with l = 1 and no value; a row that sees no key stays empty.
        sink = tl.load(sinks_ptr + heads, mask=head_mask, other=0.0) * LOG2E
        m_all, l_all, acc_all = merge(
            m_all, l_all, acc_all, tl.where(visible, sink, float("-inf")), tl.where(visible, 1.0, 0.0),
            tl.zeros([BLOCK_H, BLOCK_DV], tl.float32), 1.0,
        )  # fmt: skip
    out = acc_all / tl.where(visible, l_all, 1.0)[:, None]
    if V_SCALE:
        out = out * tl.load(v_scale_ptr + kv_heads * stride_v_scale, mask=head_mask, other=0.0)[:, None]
    out_rows = token.to(tl.int64) * stride_out_token + heads.to(tl.int64) * stride_out_head
    out_ptrs = out_ptr + out_rows[:, None] + (offs_v * stride_out_dim)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask & belongs)
    if LSE:
        lse = tl.where(visible, (m_all + tl.math.log2(tl.where(visible, l_all, 1.0))) * LN2, float("-inf"))
        lse_ptrs = lse_ptr + token.to(tl.int64) * stride_lse_token + heads.to(tl.int64) * stride_lse_head
        tl.store(lse_ptrs, lse, mask=head_mask & belongs)

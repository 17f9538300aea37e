"""The attention kernel: one for prefill, chunked prefill, decode and mixed batches, and for work lists.

Launched by `attention.py`, followed by `reduce_kernel.py`. A program loops over work items. An item is a tile of rows
(query tokens x the query heads of one KV head), a half-open range of cells, and the partial it fills. The arithmetic is
that of a cell at a time (see `numerics.py`): which items exist decides which program computes a cell, never what comes
out.

Rows are flat: row f of a sequence is query token f // GROUP, head f % GROUP of the KV head, so any group size fills a
tile. KV lanes that no row of the tile may see are not loaded (their blocks may be anything); lanes that only some rows
see contribute exact zeros to the others.
"""

import triton
import triton.language as tl

from .numerics import CELL_SIZE, LOG2E, RUN_CELLS, decode_e4m3, finite_max, merge, tanh


@triton.jit
def find_sequence(cu_seqlens_q_ptr, num_seqs, target, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence whose first tile is at or before `target`, in O(log num_seqs) loads.

    Sequence s starts at tile cu_seqlens_q[s] * GROUP // BLOCK_M + s: an upper bound of the tiles before it that needs
    no prefix sum. BLOCK_M = 0 searches tokens instead of tiles.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_q_ptr + middle)
        if BLOCK_M > 0:
            start = start * GROUP // BLOCK_M + middle
        if start <= target:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def cells_per_partial(seq_len, num_splits):
    """How many cells one partial of a sequence of seq_len tokens folds: all, a run, or one.

    With several programs a tile, a sequence with fewer runs than programs is split to single cells. Decided on the
    device from seq_len, so that the host need not know it; both kernels call this, and no result depends on it.
    """
    by_cell = (seq_len + CELL_SIZE * RUN_CELLS - 1) // (CELL_SIZE * RUN_CELLS) < num_splits
    return tl.where(num_splits == 1, 1 << 20, tl.where(by_cell, 1, RUN_CELLS))


@triton.jit
def visible_range(position, seq_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Half-open range of KV positions that a query at `position` sees."""
    end = seq_len
    if CAUSAL:
        end = tl.minimum(position + 1, seq_len)
    begin = position * 0
    if WINDOW:
        begin = tl.maximum(position + 1 - window, 0)
    return begin, end


@triton.jit
def load_item(
    items_ptr, seq_lens_ptr, cu_seqlens_q_ptr, item, seq, tile, num_splits, num_rows_total, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WORK_LIST: tl.constexpr,
):  # fmt: skip
    """One item: its first flat row, number of rows, half-open range of cells, and first row of the workspace.

    A kernel calls this before its loop and again after it: to load a few words twice is cheaper than to keep them in
    registers, which are what is short.
    """
    if WORK_LIST:
        row0 = tl.load(items_ptr + item * 5)
        num_rows = tl.load(items_ptr + item * 5 + 1)
        first_cell = tl.load(items_ptr + item * 5 + 2)
        last_cell = tl.load(items_ptr + item * 5 + 3)
        out_row = tl.load(items_ptr + item * 5 + 4).to(tl.int64)
    else:
        q_start = tl.load(cu_seqlens_q_ptr + seq)
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
        seq_len = tl.load(seq_lens_ptr + seq)
        row0 = (tile - (q_start * GROUP // BLOCK_M + seq)) * BLOCK_M
        num_rows = tl.minimum(q_len * GROUP - row0, BLOCK_M)
        begin, end = rows_range(row0, num_rows, q_len, seq_len, window, GROUP, CAUSAL, WINDOW)
        cells = cells_per_partial(seq_len, num_splits)
        first_cell = tl.maximum(item * cells, begin // CELL_SIZE)
        last_cell = tl.minimum((item + 1) * cells, (end + CELL_SIZE - 1) // CELL_SIZE)
        out_row = num_rows_total.to(tl.int64) * item + q_start * GROUP + row0
    return row0, num_rows, first_cell, last_cell, out_row


@triton.jit
def tile_items(
    seq_lens_ptr, cu_seqlens_q_ptr, seq, tile, num_splits, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Half-open range of the partials that the rows of a tile need; empty for a tile without rows."""
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + seq)
    row0 = (tile - (q_start * GROUP // BLOCK_M + seq)) * BLOCK_M
    num_rows = tl.minimum(q_len * GROUP - row0, BLOCK_M)
    begin, end = rows_range(row0, num_rows, q_len, seq_len, window, GROUP, CAUSAL, WINDOW)
    tokens = cells_per_partial(seq_len, num_splits) * CELL_SIZE
    return begin // tokens, (end + tokens - 1) // tokens


@triton.jit
def rows_range(row0, num_rows, q_len, seq_len, window, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Half-open range of KV positions that any of a sequence's rows [row0, row0 + num_rows) sees; (0, 0) if none."""
    begin, _first_end = visible_range(seq_len - q_len + row0 // GROUP, seq_len, window, CAUSAL, WINDOW)
    _last_begin, end = visible_range(seq_len - q_len + (row0 + num_rows - 1) // GROUP, seq_len, window, CAUSAL, WINDOW)
    some = (num_rows > 0) & (end > begin)
    return tl.where(some, begin, 0), tl.where(some, end, 0)


@triton.jit
def fold_run(
    q, k_ptr, v_ptr, table_ptr, tile_begin, tile_end, row_begin, row_end, lane_begin, lane_end,
    qk_scale, softcap, offs_d, offs_v,
    stride_k_block, stride_k_slot, stride_k_dim, stride_v_block, stride_v_slot, stride_v_dim,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold the cells of KV tiles [tile_begin, tile_end), all of one run: returns (m, l, acc).

    q: [BLOCK_M, BLOCK_D]; row_begin, row_end: [BLOCK_M] int32, what each row sees. One flat loop over tiles that folds
    at the end of a cell: a nest of two loops that both carry accumulators spills.
    """
    TILES_PER_CELL: tl.constexpr = CELL_SIZE // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    m_run = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_run = tl.zeros([BLOCK_M], tl.float32)
    acc_run = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    m = m_run
    l = l_run
    acc = acc_run
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        t = tile * BLOCK_N + offs_n
        lane = t < lane_end
        if WINDOW:
            lane = lane & (t >= lane_begin)
        block = tl.load(table_ptr + t // BLOCK_SIZE, mask=lane, other=0).to(tl.int64)
        slot = (t % BLOCK_SIZE).to(tl.int64)
        k_mask = lane[:, None]
        if HEAD_DIM != BLOCK_D:
            k_mask = k_mask & (offs_d < HEAD_DIM)[None, :]
        k_rows = block * stride_k_block + slot * stride_k_slot
        k = tl.load(k_ptr + k_rows[:, None] + (offs_d * stride_k_dim)[None, :], mask=k_mask, other=0)
        if FP8:
            k = decode_e4m3(k, q.dtype)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        if SOFTCAP:
            x = tanh(x) * (softcap * LOG2E)
        visible = t[None, :] < row_end[:, None]
        if WINDOW:
            visible = visible & (t[None, :] >= row_begin[:, None])
        x = tl.where(visible, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        safe = finite_max(m_new)
        p = tl.math.exp2(x - safe[:, None])
        decay = tl.math.exp2(m - safe)
        l = l * decay + tl.sum(p, 1)
        m = m_new
        v_mask = lane[:, None]
        if V_HEAD_DIM % BLOCK_V != 0:
            v_mask = v_mask & (offs_v < V_HEAD_DIM)[None, :]
        v_rows = block * stride_v_block + slot * stride_v_slot
        v = tl.load(v_ptr + v_rows[:, None] + (offs_v * stride_v_dim)[None, :], mask=v_mask, other=0)
        if FP8:
            v = decode_e4m3(v, q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        if (tile + 1) % TILES_PER_CELL == 0 or tile + 1 == tile_end:
            m_run, l_run, acc_run = merge(m_run, l_run, acc_run, m, l, acc, 1.0)
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    return m_run, l_run, acc_run


@triton.jit(do_not_specialize=["num_seqs", "num_rows_total", "num_splits", "num_partials", "window"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, table_start_ptr, seq_lens_ptr, cu_seqlens_q_ptr, k_scale_ptr, acc_ptr, ml_ptr,
    items_ptr, num_items_ptr, row_token_ptr, row_seq_ptr,
    num_seqs, num_rows_total, num_splits, num_partials, window, scale, softcap,
    stride_q_token, stride_q_head, stride_q_dim, stride_table_seq,
    stride_k_block, stride_k_slot, stride_k_head, stride_k_dim,
    stride_v_block, stride_v_slot, stride_v_head, stride_v_dim, stride_k_scale,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    INDPTR: tl.constexpr, WORK_LIST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partials of attention over a paged KV cache. Shapes, units and the two kinds of work: `attention.py`."""
    V_SLICES: tl.constexpr = (V_HEAD_DIM + BLOCK_V - 1) // BLOCK_V
    TILES_PER_CELL: tl.constexpr = CELL_SIZE // BLOCK_N
    kv_head = (tl.program_id(1) // V_SLICES).to(tl.int64)
    v_slice = tl.program_id(1) % V_SLICES
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = v_slice * BLOCK_V + tl.arange(0, BLOCK_V)
    # The score is q . k * scale * k_scale, times log2(e) for exp2; with a soft cap that factor comes after the tanh.
    qk_scale = scale * tl.load(k_scale_ptr + kv_head * stride_k_scale)
    qk_scale = tl.math.div_rn(qk_scale, softcap) if SOFTCAP else qk_scale * LOG2E

    if WORK_LIST:
        seq = 0
        tile = 0
        item_begin = tl.program_id(0)
        item_end = tl.load(num_items_ptr)
        item_step = tl.num_programs(0)
    else:
        # Last tile first: under a causal mask the last tiles of a prompt are the longest.
        tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_splits
        seq = find_sequence(cu_seqlens_q_ptr, num_seqs, tile, GROUP, BLOCK_M)
        item_begin, item_end = tile_items(
            seq_lens_ptr, cu_seqlens_q_ptr, seq, tile, num_splits, window, GROUP, BLOCK_M, CAUSAL, WINDOW
        )
        # The tile's partials are dealt out to its programs in turn.
        item_begin += tl.program_id(0) % num_splits
        item_step = num_splits

    # One step a run of an item. Nothing may be hoisted out of this loop: it would live in registers all through the
    # tile loop, and spill. For the same reason no name from before it but these two is assigned in it.
    item = item_begin
    run = 0
    while tl.condition(item < item_end, disable_licm=True):
        row0, num_rows, first_cell, last_cell, out_row = load_item(
            items_ptr, seq_lens_ptr, cu_seqlens_q_ptr, item, seq, tile, num_splits, num_rows_total, window,
            GROUP, BLOCK_M, CAUSAL, WINDOW, WORK_LIST,
        )  # fmt: skip
        run = tl.maximum(run, first_cell // RUN_CELLS)
        in_tile = offs_m < num_rows
        row = (row0 + offs_m) // GROUP
        if WORK_LIST:
            kv_seq = tl.load(row_seq_ptr + row0 // GROUP)  # all rows of an item agree on the blocks of its cells
            token = tl.load(row_token_ptr + row, mask=in_tile, other=0)
            row_seq = tl.load(row_seq_ptr + row, mask=in_tile, other=0)
            seq_len = tl.load(seq_lens_ptr + row_seq, mask=in_tile, other=0)
            position = seq_len - (tl.load(cu_seqlens_q_ptr + row_seq + 1, mask=in_tile, other=0) - token)
        else:
            kv_seq = seq
            token = tl.load(cu_seqlens_q_ptr + seq) + row
            seq_len = tl.load(seq_lens_ptr + seq)
            position = seq_len - tl.load(cu_seqlens_q_ptr + seq + 1) + token
        row_begin, row_end = visible_range(position, seq_len, window, CAUSAL, WINDOW)
        row_end = tl.where(in_tile, row_end, 0)
        lane_end = tl.max(row_end, 0)
        lane_begin = 0
        if WINDOW:
            lane_begin = tl.min(tl.where(in_tile, row_begin, 1 << 30), 0)
        head = kv_head * GROUP + (row0 + offs_m) % GROUP
        q_rows = token.to(tl.int64) * stride_q_token + head * stride_q_head
        q_mask = in_tile[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_rows[:, None] + (offs_d * stride_q_dim)[None, :], mask=q_mask, other=0.0)
        if INDPTR:
            seq_table_ptr = table_ptr + tl.load(table_start_ptr + kv_seq)
        else:
            seq_table_ptr = table_ptr + kv_seq.to(tl.int64) * stride_table_seq
        m, l, acc = fold_run(
            q, k_ptr + kv_head * stride_k_head, v_ptr + kv_head * stride_v_head, seq_table_ptr,
            tl.maximum(first_cell, run * RUN_CELLS) * TILES_PER_CELL,
            tl.minimum(
                tl.minimum(last_cell, (run + 1) * RUN_CELLS) * TILES_PER_CELL, (lane_end + BLOCK_N - 1) // BLOCK_N
            ),
            row_begin, row_end, lane_begin, lane_end, qk_scale, softcap, offs_d, offs_v,
            stride_k_block, stride_k_slot, stride_k_dim, stride_v_block, stride_v_slot, stride_v_dim,
            BLOCK_SIZE, HEAD_DIM, V_HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            WINDOW, SOFTCAP, FP8, PRECISION, STAGES,
        )  # fmt: skip
        row0, num_rows, first_cell, last_cell, out_row = load_item(
            items_ptr, seq_lens_ptr, cu_seqlens_q_ptr, item, seq, tile, num_splits, num_rows_total, window,
            GROUP, BLOCK_M, CAUSAL, WINDOW, WORK_LIST,
        )  # fmt: skip
        # The rows of a tile are neighbours in the workspace: one base address, and constants from there.
        out_row += kv_head * num_rows_total * num_partials
        in_tile = offs_m < num_rows
        acc_ptrs = acc_ptr + out_row * V_HEAD_DIM + (offs_m[:, None] * V_HEAD_DIM + offs_v[None, :])
        ml_ptrs = ml_ptr + (out_row * V_SLICES + v_slice) * 2 + offs_m * (2 * V_SLICES)
        acc_mask = in_tile[:, None] & (offs_v < V_HEAD_DIM)[None, :]
        if run > first_cell // RUN_CELLS:
            # Whole runs fold through the item's own partial in memory: a third accumulator would spill. This program
            # wrote it; the barrier is for a layout that gives an element to another thread.
            tl.debug_barrier()
            acc_item = tl.load(acc_ptrs, mask=acc_mask, other=0.0)
            m_item = tl.load(ml_ptrs, mask=in_tile, other=0.0)
            l_item = tl.load(ml_ptrs + 1, mask=in_tile, other=0.0)
            m, l, acc = merge(m_item, l_item, acc_item, m, l, acc, 1.0)
        tl.store(acc_ptrs, acc, mask=acc_mask)
        tl.store(ml_ptrs, m, mask=in_tile)
        tl.store(ml_ptrs + 1, l, mask=in_tile)
        run += 1
        if run * RUN_CELLS >= last_cell:
            item += item_step
            run = 0

"""The arithmetic of one cell: rows of queries against CELL_SIZE keys -> (log-sum-exp, normalised output), in float32.

Called by `narrow.py` and `wide.py`, and by whatever plans work differently: a row's result here depends on that row,
the cell and its mask alone, so how rows are tiled and batched never shows in the bits. That is empirical for the CPU's
matrix kernels and holds where the number of rows is a multiple of ROW_MULTIPLE (a tail of one row in their row blocks
takes another kernel); `python -m radixkv_kernels.selftest` checks it on the machine at hand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import AttentionSpec, AttentionTensors

CELL_SIZE = 256
"""KV tokens of a cell."""
HALF_CELL = CELL_SIZE // 2
"""Enough to compute a cell whose later half nobody sees, where `CellMath.halves` allows it."""
RUN_CELLS = 8
"""Cells of a run."""
ROW_MULTIPLE = 4
"""Query rows of every call are padded to a multiple of this."""


@dataclass(frozen=True, slots=True)
class CellMath:
    """What a layer's calls have in common; equal calls give an equal CellMath."""

    flash: bool
    """The fused CPU kernel; else batched matrix products in float32. Chosen by feature, dtype and device only."""
    halves: bool
    """A cell whose later half no row sees may be computed from its first half: the bits are the same."""
    compute_dtype: torch.dtype
    """What q, k and v are brought to before the products."""
    scale: float
    head_scale: Tensor | None
    """[num_kv_heads, 1, 1] float32, where keys have a scale a head."""
    softcap: float | None
    slopes: Tensor | None
    """[num_kv_heads, 1, group_size] float32 ALiBi slopes."""

    @staticmethod
    def of(spec: AttentionSpec, tensors: AttentionTensors) -> CellMath:
        """Reads k_scale's value where there is a single one (a constant of the layer). O(num_q_heads)."""
        scale, head_scale = spec.scale, None
        if tensors.k_scale is not None:
            if tensors.k_scale.stride(0) == 0 or spec.num_kv_heads == 1:
                scale = scale * float(tensors.k_scale[0])
            else:
                head_scale = tensors.k_scale.view(-1, 1, 1)
        plain = head_scale is None and spec.softcap is None and tensors.alibi_slopes is None
        flash = plain and spec.head_dim == spec.v_head_dim and tensors.q.device.type == "cpu"
        # fp16 products take a scalar path on CPUs, and batched products would round bf16 scores to bf16: both in fp32
        dtype = torch.bfloat16 if flash and tensors.q.dtype == torch.bfloat16 else torch.float32
        slopes = None
        if tensors.alibi_slopes is not None:
            slopes = tensors.alibi_slopes.view(spec.num_kv_heads, 1, spec.group_size)
        halves = flash and _halves_agree(dtype, spec.head_dim)
        return CellMath(flash, halves, dtype, scale, head_scale, spec.softcap, slopes)


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Which keys each row of a tile sees; batch is the number of (tile, cell) pairs that one call computes."""

    lo: Tensor
    """[batch, rows] int64: first visible token position."""
    hi: Tensor
    """[batch, rows] int64: one past the last."""
    position: Tensor
    """[batch, rows] int64: the row's own position, for ALiBi."""

    def __getitem__(self, index: slice | Tensor | tuple[slice, slice]) -> RowBounds:
        return RowBounds(self.lo[index], self.hi[index], self.position[index])


def cell_partials(
    math: CellMath, q: Tensor, k: Tensor, v: Tensor, first_token: Tensor, bounds: RowBounds, masked: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over one cell.

    Args:
        q: [batch, num_kv_heads, rows, head_dim] compute_dtype; rows (token, head of the group), a multiple of
            ROW_MULTIPLE; batch may have stride 0.
        k, v: [batch, num_kv_heads, CELL_SIZE (or HALF_CELL), head_dim] compute_dtype, any strides. Finite everywhere.
        first_token: [batch] int64, position of the cell's first token.
        bounds: of the rows. Rows that see nothing give lse -inf and out 0.
        masked: False where every row that matters sees the whole cell; the bits are the same either way.

    Returns (lse [batch, num_kv_heads, rows] float32 contiguous, out [.., head_dim] float32 or compute_dtype).
    O(batch * num_kv_heads * rows * CELL_SIZE * head_dim).
    """
    visible = None
    if masked or math.slopes is not None:
        tokens = first_token[:, None, None] + torch.arange(k.shape[2], device=q.device)
        if masked:
            visible = (tokens >= bounds.lo[..., None]) & (tokens < bounds.hi[..., None])  # [batch, rows, cell]
    if math.flash:
        return _flash(math.scale, q, k, v, visible)
    x = torch.matmul(q, k.transpose(-1, -2))
    x.mul_(math.scale if math.head_scale is None else math.head_scale * math.scale)
    if math.softcap is not None:
        x = torch.tanh(x.div_(math.softcap)).mul_(math.softcap)
    if math.slopes is not None:
        x.sub_(_alibi(math.slopes, tokens, bounds.position))
    if visible is not None:
        x.masked_fill_(~visible[:, None], -torch.inf)
    top = x.amax(-1, keepdim=True)
    empty = top == -torch.inf
    top.masked_fill_(empty, 0.0)
    x.sub_(top).exp_()
    total = x.sum(-1, keepdim=True)
    out = torch.matmul(x, v).div_(total.masked_fill(empty, 1.0))
    lse = (total.log() + top).masked_fill_(empty, -torch.inf)
    return lse.squeeze(-1), out


def _flash(scale: float, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)[:, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    lse = lse.contiguous()
    if visible is not None:
        # the kernel says 0 for a row that sees nothing; its out is 0 already
        lse.masked_fill_(~visible.any(-1)[:, None], -torch.inf)
    return lse, out


@functools.cache
def _halves_agree(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the fused kernel on this machine gives the bits of a cell with its later half masked from the first half.

    Once a process, some milliseconds. Its sums are in order of keys, so it should; products may choose otherwise.
    """
    gen = torch.Generator().manual_seed(0)

    def normal(tokens: int) -> Tensor:
        return torch.randn(2, 2, tokens, head_dim, generator=gen, dtype=torch.float32, device="cpu").to(dtype)

    k, v = normal(CELL_SIZE), normal(CELL_SIZE)
    for rows in (4, 12, 32, 64):
        q = normal(rows)
        hi = torch.randint(1, HALF_CELL + 1, (2, rows, 1), generator=gen, device="cpu")
        visible = torch.arange(CELL_SIZE, device="cpu") < hi
        whole = _flash(head_dim**-0.5, q, k, v, visible)
        half = _flash(head_dim**-0.5, q, k[:, :, :HALF_CELL], v[:, :, :HALF_CELL], visible[..., :HALF_CELL])
        if not all(torch.equal(x, y) for x, y in zip(whole, half, strict=True)):
            return False
    return True


def _alibi(slopes: Tensor, tokens: Tensor, position: Tensor) -> Tensor:
    """slope * |p - t|: [batch, num_kv_heads, rows, cell]; the row order is (token, head of the group), then padding."""
    num_kv_heads, _, group = slopes.shape
    batch, rows = position.shape
    of_row = slopes.expand(num_kv_heads, -(-rows // group), group).reshape(num_kv_heads, -1)[:, :rows]
    distance = (position[..., None] - tokens).abs().float()
    return of_row[None, :, :, None] * distance.view(batch, 1, rows, CELL_SIZE)

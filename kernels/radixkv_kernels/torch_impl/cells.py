"""The arithmetic of one cell: rows of queries against CELL_SIZE keys -> (log-sum-exp, normalised output), in float32.

A row's result here depends on that row, the cell and its mask alone, so how rows are tiled and batched never shows in
the bits. For the CPU's matrix kernels that holds at some numbers of rows and not at others, which differ between
machines: `row_rules` measures them, and whether half a cell will do; `python -m radixkv_kernels.selftest` says what it
found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract import AttentionSpec, AttentionTensors
from ..row_rules import RowRule, Way, cancelling, normal, rule_of

CELL_SIZE = 256
"""KV tokens of a cell."""
HALF_CELL = CELL_SIZE // 2
"""Enough to compute a cell whose later half no row sees, where `CellMath.halves` allows it."""
RUN_CELLS = 8
"""Cells of a run."""
ANY_ROWS = RowRule("attention off the CPU")
"""Nothing is measured there."""
_CALL_ROWS = 4
_NARROW_ROWS = 64
"""Calls of up to so many rows come in batches."""


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
    rows: RowRule = ANY_ROWS
    """How many rows go into one product, and what they are padded to."""

    @staticmethod
    def of(spec: AttentionSpec, tensors: AttentionTensors) -> CellMath:
        """Reads k_scale's value where there is a single one (a constant of the layer). O(num_q_heads)."""
        scale, head_scale = spec.scale, None
        if tensors.k_scale is not None:
            if tensors.k_scale.stride(0) == 0 or spec.num_kv_heads == 1:
                scale = scale * float(tensors.k_scale[0])
            else:
                head_scale = tensors.k_scale.view(-1, 1, 1)
        on_cpu = tensors.q.device.type == "cpu"
        plain = head_scale is None and spec.softcap is None and tensors.alibi_slopes is None
        flash, dtype = _kernel(tensors.q.dtype, spec.head_dim, spec.v_head_dim, plain and on_cpu)
        slopes = None
        if tensors.alibi_slopes is not None:
            slopes = tensors.alibi_slopes.view(spec.num_kv_heads, 1, spec.group_size)
        rows, halves = rule_of_cells(flash, dtype, spec.head_dim, spec.v_head_dim) if on_cpu else (ANY_ROWS, False)
        return CellMath(flash, halves, dtype, scale, head_scale, spec.softcap, slopes, rows)


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


@dataclass(frozen=True, slots=True)
class View:
    """What rows see of their cells, ready for the products. The layers of a step have it in common."""

    visible: Tensor | None
    """[batch, rows, tokens] bool; None: every row that matters sees the whole cell."""
    added: Tensor | None
    """[batch, 1, rows, tokens] compute_dtype, 0 or -inf: the mask as the fused kernel wants it."""
    empty: Tensor | None
    """[batch, 1, rows] bool, the rows that see nothing."""
    distance: Tensor | None
    """[batch, rows, tokens] float32 between row and key, for ALiBi."""

    @staticmethod
    def of(math: CellMath, first_token: Tensor, bounds: RowBounds, tokens: int, masked: bool) -> View:
        """The view of `tokens` tokens of cells that begin at first_token [batch] int64.

        masked: False where every row that matters sees the whole cell; the bits are the same either way.
        """
        visible = added = empty = distance = None
        if masked or math.slopes is not None:
            at = first_token[:, None, None] + torch.arange(tokens, device=first_token.device)
            if masked:
                visible = (at >= bounds.lo[..., None]) & (at < bounds.hi[..., None])
            if math.slopes is not None:
                distance = (bounds.position[..., None] - at).abs().float()
        if visible is not None and math.flash:
            added = torch.zeros(visible.shape, dtype=math.compute_dtype, device=visible.device)
            added = added.masked_fill_(~visible, -torch.inf)[:, None]
            empty = ~visible.any(-1)[:, None]
        return View(visible, added, empty, distance)


def cell_partials(math: CellMath, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over one cell.

    Args:
        q: [batch, num_kv_heads, rows, head_dim] compute_dtype; rows (token, head of the group), as many as
            `math.rows.padded` gives; batch may have stride 0.
        k, v: [batch, num_kv_heads, CELL_SIZE (or HALF_CELL), head_dim] compute_dtype, any strides. Finite everywhere.
        view: what the rows see. Rows that see nothing give lse -inf and out 0.

    Returns (lse [batch, num_kv_heads, rows] float32 contiguous, out [.., head_dim] float32 or compute_dtype).
    O(batch * num_kv_heads * rows * CELL_SIZE * head_dim).
    """
    if math.flash:
        return _flash(math, q, k, v, view)
    x = _matmul(math.rows, q, k.transpose(-1, -2))
    x.mul_(math.scale if math.head_scale is None else math.head_scale * math.scale)
    if math.softcap is not None:
        x = torch.tanh(x.div_(math.softcap)).mul_(math.softcap)
    if view.distance is not None:
        assert math.slopes is not None, "a view has distances where there are slopes"
        x.sub_(_alibi(math.slopes, view.distance))
    if view.visible is not None:
        x.masked_fill_(~view.visible[:, None], -torch.inf)
    top = x.amax(-1, keepdim=True)
    empty = top == -torch.inf
    top.masked_fill_(empty, 0.0)
    x.sub_(top).exp_()
    total = x.sum(-1, keepdim=True)
    out = _matmul(math.rows, x, v).div_(total.masked_fill(empty, 1.0))
    lse = (total.log() + top).masked_fill_(empty, -torch.inf)
    return lse.squeeze(-1), out


def _runs(rule: RowRule, rows: int) -> Iterator[tuple[slice, int]]:
    """The pieces of so many rows, neighbours of one size together: (rows, how many pieces)."""
    pieces = rule.pieces(rows)
    start = 0
    for size in dict.fromkeys(pieces):
        count = pieces.count(size)
        yield slice(start, start := start + size * count), count


def _stacked(x: Tensor, pieces: int) -> Tensor:
    """[1, heads, pieces * rows, n] -> [pieces, heads, rows, n], a view: equal pieces are one call."""
    return x[0].unflatten(1, (pieces, -1)).transpose(0, 1)


def _unstacked(x: Tensor) -> Tensor:
    """[pieces, heads, rows, ..] -> [1, heads, pieces * rows, ..]."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _matmul(rule: RowRule, x: Tensor, y: Tensor) -> Tensor:
    """x [batch, heads, rows, depth] @ y [batch, heads, depth, n], by the pieces of the rule."""
    found = []
    for rows, pieces in _runs(rule, x.shape[2]):
        part = x[:, :, rows]
        if pieces == 1:
            found.append(_twice(torch.matmul, part, y))
        elif len(x) == 1:
            found.append(_unstacked(torch.matmul(_stacked(part, pieces), y)))
        else:
            found += [torch.matmul(piece, y) for piece in part.chunk(pieces, 2)]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def _twice(product: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """The product of one batch and head computed twice, where there are threads: a single one is given them all, and
    may then be computed by another kernel."""
    if args[0].shape[0] * args[0].shape[1] == 1 and torch.get_num_threads() > 1:
        return product(*(x.expand(2, -1, -1, -1) for x in args))[:1]
    return product(*args)


def _flash(math: CellMath, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
    found = []
    for rows, pieces in _runs(math.rows, q.shape[2]):
        part, added = q[:, :, rows], None if view.added is None else view.added[:, :, rows]
        if pieces == 1:
            found.append(_fused(math.scale, part, k, v, added))
        elif len(q) == 1:
            keys, values = (x.expand(pieces, -1, -1, -1) for x in (k, v))
            lse, out = _fused(
                math.scale, _stacked(part, pieces), keys, values, None if added is None else _stacked(added, pieces)
            )
            found.append((_unstacked(lse), _unstacked(out)))
        else:
            masks = [None] * pieces if added is None else added.chunk(pieces, 2)
            found += [_fused(math.scale, x, k, v, mask) for x, mask in zip(part.chunk(pieces, 2), masks, strict=True)]
    lse, out = found[0] if len(found) == 1 else (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    if view.empty is not None:
        # the kernel says 0 for a row that sees nothing; its out is 0 already
        lse.masked_fill_(view.empty, -torch.inf)
    return lse, out


def _fused(scale: float, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """One call of the fused kernel; a single head is computed twice for the reason that `_twice` gives."""
    alone = q.shape[0] * q.shape[1] == 1 and torch.get_num_threads() > 1
    if alone:
        q, k, v = (x.expand(2, -1, -1, -1) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=added, scale=scale
    )
    return (lse[:1].contiguous(), out[:1]) if alone else (lse.contiguous(), out)


def attention_row_rule(
    dtype: torch.dtype, head_dim: int, *, v_head_dim: int | None = None, plain: bool = True
) -> RowRule:
    """Which numbers of query rows of `paged_attention` share their bits on this CPU, `implementation` torch.

    Measured once a process for the caller's number of threads: some 100 ms. Where `holds` is False, results are right,
    and their bits depend on the batch; the first call logs a warning.

    Args:
        dtype, head_dim: q's.
        v_head_dim: of the values; None: as q's.
        plain: without softcap, alibi_slopes and a k_scale that differs between heads.

    >>> rule = attention_row_rule(torch.float32, 64)
    >>> rule.padded(37) >= 37
    True
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return rule_of_cells(*_kernel(dtype, head_dim, v_head_dim, plain), head_dim, v_head_dim)[0]


def _kernel(dtype: torch.dtype, head_dim: int, v_head_dim: int, plain: bool) -> tuple[bool, torch.dtype]:
    """(`flash`, `compute_dtype`) of a CellMath."""
    flash = plain and head_dim == v_head_dim
    # fp16 products take a scalar path on CPUs, and batched products would round bf16 scores to bf16: both in fp32
    return flash, torch.bfloat16 if flash and dtype == torch.bfloat16 else torch.float32


def rule_of_cells(flash: bool, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> tuple[RowRule, bool]:
    """(the rule of rows of `cell_partials`, whether a cell whose later half no row sees may be computed by half)."""
    shape = f"head_dim {head_dim}" + (f" and {v_head_dim}" if v_head_dim != head_dim else "")
    name = f"{'fused' if flash else 'plain'} attention, {str(dtype)[6:]}, {shape}"
    math = CellMath(flash, False, dtype, 1.0, None, None, None)

    def rule(halves: bool) -> RowRule:
        return rule_of(
            name + (", halves of cells" if halves else ""),
            ("cells", flash, dtype, head_dim, v_head_dim, halves),
            lambda: [_trial(math, head_dim, v_head_dim, halves)],
            call_rows=_CALL_ROWS,
            most=1024,
        )

    both = rule(True) if flash else None
    if both is not None and both.unrestricted:
        return both, True
    whole = rule(False)
    halves = both is not None and both.holds and both.cost <= whole.cost
    return (both, True) if both is not None and halves else (whole, False)


def _trial(math: CellMath, head_dim: int, v_head_dim: int, halves: bool) -> Way:
    """Cells in which the scores cancel, and cells in which the values do, with a mask and without, in batches of one
    and of more; with `halves` also those of which half is seen, whole and by half."""
    problems = []
    for tokens in (CELL_SIZE, HALF_CELL) if halves else (CELL_SIZE,):
        for make in (scores_cancel, values_cancel):
            scale, q, k, v = make(math.compute_dtype, tokens, head_dim, v_head_dim)
            more = CELL_SIZE - tokens
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
            problems.append((replace(math, scale=scale), tokens, q, k, v))

    def way(rows: int) -> Tensor:
        return torch.cat([_cells(*problem, rows) for problem in problems], -1)

    return way


def _cells(math: CellMath, seen: int, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """[cells computed, rows, 1 + v_head_dim]: lse and out of equal rows that see `seen` tokens.

    q [1, head_dim], k and v [CELL_SIZE, dim].
    """
    threads = torch.get_num_threads()
    # a thread's scratch and a head's rows begin where their sizes put them, which some kernels notice
    batches = ((1, 1), (1, max(4, threads)), (2, 2)) if rows <= _NARROW_ROWS else ((1, threads),)
    found = []
    for batch, heads in batches:
        # as they are gathered: tokens outside of heads
        keys, values = (x[None, :, None].repeat(batch, 1, heads, 1).transpose(1, 2) for x in (k, v))
        queries = q.repeat(batch, heads, rows, 1)
        lo = torch.zeros(batch, rows, dtype=torch.int64, device="cpu")
        bounds = RowBounds(lo, lo + seen, lo)
        for tokens, masked in ((CELL_SIZE, True), (seen, False)):
            view = View.of(math, lo[:, 0], bounds, tokens, masked)
            lse, out = cell_partials(math, queries, keys[:, :, :tokens], values[:, :, :tokens], view)
            found.append(torch.cat((lse[..., None], out.float()), -1).flatten(0, 1))
    return torch.cat(found)


def scores_cancel(
    dtype: torch.dtype, tokens: int, head_dim: int, v_head_dim: int
) -> tuple[float, Tensor, Tensor, Tensor]:
    """q . k is zero but for rounding, and the scale makes that large."""
    q, k = cancelling(tokens, head_dim, dtype=dtype)
    gen = torch.Generator().manual_seed(1)
    return 2.0**20, q, k, normal(gen, tokens, v_head_dim, dtype=dtype)


def values_cancel(
    dtype: torch.dtype, tokens: int, head_dim: int, v_head_dim: int
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Keys in pairs of equal scores and opposite values, of sizes far apart."""
    gen = torch.Generator().manual_seed(2)
    place = torch.randperm(tokens, generator=gen, device="cpu")
    k, v = normal(gen, tokens // 2, head_dim, dtype=dtype), normal(gen, tokens // 2, v_head_dim, dtype=dtype)
    v = v * 2.0 ** torch.randint(-8, 9, v.shape, generator=gen, device="cpu").to(dtype)
    k, v = torch.cat((k, k))[place], torch.cat((v, -v))[place]
    return head_dim**-0.5, normal(gen, 1, head_dim, dtype=dtype), k, v


def _alibi(slopes: Tensor, distance: Tensor) -> Tensor:
    """slope * |p - t|: [batch, num_kv_heads, rows, tokens]; rows are (token, head of the group), then padding."""
    num_kv_heads, _, group = slopes.shape
    rows = distance.shape[1]
    of_row = slopes.expand(num_kv_heads, -(-rows // group), group).reshape(num_kv_heads, -1)[:, :rows]
    return of_row[None, :, :, None] * distance[:, None]

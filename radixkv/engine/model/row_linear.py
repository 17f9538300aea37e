"""x @ weight.T on a CPU so that a row's bits are its own: by the rule of rows of each shape. Used by `layers`.

A product is computed as it stands, or as (weight @ x.T).T, where rows are columns to the library and on some machines
fewer numbers of them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from radixkv_kernels.row_rules import RowRule, Way, cancelling, rule_of
from torch import Tensor

ALIGNMENT = 64
"""Bytes. Some libraries choose a kernel by where an operand begins; all begin at multiples of this, as in the trial."""
_CALL_ROWS = 48
_MOST_WORK = 1 << 32
"""Multiplications of the largest size that a rule is chosen by."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in], weight [out, in], bias [out], of one dtype, on a CPU -> [rows, out], contiguous.

    O(rows * in * out), with rows padded to a size of the rule.
    """
    num_rows = x.shape[0]
    rule = linear_rule(weight.shape[1], weight.shape[0], weight.dtype, bias is not None)
    pieces = rule.pieces(num_rows)
    padded = sum(pieces)
    x = F.pad(x, (0, 0, 0, padded - num_rows)) if padded > num_rows else aligned(x.contiguous())
    if len(pieces) == 1:
        return _WAYS[rule.way(padded)](x, weight, bias)[:num_rows].contiguous()
    result = x.new_empty(padded, weight.shape[0])
    for part, out in zip(x.split(pieces), result.split(pieces), strict=True):
        out.copy_(_WAYS[rule.way(part.shape[0])](aligned(part), weight, bias))
    return result[:num_rows]


def linear_rule(size_in: int, size_out: int, dtype: torch.dtype, biased: bool) -> RowRule:
    """The rule of rows of `linear` for weights [size_out, size_in], and the caller's number of threads."""
    return rule_of(
        f"linear {size_in} -> {size_out}{' with bias' if biased else ''}, {str(dtype)[6:]}",
        ("linear", size_in, size_out, dtype, biased),
        lambda: _trial(size_in, size_out, dtype, biased),
        call_rows=_CALL_ROWS,
        most=_MOST_WORK // (size_in * size_out),
    )


def aligned(x: Tensor) -> Tensor:
    """x, copied if it does not begin at a multiple of ALIGNMENT bytes."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _rows_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _weight_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())).t()


_WAYS = (_rows_first, _weight_first)


def _trial(size_in: int, size_out: int, dtype: torch.dtype, biased: bool) -> Sequence[Way]:
    x, weight = cancelling(size_out, size_in, dtype=dtype)
    bias = weight.new_zeros(size_out) if biased else None

    def of(way: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Way:
        return lambda rows: way(x.repeat(rows, 1), weight, bias)

    return [of(way) for way in _WAYS]

"""x @ weight.T on a CPU, packed weights among them, and so that a row's bits are its own: by a rule of rows a shape.

Weights that oneDNN has brought into a layout of its own take half the time that torch's product takes for a few rows
(2.2 times as fast in bfloat16 at one row and 2.7 times in float32 at eight, 576 -> 3072, on an AMD EPYC with AVX-512),
and there every number of rows from two on has shown the same bits. Where a CPU or a dtype has no such product, one is
computed as it stands, or as (weight @ x.T).T, where rows are columns to the library and on some machines fewer numbers
of them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    ways = _PACKED_WAYS if is_packed(weight) else _WAYS
    rule = linear_rule(Product.of(weight, bias))
    pieces = rule.pieces(num_rows)
    padded = sum(pieces)
    x = F.pad(x, (0, 0, 0, padded - num_rows)) if padded > num_rows else aligned(x.contiguous())
    if len(pieces) == 1:
        return ways[rule.way(padded)](x, weight, bias)[:num_rows].contiguous()
    result = x.new_empty(padded, weight.shape[0])
    for part, out in zip(x.split(pieces), result.split(pieces), strict=True):
        out.copy_(ways[rule.way(part.shape[0])](aligned(part), weight, bias))
    return result[:num_rows]


class Product(NamedTuple):
    """What a rule of rows is of: the shape of a product with weights [size_out, size_in]."""

    size_in: int
    size_out: int
    dtype: torch.dtype
    is_biased: bool
    is_packed: bool

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> Product:
        """The product with these weights. O(1)."""
        return Product(weight.shape[1], weight.shape[0], weight.dtype, bias is not None, is_packed(weight))

    def __str__(self) -> str:
        biased, packed = " with bias" if self.is_biased else "", ", packed" if self.is_packed else ""
        return f"linear {self.size_in} -> {self.size_out}{biased}, {str(self.dtype)[6:]}{packed}"


def linear_rule(product: Product) -> RowRule:
    """The rule of rows of `linear` for such a product, and the caller's number of threads."""
    return rule_of(
        str(product),
        product,
        lambda: _trial(product),
        call_rows=_CALL_ROWS,
        most=_MOST_WORK // (product.size_in * product.size_out),
    )


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies with packed weights of this dtype on this CPU. O(1)."""
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(weight: Tensor) -> Tensor:
    """A copy of weights [out, in] on a CPU in oneDNN's layout, for `product` and `linear` alone. O(size).

    Raises:
        RuntimeError: not `packs(weight.dtype)`.
    """
    # The rows that the layout is meant for; it serves any number, and no other number was quicker.
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)


def is_packed(weight: Tensor) -> bool:
    """Whether weights are in oneDNN's layout."""
    return weight.is_mkldnn


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in], weight [out, in] packed or not, bias [out] -> [rows, out], all rows at once. O(rows * in * out)."""
    return _packed_product(x, weight, bias) if is_packed(weight) else F.linear(x, weight, bias)


def aligned(x: Tensor) -> Tensor:
    """x, copied if it does not begin at a multiple of ALIGNMENT bytes."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _rows_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _weight_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())).t()


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_WAYS = (_rows_first, _weight_first)
_PACKED_WAYS = (_packed_product,)


def _trial(product: Product) -> Sequence[Way]:
    x, weight = cancelling(product.size_out, product.size_in, dtype=product.dtype)
    bias = weight.new_zeros(product.size_out) if product.is_biased else None
    if product.is_packed:
        weight = packed(weight)

    def of(way: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Way:
        return lambda rows: way(x.repeat(rows, 1), weight, bias)

    return [of(way) for way in (_PACKED_WAYS if product.is_packed else _WAYS)]

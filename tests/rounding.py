"""Attention in float64, and how far from it roundings may take a result: from theory, so that no machine sets a bound.

A sum of n terms, in any order, has partial sums that grow as sqrt(j), so roundings that are independent of each other
leave an error of u * sqrt(n / 6) times the norm of the terms, where u is the unit roundoff. For the tests of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CELL = 256
"""No sum of an implementation has more terms; cells are merged by a few roundings each."""
UNIT = 2.0**-24
_STANDARD_DEVIATIONS = 2
"""Of a norm over many numbers. Of one number among many it is three times that."""


@dataclass(frozen=True)
class Exact:
    """Rows of attention in float64, and the variances of what roundings do to them."""

    out: Tensor
    """[rows, heads, v_head_dim]."""
    lse: Tensor
    """[rows, heads]."""
    out_variance: Tensor
    lse_variance: Tensor
    dtype: torch.dtype

    @staticmethod
    def joined(parts: list[Exact]) -> Exact:
        """The rows of all, one after another."""
        names = ("out", "lse", "out_variance", "lse_variance")
        return Exact(*(torch.cat([getattr(part, name) for part in parts]) for name in names), parts[0].dtype)

    @property
    def allowed(self) -> float:
        """Of the norm of all errors of out."""
        # what the result's own format leaves of numbers that are otherwise exact
        floor = torch.finfo(self.dtype).eps / 4 * float(self.out.norm())
        return _STANDARD_DEVIATIONS * float(self.out_variance.sum().sqrt()) + floor

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Raises AssertionError where a result has NaN, other empty rows, or more error than roundings explain.

        out may have the rows' heads and columns in any shape of as many numbers.
        """
        assert out.numel() == self.out.numel() and not out.isnan().any()
        error = float((out.double().reshape(self.out.shape) - self.out).norm())
        assert error <= self.allowed, f"out: error {error:.2e}, allowed {self.allowed:.2e}"
        if lse is None:
            return
        lse = lse.reshape(self.lse.shape)
        seen = self.lse > -torch.inf
        assert torch.equal(seen, lse > -torch.inf), "lse: other rows see nothing"
        over = (lse.double() - self.lse).abs() - 3 * _STANDARD_DEVIATIONS * self.lse_variance.sqrt()
        assert (over[seen] <= 0).all(), f"lse: {float(over[seen].max()):.2e} more than allowed"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    hidden: Tensor,
    distance: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Exact:
    """One sequence; the variances are those of an implementation that is given q's dtype and adds in float32.

    Args:
        q: [rows, heads, head_dim].
        k, v: [tokens, kv_heads, dim], scales applied.
        hidden: [rows, tokens] bool.
        distance: [rows, tokens], for slopes [heads].
        sinks: [heads].
    """
    dtype, rows = q.dtype, q.shape[0]
    group = q.shape[1] // k.shape[1]
    q = q.double().transpose(0, 1)
    k, v = (x.nan_to_num().double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    x = q @ k.transpose(1, 2) * scale  # [heads, rows, tokens]
    size = x.abs()
    # in units of u ** 2
    of_scores = scale**2 * (q * q) @ (k * k).transpose(1, 2) * (q.shape[2] / 6)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    if slopes is not None:
        assert distance is not None
        x = x - slopes.double()[:, None, None] * distance.abs()
        size = torch.maximum(size, x.abs())
    x = x.masked_fill(hidden, -torch.inf)
    seen = ~hidden.all(1)
    lse = torch.logsumexp(x, 2, keepdim=True) if k.shape[1] else x.new_full((*x.shape[:2], 1), -torch.inf)
    if sinks is not None:
        joined = torch.logaddexp(lse, sinks.double()[:, None, None])
        lse = torch.where(seen[:, None], joined, lse)
    p = torch.exp(x - lse).nan_to_num(0.0).masked_fill(hidden, 0.0)
    terms = (~hidden).sum(1).clamp(max=CELL)[:, None] / 6
    finite = lse.nan_to_num(0.0, neginf=0.0)
    # of p: scores, scaling, cap and bias, the difference from the maximum, exp, log, merges
    of_p = of_scores + 2 * size**2 + (x - finite).nan_to_num(0.0, neginf=0.0) ** 2 + 6
    out, squares = p @ v, (p * p) @ (v * v)
    out_variance = (p * p * of_p) @ (v * v) + terms * squares + 6 * out * out
    lse_variance = ((p * p * of_p).sum(2) + terms[:, 0] * (p * p).sum(2) + finite[..., 0] ** 2 + 6) * UNIT**2
    of_dtype = (torch.finfo(dtype).eps / 2) ** 2 / 3 if dtype != torch.float32 else 0.0
    # halves: p is rounded before its product with v, then each cell's output, and the result
    out_variance = UNIT**2 * out_variance + of_dtype * (2 * squares + out * out)
    if dtype == torch.bfloat16:  # and by torch's fused kernel before it is added
        lse_variance = lse_variance + of_dtype * (p * p).sum(2)
    parts = (out.transpose(0, 1), lse[..., 0].T, out_variance.transpose(0, 1), lse_variance.T)
    assert parts[0].shape[0] == rows
    return Exact(*parts, dtype)

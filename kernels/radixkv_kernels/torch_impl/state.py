"""The running result of rows over part of their keys, and the one formula that merges two of them.

(top, total, acc): the softmax over the part is acc / total, its log-sum-exp top + log(total). A cell's partial is (lse,
1, out). Merging is a left fold; an empty state is the exact identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = torch.finfo(torch.float32).min
"""`top` of an empty state: finite, so that no difference is NaN; exp(-inf - FLOOR) and exp(FLOOR - top) are exact."""


@dataclass(slots=True)
class State:
    """Rows' softmax over the keys folded in so far. All float32 and contiguous; `fold_*` mutate it."""

    top: Tensor
    """[...] maximum so far."""
    total: Tensor
    """[...] sum of exp(x - top); 0 where empty."""
    acc: Tensor
    """[..., v_head_dim] sum of exp(x - top) * v."""

    @staticmethod
    def empty(shape: tuple[int, ...], v_head_dim: int, device: torch.device) -> State:
        """No keys yet."""
        return State(
            torch.full(shape, FLOOR, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(*shape, v_head_dim, dtype=torch.float32, device=device),
        )

    @staticmethod
    def first(lse: Tensor, out: Tensor) -> State:
        """The empty state with one cell folded in: same bits as `empty(...).fold_cell(lse, out)`, without the work."""
        return State(lse.clamp_min(FLOOR), (lse != -torch.inf).float(), out.to(torch.float32, copy=True))

    def fold_cell(self, lse: Tensor, out: Tensor) -> None:
        """Folds in a cell's (lse [...], out [..., v_head_dim]); lse -inf is the identity if out is finite there."""
        top = torch.maximum(self.top, lse)
        keep, add = torch.exp(self.top - top), torch.exp(lse - top)
        self.top = top
        self.total.mul_(keep).add_(add)
        # addcmul rounds once in the vector and in the scalar path alike, so tails and strides don't show in the bits
        self.acc.mul_(keep[..., None]).addcmul_(out.float(), add[..., None])

    def fold_state(self, other: State) -> None:
        """Folds in another state over later keys."""
        top = torch.maximum(self.top, other.top)
        keep, add = torch.exp(self.top - top), torch.exp(other.top - top)
        self.top = top
        self.total.mul_(keep).addcmul_(other.total, add)
        self.acc.mul_(keep[..., None]).addcmul_(other.acc, add[..., None])

    def fold_state_at(self, rows: Tensor, other: State) -> None:
        """`fold_state` for the entries `rows` [n] int64 of dim 0, `other` having n of them."""
        part = State(self.top[rows], self.total[rows], self.acc[rows])
        part.fold_state(other)
        self.top[rows], self.total[rows], self.acc[rows] = part.top, part.total, part.acc

    def finish(self, sinks: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [..., v_head_dim], lse [...]) float32, the sinks (broadcastable to [...]) joining last. Uses it up."""
        seen = self.total != 0  # NaN is seen too
        if sinks is not None:
            top = torch.maximum(self.top, sinks)
            keep = torch.exp(self.top - top)
            self.total.mul_(keep).add_(torch.exp(sinks - top).masked_fill(~seen, 0.0))
            self.acc.mul_(keep[..., None])
            self.top = top
        out = self.acc.div_(self.total.masked_fill(~seen, 1.0)[..., None])
        if v_scale is not None:
            out.mul_(v_scale)
        return out, (self.total.log() + self.top).masked_fill_(~seen, -torch.inf)


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """See `contract.py`. O(size of outs), one float32 copy of a state at a time."""
    empty = lses == -torch.inf
    first = outs[0].float().masked_fill(empty[0][..., None], 0.0).masked_fill(lses[0].isnan()[..., None], torch.nan)
    state = State.first(lses[0].contiguous(), first)
    for i in range(1, outs.shape[0]):
        state.fold_cell(lses[i].contiguous(), outs[i].float().masked_fill(empty[i][..., None], 0.0))
    merged, merged_lse = state.finish(None, None)
    out.copy_(merged)
    if lse is not None:
        lse.copy_(merged_lse)

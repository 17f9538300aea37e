"""What `api.py` hands to an implementation, and what every implementation must do with it.

An implementation is a module or a folder with the seven functions of `Implementation`, and an entry of
`selection.IMPLEMENTATIONS`. It validates nothing again: `api` has checked shapes, dtypes, devices and, on the CPU,
contents.

The arithmetic of paged attention. Row i of sequence s (tokens cu_seqlens_q[s] + i) has position
p = seq_lens[s] - q_len[s] + i and sees key t where 0 <= t < seq_lens[s], t <= p if `causal`, and t > p - window if
`window` is given. With h the KV head of query head g (h = g // (num_q_heads // num_kv_heads)):

    x = (q[g] . k[t, h]) * (scale * k_scale[h])
    x = softcap * tanh(x / softcap)                if softcap
    x = x - alibi_slopes[g] * abs(p - t)           if alibi_slopes
    lse = log(sum_t exp(x_t)  (+ exp(sinks[g])))   natural log, the sink included
    out = v_scale[h] * sum_t exp(x_t - lse) v[t, h]

A row that sees no key has out 0 and lse -inf, sinks or not; where causal, rows with p < 0 are such rows. Rows of q from
cu_seqlens_q[-1] on belong to no sequence: their out and lse are not written. Slots that no row sees may hold anything
(NaN included), and block ids of blocks that no row of the sequence sees may be anything (-1, stale): don't dereference
them.

The sum over t follows the cell rule: cells of a fixed number of tokens from position 0, runs of a fixed number of
cells, a run is the left fold of its cells, the result the left fold of its runs, with one merge formula, an empty state
being the exact identity; the sink enters once, after the last merge, then v_scale. So a row's result depends on that
row's q, p, and the KV it sees: not on the batch, not on the other rows, not on where the blocks lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of q, and of a cache that is not fp8."""
FP8 = torch.float8_e4m3fn
RUN_TOKENS = 2048
"""KV tokens of a run, in every implementation."""


class UnsupportedImplementation(NotImplementedError):
    """The call is well formed, but the implementation asked for can't run it; the message says why.

    A mistake in the arguments (shape, dtype, range) is a ValueError that names the argument.
    """


def expect(ok: bool, name: str, expected: str, got: object) -> None:
    """Raises ValueError("name: expected ..., got ...") unless ok."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The plain values of one call: hashable, the same for every call of a layer except `max_blocks`.

    Block j of sequence s is `block_ids[(block_indptr[s] if block_indptr is not None else s * block_stride) + j]`.
    """

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    max_blocks: int
    """An upper bound of the blocks of any sequence, known without a synchronisation: sizes grids and scratch."""
    block_stride: int

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """The tensors of one call, all on q's device."""

    q: Tensor
    """[num_tokens, num_q_heads, head_dim] float32, float16 or bfloat16, any strides."""
    k_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim] q's dtype or float8_e4m3fn, any strides."""
    v_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, v_head_dim] k_cache's dtype, any strides."""
    block_ids: Tensor
    """[n] int32, stride 1."""
    block_indptr: Tensor | None
    """[num_seqs + 1] int32, stride 1; None where the caller gave a rectangular table."""
    seq_lens: Tensor
    """[num_seqs] int32, stride 1."""
    cu_seqlens_q: Tensor
    """[num_seqs + 1] int32, stride 1."""
    sinks: Tensor | None
    """[num_q_heads] float32, stride 1."""
    alibi_slopes: Tensor | None
    """[num_q_heads] float32, stride 1."""
    k_scale: Tensor | None
    """[num_kv_heads] float32; stride 0 where one scale serves all heads."""
    v_scale: Tensor | None
    """As k_scale."""

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, those without rows or keys included."""
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What all plans of a planner have in common. ValueError naming the field where a value is out of range.

    >>> PlanConfig(block_size=16, num_q_heads=8, num_kv_heads=2).run_cells
    8
    """

    block_size: int
    num_q_heads: int
    num_kv_heads: int
    cell_size: int = 256
    """KV tokens of a cell: 256 for the torch implementation, 128 for Triton's."""
    causal: bool = True
    window: int | None = None
    tile_rows: int = 1024
    """Most flat rows (query token, head of the group) of an item: a kernel's tile."""
    lead_runs: int = 4
    """Most runs that one item folds: bounds an item's time."""
    min_items: int = 0
    """Cut finer, into single runs and then single cells, while there are fewer items: for a device to fill."""
    kv_itemsize: int = 2
    """Bytes of a cached number; weighs reading KV against writing partial results."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_q_heads", "num_kv_heads", "cell_size", "tile_rows", "lead_runs", "kv_itemsize"):
            value = getattr(self, name)
            expect(type(value) is int and value >= 1, name, "an int >= 1", value)
        expect(self.num_q_heads % self.num_kv_heads == 0, "num_q_heads", "a multiple of num_kv_heads", self.num_q_heads)
        expect(RUN_TOKENS % self.cell_size == 0, "cell_size", f"a divisor of {RUN_TOKENS}", self.cell_size)
        ok = self.window is None or (type(self.window) is int and self.window >= 1)
        expect(ok, "window", "None or an int >= 1", self.window)
        expect(isinstance(self.min_items, int) and self.min_items >= 0, "min_items", "an int >= 0", self.min_items)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def run_cells(self) -> int:
        """Cells of a run."""
        return RUN_TOKENS // self.cell_size

    @property
    def partial_cost(self) -> float:
        """Bytes to write and read one query token's partial over bytes of a cell's KV, per unit of head_dim."""
        return 4 * self.group_size / (self.kv_itemsize * self.cell_size)


@dataclass(frozen=True, slots=True)
class WorkList:
    """What a plan tells kernels, on the host; every array but the last two int32.

    Partial results lie in a workspace of num_partials * group_size flat rows, called slots. `plan/items.py` has a
    drawn example.
    """

    items: np.ndarray
    """[num_items, 5]: first flat row, flat rows, first cell, one past the last cell, first slot."""
    row_token: np.ndarray
    """[num_rows]: row of q of each row of the plan (a permutation)."""
    row_seq: np.ndarray
    """[num_rows]: its sequence."""
    row_base: np.ndarray
    """[num_rows + 1]: row r's partials are [row_base[r], row_base[r + 1]) of the next two, in order of cells."""
    row_slots: np.ndarray
    """[num_partials]: slot of the row's first head."""
    slot_cells: np.ndarray
    """[num_partials]: first cell of the partial; the first of a run starts a new run in the fold."""
    groups: np.ndarray
    """[num_items] int64: ascending numbers; items of one number are tiles of one group of rows over the same cells."""
    shared: np.ndarray
    """[num_rows] bool: some item has rows of this row's sequence and of another."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All eight."""
        return (
            self.items, self.row_token, self.row_seq, self.row_base, self.row_slots, self.slot_cells, self.groups,
            self.shared,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """A `WorkList` as int32 tensors on one device: what kernels read, what `torch.library` passes, what a CUDA graph
    can be replayed on.

    Made by `TreePlan.to`, or by `PlanBuffers.load` at fixed sizes and addresses: then entries past the plan's own are
    stale, and kernels loop to `num_items`.
    """

    NAMES: ClassVar = ("num_items", "items", "row_token", "row_seq", "row_base", "row_slots", "slot_cells")

    config: PlanConfig
    num_items: Tensor
    """[1]"""
    items: Tensor
    """[max_items, 5]: first flat row, flat rows, first cell, one past the last cell, first slot."""
    row_token: Tensor
    """[max_rows]: row of q of each row of the plan, -1 past its own; row_seq its sequence."""
    row_seq: Tensor
    row_base: Tensor
    """[max_rows + 1]: row r's partials are [row_base[r], row_base[r + 1]) of the next two. Rows past its own: none."""
    row_slots: Tensor
    """[max_partials]: slot (flat row of the workspace) of the row's first head."""
    slot_cells: Tensor
    """[max_partials]: first cell of the partial."""

    @staticmethod
    def shapes(max_items: int, max_rows: int, max_partials: int) -> tuple[tuple[int, ...], ...]:
        """Of `tensors`, in their order."""
        rows, partials = (max_rows,), (max_partials,)
        return (1,), (max_items, 5), rows, rows, (max_rows + 1,), partials, partials

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All seven in the order of `NAMES`, which is that of the operator's arguments."""
        return tuple(getattr(self, name) for name in self.NAMES)

    @property
    def shares(self) -> bool:
        """True: the device alone knows, and asking would synchronise."""
        return True

    @property
    def max_slots(self) -> int:
        """Flat rows of the workspace: one a query head of a KV head and partial."""
        return len(self.row_slots) * self.config.group_size

    def workspace_size(self, v_head_dim: int) -> int:
        """Most float32 numbers that a kernel's workspace holds: the values of each partial, and a maximum and a sum for
        each 16 of them."""
        return self.max_slots * self.config.num_kv_heads * (v_head_dim + 2 * -(-v_head_dim // 16)) + 4

    def to(self, device: torch.device) -> PlanTensors:
        """Itself: `api` has checked that the tensors are on the call's device."""
        return self

    def host(self) -> WorkList:
        """The work list, copied back. Synchronises off the CPU. O(num_items + num_rows)."""
        count = int(self.num_items)
        items = self.items[:count].cpu().numpy()
        row_token, row_seq = self.row_token.cpu().numpy(), self.row_seq.cpu().numpy()
        rows = int((row_token >= 0).sum())
        row_token, row_seq = row_token[:rows], row_seq[:rows]
        base = self.row_base.cpu().numpy()[: rows + 1]
        group = self.config.group_size
        sharers = np.zeros(int(row_seq.max(initial=-1)) + 1, dtype=bool)
        for row0, num_rows in items[:, :2].tolist():
            seqs = row_seq[row0 // group : (row0 + num_rows - 1) // group + 1]
            if (seqs != seqs[0]).any():
                sharers[seqs] = True
        row_slots, slot_cells = (x[: int(base[-1])].cpu().numpy() for x in (self.row_slots, self.slot_cells))
        return WorkList(items, row_token, row_seq, base, row_slots, slot_cells, np.arange(count), sharers[row_seq])


class Plan(Protocol):
    """Which rows read which cells of KV together, in the two forms that a call takes: `TreePlan` and `PlanTensors`."""

    @property
    def config(self) -> PlanConfig:
        """What the plan was made with."""

    @property
    def shares(self) -> bool:
        """False: no item serves two sequences, so the call may run as if it had no plan."""

    def host(self) -> WorkList:
        """The work list, to be read on the host."""

    def to(self, device: torch.device) -> PlanTensors:
        """The work list as tensors on a device."""


class Implementation(Protocol):
    """The seven functions of an implementation's module."""

    def unsupported(self, spec: AttentionSpec, tensors: AttentionTensors) -> str | None:
        """Why this implementation can't run the call, or None where it can; `api` raises UnsupportedImplementation.

        Looks at values of `spec`, and at dtypes, shapes and devices of `tensors`, never at their contents. O(1).
        """

    def paged_attention(self, spec: AttentionSpec, tensors: AttentionTensors, out: Tensor, lse: Tensor | None) -> None:
        """Writes `out` [num_tokens, num_q_heads, v_head_dim] in q's dtype and, unless it is None, `lse` [num_tokens,
        num_q_heads] float32; any strides. O(rows * visible keys * num_q_heads * head_dim).
        """

    def tree_attention(
        self,
        spec: AttentionSpec,
        tensors: AttentionTensors,
        plan: Plan,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """`paged_attention` with a plan made for this call: the same bits, but KV that sequences share is read once.

        `plan.host()` is its work list in numpy arrays, `plan.to(device)` the same as tensors. workspace: None, or
        float32 scratch [>= plan.workspace_size(v_head_dim)] for an implementation that would allocate without it.
        ValueError where the plan's cells or tiles are not this implementation's.
        """

    def plan_tile(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        head_dim: int,
        v_head_dim: int,
        softcap: bool,
        device: torch.device,
    ) -> tuple[int, int]:
        """(cell_size, tile_rows) of plans for such calls: KV tokens of a cell, and the most flat rows of an item.

        UnsupportedImplementation where it has none. O(1).
        """

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        """Writes keys and values [num_tokens, num_kv_heads, head_dim or v_head_dim] into their slots.

        slot_mapping [num_tokens] int64: block * block_size + offset; negative: the token is skipped. Scales as in
        `AttentionTensors`: the cache holds value / scale (divided in float32), saturated to the finite range where the
        cache is fp8. O(num_tokens * num_kv_heads * head_dim).
        """

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
        """src, dst, num_tokens [num_pairs] int64: the first num_tokens[i] rows of block src[i] to those of dst[i].

        No block is both a source and a destination, none is a destination twice. O(sum of num_tokens).
        """

    def merge_states(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """The left fold over states of the merge formula, in float32.

        outs [num_states, num_tokens, num_heads, v_head_dim], lses [num_states, num_tokens, num_heads] float32. A state
        with lse -inf is the identity, whatever its out holds (NaN included); with lse NaN the result is NaN, out and
        lse; lse is never +inf. `lse` may be None. O(size of outs).
        """

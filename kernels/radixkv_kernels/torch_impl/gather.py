"""Brings cells of a paged cache into contiguous scratch, in the dtype of the products. For `narrow.py`, `wide.py`.

A cell is read as *units*: the largest pieces of consecutive tokens that lie in one block and in one cell, so that
`index_select` moves whole rows: gcd(block_size, HALF_CELL) tokens where the cache's layout keeps tokens together, one
token where it doesn't.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .cells import CELL_SIZE, HALF_CELL
from .workspace import Workspace

_BYTES_A_CHUNK = 8 << 20
_PAD_BYTES = 64


class CacheReader:
    """Reads cells of one cache (keys or values). Holds views only; buffers come from the workspace."""

    def __init__(self, name: str, cache: Tensor, dtype: torch.dtype, workspace: Workspace) -> None:
        self.name, self.dtype, self.workspace = name, dtype, workspace
        self.block_size, self.num_heads, self.head_dim = cache.shape[1:]
        self.cache = cache
        s_block, s_token, s_head, s_dim = cache.stride()
        heads_together = s_dim == 1 and (s_head == self.head_dim or self.num_heads == 1)
        row_len = self.num_heads * self.head_dim if heads_together else self.head_dim
        self.per_head = not heads_together
        together = s_dim == 1 and (s_token == row_len or self.block_size == 1)
        self.unit = math.gcd(self.block_size, HALF_CELL) if together else 1
        self.rows: Tensor | None = None
        if s_dim != 1:
            return  # no contiguous rows at all: read() indexes element by element
        steps = [s_block, s_token * self.unit] + ([s_head] if self.per_head else [])
        counts = [cache.shape[0], self.block_size // self.unit] + ([self.num_heads] if self.per_head else [])
        # rows at every multiple of the common step: overlapping ones are never asked for
        step = math.gcd(*(s for s, n in zip(steps, counts, strict=True) if n > 1)) or 1
        self.block_step, self.unit_step = s_block // step, s_token * self.unit // step
        self.head_step = s_head // step
        last = sum(s // step * (n - 1) for s, n in zip(steps, counts, strict=True))
        if cache.shape[0]:
            bytes_view = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
            self.rows = bytes_view.as_strided((last + 1, self.unit, row_len), (step, row_len, 1))

    @property
    def token_bytes(self) -> int:
        """Of one gathered token."""
        return self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def layout(self) -> tuple[int, ...]:
        """Readers of equal layout take the same indices."""
        if self.rows is None:
            return (self.block_size, self.unit)
        steps = (self.block_step, self.unit_step, self.head_step)
        return (self.block_size, self.unit, *steps, self.num_heads if self.per_head else 0)

    def index(
        self, block_ids: np.ndarray, start: np.ndarray, first: np.ndarray, lo: np.ndarray, hi: np.ndarray, tokens: int
    ) -> Tensor:
        """What `read` takes for the first `tokens` of each cell; slice it along dim 0.

        block_ids: [..] ids of all sequences, one after the other. The rest [cells]: where the cell's sequence begins in
        them, the cell's first token, and [lo, hi) with lo < hi: blocks outside of it are replaced by the nearest one
        inside, as their ids may be anything. What is read in their place is zeroed or masked.
        """
        at = first[:, None] + np.arange(0, tokens, self.unit)
        block = at // self.block_size
        at -= block * self.block_size
        np.maximum(block, (lo // self.block_size)[:, None], out=block)
        np.minimum(block, ((hi - 1) // self.block_size)[:, None], out=block)
        block += start[:, None]
        blocks = block_ids.take(block).astype(np.int64)
        if self.rows is None:
            return torch.from_numpy(np.stack((blocks, at), 1)).to(self.cache.device)
        index = blocks * self.block_step + at // self.unit * self.unit_step
        if self.per_head:
            index = index[:, None, :] + (np.arange(self.num_heads) * self.head_step)[:, None]
        return torch.from_numpy(index.reshape(len(index), -1)).to(self.cache.device)

    def read(self, index: Tensor, tokens: int = CELL_SIZE) -> Tensor:
        """Gathers so many tokens of cells, by a slice of their `index`.

        Returns [cells, num_heads, tokens, head_dim] self.dtype, in scratch that the next read overwrites.
        """
        cells = index.shape[0]
        if self.rows is None:
            found = self.cache[index[:, 0], index[:, 1]]  # [cells, units, num_heads, head_dim]
            return self._scratch(cells, tokens, self.dtype, found.device).copy_(found.transpose(1, 2))
        source = self.rows
        shape = cells, tokens, self.num_heads, self.head_dim, self.unit, self.per_head
        key = self.name, *shape, self.cache.dtype, self.dtype, index.device

        def target() -> tuple[Tensor, Tensor]:
            raw = self._scratch(cells, tokens, source.dtype, index.device)
            # the same memory with the units apart, in the order of the index
            whole = raw if self.per_head else raw.transpose(1, 2).flatten(2)
            return whole.view(index.numel(), self.unit, source.shape[2]), raw.view(self.cache.dtype)

        rows, found = self.workspace.views(key, target)
        torch.index_select(source, 0, index.reshape(-1), out=rows)
        return (
            found if found.dtype == self.dtype else self._scratch(cells, tokens, self.dtype, found.device).copy_(found)
        )

    def _scratch(self, cells: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[cells, num_heads, tokens, head_dim], stored heads first if per_head, else tokens first."""
        if self.per_head:
            return self.workspace.take(self.name, (cells, self.num_heads, tokens, self.head_dim), dtype, device)
        row = self.num_heads * self.head_dim
        # float32 tokens a multiple of 512 bytes apart share few sets of the first-level cache: +25 % in the products
        aligned = self.num_heads > 1 and dtype.itemsize == 4 and row % 128 == 0
        pad = _PAD_BYTES // dtype.itemsize if aligned else 0
        buffer = self.workspace.take(self.name, (cells, tokens, row + pad), dtype, device)[..., :row]
        return buffer.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)


Outside = list[tuple[int, slice]]
"""Gathered tokens that no row sees: (cell, tokens of it)."""


def outside(first_tokens: list[int], lo: list[int], hi: list[int], tokens: int) -> Outside:
    """Of so many tokens gathered of each cell, those outside of [lo, hi). O(cells)."""
    found = []
    for i, (first, a, b) in enumerate(zip(first_tokens, lo, hi, strict=True)):
        if a > first:
            found.append((i, slice(0, a - first)))
        if b < first + tokens:
            found.append((i, slice(b - first, tokens)))
    return found


def zero(cells: Tensor, unseen: Outside) -> None:
    """Zeroes gathered tokens that no row sees: what lies there may be NaN, which a mask doesn't stop."""
    for i, tokens in unseen:
        cells[i, :, tokens].zero_()


def cells_a_chunk(k: CacheReader, v: CacheReader, tokens: int) -> int:
    """How many cells of so many tokens to gather at once so that they are still in the last-level cache when used."""
    return max(1, _BYTES_A_CHUNK // (tokens * (k.token_bytes + v.token_bytes)))

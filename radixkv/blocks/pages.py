"""One pool of small pages for all that layers keep: KV blocks, window blocks, states and rows, as lists of pages.

A page is a block of one full-attention layer's KV, so nothing is padded to anything larger. Pages are counted by
reference: a state that two checkpoints of one cell need, or a block that a checkpoint and the tree hold, is there once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.blocks.allocator import BlockAllocator, OutOfBlocks
from radixkv.cache.contract import NO_BLOCKS, check_block_size, check_count
from radixkv.cache.layers import CELL, FullAttention, Layers, Recurrent

Pages = np.ndarray  # [n] int32 page ids
NO_PAGES: Pages = NO_BLOCKS


class OutOfPages(OutOfBlocks):
    """More pages were wanted than are free or could be made free. Nothing was changed."""


class PagePool:
    """Pages of one size, each with a number of holders.

    Args:
        num_pages: size of the pool; None for one that grows as needed.
        page_bytes: of a page.

    Cost: O(pages) a call; 13 bytes a page of the pool.
    """

    def __init__(self, num_pages: int | None, page_bytes: int) -> None:
        self.page_bytes = check_count("page_bytes", page_bytes)
        self._pages = BlockAllocator(num_pages)
        self._num_holders = np.zeros(64, np.int32)

    @property
    def num_pages(self) -> int | None:
        """Size of the pool; None: it grows."""
        return self._pages.num_blocks

    @property
    def num_used(self) -> int:
        """Pages with a holder."""
        return self._pages.num_used

    def missing(self, num_pages: int) -> int:
        """Returns how many pages are to be freed before so many can be taken."""
        return 0 if self._pages.num_blocks is None else max(num_pages - self._pages.num_free, 0)

    def take(self, num_pages: int) -> Pages:
        """Hands out pages with one holder.

        Raises:
            OutOfPages: so many are not free.
        """
        if self.missing(num_pages):
            raise OutOfPages(f"{num_pages} pages wanted, {self._pages.num_free} of {self._pages.num_blocks} are free")
        taken = self._pages.take(num_pages)
        if len(taken) and (most := int(taken.max())) >= len(self._num_holders):
            self._num_holders = np.concatenate([self._num_holders, np.zeros(most + 1, np.int32)])
        self._num_holders[taken] = 1
        return taken

    def share(self, pages: Pages) -> Pages:
        """Adds a holder to pages that have one; returns them."""
        self._check_held(pages)
        self._num_holders[pages] += 1
        return pages

    def free(self, pages: Pages) -> None:
        """Takes a holder from pages, each given once; those without another are free."""
        self._check_held(pages)
        self._num_holders[pages] -= 1
        self._pages.free(pages[self._num_holders[pages] == 0])

    def _check_held(self, pages: Pages) -> None:
        if len(pages) and (self._num_holders[pages] < 1).any():
            raise ValueError(f"pages: expected pages in use, got {pages[self._num_holders[pages] < 1][0]}")


@dataclass(frozen=True)
class PageLayout:
    """How many pages each thing takes that the layers of a model keep.

    Attributes:
        layers: of the model.
        block_size: tokens in a block of KV, of full attention and of windows.
        page_bytes: of a page.
        kv_pages: of a block of full-attention KV in all layers.
        state_pages: of the states of all recurrent layers at one position.
        windows: for each width of window, in tokens: pages of a block in all its layers.
    """

    layers: Layers
    block_size: int
    page_bytes: int
    kv_pages: int
    state_pages: int
    windows: dict[int, int]

    @classmethod
    def of(cls, layers: Layers, block_size: int = 16, page_bytes: int | None = None) -> PageLayout:
        """Returns the layout of a model.

        Args:
            layers: of the model.
            block_size: tokens in a block.
            page_bytes: None: a block of the smallest layer that keeps KV.

        Raises:
            ValueError: no layer keeps KV of full attention.
        """
        size = check_block_size(block_size)
        if not any(isinstance(layer, FullAttention) for layer in layers):
            raise ValueError("layers: expected at least one of full attention, got none")
        if page_bytes is None:
            page_bytes = size * min(layer.token_bytes for layer in layers if not isinstance(layer, Recurrent))
        kv_pages = state_pages = 0
        windows: dict[int, int] = {}
        for layer in layers:
            if isinstance(layer, Recurrent):
                state_pages += -(-layer.state_bytes // page_bytes)
                continue
            num_pages = -(-size * layer.token_bytes // page_bytes)
            if isinstance(layer, FullAttention):
                kv_pages += num_pages
            else:
                windows[layer.num_tokens] = windows.get(layer.num_tokens, 0) + num_pages
        return cls(layers, size, page_bytes, kv_pages, state_pages, windows)

    def row_pages(self, position: int) -> int:
        """Returns the pages of what tokens have added since the last border of a cell before a position."""
        num_rows = position % CELL
        rows = [layer.row_bytes * num_rows for layer in self.layers if isinstance(layer, Recurrent)]
        return sum(-(-num_bytes // self.page_bytes) for num_bytes in rows)

    def window_blocks(self, width: int, position: int) -> range:
        """Returns the numbers of the blocks with the tokens before a position that its next token sees."""
        return range(max(position - width + 1, 0) // self.block_size, -(-position // self.block_size))

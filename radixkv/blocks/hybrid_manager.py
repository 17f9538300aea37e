"""HybridManager: where the cache of a hybrid model meets the pool of pages; it knows the holders of each page.

A request computes its prompt in chunks that end where checkpoints are to be made::

    sequence = manager.begin(prompt)                 # match: a checkpoint, and KV at least that far
    for end in (*stops, len(prompt)):
        manager.grow(sequence, end)                  # pages for the chunk, giving up checkpoints where needed
        ...                                          # compute it
        manager.publish(sequence, prompt, end)       # its blocks, and a checkpoint where one is to be
    manager.end(sequence)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from radixkv.blocks.pages import NO_PAGES, OutOfPages, PageLayout, PagePool, Pages
from radixkv.cache.contract import CacheCorruption, check_count
from radixkv.cache.hybrid.cache import GivenUp, HybridCache, HybridLease
from radixkv.cache.layers import CELL, checkpoint_bytes
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


@dataclass(slots=True)
class State:
    """What it takes to go on at a position besides whole blocks of full-attention KV, as pages.

    Attributes:
        position: number of tokens before it.
        recurrent: states at the border of the cell, of all recurrent layers.
        rows: what tokens have added since.
        windows: by width of window, then number of the block.
        kv_tail: the block of full-attention KV that the position is in; none at a border.
    """

    position: int = 0
    recurrent: Pages = field(default_factory=lambda: NO_PAGES)
    rows: Pages = field(default_factory=lambda: NO_PAGES)
    windows: dict[int, dict[int, Pages]] = field(default_factory=dict)
    kv_tail: Pages = field(default_factory=lambda: NO_PAGES)

    def all(self) -> Pages:
        """Returns all of its pages, those of `kv_tail` included."""
        blocks = [pages for window in self.windows.values() for pages in window.values()]
        return np.concatenate([self.recurrent, self.rows, self.kv_tail, *blocks])


@dataclass(eq=False, slots=True)
class HybridSequence:
    """What one request holds. Made by `HybridManager.begin`; read it, but change it through the manager alone.

    Attributes:
        lease: its pins in the cache.
        state: where it is; it shares pages with the checkpoint that it goes on from, or has left.
        block_ids: numbers of its own blocks -> their ids; those before them are the cache's.
        num_computed: positions computed or found.
    """

    lease: HybridLease
    state: State
    block_ids: dict[int, int] = field(default_factory=dict)
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class BytesByKind:
    """What the pool's pages hold, in bytes. A page that several hold counts where it comes first.

    Attributes:
        kv: blocks of full attention.
        windows, states, rows: of checkpoints and requests.
    """

    kv: int
    windows: int
    states: int
    rows: int


class HybridManager:
    """Hands pages to sequences, giving up checkpoints where needed.

    Args:
        cache: that holds nothing; this manager's alone from now on.
        num_bytes: of the pool; None for one without end.
        page_bytes: see `PageLayout.of`.

    Attributes:
        pool: of pages.
        layout: how many pages each thing takes.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, cache: HybridCache, num_bytes: int | None = None, page_bytes: int | None = None) -> None:
        self.cache = cache
        self.layout = PageLayout.of(cache.layers, cache.block_size, page_bytes)
        num_pages = None if num_bytes is None else check_count("num_bytes", num_bytes) // self.layout.page_bytes
        self.pool = PagePool(num_pages, self.layout.page_bytes)
        self._blocks: dict[int, Pages] = {}  # a block of full-attention KV is known by its first page
        self._sequences: dict[HybridSequence, None] = {}

    def begin(
        self,
        prompt: TokenIds,
        namespace: Namespace | None = None,
        *,
        turns: Iterable[int] = (),
        named: Iterable[int] = (),
    ) -> HybridSequence:
        """Matches a prompt, and takes no page (see `HybridCache.acquire`)."""
        lease = self.cache.acquire(prompt, namespace, turns=turns, named=named)
        if self._is_full(lease):
            self.cache.drop_poor_stops(lease)
        state = State() if lease.checkpoint is None else self._share(lease.checkpoint.state)
        sequence = HybridSequence(lease, state, num_computed=lease.num_tokens)
        self._sequences[sequence] = None
        return sequence

    def _is_full(self, lease: HybridLease) -> bool:
        """Whether the checkpoints that a request would leave, and its KV, do not fit without giving up others."""
        ends = [*lease.stops, len(lease.key) // TOKEN_BYTES]
        num_tokens = max(ends[-1] - lease.kv.num_tokens, 0) + self.layout.block_size
        num_pages = num_tokens // self.layout.block_size * self.layout.kv_pages
        num_pages += sum(-(-checkpoint_bytes(self.cache.layers, end) // self.layout.page_bytes) for end in ends)
        return self.pool.missing(num_pages) > 0

    def _share(self, state: State) -> State:
        pool = self.pool
        windows = {w: {n: pool.share(pages) for n, pages in blocks.items()} for w, blocks in state.windows.items()}
        return State(
            state.position, pool.share(state.recurrent), pool.share(state.rows), windows, pool.share(state.kv_tail)
        )

    def grow(self, sequence: HybridSequence, end: int) -> None:
        """Gives a sequence the pages to compute up to a position: KV that is not there yet, and the state at it.

        Raises:
            OutOfPages: not so many can be made free. The sequence has what it had.
        """
        layout, pool, old = self.layout, self.pool, sequence.state
        first = sequence.lease.kv.num_tokens // layout.block_size
        missing = [n for n in range(first, -(-end // layout.block_size)) if n not in sequence.block_ids]
        is_same_cell = end // CELL == old.position // CELL and len(old.recurrent) > 0
        num_state = 0 if end < CELL or is_same_cell else layout.state_pages
        num_rows = layout.row_pages(end)
        fresh: dict[int, list[int]] = {}  # window blocks to be written that are not the sequence's own yet
        for width in layout.windows:
            held = old.windows.get(width, {})
            fresh[width] = [
                n
                for n in layout.window_blocks(width, end)
                if n not in held or (sequence.num_computed == sequence.lease.num_tokens and self._is_cut(old, n))
            ]
        num_windows = sum(layout.windows[width] * len(numbers) for width, numbers in fresh.items())
        self._make_room(len(missing) * layout.kv_pages + num_state + num_rows + num_windows)
        for number in missing:
            pages = pool.take(layout.kv_pages)
            sequence.block_ids[number] = int(pages[0])
            self._blocks[int(pages[0])] = pages
        windows = {}
        for width, num_pages in layout.windows.items():
            held = old.windows.get(width, {})
            windows[width] = {
                n: pool.take(num_pages) if n in fresh[width] else pool.share(held[n])
                for n in layout.window_blocks(width, end)
            }
        recurrent = pool.share(old.recurrent) if is_same_cell else pool.take(num_state)
        sequence.state = State(end, recurrent, pool.take(num_rows), windows)
        # The chunk has been computed when the state at its end stands; it read the one before.
        self._free(old)
        sequence.num_computed = end

    def _is_cut(self, state: State, number: int) -> bool:
        """Whether a position is inside a block, so that a request that goes on there writes to a copy of it."""
        return state.position % self.layout.block_size > 0 and number == state.position // self.layout.block_size

    def _make_room(self, num_pages: int) -> None:
        while self.pool.missing(num_pages):
            given_up = self.cache.evict(self._shorten)
            if given_up is None:
                raise OutOfPages(f"{num_pages} pages wanted, {self.pool.missing(num_pages)} more than can be made free")
            self._take_back(given_up)

    def _shorten(self, state: State) -> tuple[State, int]:
        """Returns the state at the border of the cell, and its bytes; for layers without windows."""
        position = state.position - state.position % CELL
        size = self.layout.block_size
        tail = self.pool.share(state.kv_tail) if position % size else NO_PAGES
        shorter = State(position, self.pool.share(state.recurrent), NO_PAGES, {}, tail)
        return shorter, len(shorter.all()) * self.layout.page_bytes

    def _take_back(self, given_up: GivenUp) -> None:
        for state in given_up.states:
            self._free(state)
        self._free_blocks(given_up.block_ids.tolist())

    def _free(self, state: State) -> None:
        for pages in (state.recurrent, state.rows, state.kv_tail):
            self.pool.free(pages)
        for blocks in state.windows.values():
            for pages in blocks.values():
                self.pool.free(pages)

    def _free_blocks(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self.pool.free(self._blocks.pop(block))

    def publish(self, sequence: HybridSequence, token_ids: TokenIds, end: int) -> bool:
        """Publishes what has been computed up to a position, and leaves a checkpoint there.

        Args:
            sequence: that has grown to `end`.
            token_ids: [>= end] from position 0.
            end: the position.

        Returns:
            Whether a checkpoint was left: not where there is one.
        """
        size, lease = self.layout.block_size, sequence.lease
        key = pack(token_ids)
        first = lease.kv.num_tokens // size
        numbers = range(first, end // size)
        own = [sequence.block_ids[n] for n in numbers]
        duplicates = self.cache.insert(lease, key[first * size * TOKEN_BYTES : end // size * size * TOKEN_BYTES], own)
        for number in numbers:
            del sequence.block_ids[number]
        self._free_blocks(duplicates[:, 0].tolist())
        state = self._share(sequence.state)
        if end % size:
            state.kv_tail = self.pool.share(self._blocks[self._block_at(sequence, end // size)])
        num_pages = len(state.all())
        if self.cache.checkpoint(lease, end, state, num_pages * self.layout.page_bytes, key):
            return True
        self._free(state)
        return False

    def _block_at(self, sequence: HybridSequence, number: int) -> int:
        if number in sequence.block_ids:
            return sequence.block_ids[number]
        return int(self.cache.block_at(sequence.lease, number))

    def commit(self) -> None:
        """What was published is computed."""
        self.cache.commit()

    def end(self, sequence: HybridSequence, token_ids: TokenIds | None = None) -> None:
        """Ends a sequence; its own pages are free, what serves hits stays.

        Args:
            sequence: one that has not ended.
            token_ids: prompt and output, to be remembered.
        """
        del self._sequences[sequence]
        self._free(sequence.state)
        self._free_blocks(sequence.block_ids.values())
        self._free_blocks(self.cache.release(sequence.lease, token_ids).tolist())

    def cancel(self, sequence: HybridSequence) -> None:
        """Ends a sequence that could not grow, as if it had never begun."""
        del self._sequences[sequence]
        self._free(sequence.state)
        self._free_blocks(sequence.block_ids.values())
        self._free_blocks(self.cache.cancel(sequence.lease).tolist())

    # ---- what the pool holds

    def bytes_by_kind(self) -> BytesByKind:
        """Returns what the pages in use hold. O(pages)."""
        seen: set[int] = set()

        def count(pages: Iterable[int]) -> int:
            before = len(seen)
            seen.update(pages)
            return (len(seen) - before) * self.layout.page_bytes

        states = [*self.cache.states(), *(sequence.state for sequence in self._sequences)]
        kv = sum(count(pages.tolist()) for pages in self._blocks.values())
        kv += sum(count(state.kv_tail.tolist()) for state in states)
        windows = sum(count(p.tolist()) for state in states for each in state.windows.values() for p in each.values())
        recurrent = sum(count(state.recurrent.tolist()) for state in states)
        return BytesByKind(kv, windows, recurrent, sum(count(state.rows.tolist()) for state in states))

    def check(self) -> None:
        """Raises CacheCorruption unless every page in use has a holder that is known. O(pages); for tests."""
        self.cache.check()
        found = self.bytes_by_kind()
        held = found.kv + found.windows + found.states + found.rows
        if held != self.pool.num_used * self.layout.page_bytes:
            used = self.pool.num_used * self.layout.page_bytes
            raise CacheCorruption(f"violated: pages in use are held, got {used} bytes in use and {held} held")

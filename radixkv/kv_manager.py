"""KVManager: the only place where the cache meets the allocator, and who holds which block is known.

A sequence's blocks, by who owns them::

    position      0            lease.num_tokens          num_tokens
    block_table   [ the cache's, pinned | the sequence's own    ]
                                  ^ a partial match is copied into the first of its own

    every block of the pool:   free (allocator) + private (sequences) + pinned + evictable (cache) == num_blocks

Called by the scheduler and by `radixkv.replay`. One step: `begin` (match), `grow` (blocks), `publish` (as soon as the
step is scheduled, so that one batch computes a shared prefix once), then run the copies and the forward pass, then
`commit`; or `withdraw`, which puts everything back as it was before the step. `end` when a request is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.block_allocator import BlockAllocator, OutOfBlocks
from radixkv.cache.base import Blocks, CacheCorruption, Lease, PrefixCache, Tail
from radixkv.cache.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES, TokenIds, pack


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first num_tokens rows of a cached block, to be copied into a sequence's own before the step runs."""

    source: int
    destination: int
    num_tokens: int


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """What one request holds. Made by `KVManager.begin`; read it, but change it through the manager alone.

    Attributes:
        lease: its pins in the cache.
        block_table: [ceil(num_tokens / block_size)] int32.
        num_cached_tokens: tokens it need not compute: whole blocks matched, and rows to be copied.
        copy: the copy of a partial match, once there is a block to copy into and until the step is committed.
    """

    lease: Lease
    block_table: Blocks
    num_cached_tokens: int
    copy: BlockCopy | None = None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Blocks of the pool by who holds them. Of a growing pool, `free` are those that came back."""

    free: int
    private: int
    pinned: int
    evictable: int

    @property
    def num_blocks(self) -> int:
        return self.free + self.private + self.pinned + self.evictable


class KVManager:
    """Hands blocks to sequences, evicting cached ones where needed.

    Args:
        cache: any `radixkv.cache.base.PrefixCache`.
        num_blocks: blocks in the pool; None for a pool without end.

    Attributes:
        num_evicted_blocks: blocks evicted to make room, so far.
    """

    def __init__(self, cache: PrefixCache, num_blocks: int | None = None) -> None:
        self.cache = cache
        self.allocator = BlockAllocator(num_blocks)
        self.num_evicted_blocks = 0
        self._sequences: dict[int, SequenceBlocks] = {}
        self._copying: list[SequenceBlocks] = []
        # Since the last commit: what stood in a table where the cache's blocks stand now, and who published what.
        self._replaced: list[tuple[SequenceBlocks, int, Blocks]] = []
        self._published: list[tuple[SequenceBlocks, Blocks]] = []
        self._advanced: dict[int, int] = {}  # num_cached_tokens before

    # ---- admission

    def begin(self, token_ids: TokenIds, namespace: Namespace | None = None) -> SequenceBlocks:
        """Matches and pins what is cached of a prompt, all but its last token: one has to be computed.

        Args:
            token_ids: [>= 1] the prompt.

        Raises:
            ValueError: the prompt is empty.

        Cost: as `PrefixCache.acquire`.
        """
        packed = pack(token_ids)
        if not packed:
            raise ValueError("token_ids: expected at least one token, got none")
        lease = self.cache.acquire(packed[:-TOKEN_BYTES], namespace)
        num_partial = lease.partial.num_tokens if lease.partial else 0
        sequence = SequenceBlocks(lease, lease.block_ids, lease.num_tokens + num_partial)
        self._sequences[id(sequence)] = sequence
        return sequence

    def cancel(self, sequence: SequenceBlocks) -> None:
        """Undoes `begin` and `grow` as if they had not been: pins, recency and counts. Not after `publish`."""
        self._forget(sequence)
        self._free_own(sequence, self._num_leased(sequence))
        self.cache.cancel(sequence.lease)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Gives a sequence blocks for its first num_tokens tokens, evicting where the free ones do not suffice.

        Where the block that a partial match pins is the one that is missing, the match is given up and
        `num_cached_tokens` falls back to whole blocks.

        Raises:
            OutOfBlocks: not enough could be made free; nothing was changed, but a partial match may be given up.
        """
        block_size = self.cache.block_size
        missing = -(-num_tokens // block_size) - len(sequence.block_table)
        if missing <= 0:
            return
        if missing == self.num_available + 1 and sequence.lease.partial and not sequence.copy:
            self.give_up_partial(sequence)
        first = self._take(missing)
        destination = len(sequence.block_table)
        sequence.block_table = np.concatenate([sequence.block_table, first])
        partial = sequence.lease.partial
        if partial and not sequence.copy and destination == self._num_leased(sequence):
            sequence.copy = BlockCopy(partial.block_id, int(first[0]), partial.num_tokens)
            self._copying.append(sequence)

    def give_up_partial(self, sequence: SequenceBlocks) -> None:
        """Goes on without the partial match: its source is pinned no longer, its rows are to be computed."""
        self._drop_partial(sequence, self._num_leased(sequence))

    def fork(self, sequence: SequenceBlocks, token_ids: TokenIds) -> tuple[SequenceBlocks, list[BlockCopy]]:
        """Makes a second sequence of the same tokens: what is published is shared, the rest is copied.

        Args:
            token_ids: the tokens whose KV the sequence has, from position 0; not in the middle of a step.

        Returns:
            The second sequence, and the copies, to be run before anything else is: no commit waits for them.

        Raises:
            OutOfBlocks: there is no room for the copies; nothing was changed.
        """
        self._check_committed(sequence)
        packed = pack(token_ids)
        width = self.cache.block_size * TOKEN_BYTES
        lease = self.cache.acquire(packed[: self._num_leased(sequence) * width], sequence.lease.namespace)
        shared = lease.num_tokens // self.cache.block_size
        sources = sequence.block_table[shared : -(-len(packed) // width)]
        try:
            own = self._take(len(sources))
        except OutOfBlocks:
            self.cache.cancel(lease)
            raise
        other = SequenceBlocks(lease, np.concatenate([lease.block_ids, own]), lease.num_tokens)
        self._sequences[id(other)] = other
        num_rows = [
            min(self.cache.block_size, len(packed) // TOKEN_BYTES - i * self.cache.block_size)
            for i in range(shared, shared + len(sources))
        ]
        return other, [BlockCopy(*pair) for pair in zip(sources.tolist(), own.tolist(), num_rows, strict=True)]

    def _drop_partial(self, sequence: SequenceBlocks, num_blocks: int) -> None:
        sequence.copy = None
        self.cache.unpin_partial(sequence.lease)
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, num_blocks * self.cache.block_size)

    @property
    def num_available(self) -> int | float:
        """Blocks that `grow` could hand out: free or evictable; without end for a growing pool."""
        if self.allocator.num_blocks is None:
            return float("inf")
        return self.allocator.num_free + self.cache.sizes.evictable

    def _take(self, num_blocks: int) -> Blocks:
        if self.allocator.num_blocks is None:
            return self.allocator.take(num_blocks)
        if num_blocks > self.num_available:
            raise OutOfBlocks(
                f"{num_blocks} blocks wanted; {self.allocator.num_free} of {self.allocator.num_blocks} are free and "
                f"{self.cache.sizes.evictable} evictable"
            )
        missing = num_blocks - self.allocator.num_free
        if missing > 0:
            evicted = self.cache.evict(missing)
            self.num_evicted_blocks += len(evicted)
            # What was never cached goes first, then in order of eviction: the free queue of a flat hash.
            taken = self.allocator.take(self.allocator.num_free)
            self.allocator.free(evicted)
            return np.concatenate([taken, self.allocator.take(num_blocks - len(taken))])
        return self.allocator.take(num_blocks)

    # ---- a step

    def advance(self, sequence: SequenceBlocks, token_ids: TokenIds) -> int:
        """Matches on from the lease's end, before a further chunk: somebody may have published it in the meantime.

        Args:
            token_ids: the tokens after the lease's end that may be matched (not the last one that must be computed).

        Returns:
            Tokens that the lease gained.

        Raises:
            ValueError: the sequence has published in this step.
        """
        self._check_committed(sequence)
        first = self._num_leased(sequence)
        gained = self.cache.advance(sequence.lease, token_ids)
        if not len(gained):
            return 0
        if sequence.lease.partial and not sequence.copy:  # it continued the old end
            self._drop_partial(sequence, first)
        self._advanced.setdefault(id(sequence), sequence.num_cached_tokens)
        self._replace(sequence, first, gained)
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, sequence.lease.num_tokens)
        return len(gained) * self.cache.block_size

    def publish(self, sequence: SequenceBlocks, token_ids: TokenIds) -> int:
        """Publishes the full blocks after the lease's end, which this step computes.

        Blocks that the cache has already take the place of the sequence's own, which nothing may write to any more
        and which are freed when the step is committed.

        Args:
            token_ids: the tokens after the lease's end; they must have blocks.

        Returns:
            Tokens, from the old end of the lease on, that were cached already: their slots are not to be written.

        Raises:
            ValueError: the sequence has too few blocks for these tokens.
        """
        first = self._num_leased(sequence)
        own = sequence.block_table[first:]
        duplicates = self.cache.insert(sequence.lease, token_ids, own)
        num_duplicates = len(duplicates)
        published = own[num_duplicates : self._num_leased(sequence) - first]
        if num_duplicates:
            self._replace(sequence, first, duplicates[:, 1])
        if len(published):
            self._published.append((sequence, published))
        self._reclaim()
        return num_duplicates * self.cache.block_size

    @property
    def copies(self) -> list[BlockCopy]:
        """The copies to run before the next forward pass."""
        return [sequence.copy for sequence in self._copying if sequence.copy]

    def commit(self) -> None:
        """The step has run: its copies are done, its blocks can be copied from, and what it replaced is free."""
        for sequence in self._copying:
            if sequence.copy:
                sequence.copy = None
                self.cache.unpin_partial(sequence.lease)
        self._copying.clear()
        for _, _, own in self._replaced:
            self.allocator.free(own)
        self._replaced.clear()
        self._published.clear()
        self._advanced.clear()
        self.cache.commit()
        self._reclaim()

    def withdraw(self) -> None:
        """The step has failed: what it published is private again, what that had replaced stands in the tables again.

        A sequence that was given blocks which another published in this step loses them, and all after them: its
        `num_cached_tokens` and `block_table` say what is left. Copies are still to be run.
        """
        withdrawn = self.cache.withdraw()
        owner = {block: sequence for sequence, blocks in self._published for block in blocks.tolist()}
        for sequence, first, own in reversed(self._replaced):
            # What an earlier step had computed is still leased; own blocks go back to where the lease was cut.
            leased = max(self._num_leased(sequence) - first, 0)
            self.allocator.free(own[:leased])
            sequence.block_table = sequence.block_table.copy()
            sequence.block_table[first + leased : first + len(own)] = own[leased:]
            owner.update((block, sequence) for block in own.tolist())
        foreign = set(withdrawn.tolist())
        for sequence in self._sequences.values():
            if id(sequence) in self._advanced:
                sequence.num_cached_tokens = self._advanced[id(sequence)]
            leased = self._num_leased(sequence)
            for index in range(leased, len(sequence.block_table)):
                block = int(sequence.block_table[index])
                if block in foreign and owner[block] is not sequence:
                    self._cut(sequence, index, foreign, owner)
                    break
        self._replaced.clear()
        self._published.clear()
        self._advanced.clear()

    def _cut(self, sequence: SequenceBlocks, end: int, foreign: set[int], owner: dict[int, SequenceBlocks]) -> None:
        """Takes the blocks from `end` on from a sequence, and frees those that were its own."""
        lost = sequence.block_table[end:].tolist()
        self.allocator.free([block for block in lost if block not in foreign or owner[block] is sequence])
        sequence.block_table = sequence.block_table[:end].copy()
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, end * self.cache.block_size)
        matched = len(sequence.lease.block_ids)  # where a partial match goes on
        if sequence.lease.partial and end <= matched:
            self._drop_partial(sequence, end)

    def end(self, sequence: SequenceBlocks, tail_token_ids: TokenIds = b"") -> None:
        """Ends a sequence: its pins are let go, its own blocks are freed.

        Args:
            tail_token_ids: the computed tokens after the lease's end, fewer than a block: published as a partly filled
                block where the cache keeps such.

        Raises:
            ValueError: the sequence has published in a step that is neither committed nor withdrawn.
        """
        self._check_committed(sequence)
        leased = self._num_leased(sequence)
        tail = None
        packed = pack(tail_token_ids)
        if packed and self.cache.partial_blocks and leased < len(sequence.block_table):
            tail = Tail(packed, int(sequence.block_table[leased]))
        self.cache.release(sequence.lease, tail)
        self._forget(sequence)
        self._free_own(sequence, leased + (tail is not None))
        self._reclaim()

    # ---- who holds what

    @property
    def sizes(self) -> PoolSizes:
        """Blocks by who holds them; `private` is counted from the tables."""
        private = sum(len(s.block_table) - self._num_leased(s) for s in self._sequences.values())
        private += sum(len(own) for _, _, own in self._replaced)
        cached = self.cache.sizes
        return PoolSizes(self.allocator.num_free, private, cached.pinned, cached.evictable)

    def check(self) -> None:
        """Raises CacheCorruption unless every block is held exactly once, and the cache's own invariants hold."""
        self.cache.check()
        own = [s.block_table[self._num_leased(s) :] for s in self._sequences.values()]
        own += [blocks for _, _, blocks in self._replaced]
        private = np.concatenate([np.empty(0, np.int32), *own])
        if len(np.unique(private)) != len(private):
            raise CacheCorruption("violated: no block is private to two sequences")
        if np.isin(private, self.allocator.free_ids()).any():
            raise CacheCorruption("violated: no block of a sequence is free")
        for sequence in self._sequences.values():
            if np.isin(sequence.block_table, self.allocator.free_ids()).any():
                raise CacheCorruption("violated: no block table holds a freed block")
        sizes = self.sizes
        total = self.allocator.num_used + self.allocator.num_free
        if sizes.num_blocks != total:
            raise CacheCorruption(f"violated: free + private + pinned + evictable == {total}, got {sizes}")

    def _check_committed(self, sequence: SequenceBlocks) -> None:
        if any(other is sequence for other, _ in self._published):
            raise ValueError("sequence: expected one whose last step was committed or withdrawn")

    def _num_leased(self, sequence: SequenceBlocks) -> int:
        return sequence.lease.num_tokens // self.cache.block_size

    def _replace(self, sequence: SequenceBlocks, first: int, cached: Blocks) -> None:
        if not len(cached):
            return
        end = first + len(cached)
        own = sequence.block_table[first:end]
        if len(own):
            self._replaced.append((sequence, first, own))
        sequence.block_table = np.concatenate([sequence.block_table[:first], cached, sequence.block_table[end:]])

    def _free_own(self, sequence: SequenceBlocks, first: int) -> None:
        # Tail first, as the flat hash of engines does: what comes last in a sequence is reused first.
        self.allocator.free(sequence.block_table[first:][::-1])

    def _forget(self, sequence: SequenceBlocks) -> None:
        del self._sequences[id(sequence)]
        if sequence.copy:
            sequence.copy = None
            self._copying.remove(sequence)

    def _reclaim(self) -> None:
        """Frees at once what a fuller block has replaced."""
        if self.cache.num_superseded_blocks:
            self.allocator.free(self.cache.evict(self.cache.num_superseded_blocks))

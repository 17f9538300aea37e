"""KVManager: the only place where the cache meets the allocator; it knows the owner of each block.

A sequence's blocks by their owners::

    position      0            lease.num_tokens          num_tokens
    block_table   [ the cache's, pinned | the sequence's own    ]
                                  ^ a partial match is copied into the first of its own

Where `publish` is told to keep a sequence's own, those stay in the table in place of the cache's equal ones.

    every block of the pool:   free (allocator) + private (sequences) + pinned + evictable (cache) == num_blocks

One step: `begin` (match), `grow` (blocks), `publish` (as soon as the step is scheduled, so that one batch computes a
shared prefix once), then run the copies and the forward pass, then `commit`; or `withdraw`, which puts everything back
as it was before the step. `end` when a request is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixkv.blocks.allocator import BlockAllocator, OutOfBlocks
from radixkv.cache.contract import (
    NO_BLOCKS,
    Blocks,
    CacheCorruption,
    Lease,
    PartialBlock,
    PrefixCache,
    check_count,
    take_over,
)
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Rows to copy before the step runs, in all layers: the first num_tokens of block `source` into `destination`."""

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
        copy: the copy of a partial match, from `KVManager.grow` until the step is committed; else None.
        kept: its own blocks of whose tokens the cache pins other blocks for it; they are in its table (`publish`).
    """

    lease: Lease
    block_table: Blocks
    num_cached_tokens: int
    copy: BlockCopy | None = None
    kept: list[Blocks] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Blocks of the pool by their owners; each is counted once.

    Attributes:
        free: the allocator's; of a growing pool, those that came back.
        private: sequences' own, and own blocks that the step under way has replaced.
        pinned: the cache's, used by a sequence.
        evictable: the cache's, used by none.
    """

    free: int
    private: int
    pinned: int
    evictable: int

    @property
    def num_blocks(self) -> int:
        """All of them."""
        return self.free + self.private + self.pinned + self.evictable


@dataclass(frozen=True, slots=True)
class ResetStats:
    """What a reset of the cache did.

    Attributes:
        num_freed_blocks: blocks freed at once.
        num_pinned_blocks: blocks that are no longer found, and freed when the sequences that use them end.
        num_stale_sequences: running sequences that go on with what they have; what they compute is not found by others.
    """

    num_freed_blocks: int
    num_pinned_blocks: int
    num_stale_sequences: int


@dataclass(eq=False, slots=True)
class StepLog:
    """One sequence before the step under way, and what became its own in it: all that undoing the step takes.

    Attributes:
        own: its own blocks before the step, from block `first` on.
        num_cached_tokens: before the step.
        grown: blocks that it was given in the step.
        num_kept: runs of blocks that it kept before the step.
        replaced: own blocks in whose place the cache's stand now. Nothing may write to them; free at commit.
        duplicates: of own blocks that it kept in the step: from which block on, and the cache's.
        has_published: whether the cache holds blocks of it that are not computed yet.
    """

    first: int
    own: Blocks
    num_cached_tokens: int
    num_kept: int = 0
    grown: list[Blocks] = field(default_factory=list)
    replaced: list[Blocks] = field(default_factory=list)
    duplicates: list[tuple[int, Blocks]] = field(default_factory=list)
    has_published: bool = False

    def kept(self, num_leased: int) -> Blocks:
        """Of the sequence's own blocks before the step, those that it has again: all after the lease's end."""
        return self.own[max(num_leased - self.first, 0) :]

    def to_free(self, num_leased: int) -> Blocks:
        """The others of its own, and what it was given in the step."""
        return np.concatenate([NO_BLOCKS, self.own[: max(num_leased - self.first, 0)], *self.grown])


class KVManager:
    """Hands blocks to sequences, evicting cached ones where needed.

    Args:
        cache: any `radixkv.cache.contract.PrefixCache` that holds nothing; this manager's alone from now on.
        num_blocks: blocks in the pool; None for a pool without end.
        first_block: the lowest id of the pool; those below are never handed out (engines keep a null block 0).

    Attributes:
        num_evicted_blocks: blocks evicted to make room, so far.

    Raises:
        ValueError: num_blocks is below 1, or first_block below 0; the cache belongs to another manager, or holds blocks
            already: they would be served as if this pool's had been written.

    An exception that a method does not document (Ctrl-C, no memory left) may leave the manager half way; `clear` makes
    it usable again.

    Two requests that share 90 tokens; the second copies 10 rows of the block in which they part:

    >>> from radixkv import KVManager, RadixCache
    >>> manager = KVManager(RadixCache(block_size=16), num_blocks=100)
    >>> for prompt in (list(range(100)), [*range(90), 7, 8]):
    ...     sequence = manager.begin(prompt)
    ...     manager.grow(sequence, len(prompt))
    ...     num_written = manager.publish(sequence, prompt)
    ...     print(sequence.num_cached_tokens, sequence.block_table.tolist(), manager.copies)
    ...     manager.commit()  # here the copies and the forward pass have run
    ...     manager.end(sequence, prompt)
    0 [0, 1, 2, 3, 4, 5, 6] []
    90 [0, 1, 2, 3, 4, 7] [BlockCopy(source=5, destination=7, num_tokens=10)]
    >>> manager.sizes
    PoolSizes(free=92, private=0, pinned=0, evictable=8)
    """

    def __init__(self, cache: PrefixCache, num_blocks: int | None = None, *, first_block: int = 0) -> None:
        check_count("first_block", first_block)
        if num_blocks is not None and check_count("num_blocks", num_blocks) == 0:
            raise ValueError("num_blocks: expected an int >= 1 or None, got 0")
        if sum(cache.sizes):
            raise ValueError(f"cache: expected one that holds nothing, got {sum(cache.sizes)} blocks of another pool")
        take_over(cache, "cache", self)
        self.cache = cache
        self.owner: Any = None  # the scheduler that it belongs to
        self.num_evicted_blocks = 0
        self._num_blocks = num_blocks
        self._first_block = first_block
        self._begin()

    def _begin(self) -> None:
        self.allocator = BlockAllocator(self._num_blocks, first=self._first_block)
        self._sequences: dict[int, SequenceBlocks] = {}
        self._copying: list[SequenceBlocks] = []
        self._step: dict[int, StepLog] = {}  # by id of a sequence held here: of those that the step has changed

    def clear(self) -> None:
        """Begins anew: every block is free, nothing is cached, every sequence has ended.

        For a caller that was interrupted in the middle of a call. Cost: as `PrefixCache.clear`.
        """
        self._begin()
        self.cache.clear()

    # ---- admission

    def begin(self, token_ids: TokenIds, namespace: Namespace | None = None, *, match: bool = True) -> SequenceBlocks:
        """Matches and pins what is cached of a prompt, except its last token, which has to be computed.

        Args:
            token_ids: [>= 1] the prompt.
            namespace: what its KV depends on, or is to be kept apart by.
            match: False for a request that must compute all of its prompt (to score it, say); it publishes all the
                same.

        Returns:
            The sequence, with the cache's blocks in its table and none of its own.

        Raises:
            ValueError: the prompt is empty, or a token or the namespace is bad.

        Cost: as `PrefixCache.acquire`.
        """
        packed = pack(token_ids)
        if not packed:
            raise ValueError("token_ids: expected at least one token, got none")
        lease = self.cache.acquire(packed[:-TOKEN_BYTES] if match else b"", namespace)
        num_partial = lease.partial.num_tokens if lease.partial else 0
        sequence = SequenceBlocks(lease, lease.block_ids, lease.num_tokens + num_partial)
        self._sequences[id(sequence)] = sequence
        self._step[id(sequence)] = StepLog(0, NO_BLOCKS, 0)  # before the step it had nothing
        return sequence

    def cancel(self, sequence: SequenceBlocks) -> None:
        """Undoes `begin` and `grow` as if they had not been: pins, recency and counts.

        Raises:
            ValueError: the sequence has published, or advanced; `end` it. Or it has ended.

        Cost: O(its blocks).
        """
        self._check_committed(sequence)
        if self._num_leased(sequence) != len(sequence.lease.block_ids):
            raise ValueError(f"sequence: expected one as `begin` made it, got one with {sequence.lease}")
        self._forget(sequence)
        self._free_own(sequence, self._num_leased(sequence))
        self.cache.cancel(sequence.lease)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Gives a sequence blocks for its first num_tokens tokens, evicting where the free ones do not suffice.

        Where the block that a partial match pins is the one that is missing, the match is given up and
        `num_cached_tokens` falls back to whole blocks.

        Raises:
            OutOfBlocks: not enough could be made free; nothing was changed, but a partial match may be given up.
            ValueError: the sequence has ended.

        Cost: O(blocks of the table), and as `PrefixCache.evict`.
        """
        missing = self.num_missing(sequence, num_tokens)
        if not missing:
            return
        self.fits(sequence, num_tokens)
        grown = self._take(missing)
        self._log(sequence).grown.append(grown)
        destination = len(sequence.block_table)
        sequence.block_table = np.concatenate([sequence.block_table, grown])
        partial = sequence.lease.partial
        if partial and not sequence.copy and destination == self._num_leased(sequence):
            sequence.copy = BlockCopy(partial.block_id, int(grown[0]), partial.num_tokens)
            self._copying.append(sequence)

    def num_missing(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """Returns how many blocks `grow` would have to take for the first num_tokens tokens. O(1).

        Raises:
            ValueError: the sequence has ended.
        """
        self._check_held(sequence)
        wanted = -(-check_count("num_tokens", num_tokens) // self.cache.block_size)
        return max(wanted - len(sequence.block_table), 0)

    def fits(self, sequence: SequenceBlocks, num_tokens: int, *, spare: int = 0) -> bool:
        """Whether `grow` to num_tokens would succeed now, and leave `spare` blocks to hand out.

        Where the block that a partial match pins is the one that is missing, the match is given up here and now. So
        after a call for all tokens, `num_cached_tokens` can be told to others before the sequence grows. O(1).

        Raises:
            ValueError: the sequence has ended.
        """
        wanted = self.num_missing(sequence, num_tokens)
        if wanted and wanted + spare == self.num_available + 1 and sequence.lease.partial and not sequence.copy:
            self.give_up_partial(sequence)
        return not wanted or wanted + spare <= self.num_available

    def give_up_partial(self, sequence: SequenceBlocks) -> None:
        """Gives up the partial match of a sequence: unpins its source; its rows are to be computed. O(1)."""
        self._drop_partial(sequence, self._num_leased(sequence))

    def fork(self, sequence: SequenceBlocks, token_ids: TokenIds) -> tuple[SequenceBlocks, list[BlockCopy]]:
        """Makes a second sequence of the same tokens: what is published is shared, the rest is copied.

        Args:
            token_ids: the tokens whose KV the sequence has, from position 0; not in the middle of a step.

        Returns:
            The second sequence, and the copies, to be run before anything else is: no commit waits for them.

        Raises:
            OutOfBlocks: there is no room for the copies; nothing was changed.
            ValueError: the sequence has ended, or published in this step.

        Cost: as `PrefixCache.acquire`.
        """
        self._check_committed(sequence)
        packed = pack(token_ids)
        width = self.cache.block_size * TOKEN_BYTES
        is_stale = sequence.lease.is_stale  # then what is cached by now is other KV than the sequence's
        lease = self.cache.acquire(
            b"" if is_stale else packed[: self._num_leased(sequence) * width], sequence.lease.namespace
        )
        lease.is_stale = is_stale
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
        if log := self._step.get(id(sequence)):  # given up for good
            log.num_cached_tokens = min(log.num_cached_tokens, sequence.num_cached_tokens)

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

    def advance(self, sequence: SequenceBlocks, token_ids: TokenIds, *, start: int = 0) -> int:
        """Matches on from the lease's end, before a further chunk: another may have published it in the meantime.

        Args:
            token_ids: the sequence's tokens from position `start` on, as far as they may be matched (not the last one
                that must be computed).
            start: at most lease.num_tokens; pass that to spare packing what is matched already.

        Returns:
            Tokens that the lease gained.

        Raises:
            ValueError: the sequence has published in this step, or has ended; `start` is after the lease's end.

        Cost: as `PrefixCache.advance`, and O(blocks of the table) where it gained any.
        """
        self._check_committed(sequence)
        log, first = self._log(sequence), self._num_leased(sequence)
        gained = self.cache.advance(sequence.lease, _after(sequence, token_ids, start))
        if not len(gained):
            return 0
        if sequence.lease.partial and not sequence.copy:  # it continued the old end
            self._drop_partial(sequence, first)
        self._replace(sequence, log, first, gained)
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, sequence.lease.num_tokens)
        return len(gained) * self.cache.block_size

    def publish(self, sequence: SequenceBlocks, token_ids: TokenIds, *, start: int = 0, keep_own: bool = False) -> int:
        """Publishes the full blocks after the lease's end, all of whose tokens are computed once this step has run.

        Blocks that the cache has already take the place of the sequence's own, which nothing may write to any more
        and which are freed when the step is committed. With keep_own they stay in its table, and its own until it
        ends: for a worker whose block tables are append-only.

        Args:
            token_ids: the sequence's tokens from position `start` on, up to the last that this step computes; they must
                have blocks. Rows that a partial match copies are the sequence's own, and published with the rest.
            start: at most lease.num_tokens; pass that to spare packing what is published already.
            keep_own: write to its own blocks, and read them, also where the cache has others with the same tokens.
                Withdrawing the step replaces them after all.

        Returns:
            Tokens, from the old end of the lease on, that were cached already: their slots are not to be written,
            except with keep_own.

        Raises:
            ValueError: the sequence has ended or too few blocks for these tokens; `start` is after the lease's end.

        Cost: as `PrefixCache.insert`, and O(blocks of the table) where duplicates were found.
        """
        self._check_held(sequence)
        first = self._num_leased(sequence)
        own = sequence.block_table[first:]
        rest = _after(sequence, token_ids, start)
        num_blocks = len(rest) // (self.cache.block_size * TOKEN_BYTES)
        if num_blocks > len(own):
            num_tokens = (first + num_blocks) * self.cache.block_size
            raise ValueError(
                f"sequence: expected blocks for {num_tokens} tokens, got {len(sequence.block_table)} blocks"
            )
        log = self._log(sequence)
        duplicates = self.cache.insert(sequence.lease, rest, own)
        num_duplicates = len(duplicates)
        if keep_own and num_duplicates:
            sequence.kept.append(own[:num_duplicates].copy())
            log.duplicates.append((first, duplicates[:, 1]))
        else:
            self._replace(sequence, log, first, duplicates[:, 1])
        if self._num_leased(sequence) > first + num_duplicates:
            log.has_published = True
        self._reclaim()
        return num_duplicates * self.cache.block_size

    @property
    def copies(self) -> list[BlockCopy]:
        """The copies to run before the next forward pass. O(sequences that copy)."""
        return [sequence.copy for sequence in self._copying if sequence.copy]

    def commit(self) -> None:
        """The step has run: its copies are done, its blocks can be copied from, and what it replaced is free.

        Cost: O(what the step changed).
        """
        for sequence in self._copying:
            if sequence.copy:
                sequence.copy = None
                self.cache.unpin_partial(sequence.lease)
        self._copying.clear()
        for log in self._step.values():
            for own in log.replaced:
                self.allocator.free(own)
        self._step.clear()
        self.cache.commit()
        self._reclaim()

    def withdraw(self) -> None:
        """The step has failed: every sequence has what it had before it, and what others had published by then.

        What was published is its sequence's own again, and free if it came in this step. So a sequence may have fewer
        blocks than `grow` gave it, and fewer cached tokens than `begin` found: `block_table`, `num_cached_tokens` and
        `copy` say what is left. (A partial block that was replaced in the cache is gone.)

        Cost: O(what the step changed).
        """
        self.cache.withdraw()
        for key, log in self._step.items():
            sequence = self._sequences[key]
            leased = self._num_leased(sequence)  # cut back to what earlier steps had computed
            del sequence.kept[log.num_kept :]
            for first, cached in log.duplicates:
                end = first + len(cached)
                table = sequence.block_table
                sequence.block_table = np.concatenate([table[:first], cached, table[end:]])
            self.allocator.free(log.to_free(leased))
            sequence.block_table = np.concatenate([sequence.block_table[:leased], log.kept(leased)])
            if sequence.copy and sequence.copy.destination not in sequence.block_table:
                self._copying.remove(sequence)
                sequence.copy = None
            num_partial = sequence.lease.partial.num_tokens if sequence.lease.partial else 0
            sequence.num_cached_tokens = max(log.num_cached_tokens, sequence.lease.num_tokens + num_partial)
        self._step.clear()

    def end(self, sequence: SequenceBlocks, token_ids: TokenIds = b"", *, start: int = 0) -> None:
        """Ends a sequence: releases its pins, and frees its own blocks.

        Args:
            token_ids: the sequence's tokens from position `start` on whose KV was computed. What follows the lease's
                end, fewer than a block, is published as a partial block where the cache keeps such.
            start: at most lease.num_tokens.

        Raises:
            ValueError: the sequence has ended, or published in a step that is neither committed nor withdrawn; a whole
                block is not published yet; copied rows are to be published but were not copied; `start` is after the
                lease's end.

        Cost: as `PrefixCache.release`, and O(its own blocks).
        """
        self._check_committed(sequence)
        leased = self._num_leased(sequence)
        partial_block = None
        packed = pack(token_ids)
        rest = _after(sequence, packed, start) if packed else b""
        if rest and sequence.copy:
            raise ValueError("token_ids: expected none, as the rows of the partial match were never copied")
        if sequence.lease.is_stale:
            rest = b""
        if len(rest) >= self.cache.block_size * TOKEN_BYTES and self.cache.partial_blocks:
            raise ValueError(
                f"token_ids: expected fewer than {self.cache.block_size} after the {sequence.lease.num_tokens} "
                f"published, got {len(rest) // TOKEN_BYTES}"
            )
        if rest and self.cache.partial_blocks and leased < len(sequence.block_table):
            partial_block = PartialBlock(rest, int(sequence.block_table[leased]))
        self.cache.release(sequence.lease, partial_block)
        self._forget(sequence)
        self._free_own(sequence, leased + (partial_block is not None))
        self._reclaim()

    def reset(self, namespace: Namespace | None = None) -> ResetStats:
        """Forgets what is cached, between two steps. Running sequences go on with what they have, and share no more.

        Args:
            namespace: only what depends on one of these parts; None: everything.

        Raises:
            RuntimeError: in the middle of a step.

        Cost: as `PrefixCache.reset`.
        """
        if any(log.has_published for log in self._step.values()):
            raise RuntimeError("reset: expected the step to be committed or withdrawn before")
        num_dead = self.cache.num_dead_blocks
        forgotten = self.cache.reset(namespace)
        self.allocator.free(forgotten.block_ids)
        self._reclaim()
        num_stale = sum(sequence.lease.is_stale for sequence in self._sequences.values())
        return ResetStats(len(forgotten.block_ids) + num_dead, forgotten.num_pinned, num_stale)

    # ---- ownership

    @property
    def sizes(self) -> PoolSizes:
        """Blocks by their owners; `private` is counted from the tables. O(sequences)."""
        private = sum(len(s.block_table) - self._num_leased(s) for s in self._sequences.values())
        private += sum(len(own) for log in self._step.values() for own in log.replaced)
        private += sum(len(own) for s in self._sequences.values() for own in s.kept)
        cached = self.cache.sizes
        return PoolSizes(self.allocator.num_free, private, cached.pinned, cached.evictable)

    def check(self) -> None:
        """Raises CacheCorruption unless each block has one owner, and the cache's own invariants hold. O(pool)."""
        self.cache.check()
        own = [s.block_table[self._num_leased(s) :] for s in self._sequences.values()]
        own += [blocks for log in self._step.values() for blocks in log.replaced]
        own += [blocks for s in self._sequences.values() for blocks in s.kept]
        private = np.concatenate([NO_BLOCKS, *own])
        if len(np.unique(private)) != len(private):
            raise CacheCorruption("violated: no block is private to two sequences")
        if np.isin(private, self.allocator.free_ids()).any():
            raise CacheCorruption("violated: no block of a sequence is free")
        for sequence in self._sequences.values():
            if np.isin(sequence.block_table, self.allocator.free_ids()).any():
                raise CacheCorruption("violated: no block table holds a freed block")
            if not np.isin(np.concatenate([NO_BLOCKS, *sequence.kept]), sequence.block_table).all():
                raise CacheCorruption("violated: a block that a sequence keeps is in its table")
        sizes = self.sizes
        total = self.allocator.num_used + self.allocator.num_free
        if sizes.num_blocks != total:
            raise CacheCorruption(f"violated: free + private + pinned + evictable == {total}, got {sizes}")

    def _check_held(self, sequence: SequenceBlocks) -> None:
        if sequence is None or self._sequences.get(id(sequence)) is not sequence:
            raise ValueError("sequence: expected one that this manager began and that has not ended")

    def _check_committed(self, sequence: SequenceBlocks) -> None:
        self._check_held(sequence)
        if (log := self._step.get(id(sequence))) and log.has_published:
            raise ValueError("sequence: expected one whose last step was committed or withdrawn")

    def _log(self, sequence: SequenceBlocks) -> StepLog:
        """What the step has done to a sequence; begun before the first change."""
        log = self._step.get(id(sequence))
        if log is None:
            first = self._num_leased(sequence)
            log = StepLog(first, sequence.block_table[first:], sequence.num_cached_tokens, len(sequence.kept))
            self._step[id(sequence)] = log
        return log

    def _num_leased(self, sequence: SequenceBlocks) -> int:
        return sequence.lease.num_tokens // self.cache.block_size

    def _replace(self, sequence: SequenceBlocks, log: StepLog, first: int, cached: Blocks) -> None:
        """Puts the cache's blocks into a table, from block `first` on."""
        if not len(cached):
            return
        end = first + len(cached)
        own = sequence.block_table[first:end]
        if len(own):
            log.replaced.append(own)
        sequence.block_table = np.concatenate([sequence.block_table[:first], cached, sequence.block_table[end:]])

    def _free_own(self, sequence: SequenceBlocks, first: int) -> None:
        for own in sequence.kept:
            self.allocator.free(own)
        # The last first, as the flat hash of engines does: what comes last in a sequence is reused first.
        self.allocator.free(sequence.block_table[first:][::-1])

    def _forget(self, sequence: SequenceBlocks) -> None:
        del self._sequences[id(sequence)]
        if log := self._step.pop(id(sequence), None):
            for own in log.replaced:
                self.allocator.free(own)
        if sequence.copy:
            sequence.copy = None
            self._copying.remove(sequence)

    def _reclaim(self) -> None:
        """Frees dead blocks at once."""
        if self.cache.num_dead_blocks:
            self.allocator.free(self.cache.evict(self.cache.num_dead_blocks))


def _after(sequence: SequenceBlocks, token_ids: TokenIds, start: int) -> bytes:
    """Returns the tokens after the lease's end, packed."""
    end = sequence.lease.num_tokens
    if not 0 <= start <= end:
        raise ValueError(f"start: expected at most {end}, where the sequence's lease ends, got {start}")
    return pack(token_ids)[(end - start) * TOKEN_BYTES :]

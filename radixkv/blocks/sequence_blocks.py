"""What a sequence holds, and who holds the blocks of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixkv.cache.contract import NO_BLOCKS, Blocks, Lease


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


@dataclass(frozen=True, slots=True)
class ResetStats:
    """What a reset of the cache did.

    Attributes:
        num_freed_blocks: at once.
        num_pinned_blocks: forgotten too, and freed when the sequences that use them end.
        num_stale_sequences: running ones that go on with what they have; nothing of theirs will be found.
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
        replaced: own blocks in whose place the cache's stand now. Nothing may write to them; free at commit.
        has_published: whether the cache holds blocks of it that are not computed yet.
    """

    first: int
    own: Blocks
    num_cached_tokens: int
    grown: list[Blocks] = field(default_factory=list)
    replaced: list[Blocks] = field(default_factory=list)
    has_published: bool = False

    def kept(self, num_leased: int) -> Blocks:
        """Of the sequence's own blocks before the step, those that it has again: all after the lease's end."""
        return self.own[max(num_leased - self.first, 0) :]

    def to_free(self, num_leased: int) -> Blocks:
        """The others of its own, and what it was given in the step."""
        return np.concatenate([NO_BLOCKS, self.own[: max(num_leased - self.first, 0)], *self.grown])

"""GroupedKVManager: which request holds which block of which group, by vLLM's rules for models of several groups.

All groups share one pool and one free list: first blocks without a hash, the last freed first, then cached ones in the
order in which they were given back. So the order in which groups take and give back decides what is evicted.
Source: vLLM 0.32, `vllm/v1/core/kv_cache_manager.py`, `single_type_kv_cache_manager.py` and `block_pool.py`.

The caller's half (one forward pass at a time)::

    sequence = manager.begin(prompt)
    while sequence.num_computed < sequence.num_tokens:
        manager.compute(sequence, budget=8192)
    manager.end(sequence)

Sequences may take turns pass by pass, but a sequence's first pass follows its `begin` at once: a partly hit block is
copied then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.blocks.allocator import BlockAllocator, OutOfBlocks
from radixkv.cache.contract import CacheCorruption
from radixkv.cache.flat_hash.free_queue import FreeQueue
from radixkv.cache.flat_hash.grouped import GroupedHashCache, Table
from radixkv.cache.layers import FullAttention, Recurrent, Window
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


@dataclass(slots=True, eq=False)
class GroupedSequence:
    """A prompt on its way.

    Attributes:
        num_tokens: of the prompt.
        num_cached_tokens: that were hit.
        num_computed: tokens hit or computed so far.
        junction: of its match.
        hashes: of the prompt.
        tables: of each group: attention has a block for each block of the sequence, a recurrent group its running state
            in the last one, and the state before that where it stood.
        previous_states: by recurrent group, the index in its table of the state that the last growth went on from.
        num_passes: forward passes so far.
    """

    num_tokens: int
    num_cached_tokens: int
    num_computed: int
    junction: int
    hashes: list[bytes]
    tables: list[Table]
    previous_states: dict[int, int] = field(default_factory=dict)
    num_passes: int = 0


class GroupedKVManager:
    """The floor under a `GroupedHashCache`.

    Args:
        cache: empty, this manager's from now on.
        num_blocks: in the pool, for all groups; None: without bound. (vLLM keeps one more, its null block.)

    Attributes:
        num_evicted_blocks: so far.
    """

    def __init__(self, cache: GroupedHashCache, num_blocks: int | None = None) -> None:
        self.cache = cache
        self.allocator = BlockAllocator(num_blocks)
        self.num_evicted_blocks = 0
        self._queue = FreeQueue()  # pins every block in a table, and orders the cached ones that are in none

    def begin(self, token_ids: TokenIds, namespace: Namespace | None = None) -> GroupedSequence:
        """Matches a prompt and pins what it hits.

        Args:
            token_ids: [n], n >= 1.
            namespace: what else its KV depends on, or is to be kept apart by.

        Raises:
            ValueError: bad tokens or namespace, or no token.
        """
        packed = pack(token_ids)
        if not packed:
            raise ValueError("token_ids: expected at least one, got none")
        hashes = self.cache.hashes(packed, namespace)
        num_tokens = len(packed) // TOKEN_BYTES
        match = self.cache.match(hashes, num_tokens)
        for table in match.tables:
            self._queue.pin(_held(table))
        return GroupedSequence(num_tokens, match.num_tokens, match.num_tokens, match.junction, hashes, match.tables)

    def compute(self, sequence: GroupedSequence, budget: int) -> int:
        """Takes blocks for a prompt's next forward pass and publishes what it leaves.

        Args:
            budget: most tokens in the pass, at least 1.

        Returns:
            How many of the prompt's tokens are computed then.

        Raises:
            OutOfBlocks: the pool has not enough; the sequence is to be ended.
            ValueError: the prompt is computed already, or a bad budget.
        """
        layout, start = self.cache.layout, sequence.num_computed
        if start >= sequence.num_tokens:
            raise ValueError(f"sequence: expected tokens left to compute, got all {start} computed")
        if type(budget) is not int or budget < 1:
            raise ValueError(f"budget: expected an integer >= 1, got {budget!r}")
        end = layout.chunk_end(start, sequence.num_tokens, sequence.junction, budget)
        if sequence.num_passes:
            for group in range(len(layout.groups)):
                self._drop_passed(sequence, group)
        num_new = [self._num_new(sequence, group, end) for group in range(len(layout.groups))]
        num_left = self.allocator.num_free + self.allocator.num_used - len(self._queue.num_pins)
        if self.allocator.num_blocks is not None and sum(num_new) > num_left:
            raise OutOfBlocks(f"{sum(num_new)} blocks wanted, {num_left} of {self.allocator.num_blocks} are free")
        copied = [
            copy for group, count in enumerate(num_new) for copy in self._grow(sequence, group, end, self._take(count))
        ]
        self.cache.publish(sequence.hashes, sequence.num_tokens, sequence.junction, sequence.tables, start, end)
        for block in copied:  # they were pinned until what copies them was scheduled
            self._release([block])
        sequence.num_computed = end
        sequence.num_passes += 1
        return end

    def end(self, sequence: GroupedSequence) -> None:
        """Gives back all that a sequence holds: group by group, each from its last block on. O(blocks).

        One that never had a pass leaves the order of eviction as it was.
        """
        for table in sequence.tables:
            if sequence.num_passes:
                self._release(_held(table))
            else:
                self._queue.cancel(_held(table))
        sequence.tables = [[] for _ in sequence.tables]

    def _num_new(self, sequence: GroupedSequence, group: int, end: int) -> int:
        table, layer = sequence.tables[group], self.cache.layout.groups[group].layer
        missing = -(-end // self.cache.layout.block_size) - len(table)
        if isinstance(layer, Recurrent):
            missing = min(missing, 1)
        return max(missing, 0) + (self._copy_of(sequence, group) is not None)

    def _copy_of(self, sequence: GroupedSequence, group: int) -> int | None:
        """The cached block that the next pass would write into, so that it has to be copied first."""
        if not sequence.num_computed % self.cache.layout.block_size:
            return None
        block = sequence.tables[group][-1]
        if not sequence.num_passes:
            return block  # the hit ends inside
        # A state is overwritten; attention is added behind what is cached of a block.
        is_state = isinstance(self.cache.layout.groups[group].layer, Recurrent)
        return block if is_state and block in self.cache else None

    def _grow(self, sequence: GroupedSequence, group: int, end: int, new: list[int]) -> list[int]:
        """Puts new blocks into a group's table; returns those that are pinned until the pass is scheduled."""
        table, layer = sequence.tables[group], self.cache.layout.groups[group].layer
        source = self._copy_of(sequence, group)
        if isinstance(layer, Recurrent) and new and table:
            sequence.previous_states[group] = len(table) - 1
        copied = []
        if source is not None:
            copy = new.pop(0)
            if sequence.num_passes:
                # The request goes on in the block that it has, and the state that it left there goes to the copy.
                self.cache.move(group, source, copy)
                copied.append(copy)
            else:
                table[-1] = copy
                copied.append(source)
        if isinstance(layer, Recurrent):
            table += [None] * (-(-end // self.cache.layout.block_size) - len(new) - len(table))
        table += new
        return copied

    def _drop_passed(self, sequence: GroupedSequence, group: int) -> None:
        """Gives back what a group no longer needs after the tokens computed so far."""
        table, layer = sequence.tables[group], self.cache.layout.groups[group].layer
        block, computed = self.cache.layout.block_size, sequence.num_computed
        if isinstance(layer, FullAttention):
            return
        reach = layer.num_tokens - 1 if isinstance(layer, Window) else 1
        passed = max(computed - reach, 0) // block
        first = passed
        while first and table[first - 1] is not None:
            first -= 1
        self._release(_held(table[first:passed]))
        table[first:passed] = [None] * (passed - first)
        previous = sequence.previous_states.get(group)
        if previous is not None and previous < -(-computed // block) - 1:
            self._release(_held([table[previous]]))
            table[previous] = None

    def _take(self, num_blocks: int) -> list[int]:
        """Takes blocks off the free list, evicting those that are cached, and pins them."""
        allocator = self.allocator
        num_free = num_blocks if allocator.num_blocks is None else min(num_blocks, allocator.num_free)
        taken: list[int] = allocator.take(num_free).tolist()
        if num_free < num_blocks:
            evicted = self._queue.take(num_blocks - num_free)
            self.cache.forget(evicted)
            self.num_evicted_blocks += len(evicted)
            taken += evicted
        self._queue.pin(taken)
        return taken

    def _release(self, blocks: list[int]) -> None:
        """Unpins blocks, the last first: cached ones go to the end of the free list, the others to its front."""
        self._queue.unpin(blocks)
        unhashed = [
            block for block in reversed(blocks) if block not in self.cache and block not in self._queue.num_pins
        ]
        self._queue.remove(unhashed)
        self.allocator.free(unhashed)

    def check(self) -> None:
        """Raises CacheCorruption unless every block has one state. O(blocks)."""
        self.cache.check()
        self._queue.check()
        unpinned = self._queue.unpinned()
        if not all(block in self.cache for block in unpinned):
            raise CacheCorruption("a block without a hash waits to be evicted")
        if len(unpinned) + len(self._queue.num_pins) != self.allocator.num_used:
            raise CacheCorruption("a block is neither free, nor cached, nor in a table")


def _held(table: Table) -> list[int]:
    return [block for block in table if block is not None]

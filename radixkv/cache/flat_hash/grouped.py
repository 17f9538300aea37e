"""GroupedHashCache: vLLM's flat hash where layers keep different things. Keys are (hash, group), one map a group.

A position is hit where every group has what it needs to go on from there: full attention all blocks before it, a window
the blocks that it reaches back to, a recurrent group the state. What a request takes and gives back is the manager's
(`radixkv.blocks.grouped_manager`).

Source: vLLM 0.32, `vllm/v1/core/kv_cache_coordinator.py` and `single_type_kv_cache_manager.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.flat_hash.block_map import BlockMap
from radixkv.cache.flat_hash.groups import GroupLayout
from radixkv.cache.hashing import BlockHasher
from radixkv.cache.layers import FullAttention, Layer, Recurrent, Window
from radixkv.cache.namespace import Namespace, parts
from radixkv.cache.tokens import TokenIds, pack

Table = list[int | None]  # by block of the sequence: which holds it; None: none does


@dataclass(frozen=True, slots=True)
class GroupedMatch:
    """What a prompt finds.

    Attributes:
        num_tokens: the hit: every group can go on from there.
        junction: how far full attention alone matches (without any: the first kind of layers), where that is further;
            else 0.
        tables: of each group, up to the hit. The last block of a table is a source to be copied where the hit ends
            inside a block.
    """

    num_tokens: int
    junction: int
    tables: list[Table]


class GroupedHashCache:
    """Blocks of every group by hash; which are pinned and which go is not known here.

    Args:
        layout: of the model.
        hash_algorithm: of `BlockHasher`; collisions are not looked for.
        clock_ns: what `hash_ns` is measured with.

    Attributes:
        hash_ns: time spent hashing, since the cache was made.
    """

    def __init__(
        self,
        layout: GroupLayout,
        *,
        hash_algorithm: str = "sha256",
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.layout = layout
        self.hash_ns = 0
        self._clock_ns = clock_ns
        self._hasher = BlockHasher(hash_algorithm, layout.match_unit)
        # Whole blocks of attention, and states, each at the position where the block or the state ends.
        self._maps = [BlockMap() for _ in layout.groups]
        # Of full attention in fine mode: blocks filled up to a position inside. A block may be in both of a group's.
        self._partial = [BlockMap() for _ in layout.groups]
        self._maps_of: dict[int, list[BlockMap]] = {}  # by block, those that have it
        self._full = [i for i, group in enumerate(layout.groups) if isinstance(group.layer, FullAttention)]
        self._others: dict[Layer, list[int]] = {}
        for i, group in enumerate(layout.groups):
            if i not in self._full:
                self._others.setdefault(group.layer, []).append(i)

    def hashes(self, token_ids: TokenIds, namespace: Namespace | None = None) -> list[bytes]:
        """Returns the hash of all tokens before each multiple of the match unit but 0.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: O(tokens).
        """
        packed = pack(token_ids)
        began = self._clock_ns()
        found = list(self._hasher.chain(self._hasher.seed, packed, parts(namespace)))
        self.hash_ns += self._clock_ns() - began
        return found

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> GroupedMatch:
        """Finds the deepest position from which every group can go on; at least one token is left to compute.

        Args:
            hashes: of the prompt, as `hashes` gave them.
            num_tokens: of the prompt, at least 1.

        Cost: O(blocks matched), and a look-up for each position between what full attention and others match.
        """
        full_end, runs = self._match_full(hashes, self.layout.last_position(num_tokens))
        hit = full_end
        deepest = full_end if self._full else 0
        while True:  # what one kind of layer cuts off, another may not go on from
            before = hit
            for layer, groups in self._others.items():
                if isinstance(layer, Recurrent):
                    hit = self._last_state(hashes, groups, hit)
                else:
                    assert isinstance(layer, Window)
                    hit = self._last_window(hashes, groups, hit, self.layout.num_window_blocks(layer))
                deepest = max(deepest, hit)
            if hit in (before, 0):
                break
        return GroupedMatch(hit, deepest if deepest > hit else 0, self._tables(hashes, hit, runs))

    def _match_full(self, hashes: Sequence[bytes], limit: int) -> tuple[int, list[Table]]:
        """Returns how far full attention matches, up to a limit, and the blocks of each of its groups."""
        if not self._full:
            return limit, []
        block, unit = self.layout.block_size, self.layout.match_unit
        keys = hashes[block // unit - 1 : limit // unit : block // unit]
        for held in (self._maps[i].held for i in self._full):
            keys = list(takewhile(held.__contains__, keys))
        runs: list[Table] = [list(self._maps[i].oldest(keys)) for i in self._full]
        run = len(keys) * block
        for end in range(min(run + block - unit, limit), run, -unit):
            partial = hashes[end // unit - 1]
            if all(partial in self._partial[i].held for i in self._full):
                for table, i in zip(runs, self._full, strict=True):
                    table += self._partial[i].oldest([partial])
                return end, runs
        return run, runs

    def _last_state(self, hashes: Sequence[bytes], groups: list[int], limit: int) -> int:
        """Returns the last position up to a limit at which every group has a state; 0 if none."""
        unit = self.layout.match_unit
        held = [self._maps[i].held for i in groups]
        for end in range(limit // unit * unit, 0, -unit):
            state = hashes[end // unit - 1]
            if all(state in has for has in held):
                return end
        return 0

    def _last_window(self, hashes: Sequence[bytes], groups: list[int], limit: int, num_blocks: int) -> int:
        """Returns the last position up to a limit before which every group has a window, or all blocks from 0 on."""
        held = [self._maps[i].held for i in groups]
        first = end = limit // self.layout.block_size
        while first and end - first < num_blocks:
            first -= 1
            key = self._whole(hashes, first)
            if not all(key in has for has in held):
                end = first
        return end * self.layout.block_size

    def _whole(self, hashes: Sequence[bytes], index: int) -> bytes:
        """The hash at the end of a block."""
        return hashes[(index + 1) * (self.layout.block_size // self.layout.match_unit) - 1]

    def _tables(self, hashes: Sequence[bytes], hit: int, runs: list[Table]) -> list[Table]:
        block = self.layout.block_size
        num_blocks = -(-hit // block)
        tables: list[Table] = []
        for i, (group, blocks) in enumerate(zip(self.layout.groups, self._maps, strict=True)):
            if not hit:
                tables.append([])
            elif isinstance(group.layer, FullAttention):
                tables.append(runs[self._full.index(i)][:num_blocks])
            elif isinstance(group.layer, Recurrent):
                state = hashes[hit // self.layout.match_unit - 1]
                tables.append([None] * (num_blocks - 1) + blocks.oldest([state]))
            else:
                first = max(num_blocks - self.layout.num_window_blocks(group.layer), 0)
                keys = [self._whole(hashes, index) for index in range(first, num_blocks)]
                tables.append([None] * first + blocks.oldest(keys))
        return tables

    def publish(
        self, hashes: Sequence[bytes], num_tokens: int, junction: int, tables: Sequence[Table], start: int, end: int
    ) -> None:
        """Registers what a forward pass over a chunk of a prompt leaves that later prompts may hit.

        Full attention keeps every full block, and in fine mode the partial one at the last position that can be hit.
        A state is kept where the chunk ends, if that is the last such position or the junction, rounded down to whole
        blocks (in fine mode the former also as it is); of windows, the blocks before these two positions.

        Args:
            hashes: of the prompt.
            num_tokens: of the prompt.
            junction: of its match.
            tables: of each group, up to the chunk's end.
            start, end: of the chunk.

        Cost: O(blocks in the chunk).
        """
        layout = self.layout
        block, unit = layout.block_size, layout.match_unit
        last = layout.last_position(num_tokens)
        new = range(start // block, end // block)
        for group, blocks, partial, table in zip(layout.groups, self._maps, self._partial, tables, strict=True):
            if isinstance(group.layer, FullAttention):
                self._add(blocks, hashes, new, table)
                # Also where the hit ended there: the copy is one more block of the same hash.
                if last % block and start <= last <= end and table[last // block] not in partial.hash_of:
                    self._register(partial, hashes[last // unit - 1], table[last // block])
            elif isinstance(group.layer, Recurrent):
                if end in (last, last // block * block, junction // block * block):
                    self._register(blocks, hashes[end // unit - 1], table[-(-end // block) - 1])
            else:
                num_blocks = layout.num_window_blocks(group.layer)
                kept = {
                    index
                    for at in (last // block, junction // block)
                    for index in range(max(at - num_blocks, new.start), min(at, new.stop))
                }
                self._add(blocks, hashes, sorted(kept), table)

    def _add(self, blocks: BlockMap, hashes: Sequence[bytes], indices: Sequence[int], table: Table) -> None:
        for index in indices:
            self._register(blocks, self._whole(hashes, index), table[index])

    def _register(self, blocks: BlockMap, block_hash: bytes, block: int | None) -> None:
        assert block is not None
        blocks.add([block_hash], [block])
        self._maps_of.setdefault(block, []).append(blocks)

    def move(self, group: int, old: int, new: int) -> None:
        """Moves a state's hash from a block to a copy of it. O(1)."""
        blocks = self._maps[group]
        block_hash = blocks.hash_of[old]
        self.forget([old])
        self._register(blocks, block_hash, new)

    def forget(self, blocks: Sequence[int]) -> None:
        """Drops every hash of cached blocks. O(n)."""
        for block in blocks:
            for of_group in self._maps_of.pop(block):
                of_group.remove([block])

    def __contains__(self, block: int | None) -> bool:
        """Returns whether a block has a hash."""
        return block in self._maps_of

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with a hash."""
        return len(self._maps_of)

    def check(self) -> None:
        """Raises CacheCorruption unless the maps agree. O(blocks)."""
        maps = [*self._maps, *self._partial]
        for blocks in maps:
            blocks.check()
        known = [block for blocks in maps for block in blocks.hash_of]
        if len(known) != sum(map(len, self._maps_of.values())) or set(known) != set(self._maps_of):
            raise CacheCorruption("the maps of the groups and the maps that each block is said to be in differ")
        if len({block for blocks in self._maps for block in blocks.hash_of}) != sum(
            len(blocks.hash_of) for blocks in self._maps
        ):
            raise CacheCorruption("a block is held by two groups")

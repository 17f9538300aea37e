"""What no order and no eviction can beat: the two optima that policies are held against.

*Order optimum*: the hits of an infinite cache when everything is queued at once, so each shared block is computed once.
*Eviction bound*: one request after the other in a fixed order, in a pool of a given size, knowing the future: evict the
block whose next use is furthest, the deepest on ties (Belady 1966, on prefixes: a parent is used whenever its child is,
so the furthest is always a leaf), and never one of the request being served.

Both count whole blocks by content alone: namespaces are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from radixkv.cache.contract import check_block_size, check_count
from radixkv.cache.tokens import TOKEN_BYTES


class BlockPaths:
    """Requests as paths in the tree of whole blocks: equal prefixes are equal ids.

    Args:
        requests: (prompt, output) packed; b"" for an output that is not cached. Where the prompt is empty nothing is.
        block_size: tokens in a block.

    Attributes:
        paths: [requests] lists of block ids, prompt and output.
        num_matchable: [requests] blocks of the prompt that a cache may serve: one token is always computed.
        num_blocks: [requests] blocks that a request needs at once, its partly filled last one included.
        num_prompt_tokens: of all requests.
        depths: by block id.
    """

    def __init__(self, requests: Iterable[tuple[bytes, bytes]], block_size: int) -> None:
        self.block_size = check_block_size(block_size)
        width = block_size * TOKEN_BYTES
        self.paths: list[list[int]] = []
        self.num_matchable: list[int] = []
        self.num_blocks: list[int] = []
        self.num_prompt_tokens = 0
        self.depths: list[int] = []
        known: dict[tuple[int, bytes], int] = {}
        for prompt, output in requests:
            tokens = prompt + output if prompt else b""
            path: list[int] = []
            parent = -1
            for at in range(0, len(tokens) - width + 1, width):
                block = known.setdefault((parent, tokens[at : at + width]), len(self.depths))
                if block == len(self.depths):
                    self.depths.append(len(path))
                path.append(block)
                parent = block
            self.paths.append(path)
            self.num_matchable.append(max(len(prompt) // TOKEN_BYTES - 1, 0) // block_size)
            self.num_blocks.append(-(-len(tokens) // width))
            self.num_prompt_tokens += len(prompt) // TOKEN_BYTES

    def pool_blocks(self, share: float = 0.25) -> int:
        """Returns a pool: this share of the unique blocks, but at least twice the longest request."""
        return max(round(share * len(self.depths)), 2 * max(self.num_blocks, default=0), 1)

    def order_optimum(self) -> int:
        """Returns the tokens hit by an infinite cache with everything there at once, in the best order by prompts.

        An upper bound where outputs are not given, or no prompt begins as another's output goes on.

        In depth-first order a prompt that is the start of another comes before it, and is computed to its end but once.

        Cost: O(blocks log requests).
        """
        seen: set[int] = set()
        hits = 0
        for number in sorted(range(len(self.paths)), key=lambda i: (self.paths[i], self.num_matchable[i])):
            hits += self._hit(number, seen)
            seen.update(self.paths[number])
        return hits

    def infinite_hits(self) -> int:
        """Returns the tokens hit by an infinite cache in the order given. O(blocks)."""
        seen: set[int] = set()
        hits = 0
        for number, path in enumerate(self.paths):
            hits += self._hit(number, seen)
            seen.update(path)
        return hits

    def eviction_bound(self, num_blocks: int) -> int:
        """Returns the tokens hit in the order given by a pool that knows the future.

        Requests longer than the pool are computed without it, as `radixkv.blocks.replay` does. The partly filled last
        block of the request being served is not counted against the pool, so the bound is on the safe side by that one
        block.

        Cost: O(blocks log blocks) of all requests.
        """
        num_blocks = check_count("num_blocks", num_blocks)
        never = len(self.paths)
        next_uses = self._next_uses()
        cached: dict[int, int] = {}  # block -> its next use
        furthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); also what was used since
        depths = self.depths
        hits = 0
        for number, path in enumerate(self.paths):
            if self.num_blocks[number] > num_blocks:
                continue
            hits += self._hit(number, cached)
            for block in path:
                cached[block] = never + 1  # pinned: matches no entry of the heap
            while len(cached) > num_blocks:
                next_use, _, block = heappop(furthest)
                if cached.get(block) == -next_use:
                    del cached[block]
            for block, next_use in zip(path, next_uses[number], strict=True):
                cached[block] = next_use
                heappush(furthest, (-next_use, -depths[block], block))
            if len(furthest) > 4 * len(cached) + 1024:
                furthest = [(-next_use, -depths[block], block) for block, next_use in cached.items()]
                heapify(furthest)
        return hits

    def _next_uses(self) -> list[list[int]]:
        """For each request, in which later one each of its blocks is used next; the number of requests: in none."""
        never = len(self.paths)
        following: dict[int, int] = {}
        found: list[list[int]] = [[]] * never
        for number in range(never - 1, -1, -1):
            path = self.paths[number]
            found[number] = [following.get(block, never) for block in path]
            following.update(dict.fromkeys(path, number))
        return found

    def _hit(self, number: int, cached: dict[int, int] | set[int]) -> int:
        matched = 0
        for block in self.paths[number][: self.num_matchable[number]]:
            if block not in cached:
                break
            matched += 1
        return matched * self.block_size

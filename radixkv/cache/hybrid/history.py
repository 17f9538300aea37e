"""What requests have passed, without any KV: where a new one parts from them, and what it would have gone on from."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.cache.contract import PartialBlock, check_count
from radixkv.cache.hybrid.checkpoints import Checkpoint, TreeCheckpoints
from radixkv.cache.namespace import Namespace
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.node import Node
from radixkv.cache.tokens import TOKEN_BYTES

BLOCK = 16  # tokens that the history gives up at once


class Passed(NamedTuple):
    """What a request shares with those before it.

    Attributes:
        num_shared: leading tokens that some earlier request has too.
        deepest: the deepest checkpoint or ghost among them, or None.
        end: the last node of which it has all tokens.
    """

    num_shared: int
    deepest: Checkpoint | None
    end: Node

    def fork(self, start: int) -> int:
        """Returns the first border of a block from `start` tokens on where earlier requests part; 0: none does.

        Cost: O(nodes up to there).
        """
        found = 0
        node: Node | None = self.end
        while node is not None and (end := node.start + len(node.span) // TOKEN_BYTES) >= start:
            if len(node.children) > 1:
                found = end
            node = node.parent
        return found


class History:
    """The tokens of earlier requests as a radix tree, the least recently passed given up first, and ghosts in it.

    Args:
        max_tokens: that it holds, rounded up to blocks of 16; 4 to 9 bytes each.

    Attributes:
        checkpoints: those that are there and those that were given up, where the history still reaches them.

    Cost: `match` and `add` as acquire and insert of a `RadixCache`.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = -(-check_count("max_ghost_tokens", max_tokens) // BLOCK)
        self._tokens = RadixCache(BLOCK)
        self._tokens.owner = self  # gives each id once
        self._unused: list[int] = []
        self._num_ids = 0
        self.checkpoints = TreeCheckpoints(self._tokens.tree)

    def match(self, key: bytes, namespace: Namespace | None = None) -> Passed:
        """Returns what a request shares with earlier ones. Changes nothing.

        Args:
            key: packed tokens of a request, from position 0.
            namespace: what else its state depends on.
        """
        tree, is_plain = self._tokens.tree, namespace is None
        folded = key if is_plain else self._tokens.fold(key, namespace)
        node, at, _, child, num_common = tree.walk(tree.root, folded, 0, is_plain, False)
        if child is None and at < len(folded):
            num_common = node.nearest(folded[at : at + tree.width], is_plain)[1]
        num_shared = at // TOKEN_BYTES + num_common
        return Passed(num_shared, self.checkpoints.deepest(child or node, folded, num_shared), node)

    def add(self, key: bytes, namespace: Namespace | None = None) -> list[Checkpoint]:
        """Remembers a request; returns the checkpoints that are forgotten for it."""
        cache = self._tokens
        lease = cache.acquire(key, namespace)
        rest = key[lease.num_tokens * TOKEN_BYTES :]
        num_blocks, num_left = divmod(len(rest) // TOKEN_BYTES, BLOCK)
        cache.insert(lease, rest, self._ids(num_blocks))
        cache.commit()
        last = PartialBlock(rest[num_blocks * BLOCK * TOKEN_BYTES :], self._ids(1)[0]) if num_left else None
        cache.release(lease, last)
        surplus = cache.tree.num_blocks - self._max_blocks
        self._unused += cache.evict(max(surplus, cache.num_dead_blocks)).tolist()
        lost, self.checkpoints.lost = self.checkpoints.lost, []
        return lost

    def _ids(self, num_ids: int) -> list[int]:
        taken = self._unused[:num_ids]
        del self._unused[:num_ids]
        missing = num_ids - len(taken)
        self._num_ids += missing
        return [*taken, *range(self._num_ids - missing, self._num_ids)]

    def known(self, key: bytes, position: int, namespace: Namespace | None) -> Checkpoint | None:
        """Returns the checkpoint that there is or was at a position, or None. Cost: as a match."""
        found = self.checkpoints.place(self._tokens.fold(key, namespace), position, namespace is None)
        return None if found is None else self.checkpoints.at(position, *found)

    def record(self, key: bytes, position: int, reason: str, tick: int, namespace: Namespace | None) -> Checkpoint:
        """Returns the checkpoint that there is or was at a position of a request that was added, or a new one.

        Args:
            key: packed tokens of the request, at least `position` of them.
        """
        found = self.checkpoints.place(self._tokens.fold(key, namespace), position, namespace is None)
        if found is None:
            return Checkpoint(position, reason, tick)
        known = self.checkpoints.at(position, *found)
        if known is None:
            known = Checkpoint(position, reason, tick)
            self.checkpoints.hang(known, *found)
        return known

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it has room for now: blocks of 16. O(1)."""
        return self._tokens.tree.num_blocks * BLOCK

    def forget(self, namespace: Namespace | None) -> None:
        """Forgets everything, or what depends on one of these parts. O(everything)."""
        self._unused += self._tokens.reset(namespace).block_ids.tolist()
        self.checkpoints.lost.clear()

    def check(self) -> None:
        """Raises CacheCorruption unless every invariant holds."""
        self._tokens.check()
        self.checkpoints.check()

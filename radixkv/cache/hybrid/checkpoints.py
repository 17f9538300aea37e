"""Checkpoints at positions of a radix tree, to the token; they follow the tree through splits, merges and cuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.radix.node import Node
from radixkv.cache.radix.observer import TreeObserver
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.tokens import TOKEN_BYTES, has_negative


class Checkpoint:
    """What is known of a position where a request can go on, or could while its state was there.

    Attributes:
        position: number of tokens before it.
        reason: the placement that asked for it (`radixkv.cache.hybrid.placement`).
        born, last_use: ticks of the cache's clock, one for each request.
        num_uses: requests that went on from here, or would have, had it not been given up.
        is_continued: a request that went on from here has left a deeper one.
        is_superseded: all that came through it go on to a checkpoint below it, so far.
        pins: leases that go on from here.
        state: the caller's own: what it takes to go on here; None: given up, a *ghost*.
        num_bytes: of the state.
    """

    __slots__ = (
        "born",
        "is_continued",
        "is_superseded",
        "last_use",
        "num_bytes",
        "num_uses",
        "pins",
        "position",
        "reason",
        "state",
    )

    def __init__(self, position: int, reason: str, born: int) -> None:
        self.position = position
        self.reason = reason
        self.born = self.last_use = born
        self.num_uses = 0
        self.is_continued = self.is_superseded = False
        self.pins = 0
        self.state: Any = None
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"Checkpoint({self.position}, {self.reason!r}, uses={self.num_uses}, ghost={self.state is None})"


class TreeCheckpoints(TreeObserver):
    """The checkpoints of a tree of whole blocks, each at the node that holds the border of the block before it.

    A checkpoint inside a block hangs at the block's border by its *tail*, the tokens from the border to its position.
    So it needs no block of its own in the tree, and stays where it is whichever block follows there.

    Args:
        tree: observed from now on.

    Attributes:
        lost: checkpoints whose place the tree has given up, for the owner to take.

    Cost: a change of a node costs O(checkpoints there).
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._held: dict[Node, dict[int, dict[bytes, Checkpoint]]] = {}  # by position, then tail
        self._places: dict[Checkpoint, tuple[Node, bytes]] = {}
        self.lost: list[Checkpoint] = []
        tree.attach(self)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._places)

    def __contains__(self, checkpoint: object) -> bool:
        return checkpoint in self._places

    def node_of(self, checkpoint: Checkpoint) -> Node:
        """Returns the node at which a checkpoint hangs."""
        return self._places[checkpoint][0]

    # ---- hanging

    def place(self, key: bytes, position: int, is_plain: bool) -> tuple[Node, bytes] | None:
        """Returns the node that holds the last block's border before a position, and the tail from there.

        None where the tree does not reach the border, or where a namespace starts inside the tail: its ids are known
        as long as nodes hold them.

        Args:
            key: packed tokens of a request, a namespace folded in.
            is_plain: no namespace is folded into the key.

        Cost: as a match.
        """
        border = position // self._tree.block_size * self._tree.width
        tail = key[border : position * TOKEN_BYTES]
        if len(key) < position * TOKEN_BYTES or (tail and not is_plain and has_negative(tail)):
            return None
        node, at, _, child, num_common = self._tree.walk(self._tree.root, key[:border], 0, is_plain, False)
        if at < border:
            if child is None or at + num_common * TOKEN_BYTES < border:
                return None
            node = child
        return node, tail

    def at(self, position: int, node: Node, tail: bytes) -> Checkpoint | None:
        """Returns the checkpoint at a place, or None."""
        return self._held.get(node, {}).get(position, {}).get(tail)

    def hang(self, checkpoint: Checkpoint, node: Node, tail: bytes) -> None:
        """Puts a checkpoint at its place, where there is none."""
        self._held.setdefault(node, {}).setdefault(checkpoint.position, {})[tail] = checkpoint
        self._places[checkpoint] = node, tail

    def take_down(self, checkpoint: Checkpoint) -> tuple[Node, bytes]:
        """Removes a checkpoint; returns its place."""
        node, tail = self._places.pop(checkpoint)
        held = self._held[node]
        group = held[checkpoint.position]
        del group[tail]
        if not group:
            del held[checkpoint.position]
            if not held:
                del self._held[node]
        return node, tail

    # ---- looking

    def deepest(self, node: Node, key: bytes, most: int) -> Checkpoint | None:
        """Returns the deepest checkpoint on the path to a node's end and in the block after it, or None.

        Args:
            node: the end of a match of `key`.
            key: packed tokens of a request.
            most: number of tokens, the position it may have at most.

        Cost: O(nodes and checkpoints passed).
        """
        block_size = self._tree.block_size
        above: Node | None = node
        while above is not None:
            held = self._held.get(above)
            if held is not None:
                for position in sorted(held, reverse=True):
                    if position <= most:
                        border = position // block_size * block_size
                        found = held[position].get(key[border * TOKEN_BYTES : position * TOKEN_BYTES])
                        if found is not None:
                            return found
            above = above.parent
        return None

    def above(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Returns the deepest checkpoint above one that is not superseded, or None. Cost: as `deepest`."""
        node: Node | None
        node, next_block = self._places[checkpoint]
        border = checkpoint.position - len(next_block) // TOKEN_BYTES
        while node is not None:
            held = self._held.get(node)
            if held is not None:
                for position in sorted(held, reverse=True):
                    if position < checkpoint.position:
                        at = position // self._tree.block_size * self._tree.block_size
                        after = next_block if at == border else node.span[(at - node.start) * TOKEN_BYTES :]
                        found = held[position].get(after[: (position - at) * TOKEN_BYTES])
                        if found is not None and not found.is_superseded:
                            return found
            next_block, border = node.span[: self._tree.width], node.start
            node = node.parent
        return None

    def last_border(self, node: Node, besides: Checkpoint | None = None) -> int:
        """Returns the deepest border of a node at which a checkpoint hangs; the node's start where none does."""
        held = self._held.get(node)
        if held is None:
            return node.start
        size = self._tree.block_size
        borders = (
            p // size * size
            for p, group in held.items()
            if besides is None or any(c is not besides for c in group.values())
        )
        return max(borders, default=node.start)

    # ---- what the tree tells

    def split(self, upper: Node, lower: Node) -> None:
        """Checkpoints up to the upper half's end hang there."""
        self._move(lower, upper, lower.start)

    def merged(self, upper: Node, lower: Node) -> None:
        """Checkpoints of the upper half hang at the node that has its span now."""
        self._move(upper, lower, None)

    def _move(self, old: Node, new: Node, last: int | None) -> None:
        held = self._held.get(old)
        if held is None:
            return
        size = self._tree.block_size
        moved = [p for p in held if last is None or p // size * size <= last]
        for position in moved:
            group = held.pop(position)
            self._held.setdefault(new, {}).setdefault(position, {}).update(group)
            self._places.update((checkpoint, (new, tail)) for tail, checkpoint in group.items())
        if not held:
            del self._held[old]

    def trimmed(self, node: Node, num_blocks: int) -> None:
        """Checkpoints beyond the node's end are lost."""
        self._lose(node, node.start + node.num_tokens)

    def removed(self, node: Node) -> None:
        """Checkpoints of the node are lost."""
        self._lose(node, -1)

    def _lose(self, node: Node, last: int) -> None:
        size = self._tree.block_size
        for position, group in list(self._held.get(node, {}).items()):
            if position // size * size > last:
                for checkpoint in list(group.values()):
                    self.take_down(checkpoint)
                    self.lost.append(checkpoint)

    def check(self) -> None:
        """Raises CacheCorruption unless every checkpoint hangs in the tree where it is to. O(nodes + checkpoints)."""
        nodes = [self._tree.root]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        if not self._held.keys() <= set(nodes):
            raise CacheCorruption("violated: checkpoints hang at nodes of the tree")
        seen = 0
        for node, held in self._held.items():
            for position, group in held.items():
                border = position // self._tree.block_size * self._tree.block_size
                if not (node.start < border <= node.start + node.num_tokens or border == node.start == 0):
                    raise CacheCorruption(f"violated: checkpoints hang where their block begins, got {position}")
                for tail, checkpoint in group.items():
                    seen += 1
                    if checkpoint.position != position or len(tail) != (position - border) * TOKEN_BYTES:
                        raise CacheCorruption(f"violated: a tail goes up to the position, got {checkpoint}")
                    if self._places.get(checkpoint) != (node, tail):
                        raise CacheCorruption(f"violated: a checkpoint's place is known, got {checkpoint}")
        if seen != len(self._places):
            raise CacheCorruption(f"violated: checkpoints are counted, got {len(self._places)} for {seen}")

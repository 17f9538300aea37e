"""The watches of a radix tree: matches that pin nothing and follow what becomes of the tree.

A watch costs something when what it matches changes, and nothing else: a scheduler that orders by cached tokens does
not match its whole queue again at each step.
"""

from __future__ import annotations

from radixkv.cache.contract import CacheCorruption, Rank, Watch
from radixkv.cache.radix.node import Node
from radixkv.cache.radix.observer import TreeObserver
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.tokens import TOKEN_BYTES, unpack


class _Endings:
    """The watches whose matches end in one node."""

    __slots__ = ("after", "inside", "num_ranked")

    def __init__(self) -> None:
        self.inside: dict[Watch, None] = {}  # before the end of its span
        self.after: dict[bytes, dict[Watch, None]] = {}  # at its end: by the block that they need next
        self.num_ranked = 0

    def all(self) -> list[Watch]:
        return [*self.inside, *(watch for group in self.after.values() for watch in group)]


class TreeWatches(TreeObserver):
    """The watches of a radix tree, by the nodes in which their matches end. Observes the tree while there are any.

    Cost: a change of a node costs O(watches whose matches end in it and which it concerns).
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._endings: dict[Node, _Endings] = {}

    def add(self, watch: Watch) -> None:
        """Matches a watch and keeps it up to date from now on. Cost: as a match."""
        if not self._endings:
            self._tree.attach(self)
            self._tree.deferral = self.deferral
        self._place(watch, *self._match(watch, self._tree.root, 0))
        self._tree.requeue(watch.cursor)

    def remove(self, watch: Watch) -> None:
        """Ends a watch. O(1), and the rank of a leaf."""
        node = watch.cursor
        watch.cursor = watch.changed = None
        self._take_out(watch, node)
        if not self._endings:
            self._tree.detach(self)
            self._tree.deferral = None

    def end_all(self) -> None:
        """Ends every watch."""
        for endings in self._endings.values():
            for watch in endings.all():
                watch.cursor = watch.changed = None

    def _match(self, watch: Watch, node: Node, at: int) -> tuple[Node, int]:
        """Goes on from the end of a node, at byte `at`; returns where the match ends, and the bytes matched."""
        node, at, _, child, num_common = self._tree.walk(node, watch.key, at, watch.is_plain, False)
        if child is not None and num_common >= self._tree.block_size:
            return child, at + num_common // self._tree.block_size * self._tree.width
        return node, at

    def _place(self, watch: Watch, node: Node, at: int) -> None:
        endings = self._endings.get(node)
        if endings is None:
            endings = self._endings[node] = _Endings()
        if at == _end(node):
            endings.after.setdefault(watch.key[at : at + self._tree.width], {})[watch] = None
        else:
            endings.inside[watch] = None
        endings.num_ranked += watch.rank is not None
        watch.cursor = node
        watch.move(at // TOKEN_BYTES)

    def _take_out(self, watch: Watch, node: Node) -> None:
        endings = self._endings[node]
        if watch in endings.inside:
            del endings.inside[watch]
        else:
            at = _end(node)
            key = watch.key[at : at + self._tree.width]
            group = endings.after[key]
            del group[watch]
            if not group:
                del endings.after[key]
        if not endings.inside and not endings.after:
            del self._endings[node]
        endings.num_ranked -= watch.rank is not None
        self._tree.requeue(node)

    def deferral(self, node: Node) -> tuple[int, Rank] | None:
        """Returns how much of a node is evicted last, as `RadixTree.deferral` is to: what watches with a rank match.

        The rank is the highest of theirs.

        Cost: O(watches whose matches end in it).
        """
        endings = self._endings.get(node)
        if endings is None or not endings.num_ranked:
            return None
        ranked = [watch for watch in endings.all() if watch.rank is not None]
        num_bytes = max(watch.num_tokens for watch in ranked) * TOKEN_BYTES - node.start * TOKEN_BYTES
        return num_bytes, max(watch.rank for watch in ranked)  # type: ignore[type-var, return-value]

    def namespace_ids(self) -> set[int]:
        """Returns the interned ids in what is watched. O(tokens watched)."""
        found: set[int] = set()
        for endings in self._endings.values():
            for watch in endings.all():
                if not watch.is_plain:
                    tokens = unpack(watch.key)
                    found.update(tokens[tokens < 0].tolist())
        return found

    # ---- what the tree tells

    def grew(self, node: Node, num_bytes: int, first_block: bytes) -> None:
        """Watches that need the first new block next match on."""
        endings = self._endings.get(node)
        if endings is None:
            return
        group = endings.after.pop(first_block, {})
        is_longer = len(node.span) > num_bytes
        if is_longer:  # all others end before its end now
            endings.inside.update((watch, None) for others in endings.after.values() for watch in others)
            endings.after.clear()
        endings.num_ranked -= sum(watch.rank is not None for watch in group)
        if not endings.inside and not endings.after:
            del self._endings[node]
        start = node.start * TOKEN_BYTES
        for watch in group:
            if is_longer:
                assert node.parent is not None
                self._place(watch, *self._match(watch, node.parent, start))
            else:
                self._place(watch, *self._match(watch, node, start + num_bytes))

    def split(self, upper: Node, lower: Node) -> None:
        """Watches whose matches end in the upper half move there."""
        at = _end(upper)
        endings = self._endings.get(lower)
        if endings is not None:
            self._move([w for w in endings.inside if w.num_tokens * TOKEN_BYTES <= at], endings, lower, upper)

    def merged(self, upper: Node, lower: Node) -> None:
        """Watches whose matches end in the upper half move to the node that has its span now."""
        endings = self._endings.get(upper)
        if endings is not None:
            self._move(endings.all(), endings, upper, lower)

    def trimmed(self, node: Node, num_blocks: int) -> None:
        """Watches that match more than is left are cut back to its end."""
        endings = self._endings.get(node)
        if endings is not None:
            end = _end(node)
            over = [watch for watch in endings.all() if watch.num_tokens * TOKEN_BYTES >= end]
            self._move(over, endings, node, node, end)

    def removed(self, node: Node) -> None:
        """Watches whose matches end in the node are cut back to the end of its parent."""
        endings = self._endings.get(node)
        if endings is not None:
            assert node.parent is not None
            self._move(endings.all(), endings, node, node.parent, _end(node.parent))

    def _move(self, watches: list[Watch], endings: _Endings, old: Node, new: Node, end: int | None = None) -> None:
        """Moves watches to another node, at most to byte `end`."""
        for watch in watches:
            endings.inside.pop(watch, None)
        moved = set(watches)
        for key in [key for key, group in endings.after.items() if not moved.isdisjoint(group)]:
            left = {watch: None for watch in endings.after[key] if watch not in moved}
            if left:
                endings.after[key] = left
            else:
                del endings.after[key]
        endings.num_ranked -= sum(watch.rank is not None for watch in watches)
        if not endings.inside and not endings.after:
            del self._endings[old]
        for watch in watches:
            at = watch.num_tokens * TOKEN_BYTES
            self._place(watch, new, at if end is None else min(at, end))
        self._tree.requeue(old)
        self._tree.requeue(new)

    def check(self) -> None:
        """Raises CacheCorruption unless every watch stands where a new match would. O(watches, each as a match)."""
        if (self in self._tree.observers) != bool(self._endings):
            raise CacheCorruption("violated: watches observe the tree while there are any")
        for node, endings in self._endings.items():
            watches = endings.all()
            num_ranked = sum(watch.rank is not None for watch in watches)
            if not watches or endings.num_ranked != num_ranked:
                raise CacheCorruption(f"violated: watches are counted, got {endings.num_ranked} for {num_ranked}")
            for watch in watches:
                at = watch.num_tokens * TOKEN_BYTES
                is_after = watch in endings.after.get(watch.key[at : at + self._tree.width], ())
                if self._match(watch, self._tree.root, 0) != (node, at) or watch.cursor is not node:
                    raise CacheCorruption(f"violated: a watch stands where its match ends, got {watch}")
                if is_after != (at == _end(node)) or is_after == (watch in endings.inside):
                    raise CacheCorruption(f"violated: a watch is inside its node or at its end, got {watch}")


def _end(node: Node) -> int:
    return node.start * TOKEN_BYTES + len(node.span)

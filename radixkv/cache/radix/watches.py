"""Watches: matches that pin nothing and follow what becomes of the cache.

A watch costs something when what it matches changes, and nothing else: nobody matches the whole queue again at each
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.tokens import TOKEN_BYTES, unpack

if TYPE_CHECKING:
    from radixkv.cache.radix.node import Node
    from radixkv.cache.radix.tree import RadixTree

Rank = tuple[float, float]


class Watch:
    """How far a request's tokens are cached in whole blocks, now.

    Attributes:
        num_tokens: cached now; follows every insertion and eviction.
        rank: None, or: what it matches is evicted after all that no such watch matches, the lowest rank first.
    """

    __slots__ = ("changed", "cursor", "is_plain", "key", "num_tokens", "rank")

    def __init__(self, key: bytes, is_plain: bool, rank: Rank | None, changed: Callable[[], None] | None) -> None:
        if rank is not None and not (isinstance(rank, tuple) and len(rank) == 2 and all(x == x for x in rank)):
            raise ValueError(f"rank: expected None or two numbers, got {rank!r}")
        self.key = key  # packed, as the cache compares it
        self.is_plain = is_plain
        self.num_tokens = 0
        self.rank = rank
        self.changed = changed  # called whenever num_tokens has changed
        self.cursor: Any = None  # the cache's own: where the match ends; None once it is let go

    def __repr__(self) -> str:
        return f"Watch(num_tokens={self.num_tokens}, rank={self.rank})"

    def move(self, num_tokens: int) -> None:
        """Sets num_tokens and tells whoever wants to know."""
        if num_tokens != self.num_tokens:
            self.num_tokens = num_tokens
            if self.changed is not None:
                self.changed()


def check_watching(watch: Watch) -> None:
    """Raises ValueError unless it is a watch that has not ended."""
    if not isinstance(watch, Watch) or watch.cursor is None:
        raise ValueError(f"watch: expected one that has not ended, got {watch!r}")


class _Endings:
    """The watches whose matches end in one node."""

    __slots__ = ("after", "inside", "num_ranked")

    def __init__(self) -> None:
        self.inside: dict[Watch, None] = {}  # before the end of its span
        self.after: dict[bytes, dict[Watch, None]] = {}  # at its end: by the block that they need next
        self.num_ranked = 0

    def all(self) -> list[Watch]:
        return [*self.inside, *(watch for group in self.after.values() for watch in group)]


class TreeWatches:
    """The watches of a radix tree, by the nodes in which their matches end.

    Cost: a change of a node costs O(watches whose matches end in it and which it concerns); what nobody watches costs
    the tree one look into an empty dict.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.endings: dict[Node, _Endings] = {}

    def add(self, watch: Watch) -> None:
        """Matches a watch and keeps it up to date from now on. Cost: as a match."""
        self._place(watch, *self._walk(watch, self._tree.root, 0))
        self._rank_again(watch.cursor)

    def remove(self, watch: Watch) -> None:
        """O(1), and the rank of a leaf."""
        node = watch.cursor
        watch.cursor = watch.changed = None
        self._take_out(watch, node)

    def end_all(self) -> None:
        """Ends every watch."""
        for endings in self.endings.values():
            for watch in endings.all():
                watch.cursor = watch.changed = None

    def _walk(self, watch: Watch, node: Node, at: int) -> tuple[Node, int]:
        """Goes on from the end of a node; returns where the match ends, and the bytes matched."""
        key, width = watch.key, self._tree.width
        end = len(key) // width * width
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            span = child.span
            if at + len(span) <= end and key.startswith(span, at) and not (watch.is_plain and child.is_marked):
                at += len(span)
                node = child
                continue
            common = child.num_common_tokens(key, at, watch.is_plain) * TOKEN_BYTES // width * width
            return (child, at + common) if common else (node, at)
        return node, at

    def _place(self, watch: Watch, node: Node, at: int) -> None:
        endings = self.endings.get(node)
        if endings is None:
            endings = self.endings[node] = _Endings()
        if at == _end(node):
            endings.after.setdefault(watch.key[at : at + self._tree.width], {})[watch] = None
        else:
            endings.inside[watch] = None
        endings.num_ranked += watch.rank is not None
        watch.cursor = node
        watch.move(at // TOKEN_BYTES)

    def _take_out(self, watch: Watch, node: Node) -> None:
        endings = self.endings[node]
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
            del self.endings[node]
        endings.num_ranked -= watch.rank is not None
        self._rank_again(node)

    def _rank_again(self, node: Node) -> None:
        if node.entry:
            self._tree.leave_leaves(node)
            self._tree.enter_leaves(node)

    def wanted(self, node: Node) -> tuple[int, Rank] | None:
        """Returns how many bytes of a node's span watches with a rank match, and the highest of their ranks, or None.

        Cost: O(watches whose matches end in it).
        """
        endings = self.endings.get(node)
        if endings is None or not endings.num_ranked:
            return None
        ranked = [watch for watch in endings.all() if watch.rank is not None]
        num_bytes = max(watch.num_tokens for watch in ranked) * TOKEN_BYTES - node.start * TOKEN_BYTES
        return num_bytes, max(watch.rank for watch in ranked)  # type: ignore[type-var, return-value]

    def marks(self) -> set[int]:
        """Returns the interned ids in what is watched. O(tokens watched)."""
        found: set[int] = set()
        for endings in self.endings.values():
            for watch in endings.all():
                if not watch.is_plain:
                    tokens = unpack(watch.key)
                    found.update(tokens[tokens < 0].tolist())
        return found

    # ---- what the tree tells

    def grown(self, node: Node, old_end: int, key: bytes) -> None:
        """Blocks were put after what ended at byte `old_end`, the first of them `key`: in the node, or in a child."""
        endings = self.endings.get(node)
        if endings is None:
            return
        group = endings.after.pop(key, {})
        if _end(node) > old_end:  # in place: all others end before its end now
            endings.inside.update((watch, None) for others in endings.after.values() for watch in others)
            endings.after.clear()
        endings.num_ranked -= sum(watch.rank is not None for watch in group)
        if not endings.inside and not endings.after:
            del self.endings[node]
        start = node.start * TOKEN_BYTES
        new = node.span[old_end - start :]
        for watch in group:
            at = old_end
            if new:
                if watch.key.startswith(new, at) and not (watch.is_plain and node.is_marked):
                    at += len(new)
                else:
                    common = node.num_common_tokens(watch.key, start, watch.is_plain) * TOKEN_BYTES
                    at = start + common // self._tree.width * self._tree.width
            self._place(watch, *(self._walk(watch, node, at) if at == start + len(node.span) else (node, at)))

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two."""
        at = _end(upper)
        endings = self.endings.get(lower)
        if endings is not None:
            self._move([w for w in endings.inside if w.num_tokens * TOKEN_BYTES <= at], endings, lower, upper)

    def joined(self, upper: Node, node: Node) -> None:
        """The span of `upper` was put before that of `node`, its only child."""
        endings = self.endings.get(upper)
        if endings is not None:
            self._move(endings.all(), endings, upper, node)

    def cut(self, node: Node, heir: Node) -> None:
        """A node lost blocks off its end; where all of them, its parent is the heir, else itself."""
        endings = self.endings.get(node)
        if endings is None:
            return
        end = _end(heir)
        over = [watch for watch in endings.all() if node is not heir or watch.num_tokens * TOKEN_BYTES >= end]
        self._move(over, endings, node, heir, end)

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
            del self.endings[old]
        for watch in watches:
            at = watch.num_tokens * TOKEN_BYTES
            self._place(watch, new, at if end is None else min(at, end))
        self._rank_again(old)
        self._rank_again(new)

    def check(self) -> None:
        """Raises CacheCorruption unless every watch stands where a new match would. O(watches, each as a match)."""
        for node, endings in self.endings.items():
            watches = endings.all()
            num_ranked = sum(watch.rank is not None for watch in watches)
            if not watches or endings.num_ranked != num_ranked:
                raise CacheCorruption(f"violated: watches are counted, got {endings.num_ranked} for {num_ranked}")
            for watch in watches:
                at = watch.num_tokens * TOKEN_BYTES
                is_after = watch in endings.after.get(watch.key[at : at + self._tree.width], ())
                if self._walk(watch, self._tree.root, 0) != (node, at) or watch.cursor is not node:
                    raise CacheCorruption(f"violated: a watch stands where its match ends, got {watch}")
                if is_after != (at == _end(node)) or is_after == (watch in endings.inside):
                    raise CacheCorruption(f"violated: a watch is inside its node or at its end, got {watch}")


def _end(node: Node) -> int:
    return node.start * TOKEN_BYTES + len(node.span)

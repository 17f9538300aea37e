"""The node of the radix tree: a span of tokens and the blocks that hold their KV. Used by `radixkv.cache.radix`."""

from __future__ import annotations

from typing import Any

from sortedcontainers import SortedList

from radixkv.tokens import TOKEN_BYTES, num_common_tokens

BLOCK_ID_BYTES = 4


class Node:
    """A span of whole blocks, or a *tail*: fewer tokens than a block, in one block, never with children.

    Spans and block ids are packed int32 `bytes`: comparing is a memcmp, slicing is a copy (no view keeps a larger array
    alive), and a block costs four bytes.
    """

    __slots__ = (
        "blocks",
        "born",
        "children",
        "fresh",
        "heat",
        "order",
        "parent",
        "pins",
        "rank",
        "span",
        "stamp",
        "start",
    )

    def __init__(self, span: bytes, blocks: bytes, parent: Node | None, start: int, born: int) -> None:
        self.span = span
        self.blocks = blocks
        self.parent = parent
        self.start = start  # tokens before the span
        self.children: dict[bytes, Node] = {}  # by the first block of the child's span (a tail: by its whole span)
        self.order: SortedList | None = None  # the keys of children, sorted; made when first needed
        self.pins = 0  # leases that end here + partial matches copied from here + pinned children
        self.fresh = 0  # blocks at the end of the span that were inserted since the last commit
        self.born = born
        self.stamp = born
        self.heat = 0.0
        self.rank: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.span) // TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) // BLOCK_ID_BYTES

    def add_child(self, key: bytes, child: Node) -> None:
        self.children[key] = child
        if self.order is not None:
            self.order.add(key)

    def remove_child(self, key: bytes) -> None:
        del self.children[key]
        if self.order is not None:
            if self.children:
                self.order.remove(key)
            else:
                self.order = None

    def sorted_keys(self) -> SortedList:
        """Returns the keys of the children, sorted, and keeps them so from now on. Cost: O(children) the first time."""
        if self.order is None:
            self.order = SortedList(self.children)
        return self.order

    def nearest(self, tokens: bytes) -> tuple[Node | None, int]:
        """Returns the child whose first block shares most leading tokens with these, and how many.

        Only blocks of a finished step count. In sorted order, what shares most stands next to where the tokens would
        stand, so two neighbours decide. Cost: O(log children).
        """
        if len(self.children) < 2:
            candidates = list(self.children)
        else:
            keys = self.sorted_keys()
            at = keys.bisect_left(tokens)
            candidates = keys[max(at - 1, 0) : at + 1]
        best, most = None, 0
        for key in candidates:
            child = self.children[key]
            if child.fresh == len(child.blocks) // BLOCK_ID_BYTES:
                continue
            common = num_common_tokens(key, tokens)
            if common > most:
                best, most = child, common
        return best, most

    def tail_before(self, span: bytes) -> Node | None:
        """Returns the child that is a tail and a proper prefix of this span, if there is one. Cost: O(log children).

        At most one is: a tail that is a prefix of another was replaced by it. And nothing stands between the two in
        sorted order: it would have replaced the tail as well.
        """
        if len(self.children) == 1:
            (key,) = self.children
        elif self.order:  # kept from the first tail on
            at = self.order.bisect_left(span)
            if not at:
                return None
            key = self.order[at - 1]
        else:
            return None
        # A whole block that begins the span would have been walked into.
        return self.children[key] if span.startswith(key) else None

"""The node of the radix tree: a span of tokens and the blocks that hold their KV."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv.cache.radix.child_order import ChildOrder
from radixkv.cache.tokens import TOKEN_BYTES, num_common_tokens

BLOCK_ID_BYTES = 4

# A span is at most so long. A leaf that one lease alone pins is extended in place up to it, then gets a child: copying
# an ever longer span for every chunk would make publishing a long prompt quadratic, as would taking blocks off its end.
MAX_SPAN_BYTES = 8192 * TOKEN_BYTES


class Node:
    """A span of whole blocks, or a *partial block*: fewer tokens than a block, in one block, never with children.

    Spans and block ids are packed int32 `bytes`: comparing is a memcmp, slicing is a copy (no view keeps a larger array
    alive), and a block costs four bytes.
    """

    __slots__ = (
        "blocks",
        "born",
        "children",
        "entry",
        "has_namespace",
        "is_removed",
        "last_use",
        "num_uncommitted",
        "order",
        "owner",
        "parent",
        "pins",
        "policy_state",
        "span",
        "start",
    )

    older = 0.0  # a policy sees a partial block through an `AgedPartialBlock`, which may look older

    def __init__(self, span: bytes, blocks: bytes, parent: Node | None, start: int, born: int) -> None:
        self.span = span
        self.blocks = blocks
        self.parent = parent
        self.start = start  # tokens before the span
        self.children: dict[bytes, Node] = {}  # by the first block of the child's span (a partial block: by all)
        self.order: ChildOrder | None = None  # the keys of children, sorted; made when first needed
        self.pins = 0  # leases that end here + partial matches copied from here + pinned children
        self.has_namespace = False  # whether the span holds an interned id, so that plain tokens may not enter it
        self.is_removed = False  # no match finds it; while it is pinned it holds its blocks
        self.num_uncommitted = 0  # blocks at the end of the span that were inserted since the last commit
        self.born = born  # tick of the tree's clock
        self.last_use = born  # tick of the last release of a lease that used it
        self.policy_state: Any = 0.0  # the policy's own
        self.entry = 0  # of the order of leaves; 0: it is in none
        self.owner: tuple[str | None, int] | None = None  # the tenants' own

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the span."""
        return len(self.span) // TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        """Number of blocks that hold the span."""
        return len(self.blocks) // BLOCK_ID_BYTES

    @property
    def is_computed(self) -> bool:
        """Whether its first block is of a finished step, so that rows can be copied from it."""
        return self.num_uncommitted < self.num_blocks

    def first_prefix(self) -> bytes:
        """Returns the packed tokens from the root to the end of the first block; empty at the root. O(tokens)."""
        path = [self.span[: len(self.span) // max(self.num_blocks, 1)]]
        above = self.parent
        while above is not None:
            path.append(above.span)
            above = above.parent
        return b"".join(reversed(path))

    def num_common_tokens(self, key: bytes, at: int, is_plain: bool) -> int:
        """Counts the tokens that the span and a key from byte `at` on have in common.

        Args:
            is_plain: the key is a caller's own tokens: none of them is an interned id, whatever number it is.
        """
        common = num_common_tokens(self.span, key, 0, at)
        if is_plain and self.has_namespace:
            marks = np.flatnonzero(np.frombuffer(self.span, np.int32, common) < 0)
            return int(marks[0]) if len(marks) else common
        return common

    def add_child(self, key: bytes, child: Node) -> None:
        """Adds a child that is found by `key`."""
        self.children[key] = child
        if self.order is not None:
            self.order.add(key)

    def remove_child(self, key: bytes) -> None:
        """Removes the child that is found by `key`."""
        del self.children[key]
        if self.order is not None:
            if self.children:
                self.order.remove(key)
            else:
                self.order = None

    def in_order(self) -> ChildOrder:
        """Returns the keys of the children, sorted, and keeps them so from now on. Cost: O(children) the first time."""
        if self.order is None:
            self.order = ChildOrder(self.children)
        return self.order

    def nearest(self, tokens: bytes, is_plain: bool) -> tuple[Node | None, int]:
        """Returns the child whose first block shares most leading tokens with these, and how many.

        Only blocks of a finished step count. In sorted order what shares most stands next to where the tokens would
        stand, and less the further away, so few are looked at.

        Args:
            is_plain: the tokens are a caller's own: they may not agree with an interned id.

        Cost: O(log children), and the blocks of the step under way that stand between.
        """
        children, best, most = self.children, None, 0
        if len(children) < 2:
            for key, child in children.items():
                common = min(child.num_common_tokens(tokens, 0, is_plain), len(key) // TOKEN_BYTES)
                if common and child.is_computed:
                    return child, common
            return None, 0
        order = self.in_order()
        start = order.place(tokens)
        for step in (order.up, order.down):
            key, at = step(start)
            while key:
                child = children[key]
                common = min(child.num_common_tokens(tokens, 0, is_plain), len(key) // TOKEN_BYTES)
                if common <= most:
                    break
                if child.is_computed:
                    best, most = child, common
                    break
                key, at = step(at)
        return best, most

    def partial_block_before(self, span: bytes) -> Node | None:
        """Returns the partial block among the children that is a proper prefix of this span, or None. O(log children).

        At most one is: a partial block that is a prefix of another was replaced by it. And nothing stands between the
        two in sorted order: it would have replaced the partial block as well.
        """
        if len(self.children) == 1:
            (key,) = self.children
        elif self.order is None:  # it is kept from the first partial block on
            return None
        else:
            key, _ = self.order.down(self.order.place(span))
            if not key:
                return None
        # A whole block that begins the span would have been walked into.
        return self.children[key] if span.startswith(key) else None

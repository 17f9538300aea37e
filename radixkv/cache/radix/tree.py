"""The radix tree itself: nodes, pins, leaves, and the blocks inserted since the last commit.

Everything here is in packed bytes: a *key* is the packed tokens of a request, `width` the bytes of a block's tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv.cache.radix.eviction import PartialBlock, Policy, overrides
from radixkv.cache.radix.leaf_order import LeafOrder
from radixkv.cache.radix.node import BLOCK_ID_BYTES, Node
from radixkv.cache.radix.watches import TreeWatches
from radixkv.cache.tokens import TOKEN_BYTES, has_negative

# A node's span is at most so long. A leaf that one lease alone holds is extended in place up to it, then gets a child:
# copying an ever longer span for every chunk would make publishing a long prompt quadratic, as would taking blocks off
# the end of one.
MAX_SPAN_BYTES = 8192 * TOKEN_BYTES


class RadixTree:
    """Spans of tokens in a tree, each node pinned or not, the unpinned leaves in the order of a policy.

    Attributes:
        clock: ticks at every release; all stamps are its values.
        num_blocks: blocks held in all; num_pinned of them are pinned.
        leaves: the unpinned nodes without children, in the order of eviction.
        last: those of them that watches with a rank match whole; evicted after all others.
        watches: matches that follow what changes here.
        superseded: unpinned blocks of tails that a fuller block has replaced.
        fresh: nodes that hold blocks inserted since the last commit, as the keys of a dict.
    """

    def __init__(self, block_size: int, policy: Policy) -> None:
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES
        self.policy = policy
        # What a policy inherits from lru is done here, without a call for every node of every release.
        self._is_touched = overrides(policy, "touch")
        self._is_ranked = overrides(policy, "rank")
        self._is_told = overrides(policy, "evicted")
        self._partial_ageing = policy.partial_ageing
        self._grows_in_place = policy.grows_in_place
        self.root = Node(b"", b"", None, 0, 0)
        self.root.pins = 1  # never a leaf, and the end of every walk up
        self.leaves = policy.begin()
        self.last = LeafOrder(first_entry=-(2**62))  # entries below zero: a node tells which order it is in
        self.watches = TreeWatches(self)
        self._watched = self.watches.endings
        self.superseded: list[int] = []
        self.clock = 0
        self._evicted_stamp = 0
        self.num_pinned = 0
        self.num_blocks = 0
        self.fresh: dict[Node, None] = {}

    def walk(self, node: Node, key: bytes, is_plain: bool) -> tuple[Node, int, list[bytes]]:
        """Goes down as far as whole blocks of the key agree, splitting where they end inside a span.

        Args:
            is_plain: the key is a caller's own tokens, and must not meet an interned id, whatever numbers it holds.

        Returns the node reached, the bytes of the key matched, and the packed blocks of each node passed.
        """
        width = self.width
        end = len(key) // width * width
        at = 0
        found = []
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            span = child.span
            # A memcmp, without a copy. What holds an interned id is never all of a caller's own tokens.
            if at + len(span) <= end and key.startswith(span, at) and not (is_plain and child.is_marked):
                at += len(span)
            else:
                common = child.num_common_tokens(key, at, is_plain) // self.block_size * width
                if not common:
                    break
                child = self.split(child, common)
                at += common
            found.append(child.blocks)
            node = child
        return node, at, found

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` bytes of its span; returns the new upper half. The node stays the lower half."""
        cut = at // self.width * BLOCK_ID_BYTES
        parent = node.parent
        assert parent is not None
        upper = Node(node.span[:at], node.blocks[:cut], parent, node.start, node.born)
        # Neither half is refreshed: only a release stamps.
        upper.stamp, upper.heat = node.stamp, node.heat
        upper.pins = 1 if node.pins else 0
        parent.children[upper.span[: self.width]] = upper  # the key stays, and with it the order
        node.span, node.blocks = node.span[at:], node.blocks[cut:]
        node.parent, node.start = upper, node.start + at // TOKEN_BYTES
        upper.children[node.span[: self.width]] = node
        if node.is_marked:
            upper.is_marked, node.is_marked = has_negative(upper.span), has_negative(node.span)
        if node.fresh > node.num_blocks:
            upper.fresh = node.fresh - node.num_blocks
            node.fresh = node.num_blocks
            self.fresh[upper] = None
        if self._watched:
            self.watches.split(upper, node)
        return upper

    def join(self, upper: Node) -> None:
        """Undoes a split that nobody needs any longer: both halves are of one age and no lease ends between them."""
        if len(upper.children) != 1 or upper.parent is None or upper.is_forgotten:
            return
        (node,) = upper.children.values()
        if (
            len(node.span) < self.width
            or upper.pins != (node.pins > 0)
            or (upper.stamp, upper.heat, upper.born) != (node.stamp, node.heat, node.born)
            or (upper.fresh and node.fresh < node.num_blocks)
            or (node.fresh and upper.fresh not in (0, upper.num_blocks))
            or len(upper.span) + len(node.span) > MAX_SPAN_BYTES
        ):
            return
        if upper.fresh:
            del self.fresh[upper]
            node.fresh += upper.fresh
        node.span, node.blocks = upper.span + node.span, upper.blocks + node.blocks
        node.parent, node.start = upper.parent, upper.start
        node.is_marked |= upper.is_marked
        upper.parent.children[node.span[: self.width]] = node  # the key stays, and with it the order
        if self._watched:
            self.watches.joined(upper, node)

    # ---- pins

    def pin(self, node: Node) -> None:
        """Pins a node and all above it. O(nodes up to the first that is pinned already)."""
        if node.entry:
            self.leave_leaves(node)
        while True:
            node.pins += 1
            if node.pins > 1:
                return
            self.num_pinned += len(node.blocks) // BLOCK_ID_BYTES
            node = node.parent  # type: ignore[assignment]  # the root is always pinned

    def unpin(self, node: Node, *, stamp: int | None) -> None:
        """Lets one pin go. With a stamp, marks what nobody holds any longer; with None, leaves recency as it was.

        The first ancestor that is still pinned is stamped too, though it may be stamped again: if its last pin goes
        without a stamp, it must not look older than what was released below it.
        """
        if stamp is not None and self._is_touched:
            self._touch(node, stamp)
        while True:
            node.pins -= 1
            if node.pins:
                if stamp is not None:
                    node.stamp = stamp
                return
            self.num_pinned -= len(node.blocks) // BLOCK_ID_BYTES
            parent = node.parent
            if parent is None:  # a tail that was replaced while it was pinned
                self.superseded.extend(np.frombuffer(node.blocks, np.int32).tolist())
                return
            if stamp is not None:
                node.stamp = stamp
            elif parent.stamp < node.stamp:
                parent.stamp = node.stamp
            if not node.children:
                self.enter_leaves(node)
            node = parent

    def _touch(self, node: Node | None, stamp: int) -> None:
        """A use of a node is a use of all above it, also of those that others hold at the same time."""
        while node is not None:
            self.policy.touch(node, stamp)
            node = node.parent

    def leave_leaves(self, node: Node) -> None:
        (self.leaves if node.entry > 0 else self.last).remove(node)

    def enter_leaves(self, node: Node) -> None:
        if node.is_forgotten:
            self.superseded += np.frombuffer(node.blocks, np.int32).tolist()
            self._detach(node)
            return
        if self._watched and (wanted := self.watches.wanted(node)) and wanted[0] == len(node.span):
            self.last.add(node, wanted[1])
            return
        rank: Any
        if len(node.span) >= self.width or not self._partial_ageing:
            rank = self.policy.rank(node) if self._is_ranked else node.stamp
        else:
            empty = 1 - len(node.span) / self.width
            older = self._partial_ageing * empty * (self.clock - self._evicted_stamp)
            rank = self.policy.rank(PartialBlock(node, older)) if self._is_ranked else node.stamp - older
        self.leaves.add(node, rank)

    # ---- growing. A pin of the caller's on `node` moves on to the node returned.

    def append(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> Node:
        """Puts whole blocks after a node, where nothing goes on with them; returns the node that ends with them."""
        self.num_blocks += len(blocks) // BLOCK_ID_BYTES
        self.num_pinned += len(blocks) // BLOCK_ID_BYTES
        if self._watched and node in self._watched:
            after, key, end = node, span[: self.width], node.start * TOKEN_BYTES + len(node.span)
            last = self._append(node, span, blocks, is_plain)
            self.watches.grown(after, end, key)
            return last
        return self._append(node, span, blocks, is_plain)

    def _append(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> Node:
        if node.children:
            self._supersede(node.tail_before(span))
        is_alone = node.pins == 1 and not node.children and node is not self.root
        if is_alone and (self._grows_in_place or node.born == self.clock):
            room = max(MAX_SPAN_BYTES - len(node.span), 0) // self.width
            if room:
                self._extend(node, span[: room * self.width], blocks[: room * BLOCK_ID_BYTES], is_plain)
                span, blocks = span[room * self.width :], blocks[room * BLOCK_ID_BYTES :]
        step = max(MAX_SPAN_BYTES // self.width, 1)
        while span:
            child = self._add_child(node, span[: step * self.width], blocks[: step * BLOCK_ID_BYTES], is_plain)
            child.fresh = child.num_blocks
            self.fresh[child] = None
            node, span, blocks = child, span[step * self.width :], blocks[step * BLOCK_ID_BYTES :]
        return node

    def _extend(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> None:
        node.span += span
        node.blocks += blocks
        node.fresh += len(blocks) // BLOCK_ID_BYTES
        self.fresh[node] = None
        if not is_plain:
            node.is_marked |= has_negative(span)

    def hang(self, node: Node, tokens: bytes, block: bytes, is_plain: bool) -> Node:
        """Puts a partly filled block under a node, unless a fuller one of its tokens is there; then it is superseded.

        Returns the tail, or the node.
        """
        self.num_blocks += 1
        order = node.in_order()  # kept wherever there are tails
        if order.up(order.place(tokens))[0].startswith(tokens):
            self.superseded.extend(np.frombuffer(block, np.int32).tolist())
            return node
        self._supersede(node.tail_before(tokens))
        self.num_pinned += 1
        node.in_order()  # the last child may just have gone, and the order with it
        return self._add_child(node, tokens, block, is_plain)

    def _add_child(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> Node:
        child = Node(span, blocks, node, node.start + len(node.span) // TOKEN_BYTES, self.clock)
        child.pins = 1  # the caller's pin on the parent becomes the child's pin on it
        child.is_marked = not is_plain and has_negative(span)
        node.add_child(span[: self.width], child)
        return child

    def _supersede(self, tail: Node | None) -> None:
        """Takes a tail out: a fuller block of the same tokens is there. While pinned, its block counts as pinned."""
        if tail is None:
            return
        parent = tail.parent
        assert parent is not None
        parent.remove_child(tail.span)
        tail.parent = None
        if tail.pins:
            parent.pins -= 1  # stays above zero: whoever brings the fuller block pins it
        else:
            self.leave_leaves(tail)
            self.superseded.extend(np.frombuffer(tail.blocks, np.int32).tolist())

    # ---- shrinking

    def evict(self, num_blocks: int) -> list[int]:
        """Takes blocks off the first leaves, tail first, superseded ones before all. O(leaves taken * log leaves)."""
        evicted = self.superseded[:num_blocks]
        del self.superseded[: len(evicted)]
        needed = num_blocks - len(evicted)
        while needed and (first := self.leaves.first() or self.last.first()):
            rank, node = first
            self._evicted_stamp = node.stamp
            size = len(node.blocks) // BLOCK_ID_BYTES
            kept = max(size - needed, 0)
            if self._watched and node.entry > 0 and (wanted := self.watches.wanted(node)):
                kept = max(kept, wanted[0] // self.width)  # what goes on after that first
            if self._is_told and node.entry > 0:
                self.policy.evicted(node, rank, kept)
            needed -= size - kept
            evicted.extend(reversed(np.frombuffer(node.blocks, np.int32, size - kept, kept * BLOCK_ID_BYTES).tolist()))
            if kept:
                self._trim(node, kept)
                node.fresh = max(node.fresh - (size - kept), 0)
                if not node.fresh:
                    self.fresh.pop(node, None)
                continue
            self.leave_leaves(node)
            self.fresh.pop(node, None)
            node.fresh = 0
            self._unlink(node)
        self.num_blocks -= len(evicted)
        return evicted

    def forget(self, top: Node) -> tuple[list[int], list[int]]:
        """Takes a node out with all below it, so that nothing finds them; between two steps.

        What is pinned stays with whoever pins it, under the parent it had, and is superseded when the last pin goes.

        Returns the blocks of what is not pinned, which are held no longer, and the others. O(nodes below).
        """
        nodes = [top]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        if self._watched:
            for node in reversed(nodes):  # children before their parents
                assert node.parent is not None
                self.watches.cut(node, node.parent)
        self._detach(top)
        assert top.parent is not None
        if not top.parent.pins and not top.parent.children:
            self.enter_leaves(top.parent)
        given_up: list[int] = []
        kept: list[int] = []
        for node in nodes:
            if node.pins:
                node.is_forgotten = True
                kept += np.frombuffer(node.blocks, np.int32).tolist()
                continue
            if node.entry:
                self.leave_leaves(node)
            given_up += np.frombuffer(node.blocks, np.int32).tolist()
            self._detach(node)
        self.num_blocks -= len(given_up)
        return given_up, kept

    def _detach(self, node: Node) -> None:
        """Takes a node out of its parent's children, if it is there still; its pins stay with the parent."""
        assert node.parent is not None
        key = node.span[: self.width]
        if node.parent.children.get(key) is node:
            node.parent.remove_child(key)

    def withdraw(self) -> list[bytes]:
        """Takes out what was inserted since the last commit. No lease may end there any longer.

        Returns the packed blocks taken, a run for each node.
        """
        nodes = list(self.fresh)
        for node in nodes:
            if node.entry:
                self.leave_leaves(node)
        if self._watched:
            for node in sorted(nodes, key=lambda node: -node.start):  # before a parent is taken from its children
                if node.fresh == node.num_blocks and node.parent is not None:
                    self.watches.cut(node, node.parent)
        taken = []
        cut = []  # what is left of them, and their parents: may be leaves now
        for node in nodes:
            kept = node.num_blocks - node.fresh
            taken.append(node.blocks[kept * BLOCK_ID_BYTES :])
            self.num_blocks -= node.fresh
            if node.pins:
                self.num_pinned -= node.fresh
            node.fresh = 0
            if kept:
                self._trim(node, kept)
                cut.append(node)
            else:
                assert node.parent is not None
                node.parent.remove_child(node.span[: self.width])
                cut.append(node.parent)
                node.parent = None
        for node in dict.fromkeys(cut):
            if node.parent is not None and not node.pins and not node.children:
                self.enter_leaves(node)
        self.fresh.clear()
        return taken

    def _trim(self, node: Node, num_blocks: int) -> None:
        node.blocks = node.blocks[: num_blocks * BLOCK_ID_BYTES]
        node.span = node.span[: num_blocks * self.width]
        if node.is_marked:
            node.is_marked = has_negative(node.span)
        if self._watched:
            self.watches.cut(node, node)

    def _unlink(self, leaf: Node) -> None:
        """Takes an unpinned leaf out; its parent may be a leaf now."""
        parent = leaf.parent
        assert parent is not None
        parent.remove_child(leaf.span[: self.width])
        if self._watched:
            self.watches.cut(leaf, parent)
        if not parent.pins and not parent.children:
            self.enter_leaves(parent)

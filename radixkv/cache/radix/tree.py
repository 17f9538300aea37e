"""The radix tree itself: nodes, pins, leaves, and the blocks inserted since the last commit.

Everything here is in packed bytes: a *key* is the packed tokens of a request, `width` the bytes of a block's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from radixkv.cache.contract import Rank
from radixkv.cache.radix.eviction import AgedPartialBlock, Policy, overrides
from radixkv.cache.radix.leaf_order import LeafOrder
from radixkv.cache.radix.node import BLOCK_ID_BYTES, MAX_SPAN_BYTES, Node
from radixkv.cache.radix.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES, has_negative, unpack


class RadixTree:
    """Spans of tokens in a tree, each node pinned or not, the unpinned leaves in the order of a policy.

    Attributes:
        clock: ticks at every release; `Node.last_use` and `Node.born` are its values.
        num_blocks: number of blocks held in all, of which num_pinned are pinned.
        leaves: the unpinned nodes without children, in the order of eviction.
        last: the leaves that are evicted after all others.
        deferral: None, or a function from a leaf to what of it is to be evicted last: the number of bytes at the front
            of its span, and their rank (the lowest is evicted first); None: nothing of it.
        dead_blocks: unpinned blocks of nodes that were removed: no match finds them, and they are evicted first.
        uncommitted: nodes that hold blocks inserted since the last commit, as the keys of a dict.
        observers: told of each change of the structure.
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
        self.deferral: Callable[[Node], tuple[int, Rank] | None] | None = None
        self.observers: tuple[TreeObserver, ...] = ()
        self.dead_blocks: list[int] = []
        self.clock = 0
        self._evicted_last_use = 0
        self.num_pinned = 0
        self.num_blocks = 0
        self.uncommitted: dict[Node, None] = {}

    def attach(self, observer: TreeObserver) -> None:
        """Tells an observer of every change from now on."""
        self.observers = (*self.observers, observer)

    def detach(self, observer: TreeObserver) -> None:
        """Tells an observer nothing more."""
        self.observers = tuple(other for other in self.observers if other is not observer)

    # ---- matching

    def walk(
        self, node: Node, key: bytes, at: int, is_plain: bool, is_split: bool
    ) -> tuple[Node, int, list[bytes], Node | None, int]:
        """Goes down from the end of a node as far as a key agrees with whole spans, or with whole blocks.

        Args:
            key: packed tokens, from position 0 of the request, or from the end of `node` on.
            at: byte of the key at the node's end.
            is_plain: the key is a caller's own tokens, and must not meet an interned id, whatever numbers it holds.
            is_split: whether to split a span of which some whole blocks agree, and to go to the end of these. Without,
                nothing is changed.

        Returns:
            The node reached, the byte of the key at its end, the packed blocks of each node passed; and, where a span
            that is not split agrees in part, its node and the number of tokens that agree, else None and 0.

        Cost: a memcmp of the match, and O(nodes passed).
        """
        width = self.width
        end = len(key) // width * width
        found = []
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            span = child.span
            # A memcmp, without a copy. What holds an interned id is never all of a caller's own tokens.
            if at + len(span) <= end and key.startswith(span, at) and not (is_plain and child.has_namespace):
                at += len(span)
                found.append(child.blocks)
                node = child
                continue
            num_common = child.num_common_tokens(key, at, is_plain)
            if not is_split:
                return node, at, found, child, num_common
            if num_common >= self.block_size:
                node = self.split(child, num_common // self.block_size * width)
                at += len(node.span)
                found.append(node.blocks)
            break
        return node, at, found, None, 0

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` bytes of its span; returns the new upper half. The node stays the lower half."""
        cut = at // self.width * BLOCK_ID_BYTES
        parent = node.parent
        assert parent is not None
        upper = Node(node.span[:at], node.blocks[:cut], parent, node.start, node.born)
        # Neither half is refreshed: only a release is a use.
        upper.last_use, upper.policy_state = node.last_use, node.policy_state
        upper.pins = 1 if node.pins else 0
        parent.children[upper.span[: self.width]] = upper  # the key stays, and with it the order
        node.span, node.blocks = node.span[at:], node.blocks[cut:]
        node.parent, node.start = upper, node.start + at // TOKEN_BYTES
        upper.children[node.span[: self.width]] = node
        if node.has_namespace:
            upper.has_namespace, node.has_namespace = has_negative(upper.span), has_negative(node.span)
        if node.num_uncommitted > node.num_blocks:
            upper.num_uncommitted = node.num_uncommitted - node.num_blocks
            node.num_uncommitted = node.num_blocks
            self.uncommitted[upper] = None
        for observer in self.observers:
            observer.split(upper, node)
        return upper

    def merge(self, upper: Node) -> None:
        """Undoes a split that is of no use any more: both halves are of one age and no lease ends between them."""
        if len(upper.children) != 1 or upper.parent is None or upper.is_removed:
            return
        (node,) = upper.children.values()
        if (
            len(node.span) < self.width
            or upper.pins != (node.pins > 0)
            or (upper.last_use, upper.policy_state, upper.born) != (node.last_use, node.policy_state, node.born)
            or (upper.num_uncommitted and node.num_uncommitted < node.num_blocks)
            or (node.num_uncommitted and upper.num_uncommitted not in (0, upper.num_blocks))
            or len(upper.span) + len(node.span) > MAX_SPAN_BYTES
        ):
            return
        if upper.num_uncommitted:
            del self.uncommitted[upper]
            node.num_uncommitted += upper.num_uncommitted
        node.span, node.blocks = upper.span + node.span, upper.blocks + node.blocks
        node.parent, node.start = upper.parent, upper.start
        node.has_namespace |= upper.has_namespace
        upper.parent.children[node.span[: self.width]] = node  # the key stays, and with it the order
        for observer in self.observers:
            observer.merged(upper, node)

    # ---- pins

    def pin(self, node: Node) -> None:
        """Pins a node and all above it. O(nodes up to the first that is pinned already)."""
        if node.entry:
            self.dequeue(node)
        observers = self.observers
        while True:
            node.pins += 1
            if node.pins > 1:
                return
            self.num_pinned += len(node.blocks) // BLOCK_ID_BYTES
            if observers:
                for observer in observers:
                    observer.pinned(node)
            node = node.parent  # type: ignore[assignment]  # the root is always pinned

    def unpin(self, node: Node, *, last_use: int | None) -> None:
        """Removes one pin. Nodes whose pin count reaches zero get `last_use` as theirs; None leaves recency as it was.

        The first ancestor that is still pinned gets it too, though it may get a later one: if its last pin is removed
        with None, it must not look older than what was released below it.
        """
        if last_use is not None and self._is_touched:
            self._touch(node, last_use)
        observers = self.observers
        while True:
            node.pins -= 1
            if node.pins:
                if last_use is not None:
                    node.last_use = last_use
                return
            self.num_pinned -= len(node.blocks) // BLOCK_ID_BYTES
            parent = node.parent
            if parent is None:  # a partial block that was replaced while it was pinned
                self.dead_blocks += unpack(node.blocks).tolist()
                return
            if last_use is not None:
                node.last_use = last_use
            elif parent.last_use < node.last_use:
                parent.last_use = node.last_use
            if not node.children:
                if node.is_removed:
                    self.dead_blocks += unpack(node.blocks).tolist()
                    self._detach(node)
                else:
                    self.queue(node)
            if observers and not node.is_removed:
                for observer in observers:
                    observer.unpinned(node)
            node = parent

    def _touch(self, node: Node | None, tick: int) -> None:
        """A use of a node is a use of all above it, also of those that other leases pin at the same time."""
        while node is not None:
            self.policy.touch(node, tick)
            node = node.parent

    # ---- the order of leaves

    def dequeue(self, leaf: Node) -> None:
        """Takes a leaf out of the order of eviction."""
        (self.leaves if leaf.entry > 0 else self.last).remove(leaf)

    def queue(self, leaf: Node) -> None:
        """Puts an unpinned node without children into the order of eviction."""
        if self.deferral and (deferred := self.deferral(leaf)) and deferred[0] == len(leaf.span):
            self.last.add(leaf, deferred[1])
            return
        rank: Any
        if len(leaf.span) >= self.width or not self._partial_ageing:
            rank = self.policy.rank(leaf) if self._is_ranked else leaf.last_use
        else:
            empty = 1 - len(leaf.span) / self.width
            older = self._partial_ageing * empty * (self.clock - self._evicted_last_use)
            rank = self.policy.rank(AgedPartialBlock(leaf, older)) if self._is_ranked else leaf.last_use - older
        self.leaves.add(leaf, rank)

    def requeue(self, node: Node) -> None:
        """Ranks a node anew, if it is in the order of eviction: what `deferral` says of it has changed."""
        if node.entry:
            self.dequeue(node)
            self.queue(node)

    # ---- growing. A pin of the caller's on `node` moves on to the node returned.

    def append(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> Node:
        """Puts whole blocks after a node, where no child begins with them; returns the node that ends with them."""
        self.num_blocks += len(blocks) // BLOCK_ID_BYTES
        self.num_pinned += len(blocks) // BLOCK_ID_BYTES
        grown, num_bytes, added = node, len(node.span), span
        if node.children:
            self._replace_partial_block(node.partial_block_before(span))
        is_alone = node.pins == 1 and not node.children and node is not self.root
        if is_alone and (self._grows_in_place or node.born == self.clock):
            room = max(MAX_SPAN_BYTES - len(node.span), 0) // self.width
            if room:
                self._extend(node, span[: room * self.width], blocks[: room * BLOCK_ID_BYTES], is_plain)
                span, blocks = span[room * self.width :], blocks[room * BLOCK_ID_BYTES :]
        step = max(MAX_SPAN_BYTES // self.width, 1)
        while span:
            child = self._add_child(node, span[: step * self.width], blocks[: step * BLOCK_ID_BYTES], is_plain)
            child.num_uncommitted = child.num_blocks
            self.uncommitted[child] = None
            node, span, blocks = child, span[step * self.width :], blocks[step * BLOCK_ID_BYTES :]
        for observer in self.observers:
            observer.grew(grown, num_bytes, added[: self.width])
        return node

    def _extend(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> None:
        node.span += span
        node.blocks += blocks
        node.num_uncommitted += len(blocks) // BLOCK_ID_BYTES
        self.uncommitted[node] = None
        if not is_plain:
            node.has_namespace |= has_negative(span)

    def insert_partial_block(self, node: Node, tokens: bytes, block: bytes, is_plain: bool) -> Node:
        """Puts a partly filled block under a node, or makes it a dead block if one that begins with it is there.

        Returns the partial block's node, or `node`.
        """
        self.num_blocks += 1
        order = node.in_order()  # kept wherever there are partial blocks
        if order.up(order.place(tokens))[0].startswith(tokens):
            self.dead_blocks += unpack(block).tolist()
            return node
        self._replace_partial_block(node.partial_block_before(tokens))
        self.num_pinned += 1
        node.in_order()  # the last child may just have gone, and the order with it
        return self._add_child(node, tokens, block, is_plain)

    def _add_child(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> Node:
        child = Node(span, blocks, node, node.start + len(node.span) // TOKEN_BYTES, self.clock)
        child.pins = 1  # the caller's pin on the parent becomes the child's pin on it
        child.has_namespace = not is_plain and has_negative(span)
        node.add_child(span[: self.width], child)
        return child

    def _replace_partial_block(self, node: Node | None) -> None:
        """Removes a partial block: a fuller block of the same tokens is there.

        If it is pinned, it keeps its block until it is unpinned, but no longer pins its parent, so that the parent can
        still grow in place.
        """
        if node is None:
            return
        parent = node.parent
        assert parent is not None
        parent.remove_child(node.span)
        node.is_removed = True
        for observer in self.observers:
            observer.removed(node)
        node.parent = None
        if node.pins:
            parent.pins -= 1  # stays above zero: the lease that brings the fuller block pins it
        else:
            self.dequeue(node)
            self.dead_blocks += unpack(node.blocks).tolist()

    # ---- shrinking

    def evict(self, num_blocks: int) -> list[int]:
        """Takes blocks off the first leaves, the last block of each first; dead blocks before all.

        Cost: O(leaves taken * log leaves).
        """
        evicted = self.dead_blocks[:num_blocks]
        del self.dead_blocks[: len(evicted)]
        while len(evicted) < num_blocks and (first := self.leaves.first() or self.last.first()):
            rank, node = first
            self._evicted_last_use = node.last_use
            num_kept = max(len(node.blocks) // BLOCK_ID_BYTES - (num_blocks - len(evicted)), 0)
            if node.entry > 0:
                if self.deferral and (deferred := self.deferral(node)):
                    num_kept = max(num_kept, deferred[0] // self.width)  # first what goes on after that
                if self._is_told:
                    self.policy.evicted(node, rank, num_kept)
            evicted += self.cut(node, num_kept)
        self.num_blocks -= len(evicted)
        return evicted

    def cut(self, leaf: Node, num_kept: int) -> list[int]:
        """Takes blocks off the end of a leaf in the order of eviction; with none left, the leaf itself.

        Returns the blocks, the last first. They count as held until the caller takes them off `num_blocks`.
        """
        taken = np.frombuffer(leaf.blocks, np.int32, -1, num_kept * BLOCK_ID_BYTES).tolist()
        taken.reverse()
        if leaf.num_uncommitted:
            leaf.num_uncommitted = max(leaf.num_uncommitted - len(taken), 0)
            if not leaf.num_uncommitted:
                del self.uncommitted[leaf]
        if num_kept:
            self._trim(leaf, num_kept)
            return taken
        self.dequeue(leaf)
        parent = leaf.parent
        assert parent is not None
        parent.remove_child(leaf.span[: self.width])
        for observer in self.observers:
            observer.removed(leaf)
        if not parent.pins and not parent.children:
            self.queue(parent)
        return taken

    def remove_below(self, top: Node) -> tuple[list[int], list[int]]:
        """Takes a node out with all below it, so that no match finds them; between two steps.

        What is pinned stays under the parent that it had, and its blocks are dead when the last pin is removed.

        Returns the blocks of what is not pinned, which are held no longer, and the others. O(nodes below).
        """
        nodes = [top]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        self._detach(top)
        for node in reversed(nodes) if self.observers else ():  # children before their parents
            for observer in self.observers:
                observer.removed(node)
        assert top.parent is not None
        if not top.parent.pins and not top.parent.children:
            self.queue(top.parent)
        given_up: list[int] = []
        kept: list[int] = []
        for node in nodes:
            node.is_removed = True
            if node.pins:
                kept += unpack(node.blocks).tolist()
                continue
            if node.entry:
                self.dequeue(node)
            given_up += unpack(node.blocks).tolist()
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
        nodes = list(self.uncommitted)
        for node in nodes:
            if node.entry:
                self.dequeue(node)
        taken = [node.blocks[(node.num_blocks - node.num_uncommitted) * BLOCK_ID_BYTES :] for node in nodes]
        cut = []  # what is left of them, and their parents: may be leaves now
        if self.observers:
            nodes.sort(key=lambda node: -node.start)  # children before their parents
        for node in nodes:
            kept = node.num_blocks - node.num_uncommitted
            self.num_blocks -= node.num_uncommitted
            if node.pins:
                self.num_pinned -= node.num_uncommitted
            node.num_uncommitted = 0
            if kept:
                self._trim(node, kept)
                cut.append(node)
            else:
                assert node.parent is not None
                node.parent.remove_child(node.span[: self.width])
                node.is_removed = True
                for observer in self.observers:
                    observer.removed(node)
                cut.append(node.parent)
        for node in dict.fromkeys(cut):
            if not node.is_removed and not node.pins and not node.children:
                self.queue(node)
        self.uncommitted.clear()
        return taken

    def _trim(self, node: Node, num_kept: int) -> None:
        num_blocks = node.num_blocks - num_kept
        node.blocks = node.blocks[: num_kept * BLOCK_ID_BYTES]
        node.span = node.span[: num_kept * self.width]
        if node.has_namespace:
            node.has_namespace = has_negative(node.span)
        for observer in self.observers:
            observer.trimmed(node, num_blocks)

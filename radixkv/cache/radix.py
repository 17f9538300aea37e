"""RadixCache: a radix tree of token spans, so that requests which diverge partway share what they have in common.

The structure is RadixAttention's (Zheng et al., SGLang, arXiv 2312.07104); what makes it quick in plain Python is said
where it is done: packed spans compared by memcmp, growth in place, pins that stop at the first pinned ancestor, a leaf
in the sorted set only while nobody holds it, recency stamped at release alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
from sortedcontainers import SortedKeyList

from radixkv.cache.base import (
    NO_BLOCKS,
    Blocks,
    CacheSizes,
    Lease,
    Partial,
    Tail,
    check_block_size,
    check_count,
    check_live,
    pack_blocks,
)
from radixkv.cache.eviction import Policy, make_policy
from radixkv.cache.namespace import Interner, Namespace
from radixkv.cache.node import BLOCK_ID_BYTES, Node
from radixkv.cache.radix_check import check_tree
from radixkv.tokens import TOKEN_BYTES, TokenIds, num_common_tokens, pack

# A lease that alone holds a leaf extends it in place up to this length, then adds a child: copying an ever longer span
# for every chunk would make publishing a long prompt quadratic.
MAX_EXTENDED_BYTES = 8192 * TOKEN_BYTES

NO_DUPLICATES: Blocks = np.empty((0, 2), np.int32)
NO_DUPLICATES.flags.writeable = False


def _unpacked(blocks: bytes) -> Blocks:
    return np.frombuffer(blocks, np.int32)


def _joined(blocks: list[bytes]) -> Blocks:
    return np.frombuffer(b"".join(blocks), np.int32) if blocks else NO_BLOCKS


class RadixLease(Lease):
    """A lease whose cursor is a node; `source` is the node that holds the block of its partial match."""

    __slots__ = ("source",)

    def __init__(self, cursor: Node, num_tokens: int, block_ids: Blocks, namespace: Namespace | None) -> None:
        super().__init__(cursor, num_tokens, block_ids, namespace)
        self.source: Node | None = None


class RadixCache:
    """A prefix cache over a radix tree (see `radixkv.cache.base` for the contract of every method).

    Args:
        block_size: tokens in a block, 1 to 1024.
        partial_blocks: share to the token at any block size: matches report how far the next block agrees, and
            released requests may leave a partly filled last block.
        policy: name of an eviction policy, or one of your own (`radixkv.cache.eviction`).

    Cost: `peek` and `acquire` about a memcmp of the match plus O(nodes on the path); `insert` O(tokens after the
    lease); `release` O(nodes let go * log leaves); `evict` O(leaves taken * log leaves), at any number of leaves.
    """

    def __init__(self, block_size: int = 16, *, partial_blocks: bool = True, policy: str | Policy = "lru") -> None:
        self.block_size = check_block_size(block_size)
        self.partial_blocks = partial_blocks and block_size > 1
        self.policy = make_policy(policy)
        # lru needs nothing beyond the stamp; do not pay for a call on every node of every release
        self._touch = None if type(self.policy).touch is Policy.touch else self.policy.touch
        self._lru = type(self.policy) is Policy
        self._block_bytes = block_size * TOKEN_BYTES
        self._root = Node(b"", b"", None, 0, 0)
        self._root.pins = 1  # never a leaf, and the end of every walk up
        self._leaves: SortedKeyList = SortedKeyList(key=attrgetter("rank"))
        self._superseded: list[int] = []  # blocks of tails that a fuller block has replaced, unpinned
        self._interner = Interner()
        self._clock = 0  # ticks at every release
        self._num_pinned = 0
        self._num_blocks = 0
        self._fresh: list[Node] = []  # nodes that may hold blocks inserted since the last commit
        self._moved: list[RadixLease] = []  # leases moved while there were such nodes

    # ---- matching

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace, add=False)
        width = self._block_bytes
        end = len(key) // width * width
        node, at = self._root, 0
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            span = child.span
            if at + len(span) <= end and key.startswith(span, at):
                at += len(span)
                node = child
                continue
            common = num_common_tokens(span, key, 0, at)
            whole = common // self.block_size * self.block_size
            next_is_fresh = whole // self.block_size >= child.num_blocks - child.fresh
            return at // TOKEN_BYTES + (whole if next_is_fresh or not self.partial_blocks else common)
        partial = node.nearest(key[at : at + width])[1] if self.partial_blocks and at < len(key) else 0
        return at // TOKEN_BYTES + partial

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> RadixLease:
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace)
        node, at, found = self._walk(self._root, key)
        self._pin(node)
        lease = RadixLease(node, at // TOKEN_BYTES, _joined(found), namespace)
        if self.partial_blocks and at < len(key):
            source, num_tokens = node.nearest(key[at : at + self._block_bytes])
            if source is not None:
                self._pin(source)
                lease.source = source
                lease.partial = Partial(int(_unpacked(source.blocks)[0]), num_tokens)
        if self._fresh:
            self._moved.append(lease)
        return lease

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        key = self._packed(lease, token_ids)
        node, at, found = self._walk(lease.cursor, key)
        self._move(lease, node, at)
        return _joined(found)

    def _walk(self, node: Node, key: bytes) -> tuple[Node, int, list[bytes]]:
        """Goes down as far as whole blocks of the key agree, splitting where they end inside a span.

        Returns the node reached, the bytes of the key matched, and the packed blocks of each node passed.
        """
        width = self._block_bytes
        end = len(key) // width * width
        at = 0
        found = []
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            span = child.span
            if at + len(span) <= end and key.startswith(span, at):
                at += len(span)
            else:
                common = num_common_tokens(span, key, 0, at) // self.block_size * width
                child = self._split(child, common)
                at += common
            found.append(child.blocks)
            node = child
        return node, at, found

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` bytes of its span; returns the new upper half. The node stays the lower half."""
        cut = at // self._block_bytes * BLOCK_ID_BYTES
        upper = Node(node.span[:at], node.blocks[:cut], node.parent, node.start, node.born)
        # Neither half is refreshed: only a release stamps.
        upper.stamp, upper.heat = node.stamp, node.heat
        upper.pins = 1 if node.pins else 0
        assert node.parent is not None
        node.parent.children[upper.span[: self._block_bytes]] = upper
        node.span, node.blocks = node.span[at:], node.blocks[cut:]
        node.parent, node.start = upper, node.start + at // TOKEN_BYTES
        upper.children[node.span[: self._block_bytes]] = node
        if node.fresh > node.num_blocks:
            upper.fresh = node.fresh - node.num_blocks
            node.fresh = node.num_blocks
            self._fresh.append(upper)
        return upper

    # ---- pins

    def _pin(self, node: Node) -> None:
        if not node.pins and not node.children:
            self._leaves.remove(node)
        while True:
            node.pins += 1
            if node.pins > 1:
                return
            self._num_pinned += len(node.blocks) // BLOCK_ID_BYTES
            node = node.parent  # type: ignore[assignment]  # the root is always pinned

    def _unpin(self, node: Node, clock: int | None) -> None:
        """Lets one pin go. With a clock, stamps what nobody holds any longer; without, leaves recency as it was.

        The first ancestor that is still pinned is stamped too, though it may be stamped again: if its last pin goes
        without a stamp, it must not look older than what was released below it.
        """
        while True:
            node.pins -= 1
            if node.pins:
                if clock is not None:
                    node.stamp = clock
                return
            self._num_pinned -= len(node.blocks) // BLOCK_ID_BYTES
            parent = node.parent
            assert parent is not None
            if clock is not None:
                node.stamp = clock
                if self._touch is not None:
                    self._touch(node)
            elif parent.stamp < node.stamp:
                parent.stamp = node.stamp
            if not node.children:
                self._enter_leaves(node, parent)
            node = parent

    def _enter_leaves(self, node: Node, parent: Node) -> None:
        if len(node.span) < self._block_bytes and parent.children.get(node.span) is not node:
            self._superseded.extend(np.frombuffer(node.blocks, np.int32).tolist())
            return
        node.rank = node.stamp if self._lru else self.policy.rank(node)
        self._leaves.add(node)

    def _move(self, lease: Lease, node: Node, num_bytes: int) -> None:
        """Moves a lease down to a descendant of where it ends."""
        if node is not lease.cursor:
            self._pin(node)
            lease.cursor.pins -= 1  # stays above zero: a descendant is pinned
            lease.cursor = node
        lease.num_tokens += num_bytes // TOKEN_BYTES
        if self._fresh:
            self._moved.append(lease)  # type: ignore[arg-type]

    def unpin_partial(self, lease: Lease) -> None:
        check_live(lease)
        self._drop_source(lease)

    def _drop_source(self, lease: Lease) -> None:
        source = lease.source  # type: ignore[attr-defined]
        if source is not None:
            lease.source = lease.partial = None  # type: ignore[attr-defined]
            # Not stamped: one block of the span was read, the rest of it did not match.
            self._unpin(source, None)

    # ---- publishing

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        key = self._packed(lease, token_ids)
        width = self._block_bytes
        end = len(key) // width * width
        packed_blocks = pack_blocks(block_ids, end // width)
        if not end:
            return NO_DUPLICATES
        node, at, found = self._walk(lease.cursor, key)
        if at:
            self._move(lease, node, at)
        if at < end:
            self._append(lease, key[at:end], packed_blocks[at // width * BLOCK_ID_BYTES :])
        if not found:
            return NO_DUPLICATES
        cached = b"".join(found)
        return np.stack(
            [np.frombuffer(packed_blocks, np.int32, len(cached) // BLOCK_ID_BYTES), _unpacked(cached)], axis=1
        )

    def _append(self, lease: Lease, span: bytes, blocks: bytes) -> None:
        """Puts new blocks after the lease's end, where nothing continues with them, and moves the lease on."""
        node: Node = lease.cursor
        num_blocks = len(blocks) // BLOCK_ID_BYTES
        self._num_blocks += num_blocks
        self._num_pinned += num_blocks
        if node.children and self.partial_blocks:
            self._supersede(node.tail_before(span))
        source = lease.source  # type: ignore[attr-defined]
        own_pins = 1 + (source is not None and source.parent is node and source.pins == 1)
        if (
            node.pins == own_pins
            and not node.children
            and node is not self._root
            and len(node.span) + len(span) <= MAX_EXTENDED_BYTES
        ):
            node.span += span
            node.blocks += blocks
        else:
            child = Node(span, blocks, node, lease.num_tokens, self._clock)
            child.pins = 1  # the lease's pin on its parent becomes this child's pin on it
            node.add_child(span[: self._block_bytes], child)
            lease.cursor = node = child
        if not node.fresh:
            self._fresh.append(node)
        node.fresh += num_blocks
        lease.num_tokens += len(span) // TOKEN_BYTES
        self._moved.append(lease)  # type: ignore[arg-type]

    def _supersede(self, tail: Node | None) -> None:
        """Takes a tail out: a fuller block of the same tokens is there. While pinned, its block counts as pinned."""
        if tail is None:
            return
        assert tail.parent is not None
        tail.parent.remove_child(tail.span)
        if not tail.pins:
            self._leaves.remove(tail)
            self._superseded.extend(_unpacked(tail.blocks).tolist())

    def release(self, lease: Lease, tail: Tail | None = None) -> None:
        check_live(lease)
        if tail is not None:
            self._hang(lease, tail)
        lease.released = True
        self._drop_source(lease)
        self._clock += 1
        self._unpin(lease.cursor, self._clock)
        lease.cursor = None

    def cancel(self, lease: Lease) -> None:
        check_live(lease)
        lease.released = True
        self._drop_source(lease)
        self._unpin(lease.cursor, None)
        lease.cursor = None

    def _hang(self, lease: Lease, tail: Tail) -> None:
        """Publishes a partly filled last block under the lease's end, unless a fuller one of its tokens is there."""
        if not self.partial_blocks:
            raise ValueError("tail: expected None, as this cache keeps whole blocks only")
        if lease.cursor.fresh:
            raise ValueError("tail: expected a block computed in a finished step, got one of a step not committed")
        tokens = self._packed(lease, tail.token_ids)
        if not 0 < len(tokens) < self._block_bytes:
            raise ValueError(
                f"tail.token_ids: expected 1..{self.block_size - 1} tokens, got {len(tokens) // TOKEN_BYTES}"
            )
        block = pack_blocks([tail.block_id], 1)
        node: Node = lease.cursor
        self._num_blocks += 1
        keys = node.sorted_keys()
        at = keys.bisect_left(tokens)
        if at < len(keys) and keys[at].startswith(tokens):
            self._superseded.extend(_unpacked(block).tolist())
            return
        self._supersede(node.tail_before(tokens))
        child = Node(tokens, block, node, lease.num_tokens, self._clock)
        node.sorted_keys()
        node.add_child(tokens, child)
        child.pins = 1  # the lease ends here now, for the moment until it is let go
        self._num_pinned += 1
        lease.cursor = child

    def _packed(self, lease: Lease, token_ids: TokenIds) -> bytes:
        check_live(lease)
        key = pack(token_ids)
        if lease.namespace is not None:
            key = self._interner.mark(key, lease.namespace, lease.num_tokens)
        return key

    # ---- steps

    def commit(self) -> None:
        for node in self._fresh:
            node.fresh = 0
        self._fresh.clear()
        self._moved.clear()

    def withdraw(self) -> Blocks:
        for lease in dict.fromkeys(self._moved):
            if not lease.released:
                self._cut_back(lease)
        fresh = [node for node in self._fresh if node.fresh]
        for node in fresh:
            if not node.pins and not node.children:
                self._leaves.remove(node)
        taken = []
        cut = []  # what stays of them, and their parents: may be leaves now
        for node in fresh:
            kept = node.num_blocks - node.fresh
            taken.append(node.blocks[kept * BLOCK_ID_BYTES :])
            self._num_blocks -= node.fresh
            if node.pins:
                self._num_pinned -= node.fresh
            node.fresh = 0
            if kept:
                node.blocks = node.blocks[: kept * BLOCK_ID_BYTES]
                node.span = node.span[: kept * self._block_bytes]
                cut.append(node)
            else:
                assert node.parent is not None
                node.parent.remove_child(node.span[: self._block_bytes])
                cut.append(node.parent)
                node.parent = None
        for node in dict.fromkeys(cut):
            if node.parent is not None and not node.pins and not node.children:
                self._enter_leaves(node, node.parent)
        self._fresh.clear()
        self._moved.clear()
        return _joined(taken)

    def _cut_back(self, lease: RadixLease) -> None:
        """Moves a lease up to the last block that an earlier step computed."""
        node = lease.cursor
        while node.fresh:
            lease.num_tokens -= node.fresh * self.block_size
            if node.fresh < node.num_blocks:
                break
            node = node.parent
        if node is not lease.cursor:
            self._pin(node)
            self._unpin(lease.cursor, None)
            lease.cursor = node

    # ---- eviction

    def evict(self, num_blocks: int) -> Blocks:
        needed = check_count("num_blocks", num_blocks)
        evicted = self._superseded[:needed]
        del self._superseded[: len(evicted)]
        needed -= len(evicted)
        leaves = self._leaves
        while needed and leaves:
            node: Node = leaves[0]
            self.policy.evicted(node)
            size = len(node.blocks) // BLOCK_ID_BYTES
            taken = min(size, needed)
            needed -= taken
            kept = (size - taken) * BLOCK_ID_BYTES
            evicted.extend(reversed(np.frombuffer(node.blocks, np.int32, taken, kept).tolist()))
            if kept:
                node.blocks = node.blocks[:kept]
                node.span = node.span[: (size - taken) * self._block_bytes]
                node.fresh = max(node.fresh - taken, 0)
                break
            del leaves[0]
            node.fresh = 0
            parent = node.parent
            assert parent is not None
            parent.remove_child(node.span[: self._block_bytes])
            if not parent.pins and not parent.children:
                assert parent.parent is not None
                self._enter_leaves(parent, parent.parent)
        self._num_blocks -= len(evicted)
        return np.array(evicted, np.int32) if evicted else NO_BLOCKS

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(self._num_pinned, self._num_blocks - self._num_pinned)

    @property
    def num_superseded_blocks(self) -> int:
        return len(self._superseded)

    def check(self, leases: Iterable[RadixLease] | None = None) -> None:
        """Asserts every invariant; with all live leases given, that the pins are exactly theirs."""
        check_tree(self, leases)

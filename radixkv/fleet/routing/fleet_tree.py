"""The tree of a fleet: nodes are spans of whole blocks, each with the replicas that hold all of it.

Everything here is in packed bytes: a *key* is packed tokens with namespaces folded in, `width` the bytes of a block's
tokens, a *slot* a replica's bit in the masks.

Splitting a node makes a new upper half; the node stays the lower one, so that a hash known to be "in this node" is
found in it or in what is above it.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from itertools import count

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.events import BlockHash
from radixkv.cache.tokens import TOKEN_BYTES, num_common_tokens
from radixkv.fleet.routing.marks import Adapters

MAX_SPAN_TOKENS = 8192


class Hold:
    """That a replica holds all of a node: its last use, and the hashes of its blocks (none where they are unknown)."""

    __slots__ = ("hashes", "used_s")

    def __init__(self, used_s: float, hashes: list[BlockHash]) -> None:
        self.used_s = used_s
        self.hashes = hashes


class Node:
    __slots__ = ("adapters", "children", "holds", "mask", "parent", "span", "start")

    def __init__(self, span: bytes, parent: Node | None, start: int, adapters: Adapters) -> None:
        self.span = span
        self.parent = parent
        self.start = start  # bytes before the span
        self.adapters = adapters  # name and path of those that all of the span depends on
        self.children: dict[bytes, Node] = {}
        self.holds: dict[int, Hold] = {}
        self.mask = 0  # the keys of `holds` as bits


class Held:
    """One replica's part of the tree."""

    __slots__ = ("heap", "node_of", "num_blocks", "num_checked")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.node_of: dict[BlockHash, Node] = {}  # or something above it
        # (last use, -end, tie, node) of each hold, put right when its turn comes; splits leave a node's end as it is
        self.heap: list[tuple[float, int, int, Node]] = []
        self.num_checked = 0  # entries at the last look for those of nodes let go


class FleetTree:
    """Which replicas hold what.

    Args:
        block_size: tokens in a block.
        max_blocks: of each replica; the least recently used go first.
        clock: seconds, for uses.
    """

    def __init__(self, block_size: int, max_blocks: int | None, clock: Callable[[], float]) -> None:
        self.width = block_size * TOKEN_BYTES
        self.root = Node(b"", None, 0, ())
        self.held: dict[int, Held] = {}  # by slot
        self._max_blocks = sys.maxsize if max_blocks is None else max_blocks
        self._clock = clock
        self._ties = count()
        # A leaf grows in place up to so many bytes, then gets a child.
        self._max_span = max(MAX_SPAN_TOKENS // block_size, 1) * self.width

    def place(self, slot: int, node: Node, key: bytes, hashes: list[BlockHash] | None, adapters: Adapters) -> None:
        """Makes a replica hold the whole blocks of a key below a node, and stamps all of its path."""
        held, bit, width, now_s, at = self.held[slot], 1 << slot, self.width, self._clock(), 0
        while at < len(key):
            child = node.children.get(key[at : at + width])
            if child is None:
                is_own = node.mask == bit and not node.children and node.adapters == adapters
                room = self._max_span - len(node.span) if is_own else 0
                piece = key[at : at + (room if room > 0 else self._max_span)]
                if room > 0:  # a leaf of its own grows in place
                    child = node
                    child.span += piece
                else:
                    child = Node(piece, node, node.start + len(node.span), adapters)
                    node.children[piece[:width]] = child
            else:
                if not key.startswith(child.span, at):
                    child = self.split(child, num_common_bytes(child.span, key, at, width))
                piece = child.span
            if child is node or slot not in child.holds:
                num_blocks = len(piece) // width
                new = hashes and hashes[at // width : at // width + num_blocks]
                held.num_blocks += num_blocks
                if child is node:
                    if new:
                        child.holds[slot].hashes += new
                else:
                    child.holds[slot] = Hold(now_s, new or [])
                    child.mask |= bit
                    self._push(slot, child)
                if new:
                    held.node_of.update(dict.fromkeys(new, child))
            node = child
            at += len(piece)
        above: Node | None = node
        while above is not None:
            if slot in above.holds:
                above.holds[slot].used_s = now_s
            above = above.parent

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` bytes of its span; returns the new upper half. The node stays the lower half."""
        parent, cut = node.parent, at // self.width
        assert parent is not None
        upper = Node(node.span[:at], parent, node.start, node.adapters)
        parent.children[upper.span[: self.width]] = upper
        node.span, node.start, node.parent = node.span[at:], node.start + at, upper
        upper.children[node.span[: self.width]] = node
        upper.mask = node.mask
        for slot, hold in node.holds.items():
            upper.holds[slot] = Hold(hold.used_s, hold.hashes[:cut])
            hold.hashes = hold.hashes[cut:]
            self._push(slot, upper)
        return upper

    def let_go(self, slot: int, node: Node, num_kept: int) -> None:
        """A replica no longer holds the blocks of a node from `num_kept` on."""
        held, hold, bit = self.held[slot], node.holds[slot], 1 << slot
        held.num_blocks -= len(node.span) // self.width - num_kept
        for block_hash in hold.hashes[num_kept:]:
            held.node_of.pop(block_hash, None)
        if num_kept and node.mask == bit and not node.children:
            node.span = node.span[: num_kept * self.width]
            del hold.hashes[num_kept:]
            return
        if num_kept:
            self.split(node, num_kept * self.width)
        del node.holds[slot]
        node.mask &= ~bit
        self._prune(node)

    def _prune(self, node: Node | None) -> None:
        """Removes a node without holders and children, and what that leaves above it."""
        while node is not None and node.parent is not None and not node.mask and not node.children:
            del node.parent.children[node.span[: self.width]]
            node = node.parent

    def clear(self, slot: int) -> None:
        """A replica holds nothing any more. O(tree)."""
        order = [self.root]
        for node in order:  # grows while it is walked
            order.extend(node.children.values())
        for node in reversed(order):
            if node.holds.pop(slot, None):
                node.mask &= ~(1 << slot)
                self._prune(node)
        self.held[slot] = Held()

    def find(self, slot: int, block_hash: BlockHash) -> tuple[Node, int] | None:
        """Returns the node that holds a block of a replica, and which of the node's blocks it is."""
        node = self.held[slot].node_of.get(block_hash)
        while node is not None:
            hold = node.holds.get(slot)
            if hold is not None and hold.hashes:
                if hold.hashes[-1] == block_hash:  # what is removed or continued is most often the last
                    return node, len(hold.hashes) - 1
                if block_hash in hold.hashes:
                    return node, hold.hashes.index(block_hash)
            node = node.parent
        return None

    # ---- bounds

    def _entry(self, slot: int, node: Node) -> tuple[float, int, int, Node]:
        return node.holds[slot].used_s, -node.start - len(node.span), next(self._ties), node

    def _push(self, slot: int, node: Node) -> None:
        heap = self.held[slot].heap
        heapq.heappush(heap, self._entry(slot, node))
        if len(heap) > 64 and len(heap) > 2 * self.held[slot].num_checked:
            # Entries of nodes let go since pile up where nothing else takes them out.
            heap[:] = {id(entry[3]): entry for entry in heap if slot in entry[3].holds}.values()
            heapq.heapify(heap)
            self.held[slot].num_checked = len(heap)

    def trim(self, slot: int) -> None:
        """Lets go the least recently used blocks of a replica beyond max_blocks, deepest first."""
        self._evict(slot, -math.inf, self._max_blocks)

    def expire(self, slot: int, before_s: float) -> None:
        """Lets go what a replica has not used since a time."""
        self._evict(slot, before_s, sys.maxsize)

    def _evict(self, slot: int, before_s: float, max_blocks: int) -> None:
        held = self.held[slot]
        heap = held.heap
        while heap:
            used_s, _, _, node = heap[0]
            hold = node.holds.get(slot)
            if hold is None:
                heapq.heappop(heap)
            elif hold.used_s != used_s:
                heapq.heapreplace(heap, self._entry(slot, node))
            else:
                excess = held.num_blocks - max_blocks
                if used_s >= before_s and excess <= 0:
                    return
                heapq.heappop(heap)
                kept = 0 if used_s < before_s else max(len(node.span) // self.width - excess, 0)
                self.let_go(slot, node, kept)
                if slot in node.holds:
                    self._push(slot, node)

    def check(self) -> None:
        """Asserts every invariant. Raises CacheCorruption. O(tree); for tests."""
        num_blocks = dict.fromkeys(self.held, 0)
        hashes: dict[int, set[BlockHash]] = {slot: set() for slot in self.held}
        nodes = [self.root]
        for node in nodes:  # grows while it is walked
            for first, child in node.children.items():
                _check(child.parent is node and child.span[: self.width] == first, "a child hangs where it belongs")
                _check(child.start == node.start + len(node.span), "a child starts where its parent ends")
            nodes.extend(node.children.values())
            _check(node.mask == sum(1 << slot for slot in node.holds), "the mask is that of the holders")
            if node is self.root:
                continue
            _check(bool(node.span) and len(node.span) % self.width == 0, "a span is whole blocks")
            _check(bool(node.mask or node.children), "a node is held, or something hangs on it")
            for slot, hold in node.holds.items():
                num_blocks[slot] += len(node.span) // self.width
                _check(len(hold.hashes) in (0, len(node.span) // self.width), "a hash for each block")
                hashes[slot] |= set(hold.hashes)
                for i, block_hash in enumerate(hold.hashes):
                    _check(self.find(slot, block_hash) == (node, i), "a hash leads to its block")
                _check(any(entry[3] is node for entry in self.held[slot].heap), "a hold is in the order of uses")
        for slot, held in self.held.items():
            _check(held.num_blocks == num_blocks[slot] <= self._max_blocks, "blocks are counted")
            _check(held.node_of.keys() == hashes[slot], "hashes are those of what is held")


def num_common_bytes(span: bytes, key: bytes, at: int, width: int) -> int:
    """Returns the bytes that whole blocks of a span and of a key from byte `at` on have in common."""
    common = num_common_tokens(span, key, 0, at) * TOKEN_BYTES
    return common - common % width


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise CacheCorruption(f"expected that {what}")

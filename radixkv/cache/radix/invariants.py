"""Every invariant of the radix tree, in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from radixkv.cache.contract import CacheCorruption, Lease
from radixkv.cache.radix.node import MAX_SPAN_BYTES, Node
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.tokens import has_negative, unpack


def check_tree(tree: RadixTree, leases: Collection[Lease]) -> None:
    """Raises CacheCorruption, naming the invariant, unless all of them hold.

    Args:
        leases: all that live.
    """
    width = tree.width
    blocks: list[int] = list(tree.dead_blocks)
    num_pinned = 0
    leaves: list[Node] = []
    pins: Counter[int] = Counter()
    nodes = [tree.root]
    for node in nodes:  # grows while it is walked
        nodes.extend(node.children.values())
        is_partial = len(node.span) < width
        if node is not tree.root:
            assert node.parent is not None
            _hold(len(node.span) > 0, "no span is empty")
            _hold(is_partial or len(node.span) % width == 0, "a span is whole blocks, or a partial block")
            _hold(not is_partial or not node.children, "a partial block has no children")
            _hold(node.num_blocks == -(-len(node.span) // width), "a block for every block_size tokens")
            _hold(node.start == node.parent.start + node.parent.num_tokens, "a span starts where its parent's ends")
            _hold(not node.pins or node.parent.pins > 0, "what is pinned has pinned ancestors")
            _hold(
                node.pins > 0 or node.parent.pins > 0 or node.parent.last_use >= node.last_use,
                "no child is more recent",
            )
            _hold(0 <= node.num_uncommitted <= node.num_blocks, "uncommitted blocks are blocks of the node")
            _hold((node in tree.uncommitted) == (node.num_uncommitted > 0), "nodes with uncommitted blocks are listed")
            _hold(len(node.span) <= max(MAX_SPAN_BYTES, width), "no span is too long")
            _hold(node.has_namespace == has_negative(node.span), "interned ids are known")
            _hold(not node.is_removed, "what was removed is found no more")
            pins[id(node.parent)] += node.pins > 0
        for key, child in node.children.items():
            _hold(child.parent is node, "children know their parent")
            _hold(child.span[:width] == key, "children are found by their first block")
            followed = not node.num_uncommitted or child.num_uncommitted == child.num_blocks
            _hold(followed, "what follows an uncommitted block is uncommitted")
        if node.order is not None:
            _hold(list(node.order) == sorted(node.children), "the order of children is their keys, sorted")
        partial = [key for key in node.children if len(key) < width]
        has_order = not partial or len(node.children) == 1 or node.order is not None
        _hold(has_order, "an order is kept where there are partial blocks")
        for short in partial:
            others = (key for key in node.children if key is not short)
            _hold(not any(key.startswith(short) for key in others), "no partial block is a prefix of a sibling")
        blocks.extend(unpack(node.blocks).tolist())
        if node.pins:
            num_pinned += node.num_blocks
        elif not node.children:
            leaves.append(node)
    detached = _detached(leases, {id(node) for node in nodes})
    for node in detached:
        blocks.extend(unpack(node.blocks).tolist())
        num_pinned += node.num_blocks
        _hold(node.pins > 0, "what is found no more is held only while it is pinned")
        _hold(node.is_removed, "what is found no more was removed")
        if node.parent is not None:
            pins[id(node.parent)] += 1
    _hold(len(set(blocks)) == len(blocks), "no block is held twice")
    ordered = [*tree.leaves.in_order(), *tree.last.in_order()]
    _hold(sorted(map(id, leaves)) == sorted(map(id, ordered)), "leaves are the unpinned childless nodes")
    _hold(len(tree.leaves) + len(tree.last) == len(leaves), "the count of leaves")
    deferral = tree.deferral or (lambda leaf: None)
    deferred = [leaf for leaf in leaves if (found := deferral(leaf)) and found[0] == len(leaf.span)]
    _hold(set(deferred) == set(tree.last.in_order()), "what is deferred whole is evicted last")
    _hold(all(node.entry == 0 for node in nodes if node.pins or node.children), "only leaves are in their order")
    for lease in leases:
        pins[id(lease.cursor)] += 1
        pins[id(lease.source)] += lease.source is not None
        end = lease.cursor.start + lease.cursor.num_tokens
        _hold(lease.num_tokens == end, "a lease ends where its node ends")
        _hold(lease.is_stale or not lease.cursor.is_removed, "a lease that ends in what was removed is stale")
    pins[id(tree.root)] += 1
    for node in (*nodes, *detached):
        _hold(node.pins == pins[id(node)], "pins are the leases here, the copies from here and the pinned children")
    _hold(tree.num_pinned == num_pinned, "the count of pinned blocks")
    _hold(tree.num_blocks == len(blocks), "the count of blocks")


def _detached(leases: Iterable[Lease], attached: set[int]) -> list[Node]:
    """The removed nodes that leases pin: partial blocks that were replaced, and what a reset removed."""
    found: dict[int, Node] = {}
    for lease in leases:
        for held in (lease.cursor, lease.source):
            node = held
            while node is not None and id(node) not in attached and id(node) not in found:
                found[id(node)] = node
                node = node.parent
    return list(found.values())


def _hold(holds: bool, invariant: str) -> None:
    if not holds:
        raise CacheCorruption(f"violated: {invariant}")

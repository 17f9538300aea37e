"""Caps on what the radix tree holds of each tenant, so that no tenant evicts all others.

A tenant is a `Salt`: what its requests share from the salt's start on is its own, what stands before has no owner. A
cap counts the tenant's unpinned blocks: what running requests pin can't be given up, and is bounded by how many run.
Above its cap a tenant's own least recently used blocks are given up at once, so whatever it sends, all others lose at
most its cap and what its running requests pin.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import count

from radixkv.cache.contract import CacheCorruption, TenantCaps, cap_of
from radixkv.cache.namespace import Interner, Salt
from radixkv.cache.radix.node import Node
from radixkv.cache.radix.observer import TreeObserver
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.tokens import unpack

NO_OWNER = (None, 0)


class TreeTenants(TreeObserver):
    """Counts the unpinned blocks of each tenant, and gives up what is above its cap.

    Args:
        tree: observed from now on.
        caps: of each tenant.
        interner: of the ids that are folded into the tree's tokens.

    Attributes:
        num_unpinned: number of blocks by tenant; none is 0.

    Cost: a look-up for each node that gets its first pin or loses its last one.
    """

    def __init__(self, tree: RadixTree, caps: TenantCaps, interner: Interner) -> None:
        self._tree, self._caps, self._interner = tree, caps, interner
        self.num_unpinned: Counter[str] = Counter()
        # Heaps of (last use, tie, leaf) by tenant. An item is valid while the node is a leaf of that last use.
        self._leaves_of: dict[str, list[tuple[int, int, Node]]] = {}
        self._ties = count()
        self._grown: dict[str, None] = {}  # tenants whose count has grown since it was below the cap
        tree.attach(self)

    def owner(self, node: Node) -> tuple[str | None, int]:
        """Returns the outermost salt on a node's path, or None, and from which of its blocks on the node belongs to it.

        Cost: O(1), but for a node that is new or has changed O(its span).
        """
        if node.owner is None:
            node.owner = self._find_owner(node)
        return node.owner

    def _find_owner(self, node: Node) -> tuple[str | None, int]:
        if node.parent is None:
            return NO_OWNER
        tenant, _ = self.owner(node.parent)
        if tenant is not None:
            return tenant, 0
        if node.has_namespace:
            ids = unpack(node.span)
            for at in (ids < 0).nonzero()[0].tolist():
                for part in self._interner.resolve(int(ids[at]))[1]:
                    if isinstance(part, Salt):
                        return part.value, at // self._tree.block_size
        return NO_OWNER

    def enforce(self) -> None:
        """Makes what is above the caps dead blocks, the least recently used leaves first.

        A block of a step under way may be withdrawn, and is its inserter's then, so it is given up after `commit`.

        Cost: O(tenants that have grown since they were below their caps + blocks given up * log leaves).
        """
        for tenant in list(self._grown):
            if not self._give_up(tenant):
                del self._grown[tenant]

    def _give_up(self, tenant: str) -> bool:
        """Takes what is above a tenant's cap off its leaves. Returns whether blocks of a step under way are left."""
        cap = cap_of(self._caps, tenant)
        heap = self._leaves_of.get(tenant, [])
        for with_deferred in (False, True):
            left = []
            while heap and self.num_unpinned[tenant] > cap:
                item = heappop(heap)
                node = item[2]
                num_own = self._num_own(node)
                if not _is_valid(item) or not num_own:
                    continue
                if node.num_uncommitted or (node.entry < 0 and not with_deferred):
                    left.append(item)
                    continue
                num_taken = int(min(self.num_unpinned[tenant] - cap, num_own))
                self._tree.dead_blocks += self._tree.cut(node, node.num_blocks - num_taken)
                left.append(item)  # what is left of it
            for item in left:
                heappush(heap, item)
        return self.num_unpinned[tenant] > cap

    def _num_own(self, node: Node) -> int:
        """Returns how many of a node's blocks belong to its owner: from the one where the salt starts."""
        return max(node.num_blocks - self.owner(node)[1], 0)

    def _change(self, tenant: str, num_blocks: int) -> None:
        self.num_unpinned[tenant] += num_blocks
        if num_blocks > 0:
            self._grown[tenant] = None
        elif not self.num_unpinned[tenant]:  # of a tenant that holds nothing, nothing is kept
            del self.num_unpinned[tenant]
            self._leaves_of.pop(tenant, None)

    def _add_leaf(self, tenant: str, node: Node) -> None:
        heap = self._leaves_of.setdefault(tenant, [])
        heappush(heap, (node.last_use, next(self._ties), node))
        if len(heap) > 64 and len(heap) > 2 * (len(self._tree.leaves) + len(self._tree.last)):
            heap[:] = {id(item[2]): item for item in heap if _is_valid(item)}.values()
            heapify(heap)

    # ---- what the tree tells. Splitting and merging unpinned nodes leaves each tenant's count as it is.

    def grew(self, node: Node, num_bytes: int, first_block: bytes) -> None:
        """A salt may start in what was added."""
        node.owner = None

    def split(self, upper: Node, lower: Node) -> None:
        """The salt may start in either half."""
        lower.owner = None

    def merged(self, upper: Node, lower: Node) -> None:
        """The salt may start in either half."""
        lower.owner = None

    def trimmed(self, node: Node, num_blocks: int) -> None:
        """The salt may have started in what is gone."""
        tenant, first = self.owner(node)
        node.owner = None
        if tenant is not None and not node.pins:
            self._change(tenant, -min(num_blocks, max(node.num_blocks + num_blocks - first, 0)))

    def removed(self, node: Node) -> None:
        """The blocks of an unpinned node are gone, and its parent may be a leaf."""
        parent = node.parent
        assert parent is not None
        tenant, _ = self.owner(node)
        if tenant is not None and not node.pins:
            self._change(tenant, -self._num_own(node))
        tenant, _ = self.owner(parent)
        if tenant is not None and not parent.pins and not parent.children:
            self._add_leaf(tenant, parent)

    def pinned(self, node: Node) -> None:
        """Pinned blocks are not counted."""
        tenant, _ = self.owner(node)
        if tenant is not None:
            self._change(tenant, -self._num_own(node))

    def unpinned(self, node: Node) -> None:
        """Unpinned blocks are counted."""
        tenant, _ = self.owner(node)
        if tenant is not None:
            self._change(tenant, self._num_own(node))
            if not node.children:
                self._add_leaf(tenant, node)

    def check(self) -> None:
        """Raises CacheCorruption unless counts and owners are right and, between steps, no tenant is above its cap."""
        counts: Counter[str] = Counter()
        leaves = {tenant: {id(item[2]) for item in heap if _is_valid(item)} for tenant, heap in self._leaves_of.items()}
        nodes = list(self._tree.root.children.values())
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
            if self.owner(node) != self._find_owner(node):
                raise CacheCorruption(f"violated: a node knows its owner, got {node.owner}")
            tenant, _ = self.owner(node)
            if tenant is not None and not node.pins:
                counts[tenant] += self._num_own(node)
                if not node.children and id(node) not in leaves.get(tenant, ()):
                    raise CacheCorruption(f"violated: {tenant!r} can give up each of its leaves, got one it can't")
        if counts != self.num_unpinned:
            raise CacheCorruption(f"violated: unpinned blocks are counted by tenant, got {self.num_unpinned}")
        # What a step has yet to compute, and what is above it, can't be given up before the step has ended.
        for tenant, held in counts.items() if not self._tree.uncommitted else ():
            if held > cap_of(self._caps, tenant):
                raise CacheCorruption(f"violated: {tenant!r} holds at most its cap, got {held} blocks")


def _is_valid(item: tuple[int, int, Node]) -> bool:
    return item[2].entry != 0 and item[2].last_use == item[0]

"""Caps on what the cache holds of each tenant, so that one of them can't evict everyone. Used by the caches.

A tenant is a `Salt`: what its requests share from the salt's start on is its own, what stands before is nobody's. A cap
counts blocks that nobody uses at the moment: what running requests hold can't be given up, and is bounded by how many
run. Above its cap a tenant's own least recently used blocks go at once, tail first, so whatever it sends, all others
lose at most its cap and what its running requests hold.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from radixkv.cache.contract import CacheCorruption, check_count
from radixkv.cache.flat_hash.free_queue import FreeQueue
from radixkv.cache.namespace import Interner, Salt
from radixkv.cache.radix.eviction import Policy
from radixkv.cache.radix.node import Node
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.tokens import unpack

TenantCaps = int | Mapping[str, int]


def check_caps(caps: TenantCaps) -> TenantCaps:
    """Returns caps; raises ValueError unless they are a number of blocks for every tenant, or one for each by salt."""
    if isinstance(caps, Mapping):
        for tenant, cap in caps.items():
            if not isinstance(tenant, str):
                raise ValueError(f"tenant_caps: expected the values of salts, as str, got {tenant!r}")
            check_count(f"tenant_caps[{tenant!r}]", cap)
        return dict(caps)
    return check_count("tenant_caps", caps)


def cap_of(caps: TenantCaps, tenant: str | None) -> float:
    """Returns a tenant's cap in blocks; inf for one without, and for what is nobody's."""
    if tenant is None:
        return float("inf")
    return caps.get(tenant, float("inf")) if isinstance(caps, Mapping) else caps


class CappedTree(RadixTree):
    """A radix tree with caps. What is over one becomes superseded: of no use any more, and evicted first.

    Cost: a look-up for each node that is pinned or let go for the first time, besides what the tree itself costs.
    """

    def __init__(self, block_size: int, policy: Policy, caps: TenantCaps, interner: Interner) -> None:
        super().__init__(block_size, policy)
        self.caps, self._interner = caps, interner
        self.num_unpinned: Counter[str | None] = Counter()  # blocks by tenant
        self._owners: dict[Node, tuple[str | None, int]] = {}  # and from which of its blocks on
        self._leaves_of: dict[str | None, list[tuple[bool, Any, int, Node]]] = {}  # heaps; valid as in LeafOrder

    def owner(self, node: Node) -> str | None:
        """Returns whose a node is: the outermost salt's on its path, or None. O(1), but for a new node O(its span)."""
        return self._owned(node)[0]

    def _num_own(self, node: Node) -> int:
        """Returns how many of a node's blocks are its owner's: from the one where the salt starts."""
        return max(node.num_blocks - self._owned(node)[1], 0)

    def _owned(self, node: Node) -> tuple[str | None, int]:
        if node.parent is None:
            return None, 0
        if node not in self._owners:
            owner, first = self.owner(node.parent), 0
            if owner is None and node.is_marked:
                ids = unpack(node.span)
                for at in (ids < 0).nonzero()[0].tolist():
                    salts = [part for part in self._interner.resolve(int(ids[at]))[1] if isinstance(part, Salt)]
                    if salts:
                        owner, first = salts[0].value, at // self.block_size
                        break
            self._owners[node] = owner, first
        return self._owners[node]

    def pin(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and not above.pins:
            assert not above.is_forgotten
            self._change(self.owner(above), -self._num_own(above))
            above = above.parent
        super().pin(node)

    def unpin(self, node: Node, *, stamp: int | None) -> None:
        let_go = []
        above: Node | None = node
        while above is not None and above.pins == 1 and above.parent is not None:
            if not above.is_forgotten:  # else it is superseded now
                let_go.append(above)
            above = above.parent
        for each in let_go:
            self._change(self.owner(each), self._num_own(each))
        super().unpin(node, stamp=stamp)
        for owner in {self.owner(each) for each in let_go}:
            self._give_up(owner)

    def enter_leaves(self, node: Node) -> None:
        super().enter_leaves(node)
        if node.is_forgotten:
            return
        owner = self.owner(node)
        if owner is not None:
            heap = self._leaves_of.setdefault(owner, [])
            heappush(heap, (node.entry < 0, node.stamp, node.entry, node))
            if len(heap) > 64 and len(heap) > 2 * len(self.leaves):
                heap[:] = sorted(item for item in heap if item[3].entry == item[2])

    def _change(self, owner: str | None, num_blocks: int) -> None:
        """Counts blocks of a tenant; of one that holds nothing any more, no count is kept."""
        self.num_unpinned[owner] += num_blocks
        if not self.num_unpinned[owner]:
            del self.num_unpinned[owner]

    def _left(self, owners: Iterable[str | None]) -> None:
        """Blocks of these tenants are gone for good: of one that holds nothing any more, nothing is kept."""
        for owner in owners:
            if owner not in self.num_unpinned:
                self._leaves_of.pop(owner, None)

    def committed(self, nodes: Iterable[Node]) -> None:
        """Blocks in these nodes are computed by now: what could not be given up while a step might withdraw it, can."""
        for owner in {self.owner(node) for node in nodes if not node.pins and node.parent is not None}:
            self._give_up(owner)

    def _give_up(self, owner: str | None) -> None:
        """Takes what is over a tenant's cap off its leaves, the least recently used first; none of a step under way.

        A block that a step has yet to compute may be withdrawn, and is its inserter's then: it can't be given up.
        """
        over = self.num_unpinned[owner] - cap_of(self.caps, owner)
        heap = self._leaves_of.get(owner, [])
        fresh = []
        while over > 0 and heap:
            _, _, entry, node = heap[0]
            if node.entry != entry or not self._num_own(node):
                heappop(heap)
                continue
            if node.fresh:
                fresh.append(heappop(heap))
                continue
            num_taken = int(min(over, self._num_own(node)))
            kept = node.num_blocks - num_taken
            self.superseded.extend(unpack(node.blocks)[kept:][::-1].tolist())
            over -= num_taken
            if kept:
                self._trim(node, kept)
            else:
                self.leave_leaves(node)
                self._unlink(node)
        for item in fresh:
            heappush(heap, item)

    # ---- what else changes whose blocks are whose

    def split(self, node: Node, at: int) -> Node:
        self._forget(node)
        upper = super().split(node, at)
        self._count(upper, node)
        return upper

    def _extend(self, node: Node, span: bytes, blocks: bytes, is_plain: bool) -> None:
        self._owners.pop(node, None)  # a salt may start in what is added; it is pinned, and so not counted
        super()._extend(node, span, blocks, is_plain)

    def join(self, upper: Node) -> None:
        if len(upper.children) != 1 or upper.parent is None or upper.is_forgotten:
            return
        (node,) = upper.children.values()
        self._forget(upper, node)
        super().join(upper)
        self._count(*([upper, node] if node.parent is upper else [node]))

    def _forget(self, *nodes: Node) -> None:
        for node in nodes:
            if not node.pins and node.parent is not None:
                self._change(self.owner(node), -self._num_own(node))
        for node in nodes:
            self._owners.pop(node, None)

    def _count(self, *nodes: Node) -> None:
        for node in nodes:
            if not node.pins and node.parent is not None:
                self._change(self.owner(node), self._num_own(node))

    def _trim(self, node: Node, num_blocks: int) -> None:
        before = self._num_own(node)
        super()._trim(node, num_blocks)
        if not node.pins:
            self._change(self.owner(node), self._num_own(node) - before)

    def _unlink(self, leaf: Node) -> None:
        owner = self.owner(leaf)
        self._forget(leaf)
        super()._unlink(leaf)
        self._left([owner])

    def _supersede(self, tail: Node | None) -> None:
        if tail is not None:
            self._forget(tail)
        super()._supersede(tail)

    def withdraw(self) -> list[bytes]:
        taken = super().withdraw()
        self._owners.clear()
        self.num_unpinned.clear()
        nodes = list(self.root.children.values())
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        self._count(*nodes)
        self._left(list(self._leaves_of))
        for owner in list(self.num_unpinned):
            self._give_up(owner)
        return taken

    def forget(self, top: Node) -> tuple[list[int], list[int]]:
        nodes = [top]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        owners = {self.owner(node) for node in nodes}
        self._forget(*reversed(nodes))  # a node's owner is its parent's
        taken = super().forget(top)
        self._left(owners)
        return taken

    def check_caps(self) -> None:
        """Raises CacheCorruption unless the counts are right and, between steps, no tenant is over its cap."""
        counts: Counter[str | None] = Counter()
        nodes = list(self.root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
            if not node.pins:
                counts[self.owner(node)] += self._num_own(node)
        if +counts != +self.num_unpinned:
            raise CacheCorruption(f"violated: unpinned blocks are counted by tenant, got {self.num_unpinned}")
        # What a step has yet to compute, and what is above it, can't be given up before the step has ended.
        for owner, count in counts.items() if not self.fresh else ():
            if count > cap_of(self.caps, owner):
                raise CacheCorruption(f"violated: {owner!r} holds at most its cap, got {count} blocks")


class CappedQueue(FreeQueue):
    """A flat hash's queue with caps: the unpinned blocks of each tenant in order of release beside that of all."""

    def __init__(self, caps: TenantCaps) -> None:
        super().__init__()
        self.caps = caps
        self.owners: dict[int, str | None] = {}  # of every cached block; kept by the flat hash
        self._unpinned: dict[str | None, OrderedDict[int, None]] = {}  # none is empty
        self._grown: set[str | None] = set()  # tenants that have got unpinned blocks since the caps were looked at

    def pin(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        for block in blocks:
            self._leave(block)
        super().pin(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        super().unpin(blocks)
        for block in reversed(blocks):
            if block not in self.num_pins:
                self._unpinned.setdefault(self.owners[block], OrderedDict())[block] = None
                self._grown.add(self.owners[block])

    def cancel(self, blocks: Sequence[int]) -> None:
        super().cancel(blocks)
        for block in reversed(blocks):
            if block not in self.num_pins:
                order = self._unpinned.setdefault(self.owners[block], OrderedDict())
                order[block] = None
                order.move_to_end(block, last=False)  # about where it was
                self._grown.add(self.owners[block])

    def take(self, num_blocks: int, rank: Any = None) -> list[int]:
        taken = super().take(num_blocks, rank)
        for block in taken:
            self._leave(block)
            del self.owners[block]
        return taken

    def remove(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().remove(blocks)
        for block in blocks:
            self._leave(block)
            del self.owners[block]

    def _leave(self, block: int) -> None:
        order = self._unpinned.get(self.owners[block])
        if order is not None:
            order.pop(block, None)
            if not order:
                del self._unpinned[self.owners[block]]

    def take_over_caps(self) -> list[int]:
        """Takes out what tenants hold above their caps. O(tenants let go since the last time + blocks taken)."""
        taken = []
        for tenant in self._grown:
            order = self._unpinned.get(tenant, OrderedDict())
            while len(order) > cap_of(self.caps, tenant):
                block, _ = order.popitem(last=False)
                taken.append(block)
            if not order:
                self._unpinned.pop(tenant, None)
        self._grown.clear()
        self.remove(taken)
        return taken

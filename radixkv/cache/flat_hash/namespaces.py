"""Which parts of namespaces a flat hash's blocks depend on, and caps on what it holds of each tenant.

A digest does not tell what went into it, so what blocks depend on is noted beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from radixkv.cache.contract import TenantCaps, cap_of
from radixkv.cache.flat_hash.free_queue import FreeQueue, QueueObserver
from radixkv.cache.hashing import Parts
from radixkv.cache.namespace import Part, Salt


class BlockParts(dict[int, Parts]):
    """Parts by block id; blocks that depend on none, which are most, cost nothing."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def keep(self, block_ids: Sequence[int], parts: Parts, num_before: int) -> None:
        """Notes what blocks depend on. O(n).

        Args:
            block_ids: [n] of one request, num_before blocks of it stand before them.
            parts: of the request; a part concerns the block that it starts in, and all after it.
        """
        if not parts:
            return
        for index, block in enumerate(block_ids, num_before + 1):
            if parts[0].start < index * self._block_size:  # sorted by start
                last = parts[-1].start < index * self._block_size
                self[block] = parts if last else tuple(p for p in parts if p.start < index * self._block_size)

    def depending_on(self, concerned: Container[Part]) -> list[int]:
        """Returns the blocks that depend on one of these parts, each with start 0. O(blocks that depend on any)."""
        return [block for block, parts in self.items() if any(replace(p, start=0) in concerned for p in parts)]

    def owner(self, block: int) -> str | None:
        """Returns the tenant that a block belongs to: its outermost salt, or None. O(parts)."""
        return next((part.value for part in self.get(block, ()) if isinstance(part, Salt)), None)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drops the parts of blocks that are no longer in the map. O(n)."""
        if self:
            for block in block_ids:
                self.pop(block, None)


class QueueTenants(QueueObserver):
    """The unpinned blocks of each tenant in order of release, and what of them is above its cap.

    Args:
        queue: observed from now on.
        caps: of each tenant.
        parts_of: of every block in the queue that is in the map.

    Cost: O(1) for each block that is pinned, unpinned or removed, besides what the queue itself costs.
    """

    def __init__(self, queue: FreeQueue, caps: TenantCaps, parts_of: BlockParts) -> None:
        self._queue, self._caps, self._parts_of = queue, caps, parts_of
        self._unpinned: dict[str, OrderedDict[int, None]] = {}  # none is empty
        self._grown: dict[str, None] = {}  # tenants that have got unpinned blocks since the caps were looked at
        queue.observers = (*queue.observers, self)

    def pinned(self, blocks: Iterable[int]) -> None:
        """Pinned blocks are not counted."""
        self.removed(blocks)

    def unpinned(self, blocks: Iterable[int], *, is_first: bool) -> None:
        """Unpinned blocks are counted."""
        for block in blocks:
            tenant = self._parts_of.owner(block)
            if tenant is None:
                continue
            order = self._unpinned.setdefault(tenant, OrderedDict())
            order[block] = None
            if is_first:
                order.move_to_end(block, last=False)
            self._grown[tenant] = None

    def removed(self, blocks: Iterable[int]) -> None:
        """What is gone is not counted."""
        if not self._unpinned:
            return
        for block in blocks:
            tenant = self._parts_of.owner(block)
            order = None if tenant is None else self._unpinned.get(tenant)
            if order is not None:
                order.pop(block, None)
                if not order:
                    del self._unpinned[tenant]  # type: ignore[arg-type]

    def take_over_caps(self) -> list[int]:
        """Takes out what tenants hold above their caps. O(tenants unpinned since the last time + blocks taken)."""
        taken: list[int] = []
        for tenant in self._grown:
            order = self._unpinned.get(tenant, OrderedDict())
            over = len(order) - cap_of(self._caps, tenant)
            if over > 0:
                taken += islice(order, int(over))
        self._grown.clear()
        self._queue.remove(taken)
        return taken

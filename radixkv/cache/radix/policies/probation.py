"""Least recently used, on probation until the second use."""

from typing import Any

from radixkv.cache.radix.eviction import Evictable, Policy
from radixkv.cache.radix.leaf_order import LeafOrder


class Probation(Policy):
    """Least recently used, on probation until the second use: the scan resistance of 2Q (Johnson & Shasha 1994).

    What was used once looks older by a share of the age at which leaves are evicted at present, as a partly filled
    block does. So what passes through once takes less of the pool from what comes again, in proportion to the pool, and
    what does come again within the rest of that age has lost nothing.
    """

    name = "probation"
    grows_in_place = False

    def __init__(self, share: float = 0.5) -> None:
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"share: expected a number of 0 to 1, got {share!r}")
        self.share = share
        self._now = self._evicted_last_use = 0.0

    def begin(self) -> LeafOrder:
        self._now = self._evicted_last_use = 0.0
        return super().begin()

    def touch(self, node: Evictable, tick: int) -> None:
        node.policy_state += 1.0
        self._now = tick

    def rank(self, node: Evictable) -> Any:
        age = self.share * (self._now - self._evicted_last_use) if node.policy_state <= 1.0 else 0.0
        return (node.last_use - age, node.last_use)

    def evicted(self, node: Evictable, rank: Any, num_left: int) -> None:
        self._evicted_last_use = rank[1]

"""What costs most to compute again stays longest."""

from typing import Any

from radixkv.cache.radix.eviction import Evictable, Policy
from radixkv.cache.radix.leaf_order import LeafOrder


class Cost(Policy):
    """GreedyDual with the recomputation that a block saves (Cao & Irani 1997; frequency as in GDSF, Cherkasova 1998).

    rank = age + uses * cost per block, where age is the rank of the last leaf evicted (so what is not used again falls
    behind) and the cost of a token at position p is 1 + p / knee: the linear layers, and attention over p tokens. A
    block deep in a sequence costs more than one at its front. A partly filled block saves less than a full one: it is
    weighed by its tokens, and so looks no older on top of that.
    """

    name = "cost"
    partial_ageing = 0.0
    grows_in_place = False

    def __init__(self, knee_tokens: int = 30_000) -> None:
        if not isinstance(knee_tokens, int | float) or not knee_tokens >= 1:
            raise ValueError(f"knee_tokens: expected a number >= 1, got {knee_tokens!r}")
        self.knee_tokens = knee_tokens  # where attention costs as much as the rest; 30,500 for Llama-3-8B
        self._age = 0.0

    def begin(self) -> LeafOrder:
        self._age = 0.0
        return super().begin()

    def touch(self, node: Evictable, tick: int) -> None:
        node.policy_state += 1.0

    def rank(self, node: Evictable) -> Any:
        middle = node.start + node.num_tokens / 2
        cost_per_block = node.num_tokens * (1.0 + middle / self.knee_tokens) / node.num_blocks
        return (self._age + max(node.policy_state, 1.0) * cost_per_block, node.last_use)

    def evicted(self, node: Evictable, rank: Any, num_left: int) -> None:
        self._age = rank[0]

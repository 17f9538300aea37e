"""Least frequently used, with decay."""

from math import log2
from typing import Any

from radixkv.cache.radix.eviction import Evictable, Policy


class Lfu(Policy):
    """Least frequently used with exponential decay.

    A use at tick t weighs 2**(t / half_life) for ever, so a use counts half as much as one half_life ticks later and no
    score needs updating as time goes by. `policy_state` holds log2 of the sum. Uses that are `older` by t ticks are all
    worth less by the same factor: log2 of it is t / half_life.
    """

    name = "lfu"
    grows_in_place = False

    def __init__(self, half_life: int = 1000) -> None:
        if half_life < 1:
            raise ValueError(f"half_life: expected >= 1 ticks, got {half_life}")
        self.half_life = half_life

    def touch(self, node: Evictable, tick: int) -> None:
        use = tick / self.half_life
        high, low = (use, node.policy_state) if use > node.policy_state else (node.policy_state, use)
        node.policy_state = high + log2(1.0 + 2.0 ** max(low - high, -1000.0))

    def rank(self, node: Evictable) -> Any:
        return (node.policy_state - node.older / self.half_life, node.last_use)

"""Eviction policies: which leaf of the radix tree goes first. Used by `radixkv.cache.radix.cache`.

A leaf enters the tree's order of leaves when nobody holds it any longer, and leaves it when somebody does; its rank is
computed once, on entering, so a touch re-keys nothing. The lowest rank goes first, equal ranks in order of entry. All
ranks are made of logical clock ticks (one per release) so that they never need ageing in place.
"""

from collections.abc import Callable
from math import log2
from typing import Any, Protocol


class Evictable(Protocol):
    """What a policy sees of a node of the tree: a span of tokens in blocks, held by nobody."""

    born: int  # tick at which it was inserted
    stamp: int  # tick at which its last lease was released
    start: int  # tokens before its first
    heat: float  # the policy's own; a split copies it to both halves

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...


class Policy:
    """Least recently used; the others override what they need."""

    name = "lru"

    def touch(self, node: Evictable, tick: int) -> None:
        """Called at each release, at its tick, on every node of the path that was in use."""

    def rank(self, node: Evictable) -> Any:
        """Returns the key by which leaves are sorted; the lowest is evicted first."""
        return node.stamp

    def evicted(self, rank: Any) -> None:
        """Called when a leaf is evicted, wholly or in part, with what `rank` said of it."""


class Fifo(Policy):
    """First in, first out: by the tick of insertion, whatever happened since."""

    name = "fifo"

    def rank(self, node: Evictable) -> Any:
        return (node.born, node.stamp)


class Lfu(Policy):
    """Least frequently used with exponential decay.

    A use at tick t weighs 2**(t / half_life) for ever, so a use counts half as much as one half_life ticks later and no
    score needs updating as time goes by. `heat` holds log2 of the sum.
    """

    name = "lfu"

    def __init__(self, half_life: int = 1000) -> None:
        if half_life < 1:
            raise ValueError(f"half_life: expected >= 1 ticks, got {half_life}")
        self.half_life = half_life

    def touch(self, node: Evictable, tick: int) -> None:
        use = tick / self.half_life
        high, low = (use, node.heat) if use > node.heat else (node.heat, use)
        node.heat = high + log2(1.0 + 2.0 ** max(low - high, -1000.0))

    def rank(self, node: Evictable) -> Any:
        return (node.heat, node.stamp)


class Cost(Policy):
    """GreedyDual with the recomputation that a block saves (Cao & Irani 1997; frequency as in GDSF, Cherkasova 1998).

    rank = age + uses * cost per block, where age is the rank of the last leaf evicted (so what is not used again falls
    behind) and the cost of a token at position p is 1 + p / knee: the linear layers, and attention over p tokens. A
    block deep in a sequence costs more than one at its front, and a partly filled block saves less than a full one.
    """

    name = "cost"

    def __init__(self, knee_tokens: int = 30_000) -> None:
        if not isinstance(knee_tokens, int | float) or not knee_tokens >= 1:
            raise ValueError(f"knee_tokens: expected a number >= 1, got {knee_tokens!r}")
        self.knee_tokens = knee_tokens  # where attention costs as much as the rest; 30,500 for Llama-3-8B
        self._age = 0.0

    def touch(self, node: Evictable, tick: int) -> None:
        node.heat += 1.0

    def rank(self, node: Evictable) -> Any:
        middle = node.start + node.num_tokens / 2
        cost_per_block = node.num_tokens * (1.0 + middle / self.knee_tokens) / node.num_blocks
        return (self._age + max(node.heat, 1.0) * cost_per_block, node.stamp)

    def evicted(self, rank: Any) -> None:
        self._age = rank[0]


class Probation(Policy):
    """Least recently used, on probation until the second use: the scan resistance of 2Q (Johnson & Shasha 1994).

    What was used once looks older by a share of the age at which leaves are evicted at present, as a tail does under
    lru. So what passes through once takes less of the pool from what comes again, in proportion to the pool, and what
    does come again within the rest of that age has lost nothing.
    """

    name = "probation"

    def __init__(self, share: float = 0.5) -> None:
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"share: expected a number of 0 to 1, got {share!r}")
        self.share = share
        self._now = self._evicted_stamp = 0

    def touch(self, node: Evictable, tick: int) -> None:
        node.heat += 1.0
        self._now = tick

    def rank(self, node: Evictable) -> Any:
        age = self.share * (self._now - self._evicted_stamp) if node.heat <= 1.0 else 0.0
        return (node.stamp - age, node.stamp)

    def evicted(self, rank: Any) -> None:
        self._evicted_stamp = rank[1]


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": Policy,
    "lfu": Lfu,
    "fifo": Fifo,
    "cost": Cost,
    "probation": Probation,
}


def make_policy(policy: str | Policy) -> Policy:
    """Returns the policy of that name, or the policy given.

    Raises:
        ValueError: no policy has that name.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy]()

"""SIEVE: first in, first out, but a leaf that was used since the hand last passed it is passed once more."""

from typing import Any

from radixkv.cache.radix.eviction import Evictable, Policy
from radixkv.cache.radix.leaf_order import LeafOrder


class Sieve(Policy):
    """SIEVE (Zhang et al., NSDI 2024) on the leaves of a tree.

    The algorithm: objects stand in a queue in the order of insertion and never move. A hit sets an object's visited
    bit. A hand goes from the oldest to the newest and round again; it clears set bits and evicts the first object whose
    bit is clear. So what comes once goes soon, though it is new, and what is used again stays where it is.

    Here a node's place is the tick of its insertion. Nothing is cleared in passing: at each use the number of the pass
    is noted in which the hand will find the bit clear, the one after the next that reaches the node. So a rank is (that
    pass, place), and is known when a leaf is queued. On leaves that hang from the root, one block each, that evicts
    what the algorithm evicts, one by one.

    What differs in a tree: only leaves can go, so the hand passes inner nodes too, which uses up their bits; a node
    that becomes a leaf behind the hand waits for the next pass, one of the same insertion as the leaf just evicted goes
    next. A use of a node sets the bits of all above it. A partly filled block stands nearer to the oldest by as much as
    it looks older, but the hand does not turn back for it: at most it is the next.
    """

    name = "sieve"
    grows_in_place = False

    def begin(self) -> LeafOrder:
        self._pass = 1  # the number of the hand's present pass
        self._hand = -1.0  # the place that it has reached
        self._newest = -1.0  # place of the newest node that was used
        return super().begin()

    def _next_pass(self, place: float) -> int:
        """Returns the number of the pass in which the hand reaches a place next."""
        return self._pass + (place < self._hand)

    def touch(self, node: Evictable, tick: int) -> None:
        if node.born > self._newest:
            if self._hand == self._newest:  # it stood at the end of the queue: it begins again before what is new
                self._pass, self._hand = self._pass + 1, -1.0
            self._newest = node.born
        # The release of the request that inserted it is no use.
        node.policy_state = self._next_pass(node.born) + (1 if node.policy_state else 0)

    def rank(self, node: Evictable) -> Any:
        return (max(node.policy_state, self._next_pass(node.born + node.older)), node.born)

    def evicted(self, node: Evictable, rank: Any, num_left: int) -> None:
        if rank > (self._pass, self._hand):
            self._pass, self._hand = rank

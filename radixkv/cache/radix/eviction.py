"""What an eviction policy declares: in which order the leaves of the radix tree are evicted.

The tree evicts leaves only, the last block of a leaf first; a policy says which leaf. It is a subclass of `Policy` and
declares three things:

- **rank**: the leaf of the lowest rank is evicted first, leaves of equal rank in the order in which they were queued.
  `touch` and `evicted` tell the policy what its ranks may depend on.
- **partial_ageing**: how much older than it is a partly filled block looks.
- **grows_in_place**: whether one leaf may hold blocks of several ages.

What a subclass leaves as it is, it inherits from lru, and a subclass that overrides nothing is lru. The tree does not
call the methods that a policy does not override. The policies themselves are in `radixkv.cache.radix.policies`, one a
file.

All times are ticks of the tree's logical clock, one for each release.

Cost: `touch` is called once for every node on the path of every release; `rank` once when a leaf is queued (its last
pin is released, or its last child is evicted), not when it is used; `evicted` once for each leaf that loses blocks.
Under lru a release calls none of them.
"""

from __future__ import annotations

from typing import Any, Protocol

from radixkv.cache.radix.leaf_order import LeafOrder


class Evictable(Protocol):
    """What a policy sees of a node of the tree: a span of tokens and the blocks that hold their KV.

    Attributes:
        born: tick at which it was inserted.
        last_use: tick of the last release of a request that used it.
        older: ticks by which `born` and `last_use` are earlier than they were. 0, but for partly filled blocks.
        start: number of tokens before its first.
        policy_state: the policy's own, 0.0 in a new node. A split copies it to both halves, and halves in equal states
            may be merged: an immutable value.
    """

    older: float
    start: int
    policy_state: Any

    @property
    def born(self) -> float: ...

    @property
    def last_use(self) -> float: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def first_prefix(self) -> bytes:
        """Returns the packed tokens from the root to the end of its first block. O(tokens)."""


class Policy:
    """Least recently used. Other policies override what differs.

    An object serves one cache at a time.

    Attributes:
        name: what the policy is called in options and reports.
        partial_ageing: A partly filled block takes a whole block for a few tokens; in a tight pool such blocks would
            push out blocks that are worth more. So `rank` is shown one whose `born` and `last_use` are earlier by
            `partial_ageing` * (the empty share of the block) * (the age at which leaves are evicted at present).
            0: it looks as old as it is.
        grows_in_place: True: the blocks that a request appends to a leaf that it alone uses become part of the leaf, so
            that a long conversation stays a few nodes; the leaf keeps `born` and `policy_state` of its first blocks.
            For ranks made of `last_use`, which all blocks of a path get together, that changes nothing. False: blocks
            of another `born` are a node of their own. For ranks made of `born` or `policy_state`.
    """

    name = "lru"
    partial_ageing: float = 1.0
    grows_in_place: bool = True

    def begin(self) -> LeafOrder:
        """Called with every new, empty tree: forgets all earlier ones. Returns the order its leaves are to be kept in.

        Override it to start state of your own anew, or to return an order that decides what no rank can.
        """
        return LeafOrder()

    def touch(self, node: Evictable, tick: int) -> None:
        """Called at each release, at its tick, on every node of the released path, from its end to the root."""

    def rank(self, node: Evictable) -> Any:
        """Returns the key by which leaves are ordered. Ranks of one policy must compare with each other."""
        return node.last_use

    def evicted(self, node: Evictable, rank: Any, num_left: int) -> None:
        """Called before blocks of a leaf are evicted.

        Args:
            rank: what the leaf was queued with.
            num_left: number of blocks that the leaf keeps, at its front; 0: the leaf goes.
        """


class AgedPartialBlock:
    """A partly filled block as its policy is to see it: `older` ticks older than it is."""

    __slots__ = ("_node", "born", "last_use", "older", "policy_state", "start")

    def __init__(self, node: Evictable, older: float) -> None:
        self._node = node
        self.older = older
        self.born = node.born - older
        self.last_use = node.last_use - older
        self.start = node.start
        self.policy_state = node.policy_state

    @property
    def num_tokens(self) -> int:
        return self._node.num_tokens

    @property
    def num_blocks(self) -> int:
        return self._node.num_blocks

    def first_prefix(self) -> bytes:
        return self._node.first_prefix()


def overrides(policy: Policy, method: str) -> bool:
    """Returns whether a policy has a method of its own in place of the one of `Policy`."""
    return getattr(getattr(policy, method), "__func__", None) is not getattr(Policy, method)


def check_policy(policy: Policy) -> Policy:
    """Returns a policy; raises ValueError where what it declares is of no meaning."""
    ageing, grows = policy.partial_ageing, policy.grows_in_place
    if isinstance(ageing, bool) or not isinstance(ageing, int | float) or not 0 <= ageing < float("inf"):
        raise ValueError(f"policy.partial_ageing: expected a number >= 0, got {ageing!r}")
    if not isinstance(grows, bool):
        raise ValueError(f"policy.grows_in_place: expected True or False, got {grows!r}")
    return policy

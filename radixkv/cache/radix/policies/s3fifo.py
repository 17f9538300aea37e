"""S3-FIFO: a small queue that leaves must pass, a main queue with second chances, and ghosts of what was evicted."""

from __future__ import annotations

from typing import Any, NamedTuple

from radixkv.cache.radix.eviction import Evictable, Policy
from radixkv.cache.radix.leaf_order import LeafOrder
from radixkv.cache.radix.node import Node

MAX_USES = 3


class _State(NamedTuple):
    """The `policy_state` of a node."""

    is_main: bool = False  # of the main queue, not of the small one
    place: int = 0  # in the main queue
    uses: int = 0  # since it came into its queue, or its last second chance less one; at most MAX_USES


class _Queues(LeafOrder):
    """The small and the main queue. The leaf to evict is taken from the small one while it has its share of the leaves.

    Cost: `first` amortised O(log leaves): each step promotes a leaf or uses up one of its uses.
    """

    __slots__ = ("_main", "_place")

    def __init__(self) -> None:
        super().__init__()  # the small queue
        self._main = LeafOrder(first_entry=2**61)  # a node tells by its entry which queue it is in
        self._place = 0

    def next_place(self) -> int:
        """Returns the place at the end of the main queue."""
        self._place += 1
        return self._place

    def __len__(self) -> int:
        return super().__len__() + len(self._main)

    def add(self, node: Node, rank: Any) -> None:
        if rank[0]:
            self._main.add(node, rank)
        else:
            super().add(node, rank)

    def remove(self, node: Node) -> None:
        if node.entry > 2**61:
            self._main.remove(node)
        else:
            super().remove(node)

    def first(self) -> tuple[Any, Node] | None:
        while True:
            num_small = super().__len__()
            is_small = num_small * 10 >= num_small + len(self._main)
            found = super().first() if is_small else self._main.first()
            if found is None:
                return None
            node = found[1]
            state = node.policy_state or _State()
            if is_small and state.uses > 1:
                node.policy_state = _State(True, self.next_place())
            elif not is_small and state.uses:
                node.policy_state = _State(True, self.next_place(), state.uses - 1)
            else:
                return found
            self.remove(node)
            self.add(node, (True, node.policy_state.place))

    def in_order(self) -> list[Node]:
        return super().in_order() + self._main.in_order()

    def sweep(self) -> None:
        super().sweep()
        self._main.sweep()


class S3Fifo(Policy):
    """S3-FIFO (Yang et al., SOSP 2023) on the leaves of a tree.

    The algorithm: a new object enters a small queue, which holds a tenth of the cache. At its end an object that was
    used more than once since goes to the main queue, and any other is evicted and leaves its key, a ghost. At the end
    of the main queue an object that was used goes round again with one use less, and any other is evicted. An object
    that comes back while there is a ghost of it enters the main queue at once. Ghosts are as many as the main queue has
    objects.

    Here the objects are leaves: sizes of queues are counted in leaves, and the cache holds as many as the most that
    there ever were. A ghost is a hash of the tokens up to the end of a leaf's first block, so it is found again
    wherever the tree is split, and is left only where the whole leaf went. On leaves that hang from the root, one block
    each, that evicts what the algorithm evicts, but for one thing: the algorithm goes on in the small queue after a
    promotion that overfills the main one, and so evicts twice. Here each eviction is one, and takes its queue anew
    after every promotion.

    What differs in a tree: an inner node is in no queue; it counts its uses, and when it becomes a leaf it takes the
    place that its insertion or its last promotion gave it. A use of a node is one of all above it. A partly filled
    block stands nearer to the end of the small queue by as much as it looks older; in the main one it does not.

    Cost, besides the order's: O(tokens of the path) for each leaf that the small queue evicts, and for each node at its
    first release, to hash them; 8 bytes and an entry of a dict for each ghost.
    """

    name = "s3fifo"
    grows_in_place = False

    def begin(self) -> LeafOrder:
        self._queues = _Queues()
        self._ghosts: dict[int, None] = {}  # the oldest first
        self._most_leaves = 0
        return self._queues

    def touch(self, node: Evictable, tick: int) -> None:
        if node.policy_state:
            node.policy_state = node.policy_state._replace(uses=min(node.policy_state.uses + 1, MAX_USES))
        elif self._ghosts and (key := hash(node.first_prefix())) in self._ghosts:
            del self._ghosts[key]
            node.policy_state = _State(True, self._queues.next_place())
        else:
            node.policy_state = _State()

    def rank(self, node: Evictable) -> Any:
        state = node.policy_state or _State()
        return (True, state.place) if state.is_main else (False, node.born)

    def evicted(self, node: Evictable, rank: Any, num_left: int) -> None:
        self._most_leaves = max(self._most_leaves, len(self._queues))
        if rank[0] or num_left:
            return
        key = hash(node.first_prefix())
        self._ghosts.pop(key, None)
        self._ghosts[key] = None
        while len(self._ghosts) > self._most_leaves * 9 // 10:
            del self._ghosts[next(iter(self._ghosts))]

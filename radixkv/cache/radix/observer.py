"""What the radix tree tells about its structure, for state that belongs to places in it and must follow them."""

from __future__ import annotations

from radixkv.cache.radix.node import Node


class TreeObserver:
    """Told of every change of a tree that it is attached to (`RadixTree.attach`). Each method here does nothing.

    Watches (where a match ends), caps (how many blocks a tenant has) and checkpoints of hybrid models are observers. So
    can be anything else that lives at a node: `split` and `merged` say which node has the place from then on, `trimmed`
    and `removed` that the place is gone, `pinned` and `unpinned` whether it may go. `Node.owner` is a slot for the
    tenants; a further observer keeps a dict by node, as checkpoints do, or gets a slot of its own.

    Each call comes after the change, with all spans, parents and children as they are to be. The queue of leaves may
    be behind by one change. An observer may change what it hangs at nodes and may call `RadixTree.requeue`; it must not
    change the structure or the pins. What it has to give up, it gives up when the cache's operation is done.

    Cost: with no observer attached, a look at an empty tuple for each change.
    """

    def grew(self, node: Node, num_bytes: int, first_block: bytes) -> None:
        """Whole blocks were put after a node's span: at the end of the span itself, or in new children.

        Args:
            node: pinned. New children are pinned from the start; `pinned` does not tell of them.
            num_bytes: length of the span before.
            first_block: packed tokens of the first new block.
        """

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two. `lower` is the node that there was; `upper` is new, and pinned if `lower` is."""

    def merged(self, upper: Node, lower: Node) -> None:
        """A split was undone: `lower` has the span of both again. `upper` is gone, without a call of `removed`."""

    def trimmed(self, node: Node, num_blocks: int) -> None:
        """A node lost its last `num_blocks` blocks, and has others left."""

    def removed(self, node: Node) -> None:
        """A node was taken out, and nothing more is told of it. Children are told of before their parents.

        `node.parent` is still the parent that it had. A node that is pinned goes on to hold its blocks for the leases
        that pin it, but nothing finds it.
        """

    def pinned(self, node: Node) -> None:
        """A node got its first pin."""

    def unpinned(self, node: Node) -> None:
        """A node lost its last pin. If it has no children it is evictable from now on."""

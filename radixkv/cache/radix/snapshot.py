"""What a radix cache holds, as plain data for people and tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.cache.namespace import Interner, LoRA, Media, Salt
from radixkv.cache.radix.node import Node


@dataclass(eq=False, slots=True)
class Span:
    """A node of the tree at one moment.

    Attributes:
        start: tokens before it.
        token_ids: [num_tokens] int32 packed, a namespace no longer folded in.
        namespace: the parts that start in this span; what is below depends on them too.
        num_blocks: blocks that hold it.
        num_pins: leases that end here, copies that read from here, and children of which that is true.
        last_use: tick of the last release (the cache's clock, one a release); the insertion's before any.
        children: in the order of their first tokens.
    """

    start: int
    token_ids: bytes
    namespace: tuple[LoRA | Salt | Media, ...]
    num_blocks: int
    num_pins: int
    last_use: int
    children: list[Span] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def take(root: Node, interner: Interner) -> Span:
    """Copies a tree; the root is an empty span. Cost: O(nodes log nodes + tokens)."""

    def copy(node: Node) -> Span:
        tokens, namespace = interner.unmark(node.span, node.start)
        return Span(node.start, tokens, namespace, node.num_blocks, node.pins, node.stamp)

    top = copy(root)
    waiting = [(root, top)]
    while waiting:  # a path may be deeper than Python's stack
        node, span = waiting.pop()
        for _, child in sorted(node.children.items()):
            made = copy(child)
            span.children.append(made)
            waiting.append((child, made))
    return top

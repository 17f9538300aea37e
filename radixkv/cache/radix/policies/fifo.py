"""First in, first out."""

from typing import Any

from radixkv.cache.radix.eviction import Evictable, Policy


class Fifo(Policy):
    """By the tick of insertion, whatever was used since."""

    name = "fifo"
    grows_in_place = False

    def rank(self, node: Evictable) -> Any:
        return (node.born, node.last_use)

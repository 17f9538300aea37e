"""The end of the prompt."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit


class End(Placement):
    """The end of the prompt: the next turn of a chat goes on from it."""

    name = "end"

    def positions(self, visit: Visit) -> Iterable[int]:
        return (visit.num_tokens,)

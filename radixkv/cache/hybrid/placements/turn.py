"""Where turns of the chat end."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit


class Turn(Placement):
    """The last border of a turn that the request shares with earlier ones, and the last of all."""

    name = "turn"

    def positions(self, visit: Visit) -> Iterable[int]:
        shared = [turn for turn in visit.turns if turn <= visit.num_shared]
        return (*shared[-1:], *visit.turns[-1:])

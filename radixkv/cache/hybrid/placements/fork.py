"""Where all that came through a checkpoint part from each other."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit

DISTANCE = 64


class Fork(Placement):
    """Where earlier requests first part after the checkpoint that this one goes on from.

    All that came through that checkpoint share up to here, so one here serves them better and makes it superfluous.
    There is one already, but where memory was short when the second request passed.
    """

    name = "fork"

    def positions(self, visit: Visit) -> Iterable[int]:
        return (visit.fork,) if visit.start + DISTANCE <= visit.fork <= visit.num_shared else ()

"""A little before where a request parts from all before it."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit

DISTANCE = 64


class BeforeBranch(Placement):
    """64 tokens before where the request parts: questions on one document part one to four tokens sooner or later.

    Only where the request computes at least as much on the way there.
    """

    name = "before_branch"

    def positions(self, visit: Visit) -> Iterable[int]:
        position = visit.num_shared - DISTANCE
        return (position,) if position >= visit.start + DISTANCE else ()

"""Where a request parts from all before it."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit


class Branch(Placement):
    """Where the request parts from all before it: its second visitor leaves what the third goes on from."""

    name = "branch"

    def positions(self, visit: Visit) -> Iterable[int]:
        return (visit.num_shared,)

"""Positions that the caller names."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit


class Named(Placement):
    """Positions that the caller names, as the cache breakpoints of an API do."""

    name = "named"

    def positions(self, visit: Visit) -> Iterable[int]:
        return visit.named

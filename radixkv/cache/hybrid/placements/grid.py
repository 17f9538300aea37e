"""At fixed distances."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit


class Grid(Placement):
    """Every multiple of a number of tokens, as block sizes of hybrid models make it in a flat hash."""

    name = "grid"

    def __init__(self, distance: int = 1024) -> None:
        if isinstance(distance, bool) or not isinstance(distance, int) or distance < 1:
            raise ValueError(f"distance: expected a number of tokens >= 1, got {distance!r}")
        self.distance = distance

    def positions(self, visit: Visit) -> Iterable[int]:
        return range((visit.start // self.distance + 1) * self.distance, visit.num_tokens + 1, self.distance)

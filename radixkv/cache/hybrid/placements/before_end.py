"""Well before the end of a prompt that nothing is known of."""

from collections.abc import Iterable

from radixkv.cache.hybrid.placement import Placement, Visit

DISTANCE = 256


class BeforeEnd(Placement):
    """256 tokens before the end of the prompt, where that is far from what earlier requests have.

    The first visitor of a document leaves nothing where others will part from it, but for this.
    """

    name = "before_end"

    def positions(self, visit: Visit) -> Iterable[int]:
        position = visit.num_tokens - DISTANCE
        return (position,) if position >= max(visit.num_shared, visit.start) + DISTANCE else ()

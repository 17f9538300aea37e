"""Where checkpoints are made: the placements, one a file. A file of this folder with a subclass of `Placement` is one.

A placement by name is one of them, or several joined by +: `branch+end` makes what either asks for.

>>> sorted(PLACEMENTS)
['before_branch', 'before_end', 'branch', 'end', 'fork', 'grid', 'named', 'output', 'turn']
>>> from radixkv.cache.hybrid.placement import Visit
>>> make_placement("branch+end").positions(Visit(num_tokens=100, start=0, num_shared=40))
{40: 'branch', 100: 'end'}
"""

from radixkv.cache.hybrid.placement import Placement, Placements
from radixkv.cache.registry import find_classes

PLACEMENTS: dict[str, type[Placement]] = find_classes(Placement, __name__, __path__)
DEFAULT_PLACEMENT = "fork+branch+before_branch+end+before_end"


def make_placement(placement: str | Placement | Placements) -> Placements:
    """Returns the placements of that name, or names joined by +, or one or several given.

    Raises:
        ValueError: no placement has that name.
    """
    if isinstance(placement, Placements):
        return placement
    if isinstance(placement, Placement):
        return Placements((placement,))
    names = placement.split("+") if isinstance(placement, str) else []
    if not names or not PLACEMENTS.keys() >= set(names):
        raise ValueError(f"placement: expected some of {', '.join(PLACEMENTS)}, joined by +, got {placement!r}")
    return Placements(tuple(PLACEMENTS[name]() for name in names))

"""Which checkpoint goes first: the retentions, one a file. A file of this folder with a subclass of `Retention` is one.

>>> sorted(RETENTIONS)
['adaptive', 'continued_first', 'recency', 'saved_per_byte']
"""

from radixkv.cache.hybrid.retention import Retention
from radixkv.cache.registry import find_classes

RETENTIONS: dict[str, type[Retention]] = {Retention.name: Retention} | find_classes(Retention, __name__, __path__)


def make_retention(retention: str | Retention) -> Retention:
    """Returns a new retention of that name, or the retention given.

    Raises:
        ValueError: no retention has that name.
    """
    if isinstance(retention, Retention):
        return retention
    if not isinstance(retention, str) or retention not in RETENTIONS:
        raise ValueError(f"retention: expected one of {', '.join(RETENTIONS)}, got {retention!r}")
    return RETENTIONS[retention]()

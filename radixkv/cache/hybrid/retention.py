"""What a retention declares: which checkpoint goes first when memory is short.

Full KV beyond the deepest checkpoint of a branch serves no hit, so what a checkpoint costs is its own state and the KV
that it alone needs; both go with it. What stays is its ghost.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from radixkv.cache.hybrid.checkpoints import Checkpoint


class Weight(NamedTuple):
    """What it would mean to give a checkpoint up, now.

    Attributes:
        num_saved: tokens that a request which goes on from it need not compute, against the next checkpoint above.
        num_bytes: what it frees: its state, and KV that no other checkpoint and no running request needs.
        continues: whether the tree has a checkpoint below it.
    """

    num_saved: int
    num_bytes: int
    continues: bool


class Retention:
    """Least recently used. Others override what differs. An object serves one cache at a time.

    Attributes:
        name: what it is called in options and reports.
        shortens: whether it also ranks the rows of a checkpoint alone, which may go while its state at the border of
            the cell stays.
    """

    name = "recency"
    shortens = False

    def begin(self, known: Collection[Checkpoint]) -> None:
        """Called with every new, empty cache.

        Args:
            known: the checkpoints and ghosts that the cache knows of, as they come and go.
        """

    def met(self, checkpoint: Checkpoint, tick: int) -> None:
        """Called when a request goes on from a checkpoint, or would have from a ghost, before either notes it."""

    def forgotten(self, checkpoint: Checkpoint, tick: int) -> None:
        """Called when a checkpoint or ghost is known no longer."""

    def rank(self, checkpoint: Checkpoint, weight: Weight, tick: int) -> Any:
        """Returns the key by which checkpoints go, the lowest first. Keys of one retention compare with each other."""
        return checkpoint.last_use

"""Recency and computation saved per byte together: Marconi's measure."""

from typing import Any

from radixkv.cache.hybrid.checkpoints import Checkpoint
from radixkv.cache.hybrid.retention import Retention, Weight


class SavedPerByte(Retention):
    """What saves least computation per byte, over its age, goes first (Marconi, Pan et al., arXiv 2411.19379).

    Marconi adds recency and saved FLOPs per byte, each scaled to 0 .. 1 over the candidates, with a weight found by
    replaying. Here the two are multiplied, which needs neither scale nor weight: tokens saved per byte over the
    requests since the last use.
    """

    name = "saved_per_byte"
    shortens = True

    def rank(self, checkpoint: Checkpoint, weight: Weight, tick: int) -> Any:
        return weight.num_saved / max(weight.num_bytes, 1) / (tick - checkpoint.last_use + 1)

"""First what the tree continues below, then the least recently used."""

from typing import Any

from radixkv.cache.hybrid.checkpoints import Checkpoint
from radixkv.cache.hybrid.retention import Retention, Weight


class ContinuedFirst(Retention):
    """Once the next checkpoint of a conversation stands, the one before it goes first.

    But not one where requests part, nor one that was used twice: more may come through it.
    """

    name = "continued_first"

    def rank(self, checkpoint: Checkpoint, weight: Weight, tick: int) -> Any:
        is_passed = weight.continues and checkpoint.num_uses <= 1 and checkpoint.reason in ("end", "output")
        return not is_passed, checkpoint.last_use

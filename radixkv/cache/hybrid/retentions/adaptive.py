"""What is expected to save least computation per byte and time goes first; expected from what ghosts have shown."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from radixkv.cache.hybrid.checkpoints import Checkpoint
from radixkv.cache.hybrid.retention import Retention, Weight

NUM_EXACT = 8  # ages below it are bins of their own; above, an octave is four bins
NUM_BINS = NUM_EXACT + 4 * 28
EDGES = np.array([*range(NUM_EXACT), *(2 ** (3 + i // 4) * (4 + i % 4) / 4 for i in range(4 * 28 + 1))])
WIDTHS = np.diff(EDGES)
PRIOR = 0.25 * WIDTHS / np.maximum(EDGES[1:], 1)  # the chance of a use in a bin of ages: as under lru, falling with age

Kind = tuple[str, int, bool]


def age_bin(age: int) -> int:
    """Returns the bin of an age in requests."""
    if age < NUM_EXACT:
        return max(age, 0)
    octave = age.bit_length() - 1
    return min(NUM_EXACT + 4 * (octave - 3) + (age >> (octave - 2)) - 4, NUM_BINS - 1)


class Adaptive(Retention):
    """Ranks by expected savings per byte and request, learned from the uses that checkpoints and ghosts would have had.

    Checkpoints of a kind (why it was made, how often it was used, whether a request went on beyond it) are taken to be
    alike. Of each kind it counts at which ages a request came back, and at which none had. Ghosts count as if they were
    there, so what is learned depends little on what was kept. A kind's chances at an age are drawn towards those of
    all kinds, and these towards lru's, each with the weight of `confidence` checkpoints. The rank is

        tokens saved / bytes freed * max over t of P(use within t) / E[time until it, or t]

    which is the Gittins index of a checkpoint that takes memory until it is used: where requests come round at a fixed
    distance it keeps the old and gives up the new, where recent ones come again the other way round.

    Args:
        confidence: number of checkpoints of a kind after which what they show counts as much as what was believed.
    """

    name = "adaptive"
    shortens = True

    def __init__(self, confidence: float = 4.0) -> None:
        if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence < math.inf:
            raise ValueError(f"confidence: expected a number > 0, got {confidence!r}")
        self.confidence = confidence
        self.begin(())

    def begin(self, known: Collection[Checkpoint]) -> None:
        self._known = known
        self._uses: dict[Kind, np.ndarray] = {}  # by age
        self._ends: dict[Kind, np.ndarray] = {}  # of waiting for a use, by one or not, by age
        self._indices: dict[Kind, list[float]] = {}
        self._num_told = self._num_learned = 0

    def _kind(self, checkpoint: Checkpoint) -> Kind:
        return checkpoint.reason, min(checkpoint.num_uses, 2), checkpoint.is_continued

    def _tell(self, counts: dict[Kind, np.ndarray], checkpoint: Checkpoint, tick: int) -> None:
        found = counts.get(kind := self._kind(checkpoint))
        if found is None:
            found = counts[kind] = np.zeros(NUM_BINS)
        found[age_bin(tick - checkpoint.last_use)] += 1

    def met(self, checkpoint: Checkpoint, tick: int) -> None:
        self._tell(self._uses, checkpoint, tick)
        self._tell(self._ends, checkpoint, tick)
        self._num_told += 1

    def forgotten(self, checkpoint: Checkpoint, tick: int) -> None:
        self._tell(self._ends, checkpoint, tick)

    def _learn(self, tick: int) -> None:
        """Makes the indices anew. Cost: O(known + kinds * bins ** 2)."""
        self._num_learned = self._num_told
        ends = {kind: counts.copy() for kind, counts in self._ends.items()}
        for checkpoint in self._known:
            self._tell(ends, checkpoint, tick)
        waiting = {kind: counts[::-1].cumsum()[::-1] for kind, counts in ends.items()}  # that reached an age
        uses = {kind: self._uses.get(kind, np.zeros(NUM_BINS)) for kind in waiting}
        weight = self.confidence
        believed = (sum(uses.values()) + weight * PRIOR) / (sum(waiting.values()) + weight)
        self._others = index_by_age(believed)
        self._indices = {
            kind: index_by_age((uses[kind] + weight * believed) / (waiting[kind] + weight)) for kind in waiting
        }

    def rank(self, checkpoint: Checkpoint, weight: Weight, tick: int) -> Any:
        if not self._indices or self._num_told > self._num_learned * 1.02 + 4:
            self._learn(tick)
        index = self._indices.get(self._kind(checkpoint), self._others)[age_bin(tick - checkpoint.last_use)]
        return index * weight.num_saved / max(weight.num_bytes, 1)


def index_by_age(chances: np.ndarray) -> list[float]:
    """Returns the Gittins index by bin of age.

    Args:
        chances: [NUM_BINS] float64, of a use within a bin for what has reached it unused.

    Returns:
        [NUM_BINS] uses per request waited, at the best time to stop waiting.
    """
    chances = np.minimum(chances, 0.999)
    alive = np.concatenate([[1.0], np.cumprod(1 - chances)[:-1]])
    alive = np.maximum(alive, 1e-30)
    uses = np.concatenate([[0.0], np.cumsum(alive * chances)])
    times = np.concatenate([[0.0], np.cumsum(alive * (1 - chances / 2) * WIDTHS)])
    gained = uses[None, 1:] - uses[:-1, None]  # [from, to]
    waited = times[None, 1:] - times[:-1, None]
    ratios = np.where(np.tri(NUM_BINS, k=-1, dtype=bool), 0.0, gained / np.maximum(waited, 1e-30))
    return ratios.max(axis=1).tolist()

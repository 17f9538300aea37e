"""Times of attention on this CPU: sides in turns, beside a canary; a side that is wrong is not timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from experiments.attention_batches import Batch, Peer

_FEWEST = 3
_WAIT_S = 0.3
"""For a quiet moment before a sample; then it is taken all the same, and counted apart."""


@dataclass(frozen=True)
class Timing:
    """How often, how long, by which clock."""

    samples: int = 15
    patience_s: float = 90.0
    canary_slack: float = 1.6
    clock: str = "wall"
    """"wall", all threads; or "cpu": CPU time of one thread, which a busy neighbour hardly changes."""


class Canary:
    """A product that takes under 0.5 ms where nobody else is at work."""

    def __init__(self, slack: float) -> None:
        self._a, self._b = torch.randn(8, 128, 256), torch.randn(8, 256, 128)
        self._slack = slack
        self.best_s = min(self.look() for _ in range(50))

    def look(self) -> float:
        """Seconds that one product takes now."""
        start = time.perf_counter()
        torch.bmm(self._a, self._b)
        return time.perf_counter() - start

    def quiet(self) -> bool:
        """Whether three in a row are about as fast as the fastest ever."""
        seen = [self.look() for _ in range(3)]
        self.best_s = min(self.best_s, *seen)
        return max(seen) <= self._slack * self.best_s


def errors_of(batch: Batch, sides: dict[str, Peer]) -> dict[str, float]:
    """Relative error of each against float64, on a few rows; raises where one is wrong."""
    errors = {}
    rows = [0, batch.q.shape[0] // 2, batch.q.shape[0] - 1]
    for name, side in sides.items():
        out, worst = side(), 0.0
        for row in rows:
            s, i = divmod(row, batch.q_len)
            n = batch.context - batch.q_len + i + 1
            k, v = (
                c[batch.block_table[s]].flatten(0, 1)[:n].double().repeat_interleave(batch.q.shape[1] // c.shape[2], 1)
                for c in (batch.k_cache, batch.v_cache)
            )
            x = torch.einsum("hd,nhd->hn", batch.q[row].double(), k) * batch.q.shape[2] ** -0.5
            want = torch.einsum("hn,nhd->hd", torch.softmax(x, 1), v)
            worst = max(worst, float((out[row].double() - want).norm() / want.norm()))
        limit = 1e-5 if batch.q.dtype == torch.float32 else 2e-2
        if not worst < limit:
            raise AssertionError(f"{name}: relative error {worst:.1e}, so its time means nothing")
        errors[name] = worst
    return errors


def time_sides(timing: Timing, sides: dict[str, Peer], canary: Canary) -> dict[str, tuple[list[float], bool]]:
    """Each side's samples in seconds, taken in turns, and whether they are the quiet ones.

    All samples of all sides where some side has fewer than _FEWEST quiet ones: a ratio of one mood to another is none.
    """
    quiet: dict[str, list[float]] = {name: [] for name in sides}
    every: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + timing.patience_s
    clock = time.process_time if timing.clock == "cpu" else time.perf_counter
    while min(map(len, quiet.values())) < timing.samples and time.perf_counter() < end:
        for name, side in sides.items():
            give_up = min(end, time.perf_counter() + _WAIT_S)
            while not (before := timing.clock == "cpu" or canary.quiet()) and time.perf_counter() < give_up:
                time.sleep(0.05)
            start = clock()
            side()
            took = clock() - start
            every[name].append(took)
            if before and (timing.clock == "cpu" or canary.quiet()):
                quiet[name].append(took)
    enough = min(map(len, quiet.values())) >= min(_FEWEST, timing.samples)
    return {name: (quiet[name] if enough else every[name], enough) for name in sides}


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy far larger than the caches; the best of some."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(8))
    return 2 * source.nbytes / best


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

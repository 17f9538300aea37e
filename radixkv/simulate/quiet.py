"""Quiet steps: those in which every running sequence decodes and nothing else happens, passed over at once.

No block is taken, published or released in them, no request waits or ends, so nothing but lengths changes, and the
results are those of the same steps one by one. Few sequences have many quiet steps (a block's 16 tokens over their
number plus one), hundreds have next to none, for one of them is always at a block's border.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from radixkv.scheduling.scheduler import Scheduler
from radixkv.simulate.cost_model import CostModel
from radixkv.simulate.live import Live
from radixkv.simulate.step_load import StepLoad, num_pinned_kv_tokens


@dataclass(slots=True)
class QuietSteps:
    """Steps that follow each other, planned and not yet over.

    Attributes:
        ends_s: [>= 1] of those that are left, in order.
        begins_s, load: of the first of them that is left.
    """

    ends_s: list[float]
    begins_s: float
    load: StepLoad

    @classmethod
    def plan(
        cls, scheduler: Scheduler, lives: Mapping[str, Live], cost: CostModel, at_s: float, arrives_s: float
    ) -> QuietSteps | None:
        """Plans the quiet steps from `at_s` on, as many as begin before `arrives_s`; None where there are none."""
        num_steps = scheduler.num_decode_only_steps()
        if not num_steps:
            return None
        for running in scheduler.running:
            sequence = running.sequence
            num_steps = min(num_steps, lives[sequence.request.request_id].num_left_tokens(sequence) - 1)
        if num_steps <= 0:
            return None
        first_s, first = at_s, _load(scheduler)
        ends_s: list[float] = []
        load = first
        while len(ends_s) < num_steps and at_s < arrives_s:
            at_s += cost.step_s(load)
            ends_s.append(at_s)
            load = _next(load)
        return cls(ends_s, first_s, first)

    def cut(self, at_s: float) -> None:
        """Something arrives at `at_s`: steps that would begin then or later are not quiet."""
        del self.ends_s[bisect_left(self.ends_s, at_s) + 1 :]

    def take(self, until_s: float) -> list[tuple[float, float, StepLoad]]:
        """Takes out those that end by `until_s`; returns when each begins and ends, and its load."""
        count = bisect_right(self.ends_s, until_s)
        taken = []
        for end_s in self.ends_s[:count]:
            taken.append((self.begins_s, end_s, self.load))
            self.begins_s, self.load = end_s, _next(self.load)
        del self.ends_s[:count]
        return taken


def _load(scheduler: Scheduler) -> StepLoad:
    count = len(scheduler.running)
    logical, unique = num_pinned_kv_tokens(scheduler)
    return StepLoad(
        num_decode_tokens=count, num_logits=count, num_decode_kv_tokens=logical, num_unique_kv_tokens=unique
    )


def _next(load: StepLoad) -> StepLoad:
    """Every sequence is longer by a token of its own."""
    return load._replace(
        num_decode_kv_tokens=load.num_decode_kv_tokens + load.num_decode_tokens,
        num_unique_kv_tokens=load.num_unique_kv_tokens + load.num_decode_tokens,
    )

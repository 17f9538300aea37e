"""The step under way, as the simulator keeps it from its beginning to its end."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.scheduling.batch import ScheduledBatch, StepStats
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence
from radixkv.simulate.step_load import StepLoad


@dataclass(frozen=True, slots=True)
class Step:
    """What was scheduled, when; from before: the host's seconds, and hits, preemptions and evicted blocks."""

    batch: ScheduledBatch
    sequences: list[Sequence]
    load: StepLoad
    started_s: float
    ends_s: float
    before_s: float
    counts: tuple[int, int, int]

    def stats(self, number: int, scheduler: Scheduler, num_finished: int, schedule_s: float) -> StepStats:
        """Returns the statistics of the step, which has just ended; counted as the engine counts."""
        manager = scheduler.manager
        prompts = sum(
            min(max(sequence.num_prompt_tokens - item.start, 0), item.num_tokens)
            for sequence, item in zip(self.sequences, self.batch.sequences, strict=True)
        )
        return StepStats(
            step=number,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=prompts,
            num_decode_tokens=self.batch.num_tokens - prompts,
            num_hit_tokens=scheduler.num_hit_tokens - self.counts[0],
            num_preemptions=scheduler.num_preemptions - self.counts[1],
            num_evicted_blocks=manager.num_evicted_blocks - self.counts[2],
            num_finished=num_finished,
            num_failed=0,
            sizes=manager.sizes,
            schedule_s=schedule_s - self.before_s,
            forward_s=self.ends_s - self.started_s,
            postprocess_s=0.0,
        )

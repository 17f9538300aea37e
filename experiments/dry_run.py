"""Runs the real scheduler, manager and cache without a model. For counting, not timing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixkv.scheduling.batch import ScheduledBatch
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence as Running


@dataclass(frozen=True)
class DryRun:
    """What a run came to."""

    num_steps: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    num_evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens


def dry_run(
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    num_per_step: int | None = None,
    on_batch: Callable[[ScheduledBatch], None] = lambda batch: None,
    next_token: Callable[[Running], int] = lambda sequence: 0,
) -> DryRun:
    """Serves requests to their ends.

    Args:
        num_per_step: how many arrive before each step; None: all before the first.
        on_batch: is given what each step would run.
        next_token: what a sequence samples.
    """
    waiting = list(requests)[::-1]
    num_steps = num_computed = 0
    while waiting or scheduler.has_unfinished:
        for _ in range(len(waiting) if num_per_step is None else min(num_per_step, len(waiting))):
            scheduler.add(waiting.pop())
        batch = scheduler.schedule()
        on_batch(batch)
        num_steps += 1
        num_computed += batch.num_tokens
        sequences = scheduler.commit()
        for sequence, item in zip(sequences, batch.sequences, strict=True):
            if item.needs_logits:
                scheduler.append_token(sequence, next_token(sequence))
                if len(sequence.generated_token_ids) == sequence.request.sampling_params.max_tokens:
                    scheduler.finish(sequence)
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    evicted = scheduler.manager.num_evicted_blocks
    return DryRun(num_steps, num_prompt, scheduler.num_hit_tokens, num_computed, scheduler.num_preemptions, evicted)

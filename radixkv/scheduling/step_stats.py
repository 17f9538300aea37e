"""StepStats: what one step did. Reported by `radixkv.engine.engine` and `radixkv.simulate` alike."""

from dataclasses import dataclass

from radixkv.blocks.kv_manager import PoolSizes


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what ran, what waits, where the time went.

    Attributes:
        num_prefill_tokens, num_decode_tokens: computed in it.
        num_hit_tokens: of prompts first admitted in it, found in the cache.
        num_finished: requests that ended in it.
        num_failed: sequences that ended in it with an error.
        schedule_s: scheduler, manager and cache; forward_s: the model; postprocess_s: sampling and text.
    """

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_evicted_blocks: int
    num_finished: int
    num_failed: int
    sizes: PoolSizes
    schedule_s: float
    forward_s: float
    postprocess_s: float

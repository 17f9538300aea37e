"""Scheduler: continuous batching with chunked prefill over a prefix cache. Knows no model and no tensors.

Called by `radixkv.engine` and `radixkv.simulate`. A step: `schedule`, somebody runs the batch, `commit`, then
`append_token`, `fork`, `finish` for what was sampled; or `withdraw`, and each sequence again through `schedule_alone`.

Rules, in order. Running sequences first: a token for each that decodes, then chunks of prompts, then admissions, until
the budget of tokens is used up. Which of the waiting is next, and how long it waits at most, says `radixkv.waiting`;
where its blocks come from, `radixkv.running`. Whatever a step computes is published when it is scheduled
(`KVManager.publish`), and every sequence matches again before each chunk, so a prefix that many share is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from sortedcontainers import SortedKeyList

from radixkv.batch import ScheduledBatch
from radixkv.block_allocator import OutOfBlocks
from radixkv.cache.base import check_count, take_over
from radixkv.cache.namespace import parts
from radixkv.cache.watch import Watch
from radixkv.kv_manager import BlockCopy, KVManager
from radixkv.ordering import ORDERS
from radixkv.request import Request
from radixkv.running import RunningSequences
from radixkv.sequence import Sequence
from radixkv.tokens import pack
from radixkv.waiting import WaitingQueue

# Waiting sequences passed over in one step because another computes what they need next.
MAX_SKIPPED = 32
# What is kept for a while is evicted after all else but what somebody waits for.
KEPT_RANK = (float("-inf"), 0.0)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, and the order of admissions.

    Attributes:
        max_num_batched_tokens: tokens computed in a step at most.
        max_num_seqs: sequences running at once at most.
        order: fcfs, random, longest_prefix or depth_first, among requests of one priority.
        max_overtakes: nothing starts more than so many places later than first come, first served would have let it
            (`radixkv.waiting`), whatever the order and the priorities.
        queue_aware: cached leaves that waiting requests match are evicted last.
        seed: of the random order.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    order: str = "longest_prefix"
    max_overtakes: int = 256
    queue_aware: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if check_count(name, getattr(self, name)) == 0:
                raise ValueError(f"{name}: expected an int >= 1, got 0")
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {self.order!r}")
        check_count("max_overtakes", self.max_overtakes)
        check_count("seed", self.seed)
        if not isinstance(self.queue_aware, bool):
            raise ValueError(f"queue_aware: expected True or False, got {self.queue_aware!r}")


class Unfinished(NamedTuple):
    """A request as it is known outside of the scheduler.

    Attributes:
        samples: by number, the tokens of those that have not ended; sample 0 alone where the prompt was never computed.
        num_cached_tokens: of the prompt, found at its first admission; None where no step with it has run.
    """

    request: Request
    samples: Mapping[int, Iterable[int]]
    num_cached_tokens: int | None


class Scheduler:
    """Decides what runs next.

    Args:
        manager: of a pool with a bound; this scheduler's alone from now on.
        config: limits and order.

    Attributes:
        waiting: the sequences that wait.
        num_hit_tokens: of prompts at their first admission, so far.

    Raises:
        ValueError: the pool has no bound, or the manager belongs to another scheduler.

    An exception that a method does not document (Ctrl-C, no memory left) may leave the scheduler half way; `restart`
    makes it usable again.
    """

    def __init__(self, manager: KVManager, config: SchedulerConfig | None = None) -> None:
        if manager.allocator.num_blocks is None:
            raise ValueError("manager: expected a pool with a bound, got one without")
        self.config = config or SchedulerConfig()
        self.waiting = self._make_waiting(manager)
        take_over(manager, "manager", self)
        self.manager = manager
        self.owner: Any = None  # the engine that it belongs to
        self.block_size = manager.cache.block_size
        self.num_hit_tokens = 0
        self._running = self._make_running()
        self._requests: dict[str, list[Sequence]] = {}
        self._kept: list[tuple[int, int, int, Watch]] = []  # a heap, by the step in which they are let go
        self._num_kept_tokens = 0
        self._next_id = self._next_arrival = 0

    def _make_waiting(self, manager: KVManager) -> WaitingQueue:
        config = self.config
        return WaitingQueue(
            manager.cache, config.order, config.max_overtakes, queue_aware=config.queue_aware, seed=config.seed
        )

    def _make_running(self) -> RunningSequences:
        return RunningSequences(self.manager, self.waiting.add)

    def restart(self, unfinished: Iterable[Unfinished], num_hit_tokens: int) -> None:
        """Begins anew with requests as they are known from outside; whatever is in here, half done or not, is dropped.

        For a caller that was interrupted in the middle of a call. The pool is empty afterwards, and all of them wait.

        Args:
            unfinished: in order of arrival.
            num_hit_tokens: of the requests that have started.

        Cost: O(tokens), and a match for each where the order uses them.
        """
        before = {(s.request.request_id, s.sample): s for group in self._requests.values() for s in group}
        num_preemptions, step = self._running.num_preemptions, self._running.step
        self.manager.clear()
        self._requests, self._kept, self._num_kept_tokens = {}, [], 0
        self.waiting = self._make_waiting(self.manager)
        self._running = self._make_running()
        self._running.num_preemptions, self._running.step = num_preemptions, step
        self.num_hit_tokens = num_hit_tokens
        for known in unfinished:
            arrival, self._next_arrival = self._next_arrival, self._next_arrival + 1
            for sample, token_ids in known.samples.items():
                sequence = self._new_sequence((arrival, sample), known.request, sample)
                for token_id in token_ids:
                    self.append_token(sequence, token_id)
                sequence.num_cached_tokens = known.num_cached_tokens
                if same := before.get((known.request.request_id, sample)):
                    sequence.num_preemptions = same.num_preemptions
                self.waiting.add(sequence)

    # ---- requests

    @property
    def running(self) -> SortedKeyList:
        """The sequences that run, by arrival."""
        return self._running.by_arrival

    @property
    def num_preemptions(self) -> int:
        """So far."""
        return self._running.num_preemptions

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> Sequence:
        """Takes a request in; it waits for its admission.

        Raises:
            ValueError: as `check_fits`, or one of that id is unfinished. Nothing changes.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id: expected one that is not in use, got {request.request_id!r}")
        self.check_fits(request)
        sequence = self._new_sequence((self._next_arrival, 0), request, 0)
        self._next_arrival += 1
        self.waiting.add(sequence)
        return sequence

    def check_fits(self, request: Request) -> None:
        """Raises ValueError if a request has no tokens, bad ones, a bad namespace, or more than the pool ever holds."""
        pack(request.prompt_token_ids)
        parts(request.namespace)
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling_params.max_tokens
        num_slots = self._num_slots
        if not num_prompt:
            raise ValueError("prompt_token_ids: expected at least one token, got none")
        if num_prompt + max_tokens - 1 > num_slots:
            raise ValueError(
                f"request {request.request_id!r}: expected prompt + max_tokens - 1 <= {num_slots}, the pool's tokens, "
                f"got {num_prompt} + {max_tokens} - 1 = {num_prompt + max_tokens - 1}"
            )

    def _new_sequence(self, arrival: tuple[int, int], request: Request, sample: int) -> Sequence:
        sequence = Sequence(self._next_id, arrival, request, sample)
        self._next_id += 1
        self._requests.setdefault(request.request_id, []).append(sequence)
        return sequence

    def sequences(self, request_id: str) -> list[Sequence]:
        """Returns the unfinished sequences of a request; none where it is not known."""
        return list(self._requests.get(request_id, ()))

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence between steps, whatever it is doing. What it has computed stays in the cache."""
        if sequence.blocks is None:
            self.waiting.remove(sequence, is_started=False)
        else:
            self.running.remove(sequence)
            if sequence.num_computed - sequence.blocks.lease.num_tokens >= self.block_size:  # between two strides
                self._running.publish(sequence, 0, sequence.num_computed)
                self.manager.commit()
            if sequence.request.keep_steps and sequence.num_computed:
                self._keep(sequence)
            self._running.let_go(sequence)
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def _keep(self, sequence: Sequence) -> None:
        tokens, num_tokens = sequence.packed(0, sequence.num_computed), sequence.num_computed
        watch = self.manager.cache.watch(tokens, sequence.request.namespace, rank=KEPT_RANK)
        last_step = self._running.step + sequence.request.keep_steps
        heappush(self._kept, (last_step, sequence.sequence_id, num_tokens, watch))
        self._num_kept_tokens += num_tokens
        # More than the pool holds can't be kept, so a number of steps without end takes no memory without end.
        while self._num_kept_tokens > self._num_slots:
            self._let_go_first()

    def _let_go_first(self) -> None:
        """Keeps the prefix no longer that would have been let go first."""
        _, _, num_tokens, watch = heappop(self._kept)
        self._num_kept_tokens -= num_tokens
        self.manager.cache.unwatch(watch)

    @property
    def _num_slots(self) -> int:
        """Tokens that the pool holds."""
        return (self.manager.allocator.num_blocks or 0) * self.block_size

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Adds a sampled token; its KV is computed when it is fed in a later step."""
        sequence.token_ids[sequence.num_tokens] = token_id
        sequence.num_tokens += 1

    def fork(self, sequence: Sequence, sample: int) -> tuple[Sequence, list[BlockCopy]]:
        """Makes another sample of a request out of one that has just computed its prompt.

        Full blocks are shared through a lease, the rest is copied. Where there is no room for the copies, the new
        sample waits like a request of its own.

        Returns:
            The new sequence, and the copies, to be run before anything else is; then call `copied`. Until then nothing
            counts as computed of what is its own.
        """
        other = self._new_sequence((sequence.arrival[0], sample), sequence.request, sample)
        other.num_cached_tokens = sequence.num_cached_tokens
        assert sequence.blocks is not None
        if len(self.running) >= self.config.max_num_seqs:
            self.waiting.add(other)
            return other, []
        try:
            other.blocks, copies = self.manager.fork(sequence.blocks, sequence.packed(0, sequence.num_computed))
        except OutOfBlocks:
            self.waiting.add(other)
            return other, []
        self.running.add(other)
        return other, copies

    def copied(self, other: Sequence, sequence: Sequence) -> None:
        """The copies of a fork have run: it has computed what the sequence has."""
        if other.blocks is not None:
            other.num_computed = sequence.num_computed

    # ---- a step

    @property
    def batch(self) -> list[Sequence]:
        """The sequences of the step under way, in the order of its batch."""
        return self._running.batch

    def schedule(self) -> ScheduledBatch:
        """Chooses what the next step computes, and gives it blocks; without sequences where nothing can run."""
        running = self._running
        if running.batch:
            raise RuntimeError("schedule: expected the last step to be committed or withdrawn before the next")
        running.begin_step()
        while self._kept and self._kept[0][0] <= running.step:
            self._let_go_first()
        budget, prefills = running.schedule_decodes(self.config.max_num_batched_tokens)
        for sequence in prefills:
            if budget and sequence.blocks is not None:
                budget -= running.schedule_next_chunk(sequence, budget)
        if budget and self.waiting:
            self._admit(budget, [s for s in prefills if s.blocks is not None])
        return ScheduledBatch(running.items, self.manager.copies)

    def num_quiet_steps(self) -> int:
        """Returns how many of the next steps would do nothing but compute and sample a token of each that runs.

        Called between steps, by who knows beforehand what is sampled; `pass_quiet_steps` then does them at once.
        """
        if self.waiting or len(self.running) > self.config.max_num_batched_tokens:
            return 0
        num_steps = self._running.num_quiet_steps()
        return min(num_steps, self._kept[0][0] - self._running.step - 1) if self._kept else num_steps

    def pass_quiet_steps(self, num_steps: int, token_ids: Iterable[Iterable[int]]) -> None:
        """Does what `schedule`, `commit` and `append_token` would in so many steps.

        Args:
            num_steps: at most `num_quiet_steps`.
            token_ids: [running] of [num_steps], by arrival.
        """
        self._running.pass_quiet_steps(num_steps, token_ids)

    def schedule_alone(self, sequence: Sequence) -> ScheduledBatch:
        """After `withdraw`: schedules one sequence of the step that failed by itself; empty if it has to wait."""
        running = self._running
        running.batch, running.items = [], []
        if sequence.blocks is not None:
            left = sequence.target - running.first_uncomputed(sequence)
            running.schedule_next_chunk(sequence, max(left, 1))
        return ScheduledBatch(running.items, self.manager.copies)

    def commit(self) -> None:
        """The step has run."""
        self.manager.commit()
        for sequence in self._running.batch:
            sequence.num_computed = sequence.target
        self._running.batch = []

    def withdraw(self) -> list[Sequence]:
        """The step has failed: nothing it was to compute is there. Returns its sequences, in the order of the batch."""
        self.manager.withdraw()
        failed, self._running.batch = self._running.batch, []
        for sequence in failed:  # what they were to share with each other is not there
            assert sequence.blocks is not None
            if not sequence.num_computed and sequence.num_cached_tokens is not None and not sequence.num_preemptions:
                lost = max(sequence.num_cached_tokens - sequence.blocks.num_cached_tokens, 0)
                sequence.num_cached_tokens -= lost
                self.num_hit_tokens -= lost
        return failed

    # ---- admission

    def _admit(self, budget: int, prefills: Iterable[Sequence]) -> None:
        """Admits what waits, one after the other, until the budget, the room or the candidates end."""
        running = self._running
        promised = sum(running.missing(sequence) for sequence in prefills)
        num_skipped = 0
        self.waiting.begin_pass()
        while budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting.next()
            if sequence is None:
                return
            if running.computes_for(sequence):
                num_skipped += 1
                if num_skipped == MAX_SKIPPED:
                    return
                self.waiting.skip(sequence)
                continue
            if not self._begin(sequence, promised):
                return
            num_tokens = running.schedule_chunk(sequence, budget)
            assert sequence.blocks is not None
            if not num_tokens:
                self.manager.cancel(sequence.blocks)
                sequence.blocks = None
                return
            self.waiting.remove(sequence, is_started=True)
            self.running.add(sequence)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.blocks.num_cached_tokens
                self.num_hit_tokens += sequence.num_cached_tokens
            budget -= num_tokens
            promised += running.missing(sequence)

    def _begin(self, sequence: Sequence, promised: int) -> bool:
        """Matches a waiting sequence, if the pool has room for all of its prompt; else leaves everything as it was."""
        missing = self._running.missing
        blocks = self.manager.begin(sequence.packed(), sequence.request.namespace)
        sequence.blocks = blocks
        short = missing(sequence) + promised - self.manager.num_available
        if short == 1 and blocks.lease.partial:  # the block it would be copied from is the one that is missing
            self.manager.give_up_partial(blocks)
            short = missing(sequence) + promised - self.manager.num_available
        if short > 0:
            self.manager.cancel(blocks)
            sequence.blocks = None
            return False
        return True

"""Scheduler: continuous batching with chunked prefill over a prefix cache. Knows no model and no tensors.

A step: `schedule`, run the batch, `commit`, then `append_token`, `fork`, `finish` for what was sampled; or `withdraw`,
and each sequence again through `schedule_alone`.

Rules, in order. Running sequences first: a token for each that decodes, then chunks of prompts, then admissions, until
the budget of tokens is used up. `radixkv.scheduling.waiting` says which sequence is admitted next, and how long it
waits at most. Whatever a step computes is published when it is scheduled (`KVManager.publish`), and every sequence
matches again before each chunk, so a prefix that many share is computed once.

Blocks come from the free ones, then from cached leaves, then from preempting a running sequence that arrived later and
is not in the step; else the sequence waits a step. So the earliest arrival always gets on, and no two preempt each
other in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from sortedcontainers import SortedKeyList

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.kv_manager import BlockCopy, KVManager
from radixkv.cache.contract import Watch, check_count, take_over
from radixkv.cache.namespace import parts
from radixkv.cache.tokens import num_common_tokens, pack
from radixkv.scheduling.batch import ScheduledBatch, ScheduledSequence
from radixkv.scheduling.ordering import ORDERS
from radixkv.scheduling.request import Request
from radixkv.scheduling.sequence import RunningSequence, Sequence
from radixkv.scheduling.waiting import WaitingQueue

# Waiting sequences skipped in one step because another computes what they need next.
MAX_SKIPPED = 32
# Kept prefixes (`Request.keep_steps`) are evicted last, except those that waiting requests match.
KEPT_RANK = (float("-inf"), 0.0)
# A decoding sequence publishes in strides of at least so many tokens: publishing every token at block size 1 would
# cost more than the rest of the step, and few requests share what another is just generating.
DECODE_STRIDE_TOKENS = 16
# Matched before a chunk: enough for many chunks, and not the whole of a million-token prompt each time.
ADVANCE_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, and the order of admissions.

    Attributes:
        max_num_batched_tokens: tokens computed in a step at most.
        max_num_seqs: sequences running at once at most.
        order: fcfs, random, longest_prefix or depth_first, among requests of one priority.
        max_overtakes: no sequence starts more than so many places later than under first come, first served
            (`radixkv.scheduling.waiting`), whatever the order and the priorities.
        queue_aware: cached leaves that waiting requests match are evicted last.
        seed: of the random order.

    Raises:
        ValueError: a number is out of range, by name. A bad `order` is refused by the scheduler.
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
    """A request as it is known outside of the scheduler; what `Scheduler.restart` begins from.

    Attributes:
        samples: by number, the tokens of those that have not ended; sample 0 alone where the prompt was never computed.
        num_cached_tokens: tokens of the prompt found at its first admission; None where no step with it has run.
    """

    request: Request
    samples: Mapping[int, Iterable[int]]
    num_cached_tokens: int | None


class Scheduler:
    """Decides what each step computes, and where its KV goes.

    Args:
        manager: of a pool with a bound; this scheduler's alone from now on.
        config: limits and order; None: the defaults.

    Attributes:
        waiting: the sequences that wait.
        running: the sequences that run, by arrival.
        batch: those of the step under way, in the order of its `ScheduledBatch`; empty between steps.
        num_hit_tokens: tokens of prompts found in the cache at their first admission, so far.
        num_preemptions: so far.

    Raises:
        ValueError: the pool has no bound, the manager belongs to another scheduler, or there is no such order.

    An exception that a method does not document (Ctrl-C, no memory left) may leave the scheduler half way; `restart`
    makes it usable again.

    A step of two requests with a common prefix of 32 tokens, of which the second is computed once:

    >>> from radixkv import KVManager, RadixCache, Request, SamplingParams, Scheduler, SchedulerConfig
    >>> scheduler = Scheduler(KVManager(RadixCache(16), num_blocks=100), SchedulerConfig(max_num_batched_tokens=64))
    >>> params = SamplingParams(max_tokens=1)
    >>> for name, last in (("a", 7), ("b", 8)):
    ...     sequence = scheduler.add(Request(name, (*range(32), last), params))
    >>> while scheduler.has_unfinished:
    ...     batch = scheduler.schedule()
    ...     print([(each.start, each.end, each.block_table.tolist()) for each in batch.sequences])
    ...     for sequence in scheduler.commit():  # the batch has run
    ...         scheduler.append_token(sequence, 1)
    ...         scheduler.finish(sequence)
    [(0, 33, [0, 1, 2]), (32, 33, [0, 1, 3])]
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
        self.num_hit_tokens = self.num_preemptions = 0
        self._stride = -(-DECODE_STRIDE_TOKENS // self.block_size) * self.block_size
        self._step = 0
        self._next_id = self._next_arrival = 0
        self._begin()

    def _make_waiting(self, manager: KVManager) -> WaitingQueue:
        config = self.config
        return WaitingQueue(
            manager.cache, config.order, config.max_overtakes, queue_aware=config.queue_aware, seed=config.seed
        )

    def _begin(self) -> None:
        self.running: SortedKeyList = SortedKeyList(key=_arrival)
        self.batch: list[RunningSequence] = []
        self._items: list[ScheduledSequence] = []  # what each of the batch computes
        self._requests: dict[str, list[Sequence]] = {}
        self._kept: list[tuple[int, int, int, Watch]] = []  # a heap, by the last step in which they are kept
        self._num_kept_tokens = 0

    def restart(self, unfinished: Iterable[Unfinished], num_hit_tokens: int) -> None:
        """Begins anew with requests as they are known from outside; everything in here is dropped, half done or not.

        For a caller that was interrupted in the middle of a call. The pool is empty afterwards, and all of them wait.

        Args:
            unfinished: in order of arrival.
            num_hit_tokens: of the requests that have started.

        Cost: O(tokens), and a match for each where the order uses them.
        """
        before = {(s.request.request_id, s.sample): s for group in self._requests.values() for s in group}
        self.manager.clear()
        self._begin()
        self.waiting = self._make_waiting(self.manager)
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
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._requests)

    def add(self, request: Request) -> Sequence:
        """Takes a request in; its first sample waits for admission. Cost: as `WaitingQueue.add`, and O(prompt).

        Raises:
            ValueError: as `check_fits`, or the request_id is in use. Nothing changes.
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
        """Returns the unfinished sequences of a request; none where the id is not known."""
        return list(self._requests.get(request_id, ()))

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence between steps, whether it waits or runs. What it has computed stays in the cache.

        Cost: as `WaitingQueue.remove`, or as `KVManager.end`.
        """
        running = sequence.running
        if running is None:
            self.waiting.remove(sequence, is_started=False)
        else:
            self.running.remove(running)
            if running.num_computed - running.blocks.lease.num_tokens >= self.block_size:  # between two strides
                self._publish(running, 0, running.num_computed)
                self.manager.commit()
            if sequence.request.keep_steps and running.num_computed:
                self._keep(running)
            self._release(running)
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def _release(self, running: RunningSequence) -> None:
        """Ends what a sequence holds; the computed rows of a partial block go to the cache."""
        blocks, sequence = running.blocks, running.sequence
        first = blocks.lease.num_tokens
        num_left = max(running.num_computed - first, 0)
        # A block that awaits its copy holds nothing yet; in the middle of a step no whole block can go in.
        is_partial = not blocks.copy and num_left < self.block_size
        self.manager.end(blocks, sequence.packed(first, first + num_left) if is_partial else b"", start=first)
        sequence.running = None

    def _keep(self, running: RunningSequence) -> None:
        sequence, num_tokens = running.sequence, running.num_computed
        watch = self.manager.cache.watch(sequence.packed(0, num_tokens), sequence.request.namespace, rank=KEPT_RANK)
        last_step = self._step + sequence.request.keep_steps
        heappush(self._kept, (last_step, sequence.sequence_id, num_tokens, watch))
        self._num_kept_tokens += num_tokens
        # No more than the pool holds can be kept, so that a huge number of steps does not take memory without bound.
        while self._num_kept_tokens > self._num_slots:
            self._stop_keeping_first()

    def _stop_keeping_first(self) -> None:
        """Stops keeping the prefix whose last step comes first."""
        _, _, num_tokens, watch = heappop(self._kept)
        self._num_kept_tokens -= num_tokens
        self.manager.cache.unwatch(watch)

    @property
    def _num_slots(self) -> int:
        """Tokens that the pool holds."""
        return (self.manager.allocator.num_blocks or 0) * self.block_size

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Adds a sampled token; its KV is computed when it is fed in a later step. O(1)."""
        sequence.token_ids[sequence.num_tokens] = token_id
        sequence.num_tokens += 1

    def fork(self, sequence: Sequence, sample: int) -> tuple[Sequence, list[BlockCopy]]:
        """Makes another sample of a request from one that has just computed its prompt.

        Full blocks are shared through a lease, the rest is copied. Where there is no room for the copies, the new
        sample waits like a request of its own.

        Returns:
            The new sequence, and the copies, to be run before anything else is; then call `copied`. Until then nothing
            that is its own counts as computed.

        Raises:
            ValueError: the sequence does not run.

        Cost: as `KVManager.fork`, and O(prompt).
        """
        running = sequence.running
        if running is None:
            raise ValueError("sequence: expected one that runs, got one that waits or has ended")
        other = self._new_sequence((sequence.arrival[0], sample), sequence.request, sample)
        other.num_cached_tokens = sequence.num_cached_tokens
        if len(self.running) >= self.config.max_num_seqs:
            self.waiting.add(other)
            return other, []
        try:
            blocks, copies = self.manager.fork(running.blocks, sequence.packed(0, running.num_computed))
        except OutOfBlocks:
            self.waiting.add(other)
            return other, []
        self._start(RunningSequence(other, blocks))
        return other, copies

    def copied(self, other: Sequence) -> None:
        """The copies of a fork have run: `other` has computed its prompt. Does nothing for one that waits. O(1)."""
        if other.running is not None:
            other.running.num_computed = other.num_prompt_tokens

    def _start(self, running: RunningSequence) -> None:
        running.sequence.running = running
        self.running.add(running)

    # ---- a step

    def schedule(self) -> ScheduledBatch:
        """Chooses what the next step computes, and gives it blocks.

        Returns:
            The batch; without sequences where nothing can run. Its copies run before its forward pass.

        Raises:
            RuntimeError: the last step was neither committed nor withdrawn.

        Cost: O(running), a match for each chunk of a prompt, and as `WaitingQueue.next` for each admission tried.
        """
        if self.batch:
            raise RuntimeError("schedule: expected the last step to be committed or withdrawn before the next")
        self._step += 1
        self._items = []
        while self._kept and self._kept[0][0] <= self._step:
            self._stop_keeping_first()
        budget, prefills = self._schedule_decodes(self.config.max_num_batched_tokens)
        for running in prefills:
            if budget and running.sequence.running is not None:
                budget -= self._schedule_next_chunk(running, budget)
        if budget and self.waiting:
            self._admit(budget, [running for running in prefills if running.sequence.running is not None])
        return ScheduledBatch(self._items, self.manager.copies)

    def schedule_alone(self, sequence: Sequence) -> ScheduledBatch:
        """After `withdraw`: schedules one sequence of the failed step by itself.

        Returns:
            Its batch; without sequences where it has to wait for blocks, or was preempted.
        """
        self.batch, self._items = [], []
        running = sequence.running
        if running is not None:
            num_left = running.target - self._first_uncomputed(running)
            self._schedule_next_chunk(running, max(num_left, 1))
        return ScheduledBatch(self._items, self.manager.copies)

    def commit(self) -> list[Sequence]:
        """The step has run: what it computed counts, and may be copied from.

        Returns:
            Its sequences, in the order of the batch.

        Cost: O(sequences and blocks of the step).
        """
        self.manager.commit()
        for running in self.batch:
            running.num_computed = running.target
        done, self.batch = self.batch, []
        return [running.sequence for running in done]

    def withdraw(self) -> list[Sequence]:
        """The step has failed: nothing that it was to compute is there.

        Returns:
            Its sequences, in the order of the batch; each runs on, with what it had before the step.

        Cost: as `KVManager.withdraw`.
        """
        self.manager.withdraw()
        failed, self.batch = self.batch, []
        for running in failed:  # what they were to share with each other is not there
            sequence = running.sequence
            if not running.num_computed and sequence.num_cached_tokens is not None and not sequence.num_preemptions:
                num_lost = max(sequence.num_cached_tokens - running.blocks.num_cached_tokens, 0)
                sequence.num_cached_tokens -= num_lost
                self.num_hit_tokens -= num_lost
        return [running.sequence for running in failed]

    def num_decode_only_steps(self) -> int:
        """Returns how many of the next steps do nothing but compute and sample a token for each running sequence.

        Nothing is published in them and no block is taken. For a caller between steps that knows beforehand what is
        sampled; `run_decode_only_steps` then does them at once. O(running) at most.
        """
        if self.waiting or not self.running or len(self.running) > self.config.max_num_batched_tokens:
            return 0
        stride, block_size = self._stride, self.block_size
        num_steps = self._kept[0][0] - self._step - 1 if self._kept else stride
        for running in self.running:
            sequence = running.sequence
            end = sequence.num_tokens
            room = len(running.blocks.block_table) * block_size + 1 - end
            num_steps = min(num_steps, -end % stride, room)
            # A prompt's last token, left over by a chunk, is no decode: it brings a first token.
            if num_steps <= 0 or end - running.num_computed != 1 or end == sequence.num_prompt_tokens:
                return 0
        return num_steps

    def run_decode_only_steps(self, num_steps: int, token_ids: Iterable[Iterable[int]]) -> None:
        """Does what `schedule`, `commit` and `append_token` would in so many steps.

        Args:
            num_steps: at most `num_decode_only_steps`.
            token_ids: [running] of [num_steps], by arrival: what is sampled after each step.
        """
        self._step += num_steps
        for running, tokens in zip(self.running, token_ids, strict=True):
            sequence = running.sequence
            end = sequence.num_tokens
            sequence.token_ids[end : end + num_steps] = tokens
            sequence.num_tokens = end + num_steps
            running.num_computed = running.target = end + num_steps - 1
            running.step = self._step

    # ---- what is in a step

    def _schedule_decodes(self, budget: int) -> tuple[int, list[RunningSequence]]:
        """Gives a token to each that decodes; returns how many tokens are left, and those that still prefill."""
        prefills = []
        stride, step, block_size = self._stride, self._step, self.block_size
        batch, items = self.batch, self._items  # this loop runs for each sequence in each step
        for running in list(self.running):
            sequence = running.sequence
            end = sequence.num_tokens
            if end - running.num_computed != 1:
                prefills.append(running)
                continue
            if sequence.running is None or not budget:  # preempted just now
                continue
            blocks, start = running.blocks, end - 1
            if end > len(blocks.block_table) * block_size and not self._grow_decode(running, end):
                continue
            write_start = start if end % stride else self._publish(running, start, end)
            budget -= 1
            running.step = step
            running.target = end
            batch.append(running)
            table = blocks.block_table
            items.append(
                ScheduledSequence(sequence.sequence_id, sequence.token_ids, start, end, write_start, table, True)
            )
        return budget, prefills

    def _schedule_next_chunk(self, running: RunningSequence, budget: int) -> int:
        """Matches what others have published since the last chunk, and schedules the next: as `_schedule_chunk`."""
        blocks, sequence = running.blocks, running.sequence
        first = blocks.lease.num_tokens
        last = min(sequence.num_tokens - 1, first + ADVANCE_TOKENS)
        self.manager.advance(blocks, sequence.packed(first, last), start=first)
        return self._schedule_chunk(running, budget)

    def _schedule_chunk(self, running: RunningSequence, budget: int) -> int:
        """Schedules the next chunk of a prompt, at most `budget` tokens. Returns how many; 0 if it has to wait."""
        sequence = running.sequence
        start = self._first_uncomputed(running)
        end = min(sequence.num_tokens, start + budget)
        if end < sequence.num_tokens:
            # Whole blocks, so that sequences that share them need not compute part of one again.
            end = max(end // self.block_size * self.block_size, start)
            if end == start:
                end = min(sequence.num_tokens, start + budget)
        if not self.grow(running, end):
            return 0
        start = self._first_uncomputed(running)  # a partial match may have been given up for want of room
        end = min(end, start + budget)
        write_start = self._publish(running, start, end)
        running.step, running.target = self._step, end
        self.batch.append(running)
        self._items.append(
            ScheduledSequence(
                sequence.sequence_id,
                sequence.token_ids,
                start,
                end,
                write_start,
                running.blocks.block_table,
                end == sequence.num_tokens,
            )
        )
        return end - start

    def _first_uncomputed(self, running: RunningSequence) -> int:
        """Returns the first token whose KV is neither in the sequence's blocks nor about to be copied there."""
        blocks = running.blocks
        matched = blocks.num_cached_tokens if blocks.lease.partial else blocks.lease.num_tokens
        # One token is computed in any case, also where publishing has moved the lease over the last one.
        return min(max(running.num_computed, matched), running.sequence.num_tokens - 1)

    def _publish(self, running: RunningSequence, start: int, end: int) -> int:
        """Publishes tokens up to `end`; returns where, from `start` on, writing begins: the cache holds the rest."""
        blocks = running.blocks
        first = blocks.lease.num_tokens
        return max(start, first + self.manager.publish(blocks, running.sequence.packed(first, end), start=first))

    def _admit(self, budget: int, prefills: Iterable[RunningSequence]) -> None:
        """Admits what waits, one after the other, until the budget, the room or the candidates end."""
        promised = sum(self._missing(running) for running in prefills)
        num_skipped = 0
        self.waiting.begin_pass()
        while budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting.next()
            if sequence is None:
                return
            if self.computes_for(sequence):
                num_skipped += 1
                if num_skipped == MAX_SKIPPED:
                    return
                self.waiting.skip(sequence)
                continue
            running = self._match(sequence, promised)
            if running is None:
                return
            num_tokens = self._schedule_chunk(running, budget)
            if not num_tokens:
                self.manager.cancel(running.blocks)
                return
            self.waiting.remove(sequence, is_started=True)
            self._start(running)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = running.blocks.num_cached_tokens
                self.num_hit_tokens += sequence.num_cached_tokens
            budget -= num_tokens
            promised += self._missing(running)

    def _match(self, sequence: Sequence, promised: int) -> RunningSequence | None:
        """Matches a waiting sequence, if the pool has room for all of its prompt; else leaves everything as it was."""
        blocks = self.manager.begin(sequence.packed(), sequence.request.namespace)
        running = RunningSequence(sequence, blocks)
        short = self._missing(running) + promised - self.manager.num_available
        if short == 1 and blocks.lease.partial:  # the block it would be copied from is the one that is missing
            self.manager.give_up_partial(blocks)
            short = self._missing(running) + promised - self.manager.num_available
        if short > 0:
            self.manager.cancel(blocks)
            return None
        return running

    # ---- rules: a subclass may replace one, to measure what it is worth

    def computes_for(self, sequence: Sequence) -> bool:
        """Whether a sequence of this step computes, in a later chunk, a block that this waiting one needs next."""
        for other in self.batch:
            leader = other.sequence
            if other.target < leader.num_prompt_tokens and leader.request.namespace == sequence.request.namespace:
                common = min(num_common_tokens(leader.packed(), sequence.packed()), sequence.num_tokens - 1)
                if common // self.block_size > other.target // self.block_size:
                    return True
        return False

    def grow(self, running: RunningSequence, num_tokens: int) -> bool:
        """Gets blocks for a sequence's first num_tokens tokens, preempting where it must; False if it has to wait."""
        while True:
            try:
                self.manager.grow(running.blocks, num_tokens)
            except OutOfBlocks:
                victim = self.victim(running)
                if victim is None:
                    return False
                self.preempt(victim)
            else:
                return True

    def victim(self, running: RunningSequence) -> RunningSequence | None:
        """The later arrival, not of this step, of lowest priority, and of those the one that computed fewest tokens."""
        later = self.running.irange_key(min_key=running.sequence.arrival, inclusive=(False, True))
        candidates = [other for other in later if other.step != self._step]
        return min(candidates, key=_loss, default=None)

    def preempt(self, running: RunningSequence) -> None:
        """Takes a running sequence's blocks; it waits again. What it published stays cached, for its return too."""
        self.running.remove(running)
        self._release(running)
        sequence = running.sequence
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _grow_decode(self, running: RunningSequence, num_tokens: int) -> bool:
        """Gets blocks for a stride of tokens at once, where there are any; else for as many as are needed now."""
        ahead = min(-(-num_tokens // self._stride) * self._stride, len(running.sequence.token_ids) - 1)
        if self.manager.num_available >= self._stride // self.block_size and ahead > num_tokens:
            return self.grow(running, ahead)
        return self.grow(running, num_tokens)

    def _missing(self, running: RunningSequence) -> int:
        """Returns the blocks that a sequence's tokens still need."""
        return max(-(-running.sequence.num_tokens // self.block_size) - len(running.blocks.block_table), 0)


def _arrival(running: RunningSequence) -> tuple[int, int]:
    return running.sequence.arrival


def _loss(running: RunningSequence) -> tuple[int, int, tuple[int, int]]:
    own = running.num_computed - running.blocks.num_cached_tokens
    arrival = running.sequence.arrival
    return running.sequence.request.priority, own, (-arrival[0], -arrival[1])

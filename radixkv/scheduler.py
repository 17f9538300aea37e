"""Scheduler: continuous batching with chunked prefill over a prefix cache. Knows no model and no tensors.

Called by `radixkv.engine` and `radixkv.simulate`. A step: `schedule`, somebody runs the batch, `commit`, then
`append_token`, `fork`, `finish` for what was sampled; or `withdraw`, and each sequence again through `schedule_alone`.

Rules, in order. Running sequences first: a token for each that decodes, then chunks of prompts, then admissions, until
the budget of tokens is used up. Blocks for them come from what is free, then from cached leaves, then from preempting a
running sequence that arrived later and is not in the step yet; else the sequence waits a step. So the earliest arrival
gets on sooner or later, and no two preempt each other in turn. Whatever a step computes is published when it is
scheduled (`KVManager.publish`), and every sequence matches again before each chunk, so a prefix that many share is
computed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sortedcontainers import SortedKeyList, SortedList

from radixkv.batch import ScheduledBatch, ScheduledSequence
from radixkv.block_allocator import OutOfBlocks
from radixkv.cache.base import check_count
from radixkv.cache.namespace import parts
from radixkv.kv_manager import BlockCopy, KVManager
from radixkv.ordering import make_order
from radixkv.request import Request
from radixkv.sequence import Sequence
from radixkv.tokens import num_common_tokens, pack

# A decoding sequence publishes in strides of at least so many tokens: publishing every token at block size 1 would
# cost more than the rest of the step, and few requests share what another is just generating.
DECODE_STRIDE_TOKENS = 16
# Waiting sequences passed over in one step because another computes what they need next.
MAX_SKIPPED = 32
# Looked at for matches before a chunk: enough for many chunks, and not the whole of a million-token prompt each time.
ADVANCE_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, and the order of admissions.

    Attributes:
        max_num_batched_tokens: tokens computed in a step at most.
        max_num_seqs: sequences running at once at most.
        order: fcfs, longest_prefix or depth_first.
        max_overtakes: later arrivals that may start before a request; then nothing else is admitted until it fits.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    order: str = "longest_prefix"
    max_overtakes: int = 256

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if check_count(name, getattr(self, name)) == 0:
                raise ValueError(f"{name}: expected an int >= 1, got 0")
        check_count("max_overtakes", self.max_overtakes)


class Scheduler:
    """Decides what runs next.

    Args:
        manager: of a pool with a bound.
        config: limits and order.

    Attributes:
        running: by arrival.
        num_preemptions: so far.
        num_hit_tokens: of prompts at their first admission, so far.
    """

    def __init__(self, manager: KVManager, config: SchedulerConfig | None = None) -> None:
        if manager.allocator.num_blocks is None:
            raise ValueError("manager: expected a pool with a bound, got one without")
        self.manager = manager
        self.config = config or SchedulerConfig()
        self.block_size = manager.cache.block_size
        self.running: SortedKeyList = SortedKeyList(key=lambda sequence: sequence.arrival)
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self._order = make_order(self.config.order, manager.cache)
        self._waiting: SortedKeyList = SortedKeyList(key=lambda sequence: sequence.arrival)
        self._started: SortedList = SortedList()  # arrivals that were started while an older one waited
        self._requests: dict[str, list[Sequence]] = {}
        self._batch: list[Sequence] = []
        self._next_id = self._next_arrival = self._step = 0
        self._stride = -(-DECODE_STRIDE_TOKENS // self.block_size) * self.block_size

    # ---- requests

    @property
    def waiting(self) -> SortedKeyList:
        """The sequences that wait, by arrival."""
        return self._waiting

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
        self._wait(sequence)
        return sequence

    def check_fits(self, request: Request) -> None:
        """Raises ValueError if a request has no tokens, bad ones, a bad namespace, or more than the pool ever holds."""
        pack(request.prompt_token_ids)
        parts(request.namespace)
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling_params.max_tokens
        num_slots = (self.manager.allocator.num_blocks or 0) * self.block_size
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
            self._stop_waiting(sequence)
        else:
            self.running.remove(sequence)
            if sequence.num_computed - sequence.blocks.lease.num_tokens >= self.block_size:  # between two strides
                self._publish(sequence, 0, sequence.num_computed)
                self.manager.commit()
            self._let_go(sequence)
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Adds a sampled token; its KV is computed when it is fed in a later step."""
        sequence.token_ids[sequence.num_tokens] = token_id
        sequence.num_tokens += 1

    def fork(self, sequence: Sequence, sample: int) -> tuple[Sequence, list[BlockCopy]]:
        """Makes another sample of a request out of one that has just computed its prompt.

        Full blocks are shared through a lease, the rest is copied. Where there is no room for the copies, the new
        sample waits like a request of its own.

        Returns:
            The new sequence, and the copies, to be run before anything else is.
        """
        other = self._new_sequence((sequence.arrival[0], sample), sequence.request, sample)
        other.num_cached_tokens = sequence.num_cached_tokens
        assert sequence.blocks is not None
        if len(self.running) >= self.config.max_num_seqs:
            self._wait(other)
            return other, []
        try:
            other.blocks, copies = self.manager.fork(sequence.blocks, sequence.packed(0, sequence.num_computed))
        except OutOfBlocks:
            self._wait(other)
            return other, []
        other.num_computed = sequence.num_computed
        self.running.add(other)
        return other, copies

    # ---- a step

    def schedule(self) -> ScheduledBatch:
        """Chooses what the next step computes, and gives it blocks; without sequences where nothing can run."""
        if self._batch:
            raise RuntimeError("schedule: expected the last step to be committed or withdrawn before the next")
        self._step += 1
        batch: list[ScheduledSequence] = []
        budget = self.config.max_num_batched_tokens
        prefills = []
        stride, step = self._stride, self._step
        for sequence in list(self.running):
            end = sequence.num_tokens
            if end - sequence.num_computed != 1:
                prefills.append(sequence)
                continue
            blocks = sequence.blocks
            if blocks is None or not budget:  # preempted just now
                continue
            if end > len(blocks.block_table) * self.block_size and not self._grow_decode(sequence, end):
                continue
            write_start = self._publish(sequence, end - 1, end) if end % stride == 0 else end - 1
            budget -= 1
            sequence.step, sequence.target = step, end
            self._batch.append(sequence)
            batch.append(
                ScheduledSequence(
                    sequence.sequence_id, sequence.token_ids, end - 1, end, write_start, blocks.block_table, True
                )
            )
        for sequence in prefills:
            if budget and sequence.blocks is not None:
                budget -= self._continue(sequence, budget, batch)
        if budget and self._waiting:
            self._admit(budget, batch, [s for s in prefills if s.blocks is not None])
        return ScheduledBatch(batch, self.manager.copies)

    def schedule_alone(self, sequence: Sequence) -> ScheduledBatch:
        """After `withdraw`: schedules one sequence of the step that failed by itself; empty if it has to wait."""
        self._batch = []
        batch: list[ScheduledSequence] = []
        if sequence.blocks is not None:
            self._continue(sequence, max(sequence.target - self._start(sequence), 1), batch)
        return ScheduledBatch(batch, self.manager.copies)

    def commit(self) -> None:
        """The step has run."""
        self.manager.commit()
        for sequence in self._batch:
            sequence.num_computed = sequence.target
        self._batch = []

    def withdraw(self) -> list[Sequence]:
        """The step has failed: nothing it was to compute is there. Returns its sequences, in the order of the batch."""
        self.manager.withdraw()
        failed, self._batch = self._batch, []
        for sequence in failed:  # what they were to share with each other is not there
            assert sequence.blocks is not None
            if not sequence.num_computed and sequence.num_cached_tokens is not None and not sequence.num_preemptions:
                lost = max(sequence.num_cached_tokens - sequence.blocks.num_cached_tokens, 0)
                sequence.num_cached_tokens -= lost
                self.num_hit_tokens -= lost
        return failed

    @property
    def batch(self) -> list[Sequence]:
        """The sequences of the step under way, in the order of its batch."""
        return self._batch

    def _start(self, sequence: Sequence) -> int:
        """Returns the first token whose KV is neither in the sequence's blocks nor about to be copied there."""
        blocks = sequence.blocks
        assert blocks is not None
        matched = blocks.num_cached_tokens if blocks.lease.partial else blocks.lease.num_tokens
        # One token is computed in any case, also where publishing has moved the lease over the last one.
        return min(max(sequence.num_computed, matched), sequence.num_tokens - 1)

    def _continue(self, sequence: Sequence, budget: int, batch: list[ScheduledSequence]) -> int:
        """Matches what others have published since the last chunk, and schedules the next one."""
        blocks = sequence.blocks
        assert blocks is not None
        first = blocks.lease.num_tokens
        last = min(sequence.num_tokens - 1, first + ADVANCE_TOKENS)
        self.manager.advance(blocks, sequence.packed(first, last), start=first)
        return self._schedule_chunk(sequence, budget, batch)

    def _schedule_chunk(self, sequence: Sequence, budget: int, batch: list[ScheduledSequence]) -> int:
        """Schedules the next chunk of a prompt, at most `budget` tokens. Returns how many; 0 if it has to wait."""
        blocks = sequence.blocks
        assert blocks is not None
        start = self._start(sequence)
        end = min(sequence.num_tokens, start + budget)
        if end < sequence.num_tokens:
            # Whole blocks, so that whoever shares them need not compute part of one again.
            end = max(end // self.block_size * self.block_size, start)
            if end == start:
                end = min(sequence.num_tokens, start + budget)
        if not self._grow(sequence, end):
            return 0
        start = self._start(sequence)  # a partial match may have been given up for want of room
        end = min(end, start + budget)
        write_start = self._publish(sequence, start, end)
        sequence.step, sequence.target = self._step, end
        self._batch.append(sequence)
        batch.append(
            ScheduledSequence(
                sequence.sequence_id,
                sequence.token_ids,
                start,
                end,
                write_start,
                blocks.block_table,
                end == sequence.num_tokens,
            )
        )
        return end - start

    def _publish(self, sequence: Sequence, start: int, end: int) -> int:
        """Publishes tokens up to `end`; returns where, from `start` on, writing begins: the cache holds the rest."""
        blocks = sequence.blocks
        assert blocks is not None
        first = blocks.lease.num_tokens
        return max(start, first + self.manager.publish(blocks, sequence.packed(first, end), start=first))

    def _waits_for_another(self, sequence: Sequence) -> bool:
        """Whether a sequence of this step computes, in a later chunk, a block that this waiting one needs next."""
        for other in self._batch:
            if other.target < other.num_prompt_tokens and other.request.namespace == sequence.request.namespace:
                common = min(num_common_tokens(other.packed(), sequence.packed()), sequence.num_tokens - 1)
                if common // self.block_size > other.target // self.block_size:
                    return True
        return False

    # ---- room

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gets blocks for a sequence's first num_tokens tokens, preempting where it must; False if it has to wait."""
        assert sequence.blocks is not None
        while True:
            try:
                self.manager.grow(sequence.blocks, num_tokens)
            except OutOfBlocks:
                victim = self._victim(sequence)
                if victim is None:
                    return False
                self._preempt(victim)
            else:
                return True

    def _grow_decode(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gets blocks for a stride of tokens at once, where there are any; else for as many as are needed now."""
        ahead = min(-(-num_tokens // self._stride) * self._stride, len(sequence.token_ids) - 1)
        if self.manager.num_available >= self._stride // self.block_size and ahead > num_tokens:
            return self._grow(sequence, ahead)
        return self._grow(sequence, num_tokens)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The later arrival, not of this step, that loses least: it computed fewest tokens itself."""
        later = self.running.irange_key(min_key=sequence.arrival, inclusive=(False, True))
        candidates = [other for other in later if other.step != self._step]
        return min(candidates, key=_own_tokens, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks. What it has published stays in the cache, for its return among others."""
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        blocks = sequence.blocks
        assert blocks is not None
        first = blocks.lease.num_tokens
        num_left = max(sequence.num_computed - first, 0)
        # A tail that awaits its copy holds nothing yet; in the middle of a step nothing longer than a tail can go in.
        is_tail = not blocks.copy and num_left < self.block_size
        self.manager.end(blocks, sequence.packed(first, first + num_left) if is_tail else b"", start=first)
        sequence.blocks = None
        sequence.num_computed = sequence.target = 0

    # ---- admission

    def _wait(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        self._order.add(sequence)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._order.remove(sequence)

    def _admit(self, budget: int, batch: list[ScheduledSequence], prefills: Iterable[Sequence]) -> None:
        promised = sum(self._missing(sequence) for sequence in prefills)
        skipped: set[int] = set()
        self._order.begin_pass()
        while budget and self._waiting and len(self.running) < self.config.max_num_seqs:
            oldest = self._waiting[0]
            is_forced = self._num_overtakes(oldest) >= self.config.max_overtakes
            sequence = oldest if is_forced else self._order.next(skipped)
            if sequence is None or sequence.sequence_id in skipped:
                return
            if self._waits_for_another(sequence):
                skipped.add(sequence.sequence_id)
                if len(skipped) == MAX_SKIPPED:
                    return
                continue
            if not self._begin(sequence, promised):
                return
            num_tokens = self._schedule_chunk(sequence, budget, batch)
            assert sequence.blocks is not None
            if not num_tokens:
                self.manager.cancel(sequence.blocks)
                sequence.blocks = None
                return
            self._stop_waiting(sequence)
            self.running.add(sequence)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.blocks.num_cached_tokens
                self.num_hit_tokens += sequence.num_cached_tokens
            budget -= num_tokens
            promised += self._missing(sequence)
            self._order.started(sequence)
            if self._waiting and self._waiting[0].arrival < sequence.arrival:
                self._started.add(sequence.arrival)
            while self._started and (not self._waiting or self._started[0] < self._waiting[0].arrival):
                self._started.pop(0)

    def _begin(self, sequence: Sequence, promised: int) -> bool:
        """Matches a waiting sequence, if the pool has room for all of its prompt; else leaves everything as it was."""
        blocks = self.manager.begin(sequence.packed(), sequence.request.namespace)
        sequence.blocks = blocks
        short = self._missing(sequence) + promised - self.manager.num_available
        if short == 1 and blocks.lease.partial:  # the block it would be copied from is the one that is missing
            self.manager.give_up_partial(blocks)
            short = self._missing(sequence) + promised - self.manager.num_available
        if short > 0:
            self.manager.cancel(blocks)
            sequence.blocks = None
            return False
        return True

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that a sequence's tokens still need."""
        assert sequence.blocks is not None
        return max(-(-sequence.num_tokens // self.block_size) - len(sequence.blocks.block_table), 0)

    def _num_overtakes(self, sequence: Sequence) -> int:
        return len(self._started) - self._started.bisect_right(sequence.arrival)


def _own_tokens(sequence: Sequence) -> tuple[int, tuple[int, int]]:
    assert sequence.blocks is not None
    own = sequence.num_computed - sequence.blocks.num_cached_tokens
    return own, (-sequence.arrival[0], -sequence.arrival[1])

"""The running sequences: blocks for what they compute next, chunks of their prompts, and who gives way.

Blocks come from what is free, then from cached leaves, then from preempting a running sequence that arrived later and
is not in the step yet; else the sequence waits a step. So the earliest arrival gets on sooner or later, and no two
preempt each other in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sortedcontainers import SortedKeyList

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.tokens import num_common_tokens
from radixkv.scheduling.batch import ScheduledSequence
from radixkv.scheduling.sequence import Sequence

# A decoding sequence publishes in strides of at least so many tokens: publishing every token at block size 1 would
# cost more than the rest of the step, and few requests share what another is just generating.
DECODE_STRIDE_TOKENS = 16
# Looked at for matches before a chunk: enough for many chunks, and not the whole of a million-token prompt each time.
ADVANCE_TOKENS = 65_536


class RunningSequences:
    """What runs, and the step under way.

    Args:
        manager: hands out blocks.
        preempted: is told of every sequence that had to give way.

    Attributes:
        by_arrival: all of them.
        batch: those of the step under way; items: what each of them computes.
        step: its number.
        num_preemptions: so far.
    """

    def __init__(self, manager: KVManager, preempted: Callable[[Sequence], None]) -> None:
        self.manager = manager
        self.block_size = manager.cache.block_size
        self.by_arrival: SortedKeyList = SortedKeyList(key=lambda sequence: sequence.arrival)
        self.batch: list[Sequence] = []
        self.items: list[ScheduledSequence] = []
        self.step = 0
        self.num_preemptions = 0
        self._preempted = preempted
        self._stride = -(-DECODE_STRIDE_TOKENS // self.block_size) * self.block_size

    def begin_step(self) -> None:
        self.step += 1
        self.items = []

    def schedule_decodes(self, budget: int) -> tuple[int, list[Sequence]]:
        """Gives a token to each that decodes; returns how many tokens are left, and those that still prefill."""
        prefills = []
        stride, step, block_size = self._stride, self.step, self.block_size
        for sequence in list(self.by_arrival):
            end = sequence.num_tokens
            if end - sequence.num_computed != 1:
                prefills.append(sequence)
                continue
            blocks = sequence.blocks
            if blocks is None or not budget:  # preempted just now
                continue
            if end > len(blocks.block_table) * block_size and not self._grow_decode(sequence, end):
                continue
            write_start = self.publish(sequence, end - 1, end) if end % stride == 0 else end - 1
            budget -= 1
            sequence.step, sequence.target = step, end
            self.batch.append(sequence)
            self.items.append(
                ScheduledSequence(
                    sequence.sequence_id, sequence.token_ids, end - 1, end, write_start, blocks.block_table, True
                )
            )
        return budget, prefills

    def num_quiet_steps(self) -> int:
        """Returns how many of the next steps would feed a token to each that runs, and neither publish nor need blocks.

        O(running), and as much as until the first that would.
        """
        stride, block_size = self._stride, self.block_size
        fewest = stride
        for sequence in self.by_arrival:
            end = sequence.num_tokens
            assert sequence.blocks is not None
            room = len(sequence.blocks.block_table) * block_size + 1 - end
            fewest = min(fewest, -end % stride, room)
            # The last token of a prompt, left over by a chunk, is no decode: what it brings is a first token.
            if fewest <= 0 or end - sequence.num_computed != 1 or end == sequence.num_prompt_tokens:
                return 0
        return fewest if self.by_arrival else 0

    def pass_quiet_steps(self, num_steps: int, token_ids: Iterable[Iterable[int]]) -> None:
        """Does what so many quiet steps would, each followed by the next of these tokens for each sequence."""
        self.step += num_steps
        for sequence, tokens in zip(self.by_arrival, token_ids, strict=True):
            end = sequence.num_tokens
            sequence.token_ids[end : end + num_steps] = tokens
            sequence.num_tokens = end + num_steps
            sequence.num_computed = sequence.target = end + num_steps - 1
            sequence.step = self.step

    def schedule_next_chunk(self, sequence: Sequence, budget: int) -> int:
        """Matches what others have published since the last chunk, and schedules the next one, as `schedule_chunk`."""
        blocks = sequence.blocks
        assert blocks is not None
        first = blocks.lease.num_tokens
        last = min(sequence.num_tokens - 1, first + ADVANCE_TOKENS)
        self.manager.advance(blocks, sequence.packed(first, last), start=first)
        return self.schedule_chunk(sequence, budget)

    def schedule_chunk(self, sequence: Sequence, budget: int) -> int:
        """Schedules the next chunk of a prompt, at most `budget` tokens. Returns how many; 0 if it has to wait."""
        blocks = sequence.blocks
        assert blocks is not None
        start = self.first_uncomputed(sequence)
        end = min(sequence.num_tokens, start + budget)
        if end < sequence.num_tokens:
            # Whole blocks, so that whoever shares them need not compute part of one again.
            end = max(end // self.block_size * self.block_size, start)
            if end == start:
                end = min(sequence.num_tokens, start + budget)
        if not self.grow(sequence, end):
            return 0
        start = self.first_uncomputed(sequence)  # a partial match may have been given up for want of room
        end = min(end, start + budget)
        write_start = self.publish(sequence, start, end)
        sequence.step, sequence.target = self.step, end
        self.batch.append(sequence)
        self.items.append(
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

    def first_uncomputed(self, sequence: Sequence) -> int:
        """Returns the first token whose KV is neither in the sequence's blocks nor about to be copied there."""
        blocks = sequence.blocks
        assert blocks is not None
        matched = blocks.num_cached_tokens if blocks.lease.partial else blocks.lease.num_tokens
        # One token is computed in any case, also where publishing has moved the lease over the last one.
        return min(max(sequence.num_computed, matched), sequence.num_tokens - 1)

    def publish(self, sequence: Sequence, start: int, end: int) -> int:
        """Publishes tokens up to `end`; returns where, from `start` on, writing begins: the cache holds the rest."""
        blocks = sequence.blocks
        assert blocks is not None
        first = blocks.lease.num_tokens
        return max(start, first + self.manager.publish(blocks, sequence.packed(first, end), start=first))

    def computes_for(self, sequence: Sequence) -> bool:
        """Whether a sequence of this step computes, in a later chunk, a block that this waiting one needs next."""
        for other in self.batch:
            if other.target < other.num_prompt_tokens and other.request.namespace == sequence.request.namespace:
                common = min(num_common_tokens(other.packed(), sequence.packed()), sequence.num_tokens - 1)
                if common // self.block_size > other.target // self.block_size:
                    return True
        return False

    # ---- room

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gets blocks for a sequence's first num_tokens tokens, preempting where it must; False if it has to wait."""
        assert sequence.blocks is not None
        while True:
            try:
                self.manager.grow(sequence.blocks, num_tokens)
            except OutOfBlocks:
                victim = self.victim(sequence)
                if victim is None:
                    return False
                self.preempt(victim)
            else:
                return True

    def _grow_decode(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gets blocks for a stride of tokens at once, where there are any; else for as many as are needed now."""
        ahead = min(-(-num_tokens // self._stride) * self._stride, len(sequence.token_ids) - 1)
        if self.manager.num_available >= self._stride // self.block_size and ahead > num_tokens:
            return self.grow(sequence, ahead)
        return self.grow(sequence, num_tokens)

    def missing(self, sequence: Sequence) -> int:
        """Returns the blocks that a sequence's tokens still need."""
        assert sequence.blocks is not None
        return max(-(-sequence.num_tokens // self.block_size) - len(sequence.blocks.block_table), 0)

    def victim(self, sequence: Sequence) -> Sequence | None:
        """The later arrival, not of this step, of lowest priority, and of those the one that computed fewest tokens."""
        later = self.by_arrival.irange_key(min_key=sequence.arrival, inclusive=(False, True))
        candidates = [other for other in later if other.step != self.step]
        return min(candidates, key=_loss, default=None)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks. What it has published stays in the cache, for its return among others."""
        self.by_arrival.remove(sequence)
        self.let_go(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Ends what a sequence holds; its computed tail goes to the cache."""
        blocks = sequence.blocks
        assert blocks is not None
        first = blocks.lease.num_tokens
        num_left = max(sequence.num_computed - first, 0)
        # A tail that awaits its copy holds nothing yet; in the middle of a step nothing longer than a tail can go in.
        is_tail = not blocks.copy and num_left < self.block_size
        self.manager.end(blocks, sequence.packed(first, first + num_left) if is_tail else b"", start=first)
        sequence.blocks = None
        sequence.num_computed = sequence.target = 0


def _loss(sequence: Sequence) -> tuple[int, int, tuple[int, int]]:
    assert sequence.blocks is not None
    own = sequence.num_computed - sequence.blocks.num_cached_tokens
    return sequence.request.priority, own, (-sequence.arrival[0], -sequence.arrival[1])

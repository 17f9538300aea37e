"""A scheduler without in-batch sharing: what is common to the sequences of a step, each computes. For `ablation`."""

from typing import Any

from radixkv.blocks.kv_manager import KVManager, SequenceBlocks
from radixkv.cache.tokens import TokenIds, pack
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence


class PublishAtCommit(KVManager):
    """The same manager, but what a step computes can be matched when it has run and not before."""

    def __init__(self, cache: Any, num_blocks: int) -> None:
        super().__init__(cache, num_blocks)
        self._held: list[tuple[SequenceBlocks, bytes, int]] = []

    def publish(self, sequence: SequenceBlocks, token_ids: TokenIds, *, start: int = 0) -> int:
        self._held.append((sequence, pack(token_ids), start))
        return 0

    def commit(self) -> None:
        super().commit()
        for sequence, tokens, start in self._held:
            super().publish(sequence, tokens, start=start)
        self._held.clear()
        super().commit()

    def withdraw(self) -> None:
        self._held.clear()
        super().withdraw()


class ApartScheduler(Scheduler):
    """A scheduler without in-batch sharing, over a manager that publishes at commit: no sequence waits for another."""

    def computes_for(self, sequence: Sequence) -> bool:
        return False

"""KVManager for an engine that schedules one step ahead, and whose workers' block tables are append-only.

Such an engine asks in an order of its own, and one step looks like this::

    begin_step()       the step before has run, or is ahead of this one on the device's stream
    allocate(...)      for requests that run, `drop` for those that lose their blocks
    look_up(...)       for requests that wait, each followed by `allocate` where it is admitted
    end_step()         the copies to run before the step's forward pass

What running requests compute is published when the first waiting request looks up, or the step ends: until then the
engine may take a request out of the step again, whose blocks are never computed then. (Once it has done so, it admits
none.) What an admitted request computes is published at once, so that the next one shares it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from radixkv.blocks.kv_manager import BlockCopy, KVManager, ResetStats, SequenceBlocks
from radixkv.cache.contract import PrefixCache
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, pack


@dataclass(eq=False, slots=True)
class _Held:
    """One request.

    Attributes:
        tokens: the engine's list; it grows.
        packed: as many of them as were packed already.
        namespace: what its KV depends on.
        sequence: its blocks; None before a look-up and after a refusal.
        is_admitted: whether it has blocks of its own.
        is_published: whether what it computes may be shared.
    """

    tokens: list[int]
    namespace: Namespace | None
    packed: bytearray = field(default_factory=bytearray)
    sequence: SequenceBlocks | None = None
    is_admitted: bool = False
    is_published: bool = True

    def span(self, start: int, end: int) -> bytes:
        """Returns tokens start .. end packed; each is packed once."""
        known = len(self.packed) // TOKEN_BYTES
        if known < end:
            self.packed += pack(self.tokens[known:end])
        return bytes(self.packed[start * TOKEN_BYTES : end * TOKEN_BYTES])


class SequenceTables:
    """The blocks of an engine's requests, by the engine's names of them.

    Args:
        cache: holds nothing yet; this object's alone from now on.
        num_blocks: blocks of the pool that may be handed out.
        first_block: the lowest id of the pool.
        publishes: False for a pool without a cache: nothing is found, and nothing kept.

    Attributes:
        manager: the manager below.
    """

    def __init__(self, cache: PrefixCache, num_blocks: int, *, first_block: int = 0, publishes: bool = True) -> None:
        self.manager = KVManager(cache, num_blocks, first_block=first_block)
        self._num_blocks = num_blocks
        self._publishes = publishes
        self._held: dict[str, _Held] = {}
        self._pending: set[str] = set()  # looked up in this step, and not admitted
        self._unpublished: dict[str, int] = {}  # running, scheduled in this step -> tokens computed after it
        self._has_admitted = False  # in this step

    # ---- a step

    def begin_step(self) -> None:
        """The step before is final: what it computed can be copied from. O(what it changed)."""
        self.manager.commit()

    def end_step(self) -> list[BlockCopy]:
        """Returns the copies to run before the step's forward pass. Nothing is asked of the step after this."""
        self._publish_running()
        for name in list(self._pending):
            self._cancel(name)
        self._has_admitted = False
        return self.manager.copies

    def look_up(
        self, name: str, tokens: list[int], namespace: Namespace | None, *, most: int | None = None, spare: int = 0
    ) -> int:
        """Matches a waiting request, and pins the match until it is admitted or the step ends.

        Args:
            name: the engine's name of the request.
            tokens: [n] its tokens: a list that the engine appends to and does not change otherwise (but see `rewind`).
            namespace: what its KV depends on; as at the first call.
            most: match at most so many; default all but the last.
            spare: blocks that are to stay available when the request has all of its own.

        Returns:
            Tokens that it need not compute. A match into a block, which takes a copy, is given up here where its source
            is the block that is missing, so the count is final.
        """
        self._publish_running()
        self._cancel(name)
        held = self._of(name, tokens, namespace)
        end = len(tokens) if most is None else min(len(tokens), most + 1)
        held.sequence = self.manager.begin(held.span(0, end), namespace)
        self._pending.add(name)
        spare = spare if self.has_admitted else 0
        self.manager.fits(held.sequence, len(tokens), spare=spare)
        return held.sequence.num_cached_tokens

    def allocate(
        self,
        name: str,
        tokens: list[int],
        namespace: Namespace | None,
        *,
        num_slots: int,
        num_computed: int,
        whole: int = 0,
        spare: int = 0,
        reserved: int = 0,
    ) -> list[int] | None:
        """Gives a request blocks for its first num_slots tokens, and publishes what this step computes of them.

        Args:
            name, tokens, namespace: as for `look_up`. A request that was not looked up matches nothing.
            num_slots: tokens that need a slot.
            num_computed: tokens computed when this step has run.
            whole: admit it only if blocks for so many tokens could be given to it.
            spare: blocks that are to stay available in either case.
            reserved: blocks that are to stay available besides.

        Returns:
            The new blocks, or None where there are too few; then it holds what it held before, and what a look-up
            pinned is unpinned.
        """
        held = self._of(name, tokens, namespace)
        if held.sequence is None:
            held.sequence = self.manager.begin(held.span(0, 1), namespace, match=False)
            self._pending.add(name)
        sequence, manager = held.sequence, self.manager
        available = manager.num_available - spare
        lacks_whole = manager.num_missing(sequence, whole) > available
        if lacks_whole or manager.num_missing(sequence, num_slots) > available - reserved:
            if name in self._pending:
                self._cancel(name)
            return None
        num_known = len(sequence.block_table)
        manager.grow(sequence, num_slots)
        if held.is_admitted:
            self._unpublished[name] = num_computed
        else:
            self._publish_running()
            self._pending.discard(name)
            held.is_admitted = self._has_admitted = True
            self._publish(held, num_computed)
        return sequence.block_table[num_known:].tolist()

    def publish(self, name: str, num_computed: int) -> None:
        """Publishes what a request has computed, between two steps. Nothing for one that holds no blocks."""
        held = self._held.get(name)
        if held is not None and held.is_admitted:
            self._publish(held, num_computed)

    def drop(self, name: str, num_computed: int) -> None:
        """Takes a request's blocks back. What it computed stays in the cache; nothing for a request that is not known.

        Args:
            num_computed: tokens computed by steps before the one that is being scheduled.

        Raises:
            RuntimeError: in a step that has admitted a request already: it may share what this one will not compute.
        """
        self._unpublished.pop(name, None)
        self._cancel(name)
        held = self._held.pop(name, None)
        if held is None or held.sequence is None:
            return
        if self._has_admitted:
            raise RuntimeError(f"{name}: expected no request to lose its blocks after one was admitted in a step")
        self.manager.commit()  # nothing of the step under way is published yet
        sequence = held.sequence
        if self._publishes and held.is_published:
            end = min(num_computed, len(held.tokens), len(sequence.block_table) * self.manager.cache.block_size)
            self._publish(held, end)
            self.manager.commit()
            start = sequence.lease.num_tokens
            if not sequence.lease.is_stale and start < end:
                self.manager.end(sequence, held.span(start, end), start=start)
                return
        self.manager.end(sequence)

    def rewind(self, name: str, num_tokens: int) -> None:
        """The engine has changed the request's tokens from num_tokens on, none of which is published."""
        if held := self._held.get(name):
            del held.packed[num_tokens * TOKEN_BYTES :]

    def keep_apart(self, name: str) -> None:
        """Publishes nothing more of a request: its KV depends on what its namespace does not say."""
        if held := self._held.get(name):
            held.is_published = False

    def reset(self) -> ResetStats:
        """Forgets what is cached, between two steps. Running requests go on with what they have, and share no more."""
        self.manager.commit()
        return self.manager.reset()

    # ---- what an engine asks about

    @property
    def has_admitted(self) -> bool:
        """Whether any request has blocks of its own. O(requests)."""
        return any(held.is_admitted for held in self._held.values())

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, 0 .. 1; what is cached and could be evicted is not held."""
        return 1 - self.manager.num_available / self._num_blocks

    def table(self, name: str) -> list[int]:
        """Returns a request's block table; none for one that holds no blocks."""
        held = self._held.get(name)
        return held.sequence.block_table.tolist() if held and held.sequence else []

    def num_cached(self, name: str) -> int:
        """Returns how many of a request's tokens are cached in whole blocks, as far as it holds them."""
        held = self._held.get(name)
        return held.sequence.lease.num_tokens if held and held.sequence else 0

    def names(self) -> Iterable[str]:
        """Returns the requests that are known."""
        return self._held.keys()

    # ---- inside

    def _of(self, name: str, tokens: list[int], namespace: Namespace | None) -> _Held:
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(tokens, namespace)
        return held

    def _cancel(self, name: str) -> None:
        if name in self._pending:
            self._pending.discard(name)
            held = self._held[name]
            assert held.sequence is not None
            self.manager.cancel(held.sequence)
            held.sequence = None

    def _publish_running(self) -> None:
        for name, num_computed in self._unpublished.items():
            self._publish(self._held[name], num_computed)
        self._unpublished.clear()

    def _publish(self, held: _Held, num_computed: int) -> None:
        sequence = held.sequence
        assert sequence is not None
        if not self._publishes or not held.is_published or sequence.lease.is_stale:
            return
        block_size, start = self.manager.cache.block_size, sequence.lease.num_tokens
        end = min(num_computed, len(held.tokens)) // block_size * block_size
        if end > start:
            self.manager.publish(sequence, held.span(start, end), start=start, keep_own=True)

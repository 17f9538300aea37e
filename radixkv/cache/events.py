"""What a cache tells others about its content: blocks stored, removed, cleared.

The three events have the names, the fields and the order of fields of vLLM's KV events
(`vllm/distributed/kv_events.py`), so that a wire format is a thin layer. Each cache owns an `EventEmitter`; it calls it
from `commit` and `evict`, and only while someone subscribes. The hash of a block chains over all tokens and extra keys
before it (`radixkv.cache.hashing`), so equal content has equal hashes in every cache that hashes alike.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from radixkv.cache.hashing import BlockHasher, ExtraKeys, extra_keys, lora_name
from radixkv.cache.namespace import Namespace, parts
from radixkv.cache.tokens import TOKEN_BYTES

BlockHash = bytes | int

_log = logging.getLogger("radixkv")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of blocks, each the next one's parent, now held; none of the hashes was held before.

    Attributes:
        block_hashes: [n] digests; other engines' may be integers.
        parent_block_hash: of the block before the first; None where the run starts a request.
        token_ids: [n * block_size] int32 packed.
        block_size: tokens per block.
        lora_id: always None; vLLM's older field, kept for the order.
        medium: where the blocks are; to be filled in where the event is put on a wire.
        lora_name: the adapter that all blocks of the run depend on.
        extra_keys: [n] what else went into each hash, as `radixkv.cache.hashing.extra_keys` yields it; None where
            nothing did in any block.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: bytes
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Hashes of which the last copy is gone."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is held any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
Callback = Callable[[int, Event], None]


@dataclass(slots=True)
class _Subscriber:
    callback: Callback
    announce: Callable[[], None]  # of the cache: all that it has committed
    num_events: int = 0
    failure: BaseException | None = None  # of its callback: it hears nothing until it is told everything anew


class EventEmitter:
    """Turns blocks stored and removed into numbered events, one emitter a cache.

    Attributes:
        active: whether anyone subscribes. Without subscribers a cache skips the emitter, and radix any hashing.

    A callback runs inside `commit` or `evict` and must not call the cache. One that raises is *behind*: `catch_up`,
    at the next commit, tells it everything anew, and ends its subscription where that fails too.
    """

    def __init__(self, block_size: int, hasher: BlockHasher | None = None) -> None:
        """Makes an emitter without subscribers.

        Args:
            block_size: tokens per block.
            hasher: for `stored`; default sha256_cbor, made at the first subscription, because cbor2 is optional.
        """
        self.active = False
        self._block_size = block_size
        self._hasher = hasher
        self._audience: list[_Subscriber] = []
        self._is_any_behind = False
        self._hash_of: dict[int, bytes] = {}  # by block id, announced blocks
        self._copies: dict[bytes, int] = {}  # by hash, announced blocks that have it

    def subscribe(self, callback: Callback, announce: Callable[[], None]) -> Callable[[], None]:
        """Adds a subscriber, which hears of everything held now before anything else.

        Args:
            callback: called as `callback(number, event)`; numbers count from 0 for each subscriber, so that one
                that is missed shows; then subscribe anew.
            announce: the cache's: calls `stored` or `publish` for all that it has committed, parents first.

        Returns:
            A function that ends the subscription; a second call does nothing.

        Raises:
            ImportError: the default hash algorithm's library is not installed.

        Cost: O(content). The others hear nothing of the announcement.
        """
        if self._hasher is None:
            self._hasher = BlockHasher("sha256_cbor", self._block_size)
        subscriber = _Subscriber(callback, announce)
        self._announce_to(subscriber)
        return lambda: self._unsubscribe(subscriber)

    def _announce_to(self, subscriber: _Subscriber) -> None:
        """Announces all that is held to one subscriber, and then adds it to the audience. Raises what it raises."""
        before = self._hash_of, self._copies, self._audience, self.active
        try:
            # The maps follow from the content, so announcing it to one alone fills them as they were.
            self._hash_of, self._copies, self._audience, self.active = {}, {}, [subscriber], True
            subscriber.announce()
            if subscriber.failure is not None:
                raise subscriber.failure
        except BaseException:
            self._hash_of, self._copies, self._audience, self.active = before
            raise
        self._audience = [*(other for other in before[2] if other is not subscriber), subscriber]

    def catch_up(self) -> None:
        """Tells those that are behind everything anew. O(1) where nothing is; the cache calls it when it is whole."""
        if not self._is_any_behind:
            return
        for subscriber in [other for other in self._audience if other.failure is not None]:
            subscriber.failure = None
            try:
                self._tell(subscriber, AllBlocksCleared())
                self._announce_to(subscriber)
            except Exception:
                _log.exception("a subscriber of cache events failed again: its subscription ends")
                self._unsubscribe(subscriber)
        self._is_any_behind = False

    def stored(
        self,
        parent_block_id: int | None,
        block_ids: Sequence[int],
        token_ids: bytes,
        namespace: Namespace | None = None,
        start: int = 0,
    ) -> None:
        """Announces a chain of full blocks, and hashes them.

        Args:
            parent_block_id: the block before the first, announced earlier; None where start is 0.
            block_ids: [n] of the chain.
            token_ids: [n * block_size] int32 packed, as the request has them (see `Interner.unmark`).
            namespace: all parts of the path from position 0 on, those that start before `start` included.
            start: position of the first token.

        Raises:
            ValueError: parent_block_id was not announced, or is missing.

        Cost: O(n) digests.
        """
        assert self._hasher is not None, "stored without a subscriber"
        if parent_block_id is None and start:
            raise ValueError(f"parent_block_id: expected the block before position {start}, got None")
        if parent_block_id is not None and parent_block_id not in self._hash_of:
            raise ValueError(f"parent_block_id: expected a block announced earlier, got {parent_block_id}")
        parent = None if parent_block_id is None else self._hash_of[parent_block_id]
        found = parts(namespace)
        hashes = list(self._hasher.chain(self._hasher.seed if parent is None else parent, token_ids, found, start))
        keys = list(islice(extra_keys(found, start, self._block_size), len(hashes)))
        self.publish(parent, block_ids, hashes, token_ids, keys)

    def publish(
        self,
        parent_hash: bytes | None,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        token_ids: bytes,
        keys: Sequence[ExtraKeys],
    ) -> None:
        """Announces a chain of full blocks whose hashes are known: `stored` for a cache that has hashed already.

        Hashes of which a copy was announced before are counted and not told again.

        Args:
            parent_hash: of the block before the first; None where there is none.
            block_ids, block_hashes, keys: [n] of the chain.
            token_ids: [n * block_size] int32 packed.
        """
        first, count = 0, len(block_ids)
        for i in range(count):
            block_hash = block_hashes[i]
            copies = self._copies.get(block_hash, 0)
            self._copies[block_hash] = copies + 1
            self._hash_of[block_ids[i]] = block_hash
            if copies or (i > first and lora_name(keys[i]) != lora_name(keys[first])):
                self._emit_run(parent_hash, block_hashes, token_ids, keys, first, i)
                first = i + 1 if copies else i
        self._emit_run(parent_hash, block_hashes, token_ids, keys, first, count)

    def removed(self, block_ids: Iterable[int]) -> None:
        """Announces that these blocks hold nothing any more. Blocks that were never announced are passed over."""
        gone = []
        for block_id in block_ids:
            block_hash = self._hash_of.pop(block_id, None)
            if block_hash is None:
                continue
            self._copies[block_hash] -= 1
            if not self._copies[block_hash]:
                del self._copies[block_hash]
                gone.append(block_hash)
        if gone:
            self._emit(BlockRemoved(tuple(gone)))

    def cleared(self) -> None:
        """Announces that the cache holds nothing any more; so whatever was behind is up to date."""
        self._hash_of.clear()
        self._copies.clear()
        for subscriber in self._audience:
            subscriber.failure = None
        self._is_any_behind = False
        self._emit(AllBlocksCleared())

    def _emit_run(
        self,
        parent_hash: bytes | None,
        block_hashes: Sequence[bytes],
        token_ids: bytes,
        keys: Sequence[ExtraKeys],
        start: int,
        stop: int,
    ) -> None:
        if start >= stop:
            return
        width = self._block_size * TOKEN_BYTES
        run_keys = tuple(keys[start:stop])
        self._emit(
            BlockStored(
                block_hashes=tuple(block_hashes[start:stop]),
                parent_block_hash=block_hashes[start - 1] if start else parent_hash,
                token_ids=token_ids[start * width : stop * width],
                block_size=self._block_size,
                lora_name=lora_name(run_keys[0]),
                extra_keys=run_keys if any(run_keys) else None,
            )
        )

    def _emit(self, event: Event) -> None:
        for subscriber in self._audience:
            if subscriber.failure is None:
                self._tell(subscriber, event)

    def _tell(self, subscriber: _Subscriber, event: Event) -> None:
        number = subscriber.num_events
        subscriber.num_events += 1  # also where it fails: then the numbers that it sees have a gap
        try:
            subscriber.callback(number, event)
        except BaseException as error:
            subscriber.failure, self._is_any_behind = error, True
            if not isinstance(error, Exception):
                raise
            _log.exception("a subscriber of cache events failed: it is told everything anew at the next commit")

    def _unsubscribe(self, subscriber: _Subscriber) -> None:
        self._audience = [other for other in self._audience if other is not subscriber]
        if not self._audience:
            self.active = False
            self._hash_of.clear()
            self._copies.clear()

"""FlatHashCache: a flat map from chained block hashes to blocks, by vLLM's rules. The baseline that people run.

The rules (vLLM, automatic prefix caching, `vllm/v1/core/block_pool.py`): full blocks only; a lookup stops at the first
miss; blocks of equal content are all kept; an unpinned block waits in a queue, where a hit takes it out again and
eviction takes the first. vLLM's one free queue is, in this order, the allocator's free blocks (never hashed)
and this cache's queue.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from radixkv.cache.contract import (
    NO_BLOCKS,
    NO_DUPLICATES,
    Blocks,
    CacheCorruption,
    CacheSizes,
    Lease,
    PartialBlock,
    Rank,
    Reset,
    TenantCaps,
    Watch,
    check_block_size,
    check_caps,
    check_count,
    check_live,
    check_watching,
    pack_blocks,
)
from radixkv.cache.events import Callback, EventEmitter
from radixkv.cache.flat_hash.block_map import BlockMap
from radixkv.cache.flat_hash.contents import BlockContents
from radixkv.cache.flat_hash.free_queue import FreeQueue
from radixkv.cache.flat_hash.namespaces import BlockParts, QueueTenants
from radixkv.cache.flat_hash.watches import HashWatches
from radixkv.cache.hashing import CRYPTOGRAPHIC, BlockHasher, Parts
from radixkv.cache.namespace import Namespace, kinds, parts
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack, unpack


class _Cursor:
    """Where a lease stands: the blocks it pins, and the hash of the first block that missed, if that is known."""

    __slots__ = ("blocks", "missed_hash", "missed_tokens", "parts")

    def __init__(self, found: Parts) -> None:
        self.blocks: list[int] = []
        self.parts = found
        self.missed_hash: bytes | None = None
        self.missed_tokens = b""


class FlatHashCache:
    """A prefix cache keyed by the hash of each full block and all before it.

    >>> from radixkv.cache.flat_hash.cache import FlatHashCache
    >>> cache = FlatHashCache(block_size=4)
    >>> lease = cache.acquire([1, 2, 3, 4, 5, 6])                # nothing is cached yet
    >>> duplicates = cache.insert(lease, [1, 2, 3, 4, 5, 6, 7, 8], block_ids=[10, 11])
    >>> cache.commit()
    >>> cache.release(lease)
    >>> lease = cache.acquire([1, 2, 3, 4, 5, 6, 9])
    >>> lease.num_tokens, lease.block_ids.tolist()               # full blocks alone
    (4, [10])
    >>> cache.sizes
    CacheSizes(pinned=1, evictable=1)

    Attributes:
        block_size: number of tokens in a block.
        partial_blocks: False, always.
        hash_ns: time spent hashing, in the unit of `clock_ns`, since the cache was made. Counts the test that ends a
            lookup at the first miss, and nothing else of it.
        num_collisions: hits refused because the block held something else under the same hash (`verify=True` only).
    """

    partial_blocks = False

    def __init__(
        self,
        block_size: int,
        *,
        hash_algorithm: str = "sha256",
        verify: bool = False,
        digest_bits: int | None = None,
        accept_collisions: bool = False,
        tenant_caps: TenantCaps | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Makes an empty cache.

        Args:
            block_size: tokens per block.
            hash_algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor".
            verify: keep every block's tokens and serve it only where they agree, whatever the hash says.
            digest_bits: cut digests to so many bits; None keeps them whole.
            accept_collisions: allow truncated or non-cryptographic hashes without verification. A collision returns
                another request's KV.
            tenant_caps: number of unpinned blocks that the cache holds at most of a tenant (a `Salt`): one for every
                tenant, or numbers by the salt's value; None: no caps (`radixkv.cache.flat_hash.namespaces`).
            clock_ns: what `hash_ns` is measured with.

        Raises:
            ValueError: a bad argument; a hash that is not cryptographic, or is cut, without verify or acceptance.
            ImportError: the hash's library is not installed.
        """
        self.block_size = check_block_size(block_size)
        self._hasher = BlockHasher(hash_algorithm, block_size, digest_bits=digest_bits)
        if (hash_algorithm not in CRYPTOGRAPHIC or digest_bits is not None) and not (verify or accept_collisions):
            cut = "" if digest_bits is None else f" cut to {digest_bits} bits"
            raise ValueError(
                f"accept_collisions: expected True (or verify=True) with {hash_algorithm}{cut}, got {accept_collisions}"
            )
        self.verify = verify
        self.hash_ns = 0
        self.num_collisions = 0
        self.owner: Any = None
        self._clock_ns = clock_ns
        self._block_bytes = TOKEN_BYTES * block_size
        self._caps = None if tenant_caps is None else check_caps(tenant_caps)
        self._events = EventEmitter(block_size, self._hasher)
        self._begin()

    def _begin(self) -> None:
        """Makes an empty map and all that goes with it."""
        self._map = BlockMap()
        self._queue = FreeQueue()
        self._watches = HashWatches(self._map.held, self.block_size)
        self._leases: dict[Lease, None] = {}
        self._uncommitted: dict[int, None] = {}  # blocks inserted since the last commit, in order
        self._contents = BlockContents(self.block_size) if self.verify or self._events.active else None
        self._parts_of = BlockParts(self.block_size)
        self._tenants = None if self._caps is None else QueueTenants(self._queue, self._caps, self._parts_of)
        self._forgotten: set[int] = set()  # pinned, but no longer in the map
        self._dead_blocks: list[int] = []  # no longer in the map, and not pinned any more

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        """Returns how many tokens of full blocks are cached. Changes nothing (but `hash_ns`).

        Args:
            token_ids: [n] of a request, from position 0.
            namespace: what else its KV depends on.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: O(match); hashes the match and one block more.
        """
        num_collisions = self.num_collisions
        matched = self._match(_Cursor(parts(namespace)), pack(token_ids))
        self.num_collisions = num_collisions
        return len(matched) * self.block_size

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        """Pins the longest match of full blocks.

        Args:
            token_ids: [n] of a request, from position 0; without the last where one token must be computed.
            namespace: what else its KV depends on, or is to be kept apart by.

        Returns:
            A lease, to be ended by `release` or `cancel`.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: O(match); hashes the match and one block more.
        """
        cursor = _Cursor(parts(namespace))
        cursor.blocks = blocks = self._match(cursor, pack(token_ids))
        self._queue.pin(blocks)
        lease = Lease(cursor, len(blocks) * self.block_size, np.array(blocks, np.int32), namespace)
        self._leases[lease] = None
        return lease

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        """Matches on from the lease's end, and moves the lease to the end of the match.

        Args:
            lease: of this request.
            token_ids: [n] the tokens after the lease's end.

        Returns:
            [gained] int32, the blocks that the lease pins in addition.

        Raises:
            ValueError: bad tokens, or the lease has ended.

        Cost: O(new match); a block that missed before is not hashed again.
        """
        cursor = self._cursor(lease)
        packed = pack(token_ids)
        blocks = [] if lease.is_stale else self._match(cursor, packed)
        if not blocks:
            return NO_BLOCKS
        self._queue.pin(blocks)
        cursor.blocks += blocks
        lease.num_tokens += len(blocks) * self.block_size
        return np.array(blocks, np.int32)

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        """Publishes the full blocks after the lease's end; blocks of equal content are kept beside those cached.

        >>> cache = FlatHashCache(block_size=2)
        >>> first, second = cache.acquire([1, 2]), cache.acquire([1, 2])
        >>> cache.insert(first, [1, 2], [10]).tolist(), cache.insert(second, [1, 2], [20]).tolist()
        ([], [])
        >>> cache.sizes
        CacheSizes(pinned=2, evictable=0)

        Args:
            lease: of this request; moves to the end of what is published.
            token_ids: [n] the tokens after the lease's end; an incomplete last block is ignored.
            block_ids: [>= n // block_size] the blocks that hold them.

        Returns:
            No duplicates, [0, 2] int32, ever.

        Raises:
            ValueError: bad tokens or blocks, too few blocks, a block given twice or cached already. Changes nothing.

        Cost: O(tokens inserted).
        """
        cursor = self._cursor(lease)
        packed = pack(token_ids)
        num_blocks = len(packed) // self._block_bytes
        ids = unpack(pack_blocks(block_ids, num_blocks)).tolist()
        if len(set(ids)) != num_blocks or not self._map.hash_of.keys().isdisjoint(ids):
            twice = next(block for i, block in enumerate(ids) if block in self._map.hash_of or block in ids[:i])
            raise ValueError(f"block_ids: expected blocks that are not cached yet, each once, got {twice}")
        if not num_blocks or lease.is_stale:
            return NO_DUPLICATES
        began = self._clock_ns()
        hashes = list(self._hashes(cursor, packed))
        self.hash_ns += self._clock_ns() - began
        if self._contents is not None:
            self._contents.keep(self._map, cursor.blocks, hashes, packed, cursor.parts, ids)
        self._parts_of.keep(ids, cursor.parts, len(cursor.blocks))
        self._map.add(hashes, ids)
        self._queue.pin(ids)
        if self._watches:
            self._watches.added(hashes)
        self._uncommitted.update(dict.fromkeys(ids))
        cursor.blocks += ids
        cursor.missed_hash = None
        lease.num_tokens += num_blocks * self.block_size
        return NO_DUPLICATES

    def unpin_partial(self, lease: Lease) -> None:
        """Does nothing: there are no partial matches here."""
        self._cursor(lease)

    def release(self, lease: Lease, partial_block: PartialBlock | None = None) -> None:
        """Ends the lease. Blocks that no lease pins any more join the queue, the last of the request first.

        Raises:
            ValueError: the lease was released already; a partial block, because only full blocks are cached here.

        Cost: O(blocks of the lease).
        """
        cursor = self._cursor(lease)
        if partial_block is not None:
            raise ValueError(f"partial_block: expected None from a cache of full blocks, got {partial_block!r}")
        del self._leases[lease]
        lease.released = True
        self._queue.unpin(cursor.blocks)
        self._bury(cursor.blocks)
        if self._tenants is not None:
            over = self._tenants.take_over_caps()
            self._forget(over)
            self._dead_blocks += over
            if self._events.active:
                self._events.removed(over)

    def cancel(self, lease: Lease) -> None:
        """Ends a lease as if it had never been acquired: the queue is in the order it would have had. O(blocks).

        Raises:
            ValueError: the lease was released already, or has grown since `acquire`.
        """
        cursor = self._cursor(lease)
        if len(cursor.blocks) > len(lease.block_ids):
            raise ValueError(f"lease: expected one that has not grown since acquire, got {lease!r}")
        del self._leases[lease]
        lease.released = True
        self._queue.cancel(cursor.blocks)
        self._bury(cursor.blocks)

    def _bury(self, blocks: list[int]) -> None:
        """Of blocks just unpinned, takes those out of the queue that were forgotten and that no lease pins any more."""
        if self._forgotten:
            gone = [block for block in blocks if block in self._forgotten and block not in self._queue.num_pins]
            self._queue.remove(gone)
            self._forgotten.difference_update(gone)
            self._dead_blocks += gone

    def commit(self) -> None:
        """The step's KV is computed: what was inserted is announced. O(1); with subscribers O(inserted)."""
        if self._uncommitted:
            if self._events.active:
                assert self._contents is not None
                self._contents.announce(self._uncommitted, self._events)
            self._uncommitted = {}
        self._events.catch_up()

    def withdraw(self) -> Blocks:
        """Takes out every block inserted since the last commit, and cuts back all leases to before the first of them.

        Returns [n] int32, the newest first. A lease's `block_ids` stay as `acquire` set them. O(blocks of all leases).
        """
        uncommitted, self._uncommitted = self._uncommitted, {}
        if not uncommitted:
            return NO_BLOCKS
        for lease in self._leases:
            held = lease.cursor.blocks
            keep = next((i for i, block in enumerate(held) if block in uncommitted), None)
            if keep is not None:
                self._queue.unpin(held[keep:])
                del held[keep:]
                lease.cursor.missed_hash = None
                lease.num_tokens = keep * self.block_size
        blocks = list(reversed(uncommitted))
        self._queue.remove(blocks)
        self._forget(blocks)
        return np.array(blocks, np.int32)

    def reset(self, namespace: Namespace | None = None) -> Reset:
        """Forgets what it holds now: nothing of it is matched again, nor what live leases compute on top of it.

        Args:
            namespace: forget only what depends on one of these parts, wherever they start; None: everything.

        Returns:
            The unpinned blocks, the caller's again, and the number of pinned ones, which are dead when the leases on
            them have ended.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: a bad namespace.

        Cost: O(everything).
        """
        if self._uncommitted:
            raise RuntimeError("reset: expected the step to be committed or withdrawn before")
        concerned = kinds(namespace)
        for lease in self._leases:
            lease.is_stale |= namespace is None or not concerned.isdisjoint(kinds(lease.namespace))
        forgotten = list(self._map.hash_of) if namespace is None else self._parts_of.depending_on(concerned)
        given_up = [block for block in forgotten if block not in self._queue.num_pins]
        self._queue.remove(given_up)
        self._forget(forgotten)
        kept = set(forgotten).difference(given_up)
        self._forgotten |= kept
        if self._events.active:
            if namespace is None:
                self._events.cleared()
            else:
                self._events.removed(forgotten)
        return Reset(np.array(given_up, np.int32), len(kept))

    def clear(self) -> None:
        """Begins anew, with nothing, whatever state an interrupted call has left (see `PrefixCache.clear`).

        Cost: O(leases + watches).
        """
        for lease in self._leases:
            lease.released = True
        self._watches.end_all()
        self._begin()
        self._events.cleared()

    def evict(self, num_blocks: int) -> Blocks:
        """Gives up dead blocks, then the first blocks of the queue, in order.

        >>> cache = FlatHashCache(block_size=1)
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2, 3], [10, 11, 12])
        >>> cache.release(lease)
        >>> cache.evict(2).tolist(), cache.peek([1, 2, 3])
        ([12, 11], 1)

        Returns:
            [<= num_blocks] int32, fewer only where fewer are unpinned.

        Raises:
            ValueError: num_blocks is no count.

        Cost: O(num_blocks).
        """
        dead = self._dead_blocks[: check_count("num_blocks", num_blocks)]
        del self._dead_blocks[: len(dead)]
        blocks = self._queue.take(num_blocks - len(dead), self._rank if self._watches else None)
        self._forget(blocks)
        if self._events.active:
            self._events.removed(blocks)
        return np.array(dead + blocks, np.int32)

    def watch(
        self,
        token_ids: TokenIds,
        namespace: Namespace | None = None,
        *,
        rank: Rank | None = None,
        changed: Callable[[], None] | None = None,
    ) -> Watch:
        """Follows how many of these tokens are cached in full blocks, and pins nothing.

        Args:
            token_ids: [n] of a request, from position 0.
            namespace: as for `acquire`.
            rank: where given, what it matches is evicted after all that no such watch matches, the lowest rank first.
            changed: called whenever the number has changed. It must not call the cache.

        Raises:
            ValueError: bad tokens, namespace or rank.

        Cost: a hash for each block matched, now or later.
        """
        packed = pack(token_ids)
        watch = Watch(packed, namespace is None, rank, None)
        self._watches.add(watch, self._hashes(_Cursor(parts(namespace)), packed))
        watch.changed = changed
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch; blocks that no watch with a rank matches any more are evicted first from now on.

        Raises:
            ValueError: it has ended already.

        Cost: O(blocks matched).
        """
        check_watching(watch)
        self._end_deferral(self._watches.remove(watch))

    def _rank(self, block: int) -> Rank | None:
        return self._watches.rank(self._map.hash_of[block])

    def _end_deferral(self, hashes: list[bytes]) -> None:
        for block_hash in hashes:
            if self._watches.rank(block_hash) is None:
                self._queue.end_deferral(self._map.all(block_hash))

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Announces what is committed to `callback(number, event)`, and from then on what changes.

        Raises:
            ValueError: the cache holds blocks without their tokens: subscribe before the first insert, or use
                verify=True. From the first subscription on, tokens are kept.

        Cost: O(content).
        """
        if self._contents is None:
            if num_blocks := len(self._map.hash_of):
                raise ValueError(
                    f"subscribe: expected an empty cache or verify=True, got {num_blocks} blocks without their tokens"
                )
            self._contents = BlockContents(self.block_size)
        return self._events.subscribe(callback, self._announce_all)

    def _announce_all(self) -> None:
        assert self._contents is not None
        committed = (block for block in self._map.hash_of if block not in self._uncommitted)
        self._contents.announce(committed, self._events)

    @property
    def sizes(self) -> CacheSizes:
        """Number of blocks held, pinned and evictable. O(1)."""
        num_pinned = len(self._queue.num_pins)
        num_blocks = len(self._map.hash_of) + len(self._forgotten) + len(self._dead_blocks)
        return CacheSizes(num_pinned, num_blocks - num_pinned)

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens whose KV its blocks hold. O(1)."""
        return len(self._map.hash_of) * self.block_size

    @property
    def num_dead_blocks(self) -> int:
        """Of the evictable blocks, those that no match finds any more. `evict` gives them up first. O(1)."""
        return len(self._dead_blocks)

    def _cursor(self, lease: Lease) -> _Cursor:
        check_live(lease)
        if lease not in self._leases:
            raise ValueError(f"lease: expected one that this cache gave, got {lease!r}")
        return lease.cursor

    def _hashes(self, cursor: _Cursor, packed: bytes) -> Iterator[bytes]:
        """Yields the hashes of the full blocks after the cursor; a block that missed there before is not rehashed."""
        position = len(cursor.blocks) * self.block_size
        if cursor.missed_hash is not None and packed.startswith(cursor.missed_tokens):
            rest = memoryview(packed)[self._block_bytes :]
            known = cursor.missed_hash
            return chain((known,), self._hasher.chain(known, rest, cursor.parts, position + self.block_size))
        parent = self._map.hash_of[cursor.blocks[-1]] if cursor.blocks else self._hasher.seed
        return self._hasher.chain(parent, packed, cursor.parts, position)

    def _match(self, cursor: _Cursor, packed: bytes) -> list[int]:
        """Returns the cached blocks that go on from the cursor, and notes there the hash that missed."""
        cached = self._map.held
        hashes: list[bytes] = []
        missed = None
        # Hashing, and what is looked up by it, in two passes: two clock readings, and not two for each block.
        began = self._clock_ns()
        for block_hash in self._hashes(cursor, packed):
            if block_hash not in cached:
                missed = block_hash
                break
            hashes.append(block_hash)
        self.hash_ns += self._clock_ns() - began
        if self.verify:
            assert self._contents is not None
            blocks = self._contents.verify(self._map, cursor.blocks, hashes, packed, cursor.parts)
            if len(blocks) < len(hashes):
                missed = hashes[len(blocks)]
                self.num_collisions += 1
        else:
            blocks = self._map.oldest(hashes)
        cursor.missed_hash = missed
        if missed is not None:
            at = len(blocks) * self._block_bytes
            cursor.missed_tokens = packed[at : at + self._block_bytes]
        return blocks

    def _forget(self, blocks: list[int]) -> None:
        if self._uncommitted:
            for block in blocks:
                self._uncommitted.pop(block, None)
        hashes = {self._map.hash_of[block] for block in blocks} if self._watches else ()
        self._map.remove(blocks)
        self._parts_of.forget(blocks)
        for block_hash in hashes:
            if block_hash not in self._map.held:
                self._end_deferral(self._watches.removed(block_hash))
        if self._contents is not None:
            for block in blocks:
                del self._contents[block]

    def check(self) -> None:
        """Asserts every invariant. Raises CacheCorruption. O(everything)."""
        num_pins: dict[int, int] = {}
        for lease in self._leases:
            held = lease.cursor.blocks
            _require(not lease.released, f"{lease} is registered")
            _require(lease.num_tokens == len(held) * self.block_size, f"{lease} pins {len(held)} blocks")
            for block in held:
                num_pins[block] = num_pins.get(block, 0) + 1
        pinned, waiting, hashed = self._queue.num_pins, self._queue.unpinned(), self._map.hash_of
        _require(num_pins == pinned, "pins are not those of the leases")
        held = hashed.keys() | self._forgotten
        _require(pinned.keys() | set(waiting) == held, "a block is neither pinned nor queued, or unhashed")
        _require(self._forgotten <= pinned.keys() - hashed.keys(), "a block that was forgotten is free or found")
        _require(self._parts_of.keys() <= hashed.keys(), "parts are kept of a block that is gone")
        _require(held.isdisjoint(self._dead_blocks), "a dead block is held")
        _require(self._uncommitted.keys() <= hashed.keys(), "a block that is gone counts as uncommitted")
        self._map.check()
        self._queue.check()
        self._watches.check()
        if self._contents is not None:
            self._contents.check(hashed, self._hasher)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CacheCorruption(otherwise)

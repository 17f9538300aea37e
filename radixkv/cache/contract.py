"""The one contract of every prefix cache. Token ids and block ids only: no tensors, no requests, no allocator.

The cache owns what was inserted and not yet evicted or withdrawn; every other block is the caller's.

One step, in order::

    lease = cache.acquire(token_ids[:-1])       # the longest match, pinned
    ...                                         # the caller allocates blocks for the rest, evicting where needed
    cache.insert(lease, token_ids_after_the_lease, block_ids)   # publish, when the step that fills them is scheduled
    cache.commit()                              # the step has run (or: cache.withdraw(), it has failed)
    cache.release(lease, partial_block)         # the request has ended

State that is not KV, such as that of recurrent layers, has no blocks. It belongs to a position: `radixkv.cache.hybrid`
hangs checkpoints at positions of a radix tree. Nothing here knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, has_negative, pack, unpack

Blocks = np.ndarray  # [n] int32 block ids
NO_BLOCKS: Blocks = np.empty(0, np.int32)
NO_BLOCKS.flags.writeable = False
NO_DUPLICATES: Blocks = np.empty((0, 2), np.int32)
NO_DUPLICATES.flags.writeable = False

MAX_BLOCK_SIZE = 16_384  # tokens: a block that holds the largest states of hybrid models has 8,320

Rank = tuple[float, float]  # of what is evicted after all else: the lowest goes first
TenantCaps = int | Mapping[str, int]  # number of blocks for each tenant, or for each by the value of its salt


class CacheCorruption(AssertionError):
    """An invariant of a cache does not hold: a fault in the cache, or blocks inserted twice."""


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """A cached block of which the first `num_tokens` tokens agree with the tokens after a lease's end."""

    block_id: int
    num_tokens: int


class PartialBlock(NamedTuple):
    """A partly filled last block: the tokens after the lease's end, fewer than a block, and the block they are in."""

    token_ids: TokenIds
    block_id: int


class CacheSizes(NamedTuple):
    """Number of blocks held by a cache: those that leases pin, and those that `evict` could return."""

    pinned: int
    evictable: int


class Reset(NamedTuple):
    """What a reset did. The cache gives `block_ids` up; `num_pinned` blocks follow as the leases on them end."""

    block_ids: Blocks
    num_pinned: int


class Lease:
    """A pinned match and a cursor: `insert` and `advance` go on from its end. Made by `acquire`, ended by `release`.

    Attributes:
        num_tokens: number of tokens in whole blocks from position 0 that the lease pins; grows with `advance` and
            `insert`, and shrinks only by `withdraw`.
        block_ids: [num_tokens at acquire / block_size] int32, what `acquire` matched.
        partial: a partial match of the next block, its source pinned until `unpin_partial` or `release`; or None.
        namespace: as given to `acquire`.
        released: whether the lease has ended.
        is_stale: a reset concerned it. It keeps what it pins, for itself alone: it gains and publishes nothing more.
    """

    __slots__ = ("_block_ids", "cursor", "is_stale", "namespace", "num_tokens", "partial", "released", "source")

    def __init__(
        self, cursor: Any, num_tokens: int, block_ids: Blocks | list[bytes], namespace: Namespace | None
    ) -> None:
        self.cursor = cursor  # the cache's own: where the lease ends
        self.source: Any = None  # the cache's own: what the partial match pins
        self.num_tokens = num_tokens
        self._block_ids = block_ids
        self.partial: PartialMatch | None = None
        self.namespace = namespace
        self.released = False
        self.is_stale = False

    @property
    def block_ids(self) -> Blocks:
        """[num_tokens at acquire / block_size] int32, what `acquire` matched. Cost: O(blocks) on first access."""
        if type(self._block_ids) is list:  # packed runs, joined on first access; `insert` never needs them
            self._block_ids = np.frombuffer(b"".join(self._block_ids), np.int32) if self._block_ids else NO_BLOCKS
        return self._block_ids  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "released" if self.released else f"partial={self.partial}"
        return f"Lease(num_tokens={self.num_tokens}, {state})"


class Watch:
    """How far a request's tokens are cached in whole blocks, now. Made by `watch`, ended by `unwatch`.

    Attributes:
        num_tokens: number of tokens cached now; follows every insertion and eviction.
        rank: None, or: what it matches is evicted after all that no such watch matches, the lowest rank first.
        changed: None, or called whenever num_tokens has changed.
    """

    __slots__ = ("changed", "cursor", "is_plain", "key", "num_tokens", "rank")

    def __init__(self, key: bytes, is_plain: bool, rank: Rank | None, changed: Callable[[], None] | None) -> None:
        if rank is not None and not (isinstance(rank, tuple) and len(rank) == 2 and all(x == x for x in rank)):
            raise ValueError(f"rank: expected None or two numbers, got {rank!r}")
        self.key = key  # packed, as the cache compares it
        self.is_plain = is_plain  # no namespace is folded into the key
        self.num_tokens = 0
        self.rank = rank
        self.changed = changed
        self.cursor: Any = None  # the cache's own: where the match ends; None once the watch has ended

    def __repr__(self) -> str:
        return f"Watch(num_tokens={self.num_tokens}, rank={self.rank})"

    def move(self, num_tokens: int) -> None:
        """Sets num_tokens, and calls `changed` if that is another number."""
        if num_tokens != self.num_tokens:
            self.num_tokens = num_tokens
            if self.changed is not None:
                self.changed()


class PrefixCache(Protocol):
    """What every cache does.

    Token ids are packed bytes, which cost nothing, or anything that `radixkv.cache.tokens.pack` takes. A method that
    raises ValueError has changed nothing.

    Attributes:
        block_size: number of tokens in a block.
        partial_blocks: whether matches go on into a block, and `release` takes partial blocks.
        owner: what allocates its blocks (`take_over`), or None.
    """

    block_size: int
    partial_blocks: bool
    owner: Any

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        """Returns how many of these tokens are cached, those of a partial match included. Changes nothing.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: O(match).
        """
        ...

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        """Pins the longest match. Pass `token_ids[:-1]` where one token must be computed: the match is never cut.

        Args:
            token_ids: [n] of a request, from position 0.
            namespace: what else its KV depends on, or is to be kept apart by.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: O(match).
        """
        ...

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        """Matches on from the lease's end, and moves the lease to the end of the match.

        Args:
            lease: of this request.
            token_ids: [n] the tokens after the lease's end.

        Returns:
            [gained] int32, the blocks that the lease pins in addition.

        Raises:
            ValueError: bad tokens, or the lease has ended.

        Cost: O(match).
        """
        ...

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        """Publishes the full blocks after the lease's end, and moves the lease there.

        Args:
            lease: of this request.
            token_ids: [n] the tokens after the lease's end; an incomplete last block is ignored.
            block_ids: [>= n // block_size] the blocks that hold them.

        Returns:
            Duplicates, [d, 2] int32 rows of (caller's, cached): for the first d blocks the cache already held the
            same tokens. It keeps its own; the caller keeps its own too, and should use the cache's.

        Raises:
            ValueError: bad tokens or ids, too few blocks, a block that the cache holds already or that comes twice, or
                the lease has ended.

        Cost: O(n).
        """
        ...

    def unpin_partial(self, lease: Lease) -> None:
        """Unpins the source of a partial match: the copy has run, or there is no room for it. Nothing without one.

        Raises:
            ValueError: the lease has ended.
        """
        ...

    def release(self, lease: Lease, partial_block: PartialBlock | None = None) -> None:
        """Ends the lease. What no lease pins any more was used last now.

        Args:
            lease: one that has not ended.
            partial_block: the request's last block, partly filled and already computed. From here on the cache owns
                it, whether it can use it or not.

        Raises:
            ValueError: the lease has ended; a bad partial block, or one given to a cache without partial blocks.

        Cost: O(blocks of the lease) at most.
        """
        ...

    def cancel(self, lease: Lease) -> None:
        """Ends a lease as if it had never been acquired: recency stays as it was.

        Raises:
            ValueError: the lease has ended, or has grown by `insert` or `advance`.

        Cost: as `release`.
        """
        ...

    def commit(self) -> None:
        """The step's KV is computed: what was inserted since the last commit can be copied from, and is announced.

        Cost: O(blocks inserted since the last commit) at most.
        """
        ...

    def withdraw(self) -> Blocks:
        """Undoes every insert since the last commit, and cuts back the leases that end there.

        Returns:
            [n] int32, the blocks taken out; they are their inserters' again.
        """
        ...

    def reset(self, namespace: Namespace | None = None) -> Reset:
        """Forgets what it holds now: nothing of it is matched again, nor what live leases compute on top of it.

        Args:
            namespace: forget only what depends on one of these parts, wherever they start; None: everything.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: a bad namespace.

        Cost: O(everything).
        """
        ...

    def clear(self) -> None:
        """Begins anew, with nothing: no block, no lease, no watch. Subscribers stay, and are told.

        For a caller whose operation was interrupted in the middle (Ctrl-C, no memory left): an exception that a method
        does not document may leave any part of a cache half done, and this looks at none of it. All blocks are the
        caller's again; every lease and watch has ended.

        Cost: O(leases + watches).
        """
        ...

    def evict(self, num_blocks: int) -> Blocks:
        """Gives up unpinned blocks, dead ones first, then leaves, the last block of each first.

        Returns:
            [<= num_blocks] int32, fewer only where fewer are unpinned.

        Raises:
            ValueError: num_blocks is no count.
        """
        ...

    def subscribe(self, callback: Callable[[int, Any], None]) -> Callable[[], None]:
        """Announces to `callback(number, event)` what the cache holds, and from then on what changes.

        Events are those of `radixkv.cache.events`, numbered from 0 for each subscriber. Returns a function that ends
        the subscription. A callback that raises disturbs neither the cache nor other subscribers: at the next commit
        it is told `AllBlocksCleared` and everything anew; where that fails too, the subscription ends. Both are logged.

        Cost: O(content).
        """
        ...

    def watch(
        self,
        token_ids: TokenIds,
        namespace: Namespace | None = None,
        *,
        rank: Rank | None = None,
        changed: Callable[[], None] | None = None,
    ) -> Watch:
        """Follows how many of these tokens are cached in whole blocks, and pins nothing.

        Args:
            token_ids: [n] of a request, from position 0.
            namespace: as for `acquire`.
            rank: where given, what it matches is evicted after all that no such watch matches, the lowest rank first.
            changed: called whenever the number has changed. It must not call the cache.

        Raises:
            ValueError: bad tokens, namespace or rank.

        Cost: O(match).
        """
        ...

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch.

        Raises:
            ValueError: it has ended already.
        """
        ...

    @property
    def sizes(self) -> CacheSizes:
        """Number of blocks held, pinned and evictable. O(1)."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens whose KV its blocks hold. May cost O(everything)."""
        ...

    @property
    def num_dead_blocks(self) -> int:
        """Of the evictable blocks, those that no match finds any more. `evict` gives them up first. O(1)."""
        ...

    def check(self) -> None:
        """Raises CacheCorruption unless every invariant holds. O(everything); for tests."""
        ...


def check_block_size(block_size: int) -> int:
    """Returns block_size; raises ValueError unless it is a whole number of 1 to 16,384 tokens."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size: expected an int in 1..{MAX_BLOCK_SIZE}, got {block_size!r}")
    return block_size


def check_count(name: str, value: int) -> int:
    """Returns value; raises ValueError that names it unless it is an int >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value!r}")
    return int(value)


def check_caps(caps: TenantCaps) -> TenantCaps:
    """Returns caps; raises ValueError unless they are a number of blocks for every tenant, or one for each by salt."""
    if isinstance(caps, Mapping):
        for tenant, cap in caps.items():
            if not isinstance(tenant, str):
                raise ValueError(f"tenant_caps: expected the values of salts, as str, got {tenant!r}")
            check_count(f"tenant_caps[{tenant!r}]", cap)
        return dict(caps)
    return check_count("tenant_caps", caps)


def cap_of(caps: TenantCaps, tenant: str) -> float:
    """Returns a tenant's cap in blocks; inf for one without."""
    return caps.get(tenant, float("inf")) if isinstance(caps, Mapping) else caps


def take_over(part: Any, name: str, owner: Any) -> None:
    """Makes `owner` the one owner of a part that has room for one alone; for good.

    Raises:
        ValueError: another has it already: block ids of one pool say nothing in another.
    """
    if part.owner is not None:
        raise ValueError(
            f"{name}: expected one that nothing else uses, got the {type(part).__name__} of another "
            f"{type(part.owner).__name__}; make a new one for each engine"
        )
    part.owner = owner


def check_live(lease: Lease) -> None:
    """Raises ValueError if the lease was released already."""
    if lease.released:
        raise ValueError(f"lease: expected one that is still held, got {lease!r}")


def check_watching(watch: Watch) -> None:
    """Raises ValueError unless it is a watch that has not ended."""
    if not isinstance(watch, Watch) or watch.cursor is None:
        raise ValueError(f"watch: expected one that has not ended, got {watch!r}")


def pack_blocks(block_ids: Any, num_blocks: int) -> bytes:
    """Packs the first num_blocks of block_ids into int32 bytes.

    Raises:
        ValueError: there are fewer, or an id is negative or no int32.
    """
    packed = pack_unchecked(block_ids, num_blocks)
    if has_negative(packed):
        raise ValueError(f"block_ids: expected ids >= 0, got {unpack(packed).min()}")
    return packed


def pack_unchecked(block_ids: Any, num_blocks: int) -> bytes:
    """As `pack_blocks`, but an int32 array may hold negative ids, for a caller that checks them with something else."""
    if type(block_ids) is np.ndarray and block_ids.dtype == np.int32 and block_ids.ndim == 1:
        packed = (block_ids if len(block_ids) == num_blocks else block_ids[:num_blocks]).tobytes()
    else:
        try:
            packed = pack(block_ids[:num_blocks])
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise ValueError(f"block_ids: {str(error).removeprefix('token_ids: ')}") from None
    if len(packed) != TOKEN_BYTES * num_blocks:
        raise ValueError(f"block_ids: expected at least {num_blocks}, got {len(packed) // TOKEN_BYTES}")
    return packed

"""The one contract of every prefix cache. Token ids and block ids only: no tensors, no requests, no allocator.

Who owns a block: the cache owns what was inserted and not yet evicted or withdrawn; everything else is the caller's.

One step, in order::

    lease = cache.acquire(token_ids[:-1])       # the longest match, pinned
    ...                                         # the caller allocates blocks for the rest, evicting where needed
    cache.insert(lease, token_ids_after_the_lease, block_ids)   # publish, when the step that fills them is scheduled
    cache.commit()                              # the step has run (or: cache.withdraw(), it has failed)
    cache.release(lease, tail)                  # the request has ended
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, has_negative, pack, unpack

if TYPE_CHECKING:
    from radixkv.cache.radix.watches import Rank, Watch

Blocks = np.ndarray  # [n] int32 block ids
NO_BLOCKS: Blocks = np.empty(0, np.int32)
NO_BLOCKS.flags.writeable = False
NO_DUPLICATES: Blocks = np.empty((0, 2), np.int32)
NO_DUPLICATES.flags.writeable = False

MAX_BLOCK_SIZE = 1024


class CacheCorruption(AssertionError):
    """An invariant of a cache does not hold: a fault in the cache, or blocks inserted twice."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A cached block of which the first `num_tokens` tokens agree with the tokens after a lease's end."""

    block_id: int
    num_tokens: int


class Tail(NamedTuple):
    """A partly filled last block: the tokens after the lease's end, fewer than a block, and the block they are in."""

    token_ids: TokenIds
    block_id: int


class CacheSizes(NamedTuple):
    """Blocks held by a cache: those some lease pins, and those that `evict` could hand out."""

    pinned: int
    evictable: int


class Reset(NamedTuple):
    """What a reset did. The cache gives `block_ids` up; `num_pinned` blocks follow as the leases on them end."""

    block_ids: Blocks
    num_pinned: int


class Lease:
    """A pinned match and a cursor: `insert` and `advance` go on from its end. Made by `acquire`, ended by `release`.

    Attributes:
        num_tokens: full-block tokens from position 0 that the lease pins; grows with `advance` and `insert`, and
            shrinks only by `withdraw`.
        block_ids: [num_tokens at acquire / block_size] int32, what `acquire` matched.
        partial: a partial match of the next block, its source pinned until `unpin_partial` or `release`; or None.
        namespace: as given to `acquire`.
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
        self.partial: Partial | None = None
        self.namespace = namespace
        self.released = False
        self.is_stale = False

    @property
    def block_ids(self) -> Blocks:
        if type(self._block_ids) is list:  # packed runs, joined for who asks: publishing does not
            self._block_ids = np.frombuffer(b"".join(self._block_ids), np.int32) if self._block_ids else NO_BLOCKS
        return self._block_ids  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "released" if self.released else f"partial={self.partial}"
        return f"Lease(num_tokens={self.num_tokens}, {state})"


class PrefixCache(Protocol):
    """What every cache does. token_ids may be packed bytes (no cost) or anything `radixkv.cache.tokens.pack` takes."""

    block_size: int
    partial_blocks: bool  # whether matches go on into a block, and tails are kept
    owner: Any  # what allocates its blocks (`take_over`); None: nothing does yet

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        """Returns how many of these tokens are cached, a partial block's included. Changes nothing at all."""
        ...

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        """Pins the longest match. The cache never caps it: pass `token_ids[:-1]` where one token must be computed."""
        ...

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        """Matches on from the lease's end; token_ids are those after it. Returns the blocks that the lease gained."""
        ...

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        """Publishes the full blocks after the lease's end, and moves the lease there.

        Args:
            lease: of this request.
            token_ids: the tokens after the lease's end; an incomplete last block is ignored.
            block_ids: [>= len(token_ids) // block_size] the blocks that hold them.

        Returns:
            Duplicates, [d, 2] int32 rows of (caller's, cached): for the first d blocks the cache already held the
            same tokens. It keeps its own; the caller keeps its own too, and should use the cache's.

        Raises:
            ValueError: bad tokens or ids, too few blocks, a block that the cache holds already or that comes twice.
                Nothing changes.
        """
        ...

    def unpin_partial(self, lease: Lease) -> None:
        """Lets go of the source of a partial match: the copy has run, or there is no room for it."""
        ...

    def release(self, lease: Lease, tail: Tail | None = None) -> None:
        """Ends the lease, exactly once. Stamps recency on what nobody pins any longer.

        Args:
            tail: the request's last block, partly filled and already computed. From here on the cache owns it,
                whether it can use it or not; a cache without partial blocks refuses it (ValueError).
        """
        ...

    def cancel(self, lease: Lease) -> None:
        """Ends a lease as if it had never been acquired: nothing is stamped. Not after `insert` or `advance`."""
        ...

    def commit(self) -> None:
        """The step's KV is computed: what was inserted since the last commit can be copied from, and is announced."""
        ...

    def withdraw(self) -> Blocks:
        """Undoes every insert since the last commit, and cuts back the leases that end there.

        Returns the blocks taken out; they are their inserters' again.
        """
        ...

    def reset(self, namespace: Namespace | None = None) -> Reset:
        """Forgets what it holds now: nothing of it is matched again, nor what live leases compute on top of it.

        Args:
            namespace: forget only what depends on one of these parts, wherever they start; None: everything.

        Raises:
            RuntimeError: in the middle of a step.

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
        """Gives up unpinned blocks, leaf first, tail first; never more than asked, fewer where fewer are unpinned."""
        ...

    def subscribe(self, callback: Callable[[int, Any], None]) -> Callable[[], None]:
        """Announces to `callback(number, event)` what the cache holds, and from then on what changes.

        Events are those of `radixkv.cache.events`, numbered from 0 for each subscriber. Returns what ends it. A
        callback that raises disturbs neither the cache nor other subscribers: at the next commit it is told
        `AllBlocksCleared` and everything anew; where that fails too, the subscription ends. Both are logged.
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
            rank: where given, what it matches is evicted after all that no such watch matches, the lowest rank first.
            changed: called whenever the number has changed. It must not call the cache.
        """
        ...

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch, exactly once."""
        ...

    @property
    def sizes(self) -> CacheSizes: ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV its blocks hold. May cost O(everything)."""
        ...

    @property
    def num_superseded_blocks(self) -> int:
        """Of the evictable blocks, those of no use any more. They are the first that `evict` gives up."""
        ...

    def check(self) -> None:
        """Asserts every invariant. Raises CacheCorruption. O(everything); for tests."""
        ...


def check_block_size(block_size: int) -> int:
    """Returns block_size; raises ValueError unless it is a whole number of 1 to 1024 tokens."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size: expected an int in 1..{MAX_BLOCK_SIZE}, got {block_size!r}")
    return block_size


def check_count(name: str, value: int) -> int:
    """Returns value; raises ValueError that names it unless it is an int >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value!r}")
    return int(value)


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
    """As `pack_blocks`, but an int32 array may hold negative ids: for who checks them together with something else."""
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

"""NullCache: what no caching costs. The other end of every comparison, and the way to switch caching off."""

from collections.abc import Callable
from typing import Any

from radixkv.cache.contract import (
    NO_BLOCKS,
    NO_DUPLICATES,
    Blocks,
    CacheSizes,
    Lease,
    PartialBlock,
    Rank,
    Reset,
    Watch,
    check_block_size,
    check_count,
    check_live,
    pack_blocks,
)
from radixkv.cache.events import Callback
from radixkv.cache.namespace import Namespace, parts
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


class NullCache:
    """Caches nothing, under the contract of `radixkv.cache.contract.PrefixCache`.

    A lease pins nothing and stays at 0 tokens. `insert` checks its arguments and publishes nothing: it takes no block
    over and does not move the lease, so all blocks stay the caller's own, to be freed by the caller.

    >>> from radixkv.cache.null import NullCache
    >>> cache = NullCache(block_size=4)
    >>> lease = cache.acquire([1, 2, 3, 4])
    >>> cache.insert(lease, [1, 2, 3, 4], [10]).tolist(), lease.num_tokens, cache.peek([1, 2, 3, 4])
    ([], 0, 0)

    Args:
        block_size: number of tokens in a block, 1 to 16,384.

    Raises:
        ValueError: block_size is out of range.

    Cost: O(1) for each call, and O(n) where tokens or ids are checked.
    """

    partial_blocks = False

    def __init__(self, block_size: int) -> None:
        self.block_size = check_block_size(block_size)
        self.owner: Any = None

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        """Returns 0. Raises ValueError for bad tokens or a bad namespace."""
        pack(token_ids)
        parts(namespace)
        return 0

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        """Returns a lease on nothing. Raises ValueError for bad tokens or a bad namespace."""
        pack(token_ids)
        parts(namespace)
        return Lease(None, 0, NO_BLOCKS, namespace)

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        """Returns no blocks, [0] int32. Raises ValueError for bad tokens or a lease that has ended."""
        check_live(lease)
        pack(token_ids)
        return NO_BLOCKS

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        """Returns no duplicates, [0, 2] int32. Raises ValueError for bad tokens or ids, or a lease that has ended."""
        check_live(lease)
        pack_blocks(block_ids, len(pack(token_ids)) // (TOKEN_BYTES * self.block_size))
        return NO_DUPLICATES

    def unpin_partial(self, lease: Lease) -> None:
        """Does nothing. Raises ValueError for a lease that has ended."""
        check_live(lease)

    def release(self, lease: Lease, partial_block: PartialBlock | None = None) -> None:
        """Ends the lease. Raises ValueError for one that has ended, or a partial block."""
        check_live(lease)
        if partial_block is not None:
            raise ValueError(f"partial_block: expected None from a cache without them, got {partial_block!r}")
        lease.released = True

    def cancel(self, lease: Lease) -> None:
        """Ends the lease. Raises ValueError for one that has ended."""
        check_live(lease)
        lease.released = True

    def commit(self) -> None:
        """Does nothing."""

    def withdraw(self) -> Blocks:
        """Returns no blocks, [0] int32."""
        return NO_BLOCKS

    def reset(self, namespace: Namespace | None = None) -> Reset:
        """Returns that nothing was given up. Raises ValueError for a bad namespace."""
        parts(namespace)
        return Reset(NO_BLOCKS, 0)

    def clear(self) -> None:
        """Does nothing."""

    def evict(self, num_blocks: int) -> Blocks:
        """Returns no blocks, [0] int32. Raises ValueError unless num_blocks is a count."""
        check_count("num_blocks", num_blocks)
        return NO_BLOCKS

    def watch(
        self,
        token_ids: TokenIds,
        namespace: Namespace | None = None,
        *,
        rank: Rank | None = None,
        changed: Callable[[], None] | None = None,
    ) -> Watch:
        """Returns a watch that stays at 0. Raises ValueError for bad tokens, namespace or rank."""
        parts(namespace)
        return Watch(pack(token_ids), namespace is None, rank, changed)

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch."""
        watch.changed = None

    def subscribe(self, callback: Callback) -> Any:
        """Never calls back. Returns a function that does nothing."""
        return lambda: None

    @property
    def sizes(self) -> CacheSizes:
        """Number of blocks held: none."""
        return CacheSizes(pinned=0, evictable=0)

    @property
    def num_cached_tokens(self) -> int:
        """0."""
        return 0

    @property
    def num_dead_blocks(self) -> int:
        """0."""
        return 0

    def check(self) -> None:
        """Does nothing: there is no invariant to hold."""

"""NullCache: what no caching costs. The other end of every comparison, and the way to switch caching off."""

from collections.abc import Callable
from typing import Any

from radixkv.cache.contract import (
    NO_BLOCKS,
    NO_DUPLICATES,
    Blocks,
    CacheSizes,
    Lease,
    Reset,
    Tail,
    check_block_size,
    check_count,
    check_live,
    pack_blocks,
)
from radixkv.cache.events import Callback
from radixkv.cache.namespace import Namespace, parts
from radixkv.cache.radix.watches import Rank, Watch
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack


class NullCache:
    """Caches nothing, under the contract of `radixkv.cache.contract.PrefixCache`.

    A lease pins nothing and stays at 0 tokens. `insert` checks its arguments and publishes nothing: it takes no block
    over and does not move the lease, so all blocks stay the caller's own, for him to free when the request ends.
    """

    partial_blocks = False

    def __init__(self, block_size: int) -> None:
        self.block_size = check_block_size(block_size)
        self.owner: Any = None

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        pack(token_ids)
        parts(namespace)
        return 0

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        pack(token_ids)
        parts(namespace)
        return Lease(None, 0, NO_BLOCKS, namespace)

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        check_live(lease)
        pack(token_ids)
        return NO_BLOCKS

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        check_live(lease)
        pack_blocks(block_ids, len(pack(token_ids)) // (TOKEN_BYTES * self.block_size))
        return NO_DUPLICATES

    def unpin_partial(self, lease: Lease) -> None:
        check_live(lease)

    def release(self, lease: Lease, tail: Tail | None = None) -> None:
        check_live(lease)
        if tail is not None:
            raise ValueError(f"tail: expected None from a cache without partial blocks, got {tail!r}")
        lease.released = True

    def cancel(self, lease: Lease) -> None:
        check_live(lease)
        lease.released = True

    def commit(self) -> None:
        pass

    def withdraw(self) -> Blocks:
        return NO_BLOCKS

    def reset(self, namespace: Namespace | None = None) -> Reset:
        parts(namespace)
        return Reset(NO_BLOCKS, 0)

    def clear(self) -> None:
        pass

    def evict(self, num_blocks: int) -> Blocks:
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
        """Returns one that stays at 0."""
        parts(namespace)
        return Watch(pack(token_ids), namespace is None, rank, changed)

    def unwatch(self, watch: Watch) -> None:
        watch.changed = None

    def subscribe(self, callback: Callback) -> Any:
        """Never calls back. Returns a function that does nothing."""
        return lambda: None

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(pinned=0, evictable=0)

    @property
    def num_cached_tokens(self) -> int:
        return 0

    @property
    def num_superseded_blocks(self) -> int:
        return 0

    def check(self) -> None:
        pass

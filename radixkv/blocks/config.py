"""CacheConfig: which cache, and the pool of blocks under it."""

from dataclasses import dataclass

from radixkv.cache.contract import PrefixCache
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.policies import POLICIES

CACHES = ("null", "flat_hash", "radix")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A cache and its pool.

    >>> from radixkv import CacheConfig
    >>> CacheConfig("radix", block_size=16, num_blocks=1_000, policy="lfu").make().block_size
    16

    Attributes:
        cache: null, flat_hash (vLLM's rules: its free queue is its policy, whole blocks only) or radix.
        block_size: tokens in a block.
        partial_blocks: radix alone: share to the token.
        num_blocks: blocks in the pool; None without bound.
        policy: radix alone: an eviction policy's name.
        hash_algorithm: flat_hash alone.
        tenant_cap: unpinned blocks that the cache holds of each tenant (a `Salt`) at most; None: no cap.
    """

    cache: str = "radix"
    block_size: int = 16
    partial_blocks: bool = True
    num_blocks: int | None = None
    policy: str = "lru"
    hash_algorithm: str = "sha256"
    tenant_cap: int | None = None

    def make(self) -> PrefixCache:
        """Returns the cache.

        Raises:
            ValueError: a name is not known, or a number out of range.
        """
        if self.cache == "radix":
            return RadixCache(
                self.block_size,
                partial_blocks=self.partial_blocks,
                policy=self.policy,
                tenant_caps=self.tenant_cap,
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.cache == "flat_hash":
            return FlatHashCache(
                self.block_size,
                hash_algorithm=self.hash_algorithm,
                accept_collisions=True,
                tenant_caps=self.tenant_cap,
            )
        if self.cache == "null":
            return NullCache(self.block_size)
        raise ValueError(f"cache: expected one of {', '.join(CACHES)}, got {self.cache!r}")

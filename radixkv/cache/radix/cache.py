"""RadixCache: a radix tree of token spans, so that requests which diverge partway share what they have in common.

The structure is RadixAttention's (Zheng et al., SGLang, arXiv 2312.07104). What makes it quick in plain Python is said
where it is done, in `tree.py` and `node.py`: packed spans compared by memcmp, growth in place, pins that stop at the
first pinned ancestor, leaves queued for eviction only while they are unpinned, recency set at release alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
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
    PartialMatch,
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
    pack_unchecked,
)
from radixkv.cache.events import Callback, EventEmitter
from radixkv.cache.namespace import Interner, LoRA, Media, Namespace, Part, Salt, kinds
from radixkv.cache.radix.eviction import Policy
from radixkv.cache.radix.invariants import check_tree
from radixkv.cache.radix.node import BLOCK_ID_BYTES, Node
from radixkv.cache.radix.policies import make_policy
from radixkv.cache.radix.tenants import TreeTenants
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.radix.watches import TreeWatches
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, has_negative, pack, unpack

# New (namespace, token) pairs, besides one for each cached block, before those in no node are looked for.
MIN_PAIRS_TO_SWEEP = 1024


@dataclass(eq=False, slots=True)
class Span:
    """A node of the tree at one moment, as plain data.

    Attributes:
        start: number of tokens before it.
        token_ids: [num_tokens] int32 packed, a namespace no longer folded in.
        namespace: the parts that start in this span; what is below depends on them too.
        num_blocks: number of blocks that hold it.
        num_pins: leases that end here, copies that read from here, and children of which that is true.
        last_use: tick of the last release (the cache's clock, one a release); the insertion's before any.
        children: in the order of their first tokens.
    """

    start: int
    token_ids: bytes
    namespace: tuple[LoRA | Salt | Media, ...]
    num_blocks: int
    num_pins: int
    last_use: int
    children: list[Span] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the span."""
        return len(self.token_ids) // TOKEN_BYTES


class RadixCache:
    """A prefix cache over a radix tree (`radixkv.cache.contract` says what a method does for every cache).

    >>> from radixkv.cache.radix.cache import RadixCache
    >>> cache = RadixCache(block_size=4)
    >>> lease = cache.acquire([1, 2, 3, 4, 5, 6])                # nothing is cached yet
    >>> lease.num_tokens
    0
    >>> duplicates = cache.insert(lease, [1, 2, 3, 4, 5, 6, 7, 8], block_ids=[10, 11])
    >>> cache.commit()
    >>> cache.release(lease)
    >>> lease = cache.acquire([1, 2, 3, 4, 5, 6, 9])
    >>> lease.num_tokens, lease.block_ids.tolist(), lease.partial
    (4, [10], PartialMatch(block_id=11, num_tokens=2))
    >>> cache.sizes
    CacheSizes(pinned=2, evictable=0)

    Args:
        block_size: number of tokens in a block, 1 to 16,384.
        partial_blocks: share to the token at any block size: matches report how far the next block agrees, and
            released requests may leave a partly filled last block.
        policy: the name of one of `radixkv.cache.radix.policies`, or an object of a class of your own
            (`radixkv.cache.radix.eviction`).
        tenant_caps: number of unpinned blocks that the cache holds at most of a tenant (a `Salt`): one for every
            tenant, or numbers by the salt's value; None: no caps (`radixkv.cache.radix.tenants`).

    Raises:
        ValueError: an argument out of range, or a policy that is not known.

    Cost: `peek` and `acquire` about a memcmp of the match plus O(nodes on the path); `insert` O(tokens after the
    lease); `release` O(nodes unpinned), `evict` O(leaves taken * log leaves), at any number of leaves.
    """

    def __init__(
        self,
        block_size: int = 16,
        *,
        partial_blocks: bool = True,
        policy: str | Policy = "lru",
        tenant_caps: TenantCaps | None = None,
    ) -> None:
        if not isinstance(partial_blocks, bool):
            raise ValueError(f"partial_blocks: expected True or False, got {partial_blocks!r}")
        self.block_size = check_block_size(block_size)
        self.partial_blocks = partial_blocks and block_size > 1
        self.owner: Any = None
        self._policy = policy
        self._caps = None if tenant_caps is None else check_caps(tenant_caps)
        self._events = EventEmitter(block_size)
        self._begin()

    def _begin(self) -> None:
        """Makes an empty tree and all that goes with it."""
        self._interner = Interner()
        self._num_pairs_kept = 0  # at the last sweep
        self._leases: dict[Lease, None] = {}
        self._held: set[int] = set()  # block ids; none where an owner's allocator answers for them
        self.tree = RadixTree(self.block_size, make_policy(self._policy))
        self._watches = TreeWatches(self.tree)
        self._tenants = None if self._caps is None else TreeTenants(self.tree, self._caps, self._interner)
        self._moved: dict[Lease, None] = {}  # leases moved while there were blocks not committed

    # ---- matching

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        """Returns how many of these tokens are cached, those of a partial match included. Changes nothing.

        >>> cache = RadixCache(block_size=4)
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2, 3, 4, 5, 6, 7, 8], [10, 11])
        >>> cache.peek([1, 2, 3, 4, 5, 6])       # rows of this step can't be copied yet: whole blocks alone
        4
        >>> cache.commit()
        >>> cache.peek([1, 2, 3, 4, 5, 6])
        6

        Args:
            token_ids: [n] of a request, from position 0.
            namespace: what else its KV depends on.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: a memcmp of the match, and O(nodes on the path + log children of the last).
        """
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace, add=False)
        is_plain = namespace is None
        node, at, _, child, num_common = self.tree.walk(self.tree.root, key, 0, is_plain, False)
        num_tokens = at // TOKEN_BYTES
        if child is not None:
            num_whole = num_common // self.block_size * self.block_size
            is_next_computed = num_whole // self.block_size < child.num_blocks - child.num_uncommitted
            return num_tokens + (num_common if is_next_computed and self.partial_blocks else num_whole)
        if not self.partial_blocks or at == len(key):
            return num_tokens
        return num_tokens + node.nearest(key[at : at + self.tree.width], is_plain)[1]

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        """Pins the longest match, and the block of a partial match after it.

        >>> cache = RadixCache(block_size=4)
        >>> lease = cache.acquire([1, 2, 3])
        >>> lease
        Lease(num_tokens=0, partial=None)

        Args:
            token_ids: [n] of a request, from position 0; without the last where one token must be computed.
            namespace: what else its KV depends on, or is to be kept apart by.

        Returns:
            A lease, to be ended by `release` or `cancel`.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: a memcmp of the match, and O(nodes on the path + log children of the last). Splits at most two nodes.
        """
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace, add=False)
        tree = self.tree
        is_plain = namespace is None
        node, at, found, _, _ = tree.walk(tree.root, key, 0, is_plain, True)
        tree.pin(node)
        lease = Lease(node, at // TOKEN_BYTES, found, namespace)
        if self.partial_blocks and at < len(key):
            source, num_tokens = node.nearest(key[at : at + tree.width], is_plain)
            if source is not None:
                if len(source.span) > tree.width:
                    source = tree.split(source, tree.width)  # pin the one block, not what follows it
                tree.pin(source)
                lease.source = source
                lease.partial = PartialMatch(int(unpack(source.blocks[:BLOCK_ID_BYTES])[0]), num_tokens)
        self._leases[lease] = None
        if tree.uncommitted:
            self._moved[lease] = None
        return lease

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        """Matches on from the lease's end: another request may have published what follows.

        Args:
            lease: moves to the end of the match.
            token_ids: [n] the tokens after the lease's end.

        Returns:
            [gained] int32, the blocks that the lease pins in addition.

        Raises:
            ValueError: bad tokens, or the lease has ended.

        Cost: a memcmp of what is gained, and O(nodes passed).
        """
        key = self._key(lease, token_ids, add=False)
        if lease.is_stale:
            return NO_BLOCKS
        node, at, found, _, _ = self.tree.walk(lease.cursor, key, 0, lease.namespace is None, True)
        self._move(lease, node, at)
        return _joined(found)

    def _move(self, lease: Lease, node: Node, num_bytes: int) -> None:
        """Moves a lease down to a descendant of where it ends."""
        if node is not lease.cursor:
            self.tree.pin(node)
            lease.cursor.pins -= 1  # stays above zero: a descendant is pinned
            lease.cursor = node
        lease.num_tokens += num_bytes // TOKEN_BYTES
        if self.tree.uncommitted:
            self._moved[lease] = None

    def _key(self, lease: Lease, token_ids: TokenIds, *, add: bool = True) -> bytes:
        """Packs the tokens after a lease's end, the parts of its namespace that start there folded in."""
        check_live(lease)
        key = pack(token_ids)
        if lease.namespace is not None:
            if add and len(self._interner) > self._num_pairs_kept + self.tree.num_blocks + MIN_PAIRS_TO_SWEEP:
                self._sweep()
            key = self._interner.mark(key, lease.namespace, lease.num_tokens, add=add)
        return key

    def fold(self, token_ids: TokenIds, namespace: Namespace | None) -> bytes:
        """Returns packed tokens from position 0 as the tree compares them, cut off where nothing cached can agree.

        Args:
            token_ids: [n] of a request.
            namespace: folded in; None: the tokens are their own.

        Raises:
            ValueError: bad tokens or namespace.

        Cost: O(n).
        """
        key = pack(token_ids)
        return key if namespace is None else self._interner.mark(key, namespace, add=False)

    def path(self, node: Node) -> tuple[bytes, tuple[Part, ...]]:
        """Returns the packed tokens from position 0 to a node's end, and the namespace folded into them. O(tokens)."""
        spans = []
        above: Node | None = node
        while above is not None:
            spans.append(above.span)
            above = above.parent
        return self._interner.unmark(b"".join(reversed(spans)))

    def give_up(self, leaf: Node, num_kept: int) -> Blocks:
        """Gives up the last blocks of an unpinned leaf of the tree, whatever the policy would evict.

        Args:
            leaf: a node without children and pins.
            num_kept: number of blocks at its front that stay; 0: the leaf goes.

        Returns:
            [n] int32, the blocks given up, the last first.

        Cost: O(blocks of the leaf).
        """
        given_up = self.tree.cut(leaf, num_kept)
        self.tree.num_blocks -= len(given_up)
        if self._events.active:
            self._events.removed(given_up)
        if self._held:
            self._held.difference_update(given_up)
        return np.array(given_up, np.int32)

    def _sweep(self) -> None:
        """Forgets the namespaces that no node holds and no watch waits for: O(nodes), once in so many new pairs."""
        held = self._watches.namespace_ids()
        nodes = [self.tree.root]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
            if node.has_namespace:
                tokens = unpack(node.span)
                held.update(tokens[tokens < 0].tolist())
        self._interner.sweep(held)
        self._num_pairs_kept = len(self._interner)

    # ---- publishing

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        """Publishes the full blocks after the lease's end, and moves the lease there.

        >>> cache = RadixCache(block_size=2)
        >>> first, second = cache.acquire([1, 2, 3, 4]), cache.acquire([1, 2, 5, 6])
        >>> cache.insert(first, [1, 2, 3, 4], [10, 11]).tolist()
        []
        >>> cache.insert(second, [1, 2, 5, 6], [20, 21]).tolist()    # the cache keeps block 10, the caller block 20
        [[20, 10]]

        Args:
            lease: of this request.
            token_ids: [n] the tokens after the lease's end; an incomplete last block is ignored.
            block_ids: [>= n // block_size] the blocks that hold them.

        Returns:
            Duplicates, [d, 2] int32 rows of (caller's, cached), as `PrefixCache.insert` describes them.

        Raises:
            ValueError: bad tokens or ids, too few blocks, the lease has ended; without an owner, a block that the
                cache holds already or that comes twice (an owner's allocator gives each block once).

        Cost: O(n).
        """
        key = self._key(lease, token_ids)
        tree = self.tree
        end = len(key) // tree.width * tree.width
        blocks = pack_unchecked(block_ids, end // tree.width)
        if not end or lease.is_stale:
            return NO_DUPLICATES
        is_plain = lease.namespace is None
        if has_negative(key + blocks if is_plain else blocks):  # in one go: that is most of what it costs
            pack_blocks(unpack(blocks), end // tree.width)
            raise ValueError(f"token_ids: expected ids >= 0, got {unpack(key).min()}")
        if self.owner is None:
            self._check_new(unpack(blocks).tolist())
        node, at, found, _, _ = tree.walk(lease.cursor, key, 0, is_plain, True)
        if at:
            self._move(lease, node, at)
        if at < end:
            if self.owner is None:
                self._held.update(unpack(blocks)[at // tree.width :].tolist())
            lease.cursor = tree.append(node, key[at:end], blocks[at // tree.width * BLOCK_ID_BYTES :], is_plain)
            lease.num_tokens += (end - at) // TOKEN_BYTES
            self._moved[lease] = None
        if not found:
            return NO_DUPLICATES
        cached = _joined(found)
        return np.stack([unpack(blocks)[: len(cached)], cached], axis=1)

    def _check_new(self, block_ids: list[int]) -> None:
        """Raises ValueError if a block is held already or comes twice."""
        if not self._held.isdisjoint(block_ids) or len(set(block_ids)) != len(block_ids):
            twice = next(block for i, block in enumerate(block_ids) if block in self._held or block in block_ids[:i])
            raise ValueError(f"block_ids: expected blocks that are not cached yet, each once, got {twice}")

    # ---- ends

    def unpin_partial(self, lease: Lease) -> None:
        """Unpins the source of a partial match: the copy has run, or there is no room for it. Nothing without one.

        Its recency stays: one block was read, the rest of its span did not match.

        Raises:
            ValueError: the lease has ended.

        Cost: O(1).
        """
        check_live(lease)
        source = lease.source
        if source is not None:
            lease.source = lease.partial = None
            self.tree.unpin(source, last_use=None)
            self.tree.merge(source)
            if self._tenants is not None:
                self._tenants.enforce()

    def release(self, lease: Lease, partial_block: PartialBlock | None = None) -> None:
        """Ends the lease. What no lease pins any more was used last now.

        >>> from radixkv.cache.contract import PartialBlock
        >>> cache = RadixCache(block_size=4)
        >>> lease = cache.acquire([])
        >>> cache.release(lease, PartialBlock([1, 2, 3], block_id=7))
        >>> cache.peek([1, 2, 3, 4])
        3

        Args:
            lease: one that has not ended.
            partial_block: the request's last block, partly filled and already computed. From here on the cache owns
                it. A cached block that begins with the same tokens makes it a dead one.

        Raises:
            ValueError: the lease has ended; the partial block is no 1 to block_size - 1 tokens, is held already or
                follows a block not committed yet; the cache was made without partial blocks.

        Cost: O(nodes unpinned), and O(log children) for a partial block.
        """
        check_live(lease)
        if partial_block is not None:
            self._insert_partial_block(lease, partial_block)
        if lease.source is not None:
            self.unpin_partial(lease)
        self.tree.clock += 1
        self._end(lease, self.tree.clock)

    def cancel(self, lease: Lease) -> None:
        """Ends a lease as if it had never been acquired: recency stays as it was, and a split is undone.

        Raises:
            ValueError: the lease has ended, or has grown by `insert` or `advance`.

        Cost: O(nodes unpinned).
        """
        check_live(lease)
        if lease.num_tokens > len(lease.block_ids) * self.block_size:
            raise ValueError(f"lease: expected one that has not grown since acquire, got {lease!r}")
        self.unpin_partial(lease)
        self._end(lease, None)

    def _end(self, lease: Lease, last_use: int | None) -> None:
        node, lease.cursor, lease.released = lease.cursor, None, True
        del self._leases[lease]
        self._moved.pop(lease, None)
        self.tree.unpin(node, last_use=last_use)
        self.tree.merge(node)
        if self._tenants is not None:
            self._tenants.enforce()

    def _insert_partial_block(self, lease: Lease, partial: PartialBlock) -> None:
        """Publishes a partly filled last block under the lease's end, and for the moment moves the lease to its end."""
        if not self.partial_blocks:
            raise ValueError("partial_block: expected None, as this cache keeps whole blocks only")
        if lease.cursor.num_uncommitted:
            raise ValueError("partial_block: expected one computed in a finished step, got one of a step not committed")
        tokens = self._key(lease, partial.token_ids)
        if not 0 < len(tokens) < self.tree.width:
            expected = f"1..{self.block_size - 1} tokens"
            raise ValueError(f"partial_block.token_ids: expected {expected}, got {len(tokens) // TOKEN_BYTES}")
        if lease.namespace is None and has_negative(tokens):
            raise ValueError(f"partial_block.token_ids: expected ids >= 0, got {unpack(tokens).min()}")
        block = pack_blocks([partial.block_id], 1)
        if self.owner is None:
            self._check_new([int(partial.block_id)])
            self._held.add(int(partial.block_id))
        if lease.is_stale:
            self.tree.num_blocks += 1
            self.tree.dead_blocks.append(int(unpack(block)[0]))
            return
        lease.cursor = self.tree.insert_partial_block(lease.cursor, tokens, block, lease.namespace is None)

    # ---- steps

    def commit(self) -> None:
        """The step's KV is computed: what was inserted since the last commit can be copied from, and is announced.

        Cost: O(nodes inserted or extended since the last commit), and a hash for each block with subscribers.
        """
        uncommitted = self.tree.uncommitted
        if self._events.active:
            for node in sorted(uncommitted, key=lambda node: node.start):
                self._announce(node, node.num_blocks - node.num_uncommitted, node.num_blocks)
        for node in uncommitted:
            node.num_uncommitted = 0
        uncommitted.clear()
        self._moved.clear()
        if self._tenants is not None:
            self._tenants.enforce()
        self._events.catch_up()

    def withdraw(self) -> Blocks:
        """Undoes every insert since the last commit, and cuts back the leases that end there.

        >>> cache = RadixCache(block_size=2)
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2, 3, 4], [10, 11])
        >>> cache.withdraw().tolist(), lease.num_tokens
        ([10, 11], 0)

        Returns:
            [n] int32, the blocks taken out; they are their inserters' again.

        Cost: O(blocks inserted and leases moved since the last commit).
        """
        for lease in self._moved:
            self._cut_back(lease)
        self._moved.clear()
        blocks = _joined(self.tree.withdraw())
        self._held.difference_update(blocks.tolist())
        if self._tenants is not None:
            self._tenants.enforce()
        return blocks

    def _cut_back(self, lease: Lease) -> None:
        """Moves a lease up to the last block that an earlier step computed."""
        node: Node = lease.cursor
        while node.num_uncommitted:
            lease.num_tokens -= node.num_uncommitted * self.block_size
            if node.num_uncommitted < node.num_blocks:
                break
            assert node.parent is not None
            node = node.parent
        if node is not lease.cursor:
            self.tree.pin(node)
            self.tree.unpin(lease.cursor, last_use=None)
            lease.cursor = node

    def reset(self, namespace: Namespace | None = None) -> Reset:
        """Forgets what it holds now: nothing of it is matched again, nor what live leases compute on top of it.

        >>> cache = RadixCache(block_size=2)
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2, 3, 4], [10, 11])
        >>> cache.commit()
        >>> cache.reset().num_pinned, lease.is_stale, cache.peek([1, 2])
        (2, True, 0)

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
        if self.tree.uncommitted:
            raise RuntimeError("reset: expected the step to be committed or withdrawn before")
        concerned = kinds(namespace)
        for lease in self._leases:
            lease.is_stale |= namespace is None or not concerned.isdisjoint(kinds(lease.namespace))
        given_up: list[int] = []
        kept: list[int] = []
        for top in list(self.tree.root.children.values()) if namespace is None else self._tops(concerned):
            blocks = self.tree.remove_below(top)
            given_up += blocks[0]
            kept += blocks[1]
        self._sweep()
        self.tree.leaves.sweep()
        self.tree.last.sweep()
        if self._events.active:
            if namespace is None:
                self._events.cleared()
            else:
                self._events.removed([*given_up, *kept])
        self._held.difference_update(given_up)
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

    def _tops(self, concerned: Container[Part]) -> list[Node]:
        """Returns the nodes from which on everything depends on one of these parts, cut off from what does not."""
        tops = []
        nodes = list(self.tree.root.children.values())
        for node in nodes:  # grows while it is walked
            at = self._interner.first(node.span, concerned) if node.has_namespace else None
            if at is None:
                nodes.extend(node.children.values())
                continue
            if at >= self.block_size:
                self.tree.split(node, at // self.block_size * self.tree.width)
            tops.append(node)
        return tops

    def evict(self, num_blocks: int) -> Blocks:
        """Gives up unpinned blocks: dead ones, then of the first leaf in the policy's order the last block, and so on.

        >>> cache = RadixCache(block_size=1)
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2, 3], [10, 11, 12])
        >>> cache.commit()
        >>> cache.release(lease)
        >>> cache.evict(2).tolist(), cache.peek([1, 2, 3])
        ([12, 11], 1)

        Args:
            num_blocks: how many, at most.

        Returns:
            [<= num_blocks] int32, fewer only where fewer are unpinned.

        Raises:
            ValueError: num_blocks is no count.

        Cost: O(num_blocks + leaves taken * log leaves).
        """
        evicted = self.tree.evict(check_count("num_blocks", num_blocks))
        if self._events.active:
            self._events.removed(evicted)
        if self._held:
            self._held.difference_update(evicted)
        return np.array(evicted, np.int32) if evicted else NO_BLOCKS

    # ---- what others follow

    def watch(
        self,
        token_ids: TokenIds,
        namespace: Namespace | None = None,
        *,
        rank: Rank | None = None,
        changed: Callable[[], None] | None = None,
    ) -> Watch:
        """Follows how many of these tokens are cached in whole blocks, and pins nothing.

        >>> cache = RadixCache(block_size=2)
        >>> watch = cache.watch([1, 2, 3, 4, 5])
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2, 3, 4], [10, 11])
        >>> watch
        Watch(num_tokens=4, rank=None)
        >>> cache.unwatch(watch)

        Args:
            token_ids: [n] of a request, from position 0.
            namespace: as for `acquire`.
            rank: where given, what it matches is evicted after all that no such watch matches, the lowest rank first.
            changed: called whenever the number has changed. It must not call the cache.

        Raises:
            ValueError: bad tokens, namespace or rank.

        Cost: as `peek`; from then on O(1) for each change that concerns it.
        """
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace)
        watch = Watch(key, namespace is None, rank, None)
        self._watches.add(watch)
        watch.changed = changed
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch.

        Raises:
            ValueError: it has ended already.

        Cost: O(1).
        """
        check_watching(watch)
        self._watches.remove(watch)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Announces what is committed, and from then on what changes. Without subscribers no block is hashed.

        Args:
            callback: called as `callback(number, event)`, inside `commit`, `evict` and `reset`; it must not call the
                cache.

        Returns:
            A function that ends the subscription.

        Raises:
            ImportError: the library of the hash algorithm is not installed.

        Cost: O(content) now, and a hash for each block from then on.
        """
        return self._events.subscribe(callback, self._announce_all)

    def _announce_all(self) -> None:
        nodes = list(self.tree.root.children.values())
        for node in nodes:  # grows while it is walked: parents first
            nodes.extend(node.children.values())
            if len(node.span) >= self.tree.width:  # no partial blocks
                self._announce(node, 0, node.num_blocks - node.num_uncommitted)

    def _announce(self, node: Node, first: int, last: int) -> None:
        """Announces blocks first .. last of a node."""
        if first >= last:
            return
        tokens, namespace = self.path(node)
        start = node.start + first * self.block_size
        tokens = tokens[: (node.start + last * self.block_size) * TOKEN_BYTES]
        block_ids = unpack(node.blocks)[:last].tolist()
        parent = block_ids[first - 1] if first else None
        if not first and node.start:
            assert node.parent is not None
            parent = int(unpack(node.parent.blocks)[-1])
        self._events.stored(parent, block_ids[first:], tokens[start * TOKEN_BYTES :], namespace, start)

    # ---- what it holds

    @property
    def sizes(self) -> CacheSizes:
        """Number of blocks held, pinned and evictable. O(1)."""
        return CacheSizes(self.tree.num_pinned, self.tree.num_blocks - self.tree.num_pinned)

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens in its blocks; fewer than the blocks have rows, with partly filled ones. O(nodes)."""
        nodes = [self.tree.root]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        return sum(node.num_tokens for node in nodes)

    @property
    def num_dead_blocks(self) -> int:
        """Of the evictable blocks, those that no match finds any more. `evict` gives them up first. O(1)."""
        return len(self.tree.dead_blocks)

    def snapshot(self) -> Span:
        """Returns the whole tree as plain data, from an empty span at its root. O(nodes log nodes + tokens).

        >>> cache = RadixCache(block_size=1)
        >>> lease = cache.acquire([])
        >>> duplicates = cache.insert(lease, [1, 2], [10, 11])
        >>> [(span.num_tokens, span.num_pins) for span in cache.snapshot().children]
        [(2, 1)]
        """
        top = self._span(self.tree.root)
        waiting = [(self.tree.root, top)]
        while waiting:  # a path may be deeper than Python's stack
            node, span = waiting.pop()
            for _, child in sorted(node.children.items()):
                made = self._span(child)
                span.children.append(made)
                waiting.append((child, made))
        return top

    def _span(self, node: Node) -> Span:
        tokens, namespace = self._interner.unmark(node.span, node.start)
        return Span(node.start, tokens, namespace, node.num_blocks, node.pins, node.last_use)

    def check(self, leases: Iterable[Lease] | None = None) -> None:
        """Raises CacheCorruption unless every invariant holds. O(everything); for tests.

        Args:
            leases: all that should be live; None: not known.
        """
        if leases is not None and set(leases) != self._leases.keys():
            raise CacheCorruption(f"violated: the live leases are {leases}, got {list(self._leases)}")
        check_tree(self.tree, self._leases)
        self._watches.check()
        if self.owner is None and len(self._held) != self.tree.num_blocks:
            raise CacheCorruption(f"violated: {self.tree.num_blocks} block ids are noted, got {len(self._held)}")
        if self._tenants is not None:
            self._tenants.check()


def _joined(blocks: list[bytes]) -> Blocks:
    return unpack(b"".join(blocks)) if blocks else NO_BLOCKS

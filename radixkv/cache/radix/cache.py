"""RadixCache: a radix tree of token spans, so that requests which diverge partway share what they have in common.

The structure is RadixAttention's (Zheng et al., SGLang, arXiv 2312.07104). What makes it quick in plain Python is said
where it is done, in `tree.py` and `node.py`: packed spans compared by memcmp, growth in place, pins that stop at the
first pinned ancestor, a leaf in the sorted set only while nobody holds it, recency stamped at release alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np

from radixkv.cache.contract import (
    NO_BLOCKS,
    NO_DUPLICATES,
    Blocks,
    CacheCorruption,
    CacheSizes,
    Lease,
    Partial,
    Reset,
    Tail,
    check_block_size,
    check_count,
    check_live,
    pack_blocks,
    pack_unchecked,
)
from radixkv.cache.events import Callback, EventEmitter
from radixkv.cache.namespace import Interner, Namespace, Part, kinds
from radixkv.cache.radix.eviction import Policy
from radixkv.cache.radix.invariants import check_tree
from radixkv.cache.radix.node import BLOCK_ID_BYTES, Node
from radixkv.cache.radix.policies import make_policy
from radixkv.cache.radix.snapshot import Span, take
from radixkv.cache.radix.tenants import CappedTree, TenantCaps, check_caps
from radixkv.cache.radix.tree import RadixTree
from radixkv.cache.radix.watches import Rank, Watch, check_watching
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, has_negative, pack

# New (namespace, token) pairs, besides one for each cached block, before those in no node are looked for.
MIN_PAIRS_TO_SWEEP = 1024


class RadixCache:
    """A prefix cache over a radix tree (see `radixkv.cache.contract` for the contract of every method).

    Args:
        block_size: tokens in a block, 1 to 1024.
        partial_blocks: share to the token at any block size: matches report how far the next block agrees, and
            released requests may leave a partly filled last block.
        policy: name of one of `radixkv.cache.radix.policies`, or a `Policy` of your own (`radixkv.cache.radix.eviction`).
        tenant_caps: blocks that the cache holds at most of a tenant (a `Salt`) while nobody uses them: a number for
            each of them, or numbers by salt; None: no caps (`radixkv.cache.radix.tenants`).

    Cost: `peek` and `acquire` about a memcmp of the match plus O(nodes on the path); `insert` O(tokens after the
    lease); `release` O(nodes let go * log leaves); `evict` O(leaves taken * log leaves), at any number of leaves.
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
        policy = make_policy(self._policy)
        if self._caps is None:
            self.tree = RadixTree(self.block_size, policy)
        else:
            self.tree = CappedTree(self.block_size, policy, self._caps, self._interner)
        self._moved: dict[Lease, None] = {}  # leases moved while there were blocks not committed

    # ---- matching

    def peek(self, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace, add=False)
        is_plain = namespace is None
        width = self.tree.width
        end = len(key) // width * width
        node, at = self.tree.root, 0
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            span = child.span
            if at + len(span) <= end and key.startswith(span, at) and not (is_plain and child.is_marked):
                at += len(span)
                node = child
                continue
            common = child.num_common_tokens(key, at, is_plain)
            whole = common // self.block_size * self.block_size
            next_is_fresh = whole // self.block_size >= child.num_blocks - child.fresh
            return at // TOKEN_BYTES + (whole if next_is_fresh or not self.partial_blocks else common)
        if not self.partial_blocks or at == len(key):
            return at // TOKEN_BYTES
        return at // TOKEN_BYTES + node.nearest(key[at : at + width], is_plain)[1]

    def acquire(self, token_ids: TokenIds, namespace: Namespace | None = None) -> Lease:
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace, add=False)
        tree = self.tree
        is_plain = namespace is None
        node, at, found = tree.walk(tree.root, key, is_plain)
        tree.pin(node)
        lease = Lease(node, at // TOKEN_BYTES, found, namespace)
        if self.partial_blocks and at < len(key):
            source, num_tokens = node.nearest(key[at : at + tree.width], is_plain)
            if source is not None:
                if len(source.span) > tree.width:
                    source = tree.split(source, tree.width)  # pin the one block, not what follows it
                tree.pin(source)
                lease.source = source
                lease.partial = Partial(int(_unpacked(source.blocks[:BLOCK_ID_BYTES])[0]), num_tokens)
        self._leases[lease] = None
        if tree.fresh:
            self._moved[lease] = None
        return lease

    def advance(self, lease: Lease, token_ids: TokenIds) -> Blocks:
        key = self._key(lease, token_ids, add=False)
        if lease.is_stale:
            return NO_BLOCKS
        node, at, found = self.tree.walk(lease.cursor, key, lease.namespace is None)
        self._move(lease, node, at)
        return _joined(found)

    def _move(self, lease: Lease, node: Node, num_bytes: int) -> None:
        """Moves a lease down to a descendant of where it ends."""
        if node is not lease.cursor:
            self.tree.pin(node)
            lease.cursor.pins -= 1  # stays above zero: a descendant is pinned
            lease.cursor = node
        lease.num_tokens += num_bytes // TOKEN_BYTES
        if self.tree.fresh:
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

    def _sweep(self) -> None:
        """Forgets the namespaces that no node holds and no watch waits for: O(nodes), once in so many new pairs."""
        held = self.tree.watches.marks()
        nodes = [self.tree.root]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
            if node.is_marked:
                tokens = _unpacked(node.span)
                held.update(tokens[tokens < 0].tolist())
        self._interner.sweep(held)
        self._num_pairs_kept = len(self._interner)

    # ---- publishing

    def insert(self, lease: Lease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        key = self._key(lease, token_ids)
        tree = self.tree
        end = len(key) // tree.width * tree.width
        blocks = pack_unchecked(block_ids, end // tree.width)
        if not end or lease.is_stale:
            return NO_DUPLICATES
        is_plain = lease.namespace is None
        if has_negative(key + blocks if is_plain else blocks):  # in one go: that is most of what it costs
            pack_blocks(_unpacked(blocks), end // tree.width)
            raise ValueError(f"token_ids: expected ids >= 0, got {_unpacked(key).min()}")
        if self.owner is None:
            self._check_new(_unpacked(blocks).tolist())
        node, at, found = tree.walk(lease.cursor, key, is_plain)
        if at:
            self._move(lease, node, at)
        if at < end:
            if self.owner is None:
                self._held.update(_unpacked(blocks)[at // tree.width :].tolist())
            lease.cursor = tree.append(node, key[at:end], blocks[at // tree.width * BLOCK_ID_BYTES :], is_plain)
            lease.num_tokens += (end - at) // TOKEN_BYTES
            self._moved[lease] = None
        if not found:
            return NO_DUPLICATES
        cached = _joined(found)
        return np.stack([_unpacked(blocks)[: len(cached)], cached], axis=1)

    def _check_new(self, block_ids: list[int]) -> None:
        """Raises ValueError if a block is held already or comes twice."""
        if not self._held.isdisjoint(block_ids) or len(set(block_ids)) != len(block_ids):
            twice = next(block for i, block in enumerate(block_ids) if block in self._held or block in block_ids[:i])
            raise ValueError(f"block_ids: expected blocks that are not cached yet, each once, got {twice}")

    # ---- ends

    def unpin_partial(self, lease: Lease) -> None:
        check_live(lease)
        source = lease.source
        if source is not None:
            lease.source = lease.partial = None
            # Not stamped: one block was read, the rest of its span did not match.
            self.tree.unpin(source, stamp=None)
            self.tree.join(source)

    def release(self, lease: Lease, tail: Tail | None = None) -> None:
        check_live(lease)
        if tail is not None:
            self._hang(lease, tail)
        if lease.source is not None:
            self.unpin_partial(lease)
        self.tree.clock += 1
        self._end(lease, self.tree.clock)

    def cancel(self, lease: Lease) -> None:
        check_live(lease)
        if lease.num_tokens > len(lease.block_ids) * self.block_size:
            raise ValueError(f"lease: expected one that has not grown since acquire, got {lease!r}")
        self.unpin_partial(lease)
        self._end(lease, None)

    def _end(self, lease: Lease, stamp: int | None) -> None:
        node, lease.cursor, lease.released = lease.cursor, None, True
        del self._leases[lease]
        self._moved.pop(lease, None)
        self.tree.unpin(node, stamp=stamp)
        self.tree.join(node)

    def _hang(self, lease: Lease, tail: Tail) -> None:
        """Publishes a partly filled last block under the lease's end, and for the moment moves the lease to its end."""
        if not self.partial_blocks:
            raise ValueError("tail: expected None, as this cache keeps whole blocks only")
        if lease.cursor.fresh:
            raise ValueError("tail: expected a block computed in a finished step, got one of a step not committed")
        tokens = self._key(lease, tail.token_ids)
        if not 0 < len(tokens) < self.tree.width:
            expected = f"1..{self.block_size - 1} tokens"
            raise ValueError(f"tail.token_ids: expected {expected}, got {len(tokens) // TOKEN_BYTES}")
        if lease.namespace is None and has_negative(tokens):
            raise ValueError(f"tail.token_ids: expected ids >= 0, got {_unpacked(tokens).min()}")
        block = pack_blocks([tail.block_id], 1)
        if self.owner is None:
            self._check_new([int(tail.block_id)])
            self._held.add(int(tail.block_id))
        if lease.is_stale:
            self.tree.num_blocks += 1
            self.tree.superseded.append(int(_unpacked(block)[0]))
            return
        lease.cursor = self.tree.hang(lease.cursor, tokens, block, lease.namespace is None)

    # ---- steps

    def commit(self) -> None:
        fresh = self.tree.fresh
        if self._events.active:
            for node in sorted(fresh, key=lambda node: node.start):
                self._announce(node, node.num_blocks - node.fresh, node.num_blocks)
        for node in fresh:
            node.fresh = 0
        if fresh and isinstance(self.tree, CappedTree):
            self.tree.committed(fresh)
        fresh.clear()
        self._moved.clear()
        self._events.catch_up()

    def withdraw(self) -> Blocks:
        for lease in self._moved:
            self._cut_back(lease)
        self._moved.clear()
        blocks = _joined(self.tree.withdraw())
        self._held.difference_update(blocks.tolist())
        return blocks

    def _cut_back(self, lease: Lease) -> None:
        """Moves a lease up to the last block that an earlier step computed."""
        node: Node = lease.cursor
        while node.fresh:
            lease.num_tokens -= node.fresh * self.block_size
            if node.fresh < node.num_blocks:
                break
            assert node.parent is not None
            node = node.parent
        if node is not lease.cursor:
            self.tree.pin(node)
            self.tree.unpin(lease.cursor, stamp=None)
            lease.cursor = node

    def reset(self, namespace: Namespace | None = None) -> Reset:
        if self.tree.fresh:
            raise RuntimeError("reset: expected the step to be committed or withdrawn before")
        concerned = kinds(namespace)
        for lease in self._leases:
            lease.is_stale |= namespace is None or not concerned.isdisjoint(kinds(lease.namespace))
        given_up: list[int] = []
        kept: list[int] = []
        for top in list(self.tree.root.children.values()) if namespace is None else self._tops(concerned):
            blocks = self.tree.forget(top)
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
        for lease in self._leases:
            lease.released = True
        self.tree.watches.end_all()
        self._begin()
        self._events.cleared()

    def _tops(self, concerned: Container[Part]) -> list[Node]:
        """Returns the nodes from which on everything depends on one of these parts, cut off from what does not."""
        tops = []
        nodes = list(self.tree.root.children.values())
        for node in nodes:  # grows while it is walked
            at = self._interner.first(node.span, concerned) if node.is_marked else None
            if at is None:
                nodes.extend(node.children.values())
                continue
            if at >= self.block_size:
                self.tree.split(node, at // self.block_size * self.tree.width)
            tops.append(node)
        return tops

    def evict(self, num_blocks: int) -> Blocks:
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
        key = pack(token_ids)
        if namespace is not None:
            key = self._interner.mark(key, namespace)
        watch = Watch(key, namespace is None, rank, None)
        self.tree.watches.add(watch)
        watch.changed = changed
        return watch

    def unwatch(self, watch: Watch) -> None:
        check_watching(watch)
        self.tree.watches.remove(watch)

    # ---- what it holds

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Announces what is committed, and from then on what changes. Blocks are hashed only while someone subscribes.

        Cost: O(content) now, and a hash for each block from then on.
        """
        return self._events.subscribe(callback, self._announce_all)

    def _announce_all(self) -> None:
        nodes = list(self.tree.root.children.values())
        for node in nodes:  # grows while it is walked: parents first
            nodes.extend(node.children.values())
            if len(node.span) >= self.tree.width:  # no tails
                self._announce(node, 0, node.num_blocks - node.fresh)

    def _announce(self, node: Node, first: int, last: int) -> None:
        """Announces blocks first .. last of a node."""
        if first >= last:
            return
        path = [node.span[: last * self.tree.width]]
        above = node.parent
        while above is not None:
            path.append(above.span)
            above = above.parent
        start = node.start + first * self.block_size
        tokens, namespace = self._interner.unmark(b"".join(reversed(path)))
        block_ids = _unpacked(node.blocks)[:last].tolist()
        parent = block_ids[first - 1] if first else None
        if not first and node.start:
            assert node.parent is not None
            parent = int(_unpacked(node.parent.blocks)[-1])
        self._events.stored(parent, block_ids[first:], tokens[start * TOKEN_BYTES :], namespace, start)

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(self.tree.num_pinned, self.tree.num_blocks - self.tree.num_pinned)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in its blocks; fewer than the blocks have rows, where tails are partly filled. O(nodes)."""
        nodes = [self.tree.root]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        return sum(node.num_tokens for node in nodes)

    def snapshot(self) -> Span:
        """Returns the whole tree as plain data, from an empty span at its root. O(nodes log nodes + tokens)."""
        return take(self.tree.root, self._interner)

    @property
    def num_superseded_blocks(self) -> int:
        return len(self.tree.superseded)

    def check(self, leases: Iterable[Lease] | None = None) -> None:
        """Asserts every invariant. Raises CacheCorruption. O(everything).

        Args:
            leases: all that should be live; None: not known.
        """
        if leases is not None and set(leases) != self._leases.keys():
            raise CacheCorruption(f"violated: the live leases are {leases}, got {list(self._leases)}")
        check_tree(self.tree, self._leases)
        if self.owner is None and len(self._held) != self.tree.num_blocks:
            raise CacheCorruption(f"violated: {self.tree.num_blocks} block ids are noted, got {len(self._held)}")
        if isinstance(self.tree, CappedTree):
            self.tree.check_caps()


def _unpacked(blocks: bytes) -> Blocks:
    return np.frombuffer(blocks, np.int32)


def _joined(blocks: list[bytes]) -> Blocks:
    return np.frombuffer(b"".join(blocks), np.int32) if blocks else NO_BLOCKS

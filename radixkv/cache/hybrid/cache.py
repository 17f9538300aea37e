"""HybridCache: the radix cache of models with layers that keep more, or less, than KV of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from radixkv.cache.contract import NO_BLOCKS, Blocks, CacheCorruption, Lease, check_block_size, check_count, check_live
from radixkv.cache.hybrid.checkpoints import Checkpoint, TreeCheckpoints
from radixkv.cache.hybrid.history import History
from radixkv.cache.hybrid.placement import Placement, Placements, Visit
from radixkv.cache.hybrid.placements import DEFAULT_PLACEMENT, make_placement
from radixkv.cache.hybrid.retention import Retention, Weight
from radixkv.cache.hybrid.retentions import make_retention
from radixkv.cache.layers import CELL, Layers, Recurrent, Window, checkpoint_bytes, token_bytes
from radixkv.cache.namespace import Namespace
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.node import Node
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack, unpack

RANKED_ANEW = 8  # all checkpoints are ranked anew once in as many evictions as are an eighth of them


@dataclass(eq=False, slots=True)
class HybridLease:
    """A pinned match: KV up to one position, and a checkpoint at or before it. Made by `HybridCache.acquire`.

    Attributes:
        kv: the match of full-attention KV, in whole blocks; it grows as KV is inserted.
        checkpoint: what the request goes on from, pinned; None: from nothing. Each that it makes takes its place.
        num_tokens: tokens that need not be computed: the checkpoint's position at `acquire`.
        num_kv_tokens: tokens of which there is KV, the checkpoint's block included. Those beyond num_tokens are
            computed again, as the other layers' state is not there, but their KV need not be written.
        num_shared: tokens that an earlier request has too.
        ghost: the deepest checkpoint given up among these, if deeper than num_tokens: what would have been hit.
        stops: positions where checkpoints are to be made, ascending, with the placement that asks for each; a chunk of
            the prompt ends at each.
        poor_stops: those left out by `HybridCache.drop_poor_stops`.
    """

    kv: Lease
    checkpoint: Checkpoint | None
    num_tokens: int
    num_kv_tokens: int
    num_shared: int
    ghost: Checkpoint | None
    stops: dict[int, str]
    key: bytes = field(repr=False)  # the cache's own: the packed prompt
    poor_stops: dict[int, str] = field(default_factory=dict)
    is_known: bool = False  # the cache's own: whether history has it


class GivenUp(NamedTuple):
    """What `HybridCache.evict` gave up.

    Attributes:
        states: of the checkpoints that became ghosts.
        block_ids: [n] int32, blocks of KV that no checkpoint needs any more.
    """

    states: list[Any]
    block_ids: Blocks


class _Candidate(NamedTuple):
    """A checkpoint that may go, or its rows, as ranked at some time."""

    rank: Any
    tie: int
    checkpoint: Checkpoint
    is_whole: bool


class HybridCache:
    """A radix tree of KV with checkpoints at its positions. Token ids, block ids and counts only: no tensors.

    >>> from radixkv.cache.layers import FullAttention, Recurrent
    >>> cache = HybridCache((FullAttention(1), Recurrent(100, 1)), block_size=2, placement="branch+end")
    >>> lease = cache.acquire([1, 2, 3, 4, 5])
    >>> lease.num_tokens, lease.stops
    (0, {5: 'end'})
    >>> duplicates = cache.insert(lease, [1, 2, 3, 4, 5], block_ids=[10, 11])
    >>> cache.checkpoint(lease, 5, state="at 5", num_bytes=100)
    True
    >>> cache.commit()
    >>> cache.release(lease).tolist()
    []
    >>> lease = cache.acquire([1, 2, 3, 9])           # there is KV of two tokens, but a state at the fifth alone
    >>> lease.num_tokens, lease.num_kv_tokens, lease.num_shared, lease.stops
    (0, 2, 3, {3: 'branch', 4: 'end'})

    A match is the deepest position, to the token, with a checkpoint. KV is held as far as some checkpoint or running
    request needs it, and the tokens of earlier requests as long as history has room.

    Args:
        layers: of the model.
        block_size: number of tokens in a block of KV.
        placement: where checkpoints are made: names joined by + (`radixkv.cache.hybrid.placements`).
        retention: which checkpoint goes first: the name of one of `radixkv.cache.hybrid.retentions`, or an object.
        max_ghost_tokens: tokens of earlier requests that are remembered; 4 to 9 bytes each.

    Attributes:
        kv: the cache of full-attention KV. Evict through this class, not through it.
        clock: number of requests that used it so far.
        num_made, num_evicted: checkpoints, so far.

    Raises:
        ValueError: an argument is out of range or no name is known.

    Cost: `acquire` two matches (`RadixCache.acquire`, and the history's); `evict` O(checkpoints).
    """

    def __init__(
        self,
        layers: Layers,
        block_size: int = 16,
        *,
        placement: str | Placement | Placements = DEFAULT_PLACEMENT,
        retention: str | Retention = "adaptive",
        max_ghost_tokens: int = 8_000_000,
    ) -> None:
        self.block_size = check_block_size(block_size)
        self.layers = layers
        self.placement = make_placement(placement)
        self.retention = make_retention(retention)
        self._token_bytes = token_bytes(layers)
        # A window's blocks before the position are not there at the border, nor is what an odd block size cuts through.
        can_shorten = not any(isinstance(each, Window) for each in layers) and (
            CELL % block_size == 0 or block_size % CELL == 0
        )
        rows = sum(each.row_bytes for each in layers if isinstance(each, Recurrent))
        self._row_bytes = rows if can_shorten else 0
        self._max_ghost_tokens = check_count("max_ghost_tokens", max_ghost_tokens)
        self.kv = RadixCache(block_size, partial_blocks=False)
        self._checkpoints = TreeCheckpoints(self.kv.tree)
        self._history = History(self._max_ghost_tokens)
        self._moves: list[tuple[HybridLease, Checkpoint, bool, Checkpoint | None]] = []  # since the last commit
        self._order: list[_Candidate] = []  # a heap
        self._num_trusted = 0  # evictions until all are ranked anew
        self._ties = count()
        self.clock = self.num_made = self.num_evicted = 0
        self.retention.begin(self._history.checkpoints)

    # ---- matching

    def acquire(
        self,
        token_ids: TokenIds,
        namespace: Namespace | None = None,
        *,
        turns: Iterable[int] = (),
        named: Iterable[int] = (),
    ) -> HybridLease:
        """Pins the deepest checkpoint of a prompt before its last token, and the KV that there is.

        Args:
            token_ids: [n] the whole prompt. Its last token is always computed.
            namespace: what else its KV and states depend on, or are to be kept apart by.
            turns: positions where turns of the chat end.
            named: positions where the caller wants a checkpoint.

        Returns:
            A lease, to be ended by `release` or `cancel`.

        Raises:
            ValueError: bad tokens or namespace.
        """
        key = pack(token_ids)
        matched = key[:-TOKEN_BYTES]
        kv = self.kv.acquire(matched, namespace)
        num_most = len(matched) // TOKEN_BYTES
        folded = matched if namespace is None else self.kv.fold(matched, namespace)
        found = self._checkpoints.deepest(kv.cursor, folded, num_most)
        passed = self._history.match(matched, namespace)
        num_tokens = 0
        if found is not None:
            found.pins += 1
            num_tokens = found.position
        ghost = passed.deepest if passed.deepest is not None and passed.deepest.position > num_tokens else None
        num_shared = max(passed.num_shared, num_tokens)
        visit = Visit(num_most + 1, num_tokens, num_shared, passed.fork(num_tokens), tuple(turns), tuple(named))
        num_kv_tokens = max(kv.num_tokens, num_tokens)
        stops = self.placement.positions(visit)
        return HybridLease(kv, found, num_tokens, num_kv_tokens, num_shared, ghost, stops, key)

    def _know(self, lease: HybridLease) -> None:
        """Notes a request, once, when it has been admitted: what it goes on from is used, and history has it."""
        if lease.is_known:
            return
        lease.is_known = True
        self.clock += 1
        for used in (lease.checkpoint, lease.ghost):
            if used is not None:
                self.retention.met(used, self.clock)
                used.last_use = self.clock
                used.num_uses += 1
                used.is_superseded = False
        for checkpoint in self._history.add(lease.key, lease.kv.namespace):
            self.retention.forgotten(checkpoint, self.clock)
        for position, reason in lease.poor_stops.items():
            ghost = self._history.record(lease.key, position, reason, self.clock, lease.kv.namespace)
            if ghost.state is None:
                self.retention.forgotten(ghost, self.clock)
                ghost.last_use = self.clock

    def drop_poor_stops(self, lease: HybridLease) -> None:
        """Leaves out stops whose checkpoints would be the first to go: for a caller whose memory is full.

        They become ghosts at once, so that it shows whether they would have been used.

        Args:
            lease: that has not been inserted to yet.

        Cost: a match for each stop.
        """
        lowest = self._lowest(True)
        if lowest is None:
            return
        before, num_kv = lease.num_tokens, lease.num_kv_tokens
        kept: dict[int, str] = {}
        for position, reason in lease.stops.items():
            known = self._history.known(lease.key, position, lease.kv.namespace)
            made = Checkpoint(position, reason, self.clock)
            made.num_uses = known.num_uses if known is not None else 0
            saved_from, source = before, lease.checkpoint
            if reason == "fork" and source is not None and before == lease.num_tokens:
                above = self._checkpoints.above(source)
                saved_from = above.position if above is not None else 0
                made.reason, made.num_uses, made.is_continued = source.reason, source.num_uses, source.is_continued
            best = None
            for end in (position, position - position % CELL):
                num_bytes = checkpoint_bytes(self.layers, end) + max(end - num_kv, 0) * self._token_bytes
                if end > before:
                    found = self.retention.rank(made, Weight(end - saved_from, num_bytes, False), self.clock)
                    best = found if best is None or found > best else best
            if best is not None and best > lowest.rank:
                kept[position] = reason
                before, num_kv = position, max(position, num_kv)
        lease.poor_stops = {p: reason for p, reason in lease.stops.items() if p not in kept}
        lease.stops = kept

    # ---- publishing

    def insert(self, lease: HybridLease, token_ids: TokenIds, block_ids: Any) -> Blocks:
        """Publishes the full blocks of KV after the KV match's end, as `RadixCache.insert` does."""
        duplicates = self.kv.insert(lease.kv, token_ids, block_ids)
        self._know(lease)
        return duplicates

    def checkpoint(
        self, lease: HybridLease, position: int, state: Any, num_bytes: int, token_ids: TokenIds | None = None
    ) -> bool:
        """Leaves a checkpoint. The lease goes on from it.

        Args:
            lease: of this request, its KV inserted up to the last border of a block before the position.
            position: number of tokens before it.
            state: what it takes to go on here besides whole blocks of KV; the cache's until `evict` or `withdraw`
                returns it.
            num_bytes: of the state, at most: parts that others hold too may be counted.
            token_ids: the request's tokens up to the position at least; None: the prompt's.

        Returns:
            Whether it was taken. Else the state stays the caller's: there is one already, the lease is stale, or a
            namespace starts in the block.

        Raises:
            ValueError: the lease has ended, or its KV does not reach the position.
        """
        check_live(lease.kv)
        key = lease.key if token_ids is None else pack(token_ids)
        border = position // self.block_size * self.block_size
        if position > len(key) // TOKEN_BYTES or border > lease.kv.num_tokens or position < 1:
            raise ValueError(
                f"position: expected one whose blocks are inserted ({lease.kv.num_tokens}), got {position}"
            )
        self._know(lease)
        namespace = lease.kv.namespace
        place = self._checkpoints.place(self.kv.fold(key, namespace), position, namespace is None)
        if lease.kv.is_stale or place is None:
            return False
        there = self._checkpoints.at(position, *place)
        is_new = there is None
        if there is None:
            reason = lease.stops.get(position, "output")
            there = self._history.record(key, position, reason, self.clock, namespace)
            if there.last_use < self.clock:  # a ghost that this request did not meet
                self.retention.forgotten(there, self.clock)
            there.state, there.num_bytes, there.last_use = state, num_bytes, self.clock
            self._checkpoints.hang(there, *place)
            self.num_made += 1
        if lease.checkpoint is not there:
            self._moves.append((lease, there, is_new, lease.checkpoint))
            there.pins += 1
            if lease.checkpoint is not None:
                is_source = lease.checkpoint.position == lease.num_tokens
                lease.checkpoint.is_continued |= is_source
                if is_source and there.reason == "fork":
                    self._supersede(lease.checkpoint, there)
                self._unpin(lease.checkpoint)
            lease.checkpoint = there
        return is_new

    def _supersede(self, old: Checkpoint, new: Checkpoint) -> None:
        """Lets a checkpoint take the place of one above it: whatever came through that will come through it."""
        old.is_superseded = True
        new.reason, new.is_continued = old.reason, old.is_continued
        new.num_uses = max(new.num_uses, old.num_uses)

    # ---- ends

    def release(self, lease: HybridLease, token_ids: TokenIds | None = None) -> Blocks:
        """Ends the lease.

        Args:
            lease: one that has not ended.
            token_ids: prompt and output, to be remembered in the prompt's place.

        Returns:
            [n] int32, blocks of KV beyond the last checkpoint, which serve no hit: the caller's again.

        Raises:
            ValueError: the lease has ended.
        """
        check_live(lease.kv)
        self._know(lease)
        if token_ids is not None:
            for checkpoint in self._history.add(pack(token_ids), lease.kv.namespace):
                self.retention.forgotten(checkpoint, self.clock)
        return self._end(lease, is_used=True)

    def cancel(self, lease: HybridLease) -> Blocks:
        """Ends a lease as if it had never been acquired.

        Raises:
            ValueError: the lease has ended or has grown.
        """
        return self._end(lease, is_used=False)

    def _end(self, lease: HybridLease, is_used: bool) -> Blocks:
        node = lease.kv.cursor
        if is_used:
            self.kv.release(lease.kv)
        else:
            self.kv.cancel(lease.kv)
        if lease.checkpoint is not None:
            self._unpin(lease.checkpoint)
            lease.checkpoint = None
        return self._give_up(node)

    def _unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1
        if not checkpoint.pins and checkpoint in self._checkpoints and self._order:
            heappush(self._order, self._candidate(checkpoint, True))

    def _give_up(self, node: Node) -> Blocks:
        """Gives up the KV that no checkpoint needs at the end of a branch. Cost: O(nodes given up)."""
        given_up = [self.kv.evict(self.kv.num_dead_blocks)] if self.kv.num_dead_blocks else []
        while node.parent is not None and not (node.pins or node.children or node.is_removed):
            num_kept = (self._checkpoints.last_border(node) - node.start) // self.block_size
            if num_kept == node.num_blocks:
                break
            parent = node.parent
            given_up.append(self.kv.give_up(node, num_kept))
            if num_kept:
                break
            node = parent
        return np.concatenate(given_up) if given_up else NO_BLOCKS

    # ---- shrinking

    def weigh(self, checkpoint: Checkpoint) -> Weight:
        """Returns what giving a checkpoint up would cost and free. Cost: O(nodes up to the next checkpoint)."""
        above = self._checkpoints.above(checkpoint)
        node = self._checkpoints.node_of(checkpoint)
        border = checkpoint.position // self.block_size * self.block_size
        num_alone = 0
        continues = bool(node.children) or self._checkpoints.last_border(node, checkpoint) >= max(border, 1)
        if not continues and not node.pins:
            below: Node | None = None
            while (
                node.parent is not None
                and not node.pins
                and not node.children.keys() - _keys(below, self.kv.tree.width)
            ):
                last = self._checkpoints.last_border(node, checkpoint)
                num_alone += min(node.start + node.num_tokens, border) - last
                if last > node.start:
                    break
                below, node = node, node.parent
        num_saved = 0 if checkpoint.is_superseded else checkpoint.position - (above.position if above else 0)
        return Weight(num_saved, checkpoint.num_bytes + num_alone * self._token_bytes, continues)

    def evict(self, shorten: Callable[[Any], tuple[Any, int]] | None = None) -> GivenUp | None:
        """Gives up what the retention ranks lowest: a checkpoint, with the KV that it alone needs, or only its rows.

        Without its rows a checkpoint stands at the border of its cell. That is worth its while where memory is short:
        rows cost more a token than anything else.

        Args:
            shorten: makes of a state one without rows, at the border of its cell, and its bytes; None: rows stay.

        Returns:
            What is the caller's again; None where every checkpoint is pinned.

        Cost: O(checkpoints).
        """
        found = self._lowest(shorten is not None)
        if found is None:
            return None
        checkpoint, is_whole = found.checkpoint, found.is_whole
        node, tail = self._checkpoints.take_down(checkpoint)
        state, checkpoint.state = checkpoint.state, None
        if shorten is not None and not is_whole:
            self._hang_shorter(checkpoint, node, tail, *shorten(state))
        else:
            self.num_evicted += 1
        return GivenUp([state], self._give_up(node))

    def _candidate(self, checkpoint: Checkpoint, shortens: bool) -> _Candidate:
        """Ranks a checkpoint, and its rows alone. Cost: as `weigh`."""
        rank, weight = self.retention.rank, self.weigh(checkpoint)
        whole = rank(checkpoint, weight, self.clock)
        num_rows = checkpoint.position % CELL
        if shortens and self.retention.shortens and self._row_bytes and 0 < num_rows < weight.num_saved:
            rows = rank(checkpoint, Weight(num_rows, num_rows * self._row_bytes, weight.continues), self.clock)
            if rows < whole:
                return _Candidate(rows, next(self._ties), checkpoint, False)
        return _Candidate(whole, next(self._ties), checkpoint, True)

    def _lowest(self, shortens: bool) -> _Candidate | None:
        """Returns the unpinned checkpoint that ranks lowest, or its rows; None where all are pinned.

        Ranks are kept in a heap. The first is ranked anew before it is taken, all of them once in a while: a rank that
        has fallen since is seen late.

        Cost: O(log checkpoints) ranks, amortised.
        """
        heap = self._order
        for _ in range(2):
            if self._num_trusted <= 0 or not heap:
                heap[:] = [self._candidate(each, shortens) for each in self._checkpoints if not each.pins]
                heapify(heap)
                self._num_trusted = len(heap) // RANKED_ANEW
            self._num_trusted -= 1
            while heap:
                checkpoint = heap[0].checkpoint
                if checkpoint.pins or checkpoint not in self._checkpoints:
                    heappop(heap)
                    continue
                # Of equal ranks the first stays first, or they would take turns.
                found = self._candidate(checkpoint, shortens)._replace(tie=heap[0].tie)
                heapreplace(heap, found)
                if heap[0] is found:
                    return found
        return None

    def _hang_shorter(self, checkpoint: Checkpoint, node: Node, tail: bytes, state: Any, num_bytes: int) -> None:
        """Hangs a state at the border of the cell in which a checkpoint was, known by the same uses. O(tokens)."""
        position = checkpoint.position - checkpoint.position % CELL
        tokens, namespace = self.kv.path(node)
        tokens = tokens[: checkpoint.position // self.block_size * self.block_size * TOKEN_BYTES] + tail
        place = self._checkpoints.place(self.kv.fold(tokens, namespace or None), position, not namespace)
        if place is None:
            raise CacheCorruption(f"violated: the tree reaches {position}, where {checkpoint} was")
        shorter = self._history.record(tokens, position, checkpoint.reason, checkpoint.born, namespace or None)
        shorter.num_uses = max(shorter.num_uses, checkpoint.num_uses)
        shorter.last_use = max(shorter.last_use, checkpoint.last_use)
        shorter.is_continued |= checkpoint.is_continued
        shorter.state, shorter.num_bytes = state, num_bytes
        self._checkpoints.hang(shorter, *place)
        heappush(self._order, self._candidate(shorter, True))

    # ---- steps

    def commit(self) -> None:
        """The step is computed: what was inserted and left since the last commit stays."""
        self.kv.commit()
        self._moves.clear()

    def withdraw(self) -> GivenUp:
        """Undoes every insert and checkpoint since the last commit; what is returned is the caller's again."""
        states = []
        for lease, checkpoint, is_new, before in reversed(self._moves):
            if lease.checkpoint is checkpoint:
                checkpoint.pins -= 1
                if before is not None and before in self._checkpoints:
                    before.pins += 1
                    lease.checkpoint = before
                else:
                    lease.checkpoint = None
            if is_new and checkpoint in self._checkpoints:
                self._checkpoints.take_down(checkpoint)
                states.append(checkpoint.state)
                checkpoint.state = None
        self._moves.clear()
        return GivenUp(states, self.kv.withdraw())

    def reset(self, namespace: Namespace | None = None) -> GivenUp:
        """Forgets what it holds now, as `RadixCache.reset` does; what running requests pin is theirs until they end.

        Args:
            namespace: forget only what depends on one of these parts; None: everything.

        Returns:
            What is the caller's again.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: a bad namespace.

        Cost: O(everything).
        """
        blocks = self.kv.reset(namespace).block_ids
        self._history.forget(namespace)
        lost, self._checkpoints.lost = self._checkpoints.lost, []
        states = [checkpoint.state for checkpoint in lost]
        for checkpoint in lost:
            checkpoint.state = None
        return GivenUp(states, blocks)

    # ---- what it holds

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints that are there. O(1)."""
        return len(self._checkpoints)

    def states(self) -> list[Any]:
        """Returns the states of the checkpoints that are there. O(checkpoints)."""
        return [checkpoint.state for checkpoint in self._checkpoints]

    def block_at(self, lease: HybridLease, number: int) -> int:
        """Returns the id of a block of KV that a lease pins. O(nodes above the lease's end).

        Raises:
            ValueError: the lease does not reach it.
        """
        check_live(lease.kv)
        node = lease.kv.cursor
        while node.start > number * self.block_size:
            node = node.parent
        ids = unpack(node.blocks)
        at = number - node.start // self.block_size
        if not 0 <= at < len(ids):
            raise ValueError(f"number: expected a block that the lease pins, got {number}")
        return int(ids[at])

    @property
    def num_ghosts(self) -> int:
        """Number of checkpoints that are known and not there. O(known)."""
        return sum(checkpoint.state is None for checkpoint in self._history.checkpoints)

    def check(self) -> None:
        """Raises CacheCorruption unless every invariant holds. O(everything); for tests."""
        self.kv.check()
        self._checkpoints.check()
        self._history.check()
        if self._checkpoints.lost:
            raise CacheCorruption(f"violated: KV outlives checkpoints, got {self._checkpoints.lost}")
        if any(checkpoint.state is None or checkpoint.pins < 0 for checkpoint in self._checkpoints):
            raise CacheCorruption("violated: a checkpoint in the tree has a state, and no pins too few")
        nodes = [self.kv.tree.root]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
            is_leaf = node.parent is not None and not node.pins and not node.children
            if is_leaf and self._checkpoints.last_border(node) != node.start + node.num_tokens:
                raise CacheCorruption("violated: KV that nothing uses ends at a checkpoint")


def _keys(node: Node | None, width: int) -> set[bytes]:
    return set() if node is None else {node.span[:width]}

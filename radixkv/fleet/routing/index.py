"""FleetIndex: which replica holds how much of a prefix, from what their caches say or from what was sent to them.

Fed precisely, by the events of each replica's cache (`apply`), or approximately, by what was sent there (`add`), which
decays: per replica the least recently used go when it holds more than `max_blocks`, and all that is older than a time
(`expire`).

A match is one walk down a tree of all replicas, at each node a memcmp and an `and` of bit masks, however many they are.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import count

from radixkv.cache.contract import check_block_size
from radixkv.cache.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, pack
from radixkv.fleet.routing.fleet_tree import FleetTree, Held, num_common_bytes
from radixkv.fleet.routing.marks import adapters_of, mark_request, mark_run

_READ_FROM = (None, "GPU")  # media whose blocks a forward pass can read


class FleetIndex:
    """Which replica holds how much of a prefix.

    Args:
        block_size: tokens in a block, of all replicas.
        max_blocks: of each replica; the least recently used go first. None: as many as there are events for.
        clock: seconds, for uses.

    Cost: `match` and `add` about a memcmp of the tokens plus O(nodes on the path); `apply` O(blocks of the event);
    about 200 bytes for a block on a replica where events feed it, 5 where `add` does.
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"max_blocks: expected an int >= 1 or None, got {max_blocks}")
        self.block_size = check_block_size(block_size)
        self.tree = FleetTree(block_size, max_blocks, clock)
        self._slots: dict[str, int] = {}

    # ---- replicas

    def add_replica(self, name: str) -> int:
        """Makes room for a replica that holds nothing yet; returns its bit in the masks of `match`.

        Raises:
            ValueError: there is one of that name.
        """
        if name in self._slots:
            raise ValueError(f"name: expected a replica that is not there yet, got {name!r}")
        slot = next(slot for slot in count() if slot not in self.tree.held)
        self._slots[name] = slot
        self.tree.held[slot] = Held()
        return slot

    def remove_replica(self, name: str) -> None:
        """Forgets a replica and all that it holds. O(index)."""
        slot = self._slot(name)
        self.tree.clear(slot)
        del self._slots[name], self.tree.held[slot]

    def num_blocks(self, name: str) -> int:
        """Returns how many blocks of a replica are known."""
        return self.tree.held[self._slot(name)].num_blocks

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            raise ValueError(f"name: expected one of {', '.join(self._slots) or 'no replicas'}, got {name!r}")
        return self._slots[name]

    # ---- asking

    def match(self, token_ids: TokenIds, namespace: Namespace | None = None) -> list[tuple[int, int]]:
        """Returns how much of these tokens is held by whom. Changes nothing.

        Returns:
            (tokens, mask) with growing tokens and shrinking masks: the replicas in `mask` hold at least `tokens`.
        """
        key = pack(token_ids)
        if namespace is not None:
            key = mark_request(key, namespace, self.block_size)
        width, node, at, mask = self.tree.width, self.tree.root, 0, -1
        found: list[tuple[int, int]] = []
        end = len(key) - len(key) % width
        while at < end:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            mask &= child.mask
            if not mask:
                break
            span = child.span
            if key.startswith(span, at):
                at += len(span)
            else:
                at += num_common_bytes(span, key, at, width)
                end = at
            if found and found[-1][1] == mask:
                found.pop()
            found.append((at // TOKEN_BYTES, mask))
            node = child
        return found

    def num_matched(self, name: str, token_ids: TokenIds, namespace: Namespace | None = None) -> int:
        """Returns how many of these tokens one replica holds."""
        bit = 1 << self._slot(name)
        return max((num for num, mask in self.match(token_ids, namespace) if mask & bit), default=0)

    # ---- feeding it what was sent

    def add(self, name: str, token_ids: TokenIds, namespace: Namespace | None = None) -> None:
        """Takes a replica to hold the whole blocks of these tokens from now on, and to have used them just now."""
        key = pack(token_ids)
        if namespace is not None:
            key = mark_request(key, namespace, self.block_size)
        slot = self._slot(name)
        self.tree.place(slot, self.tree.root, key[: len(key) - len(key) % self.tree.width], None, ())
        self.tree.trim(slot)

    def expire(self, before_s: float, names: Collection[str] | None = None) -> None:
        """Forgets what has not been used since a time. O(replicas + what is forgotten * log).

        Args:
            names: only of these replicas.
        """
        for name, slot in self._slots.items():
            heap = self.tree.held[slot].heap
            if heap and heap[0][0] < before_s and (names is None or name in names):
                self.tree.expire(slot, before_s)

    # ---- feeding it events

    def apply(self, name: str, event: Event) -> None:
        """Takes in an event of a replica's cache.

        What can't be placed is passed over: a run whose parent is not known (it was trimmed, or its event was lost), a
        medium that a forward pass can't read from.

        Raises:
            ValueError: the replica is not known, or has blocks of another size.
        """
        slot = self._slot(name)
        if isinstance(event, AllBlocksCleared):
            self.tree.clear(slot)
        elif event.medium not in _READ_FROM:
            return
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                self._remove(slot, block_hash)
        else:
            self._store(slot, event)
            self.tree.trim(slot)

    def _store(self, slot: int, event: BlockStored) -> None:
        if event.block_size != self.block_size:
            raise ValueError(f"event: expected blocks of {self.block_size} tokens, got {event.block_size}")
        tree = self.tree
        for run in self._uniform_runs(slot, event):
            node = tree.root
            if run.parent_block_hash is not None:
                found = tree.find(slot, run.parent_block_hash)
                if found is None:
                    return
                node, at = found
                if (at + 1) * tree.width < len(node.span):
                    node = tree.split(node, (at + 1) * tree.width)
            adapters = adapters_of(run.extra_keys[0]) if run.extra_keys else ()
            key = mark_run(run.token_ids, run.extra_keys, node.adapters, self.block_size)
            tree.place(slot, node, key, list(run.block_hashes), adapters)

    def _uniform_runs(self, slot: int, event: BlockStored) -> Iterator[BlockStored]:
        """Yields the event in pieces that depend on the same adapters all through, without blocks known already."""
        known, keys = self.tree.held[slot].node_of, event.extra_keys
        width, start, end = self.tree.width, 0, len(event.block_hashes)
        for i in range(end + 1):
            is_known = i < end and event.block_hashes[i] in known
            is_border = i == end or is_known or (keys and i and adapters_of(keys[i]) != adapters_of(keys[i - 1]))
            if not is_border:
                continue
            if start < i:
                yield replace(
                    event,
                    block_hashes=event.block_hashes[start:i],
                    parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
                    token_ids=event.token_ids[start * width : i * width],
                    extra_keys=keys and keys[start:i],
                )
            start = i + 1 if is_known else i

    def _remove(self, slot: int, block_hash: BlockHash) -> None:
        tree = self.tree
        found = tree.find(slot, block_hash)
        if found is None:
            return
        node, at = found
        if (at + 1) * tree.width < len(node.span):  # from the middle: what follows is still held
            node = tree.split(node, (at + 1) * tree.width)
        tree.let_go(slot, node, at)

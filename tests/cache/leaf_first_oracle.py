"""A leaf-first flat hash: the plainest cache with the same hits and evictions as the radix tree. Test-only.

One entry per block, found by all tokens up to its end, with a reference count, a stamp and a count of children. No
spans, no splits, no sharing of structure: everything the tree must get right is written out.
"""

from dataclasses import dataclass, field


@dataclass
class Entry:
    block: int
    parent: tuple
    references: int = 0
    stamp: int = 0
    num_children: int = 0
    fresh: bool = True


@dataclass(eq=False)
class OracleLease:
    path: list[tuple] = field(default_factory=list)


class LeafFirstFlatHash:
    def __init__(self, block_size):
        self.block_size = block_size
        self.entries: dict[tuple, Entry] = {}
        self.clock = 0
        self.leases: list[OracleLease] = []

    def _extend(self, lease, tokens):
        """Matches on from the lease's end; returns the number of tokens gained."""
        before = lease.path[-1] if lease.path else ()
        gained = 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            key = before + tuple(tokens[:end])
            if key not in self.entries:
                break
            self.entries[key].references += 1
            lease.path.append(key)
            gained = end
        return gained

    def peek(self, tokens):
        end = 0
        while end + self.block_size <= len(tokens) and tuple(tokens[: end + self.block_size]) in self.entries:
            end += self.block_size
        return end

    def acquire(self, tokens):
        lease = OracleLease()
        self._extend(lease, tokens)
        self.leases.append(lease)
        return lease

    def advance(self, lease, tokens):
        return self._extend(lease, tokens)

    def insert(self, lease, tokens, blocks):
        base = lease.path[-1] if lease.path else ()
        done = self._extend(lease, tokens)
        duplicates = [
            (blocks[i], self.entries[base + tuple(tokens[: (i + 1) * self.block_size])].block)
            for i in range(done // self.block_size)
        ]
        for i in range(done // self.block_size, len(tokens) // self.block_size):
            parent = lease.path[-1] if lease.path else ()
            key = base + tuple(tokens[: (i + 1) * self.block_size])
            self.entries[key] = Entry(blocks[i], parent, references=1)
            if parent:
                self.entries[parent].num_children += 1
            lease.path.append(key)
        return duplicates

    def release(self, lease):
        self.clock += 1
        self.leases.remove(lease)
        for key in lease.path:
            entry = self.entries[key]
            entry.references -= 1
            entry.stamp = self.clock

    def cancel(self, lease):
        self.leases.remove(lease)
        for key in lease.path:
            self.entries[key].references -= 1

    def commit(self):
        for entry in self.entries.values():
            entry.fresh = False

    def withdraw(self):
        taken = [key for key, entry in self.entries.items() if entry.fresh]
        for lease in self.leases:
            lease.path = [key for key in lease.path if not self.entries[key].fresh]
        return [self._remove(key) for key in sorted(taken, key=len, reverse=True)]

    def _remove(self, key):
        entry = self.entries.pop(key)
        if entry.parent in self.entries:
            self.entries[entry.parent].num_children -= 1
        return entry.block

    def give_up(self, blocks):
        """Removes blocks that another cache evicted, in this order: each must be an unreferenced leaf when it goes."""
        for block in blocks:
            (key,) = [key for key, entry in self.entries.items() if entry.block == block]
            assert not self.entries[key].references and not self.entries[key].num_children
            self._remove(key)

    def evict(self, num_blocks):
        evicted = []
        while len(evicted) < num_blocks:
            leaves = [k for k, e in self.entries.items() if not e.references and not e.num_children]
            if not leaves:
                break
            # Equal stamps are blocks of one path: of those only the deepest is a leaf.
            evicted.append(self._remove(min(leaves, key=lambda key: self.entries[key].stamp)))
        return evicted

    @property
    def sizes(self):
        pinned = sum(entry.references > 0 for entry in self.entries.values())
        return pinned, len(self.entries) - pinned

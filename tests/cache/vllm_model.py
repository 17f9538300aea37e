"""The flat hash's rules written as plainly as they go: lists, sorting, whole contents instead of hashes. Test-only."""


class VllmModel:
    """Blocks of equal content side by side; unpinned blocks go in the order of their last release."""

    def __init__(self):
        self.blocks_of = {}  # by content key: its blocks, the oldest first
        self.key_of = {}
        self.released = {}  # by block: when last released
        self.clock = 0
        self.leases = []
        self.fresh = []

    def pinned(self):
        return {block for lease in self.leases for block in lease}

    def queue(self):
        pinned = self.pinned()
        return sorted((block for block in self.key_of if block not in pinned), key=self.released.__getitem__)

    def sizes(self):
        return len(self.pinned()), len(self.queue())

    def advance(self, lease, keys):
        gained = []
        for key in keys:
            if key not in self.blocks_of:
                break
            gained.append(self.blocks_of[key][0])
        lease += gained
        return gained

    def acquire(self, keys):
        lease = Blocks()
        self.advance(lease, keys)
        self.leases.append(lease)
        return lease

    def insert(self, lease, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            self.blocks_of.setdefault(key, []).append(block)
            self.key_of[block] = key
        lease += blocks
        self.fresh += blocks

    def unpin(self, blocks):
        for block in reversed(blocks):
            self.clock += 1
            self.released[block] = self.clock

    def release(self, lease):
        self.cancel(lease)
        self.unpin(lease)

    def cancel(self, lease):
        self.leases = [other for other in self.leases if other is not lease]

    def commit(self):
        self.fresh = []

    def withdraw(self):
        gone, self.fresh = self.fresh[::-1], []
        for lease in self.leases:
            keep = next((i for i, block in enumerate(lease) if block in gone), len(lease))
            self.unpin(lease[keep:])
            del lease[keep:]
        self.forget(gone)
        return gone

    def evict(self, num_blocks):
        blocks = self.queue()[:num_blocks]
        self.forget(blocks)
        self.fresh = [block for block in self.fresh if block not in blocks]
        return blocks

    def forget(self, blocks):
        for block in blocks:
            key = self.key_of.pop(block)
            self.blocks_of[key].remove(block)
            if not self.blocks_of[key]:
                del self.blocks_of[key]
            self.released.pop(block, None)


class Blocks(list):
    """A lease: the blocks it pins. Equal lists are different leases."""

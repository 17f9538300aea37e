"""The cache of a hybrid model as a plain set of prefixes: what each request finds, leaves and needs, by brute force."""

from radixkv.cache.hybrid.placement import Visit
from radixkv.cache.hybrid.placements import make_placement

HISTORY_BLOCK = 16


def common(a, b):
    """Number of leading tokens that two sequences share."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class PrefixSet:
    """Prefixes at which there is a checkpoint, and the prompts that have passed.

    Attributes:
        prefixes: tuples of tokens.
        passed: prompts, as tuples.
        last_use: by prefix, in requests.
    """

    def __init__(self, placement, block_size):
        self.placement = make_placement(placement)
        self.block_size = block_size
        self.prefixes = set()
        self.passed = set()

    def visit(self, prompt):
        """Returns the prefix that a prompt goes on from, how much it shares, and where it is to leave checkpoints."""
        matched = prompt[:-1]
        found = max((p for p in self.prefixes if matched[: len(p)] == p), key=len, default=())
        shared = max([len(found), *(common(matched, other) for other in self.passed)])
        visit = Visit(len(prompt), len(found), shared, fork=self.fork(matched, len(found)))
        return found, shared, self.placement.positions(visit)

    def fork(self, matched, start):
        """Returns the first border of a block of history from `start` on where prompts that passed part; 0: none."""
        for end in range(-(-start // HISTORY_BLOCK) * HISTORY_BLOCK, len(matched) + 1, HISTORY_BLOCK):
            nexts = {p[end : end + HISTORY_BLOCK] for p in self.passed if len(p) >= end and p[:end] == matched[:end]}
            if not nexts and end:
                return 0
            if len({n for n in nexts if not any(o != n and o[: len(n)] == n for o in nexts)} - {()}) > 1:
                return end
        return 0

    def kv_blocks(self, held):
        """Returns the blocks of KV that checkpoints need and running requests hold, each as the prefix it ends.

        Args:
            held: prefixes of whole blocks that running requests have matched or published.
        """
        size = self.block_size
        return {p[:end] for p in (*self.prefixes, *held) for end in range(size, len(p) + 1, size)}

"""The cache of a hybrid model as a plain set of prefixes: what each request finds, leaves and needs, by brute force."""

from radixkv.cache.hybrid.placement import Visit
from radixkv.cache.hybrid.placements import make_placement


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
        return found, shared, self.placement.positions(Visit(len(prompt), len(found), shared))

    def kv_blocks(self, held):
        """Returns the blocks of KV that checkpoints need and running requests hold, each as the prefix it ends.

        Args:
            held: prefixes of whole blocks that running requests have matched or published.
        """
        size = self.block_size
        return {p[:end] for p in (*self.prefixes, *held) for end in range(size, len(p) + 1, size)}

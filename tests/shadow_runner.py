"""A runner without a model: every slot holds the history whose KV was written there, and every read is checked.

The "logits" of a row are a number made of its history, so a sequence's tokens depend on nothing but its own tokens.
"""

VOCABULARY = 7


class ForwardFailed(RuntimeError):
    pass


def histories(namespace, tokens):
    """Returns a number for each token that stands for it, all before it, and the namespace."""
    chain, history = [], hash(("start", repr(namespace)))
    for token in tokens:
        history = hash((history, int(token)))
        chain.append(history)
    return chain


def next_token(history):
    """The token that follows a history: as good as random, and the same within a process."""
    return hash((history, "next")) % VOCABULARY


class ShadowRunner:
    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.block_size = scheduler.block_size
        self.slots = {}
        self.known = {}
        self.fails_on = None  # a predicate of sequences

    def history(self, sequence_id, namespace, token_ids, end):
        chain = self.known.get(sequence_id, [])
        if len(chain) < end:
            chain = self.known[sequence_id] = histories(namespace, token_ids[:end])
        return chain

    def sequence(self, sequence_id):
        return next(r.sequence for r in self.scheduler.running if r.sequence.sequence_id == sequence_id)

    def copy(self, copies):
        for copy in copies:
            for row in range(copy.num_tokens):
                self.slots[copy.destination, row] = self.slots[copy.source, row]

    def forward(self, batch):
        """Returns the next token of each sequence that needs logits, in order."""
        for block in self.scheduler.manager.allocator.free_ids().tolist():  # a read of a free block finds poison
            for row in range(self.block_size):
                self.slots.pop((block, row), None)
        self.copy(batch.copies)
        chains = []
        for item in batch.sequences:
            namespace = self.sequence(item.sequence_id).request.namespace
            history = self.history(item.sequence_id, namespace, item.token_ids, item.end)
            chains.append(history)
            assert item.start < item.end and item.start <= item.write_start <= item.end
            for position in range(item.write_start, item.end):
                block = int(item.block_table[position // self.block_size])
                self.slots[block, position % self.block_size] = history[position]
        if self.fails_on and any(self.fails_on(self.sequence(item.sequence_id)) for item in batch.sequences):
            raise ForwardFailed
        for item, history in zip(batch.sequences, chains, strict=True):
            for position in range(item.end):
                block = int(item.block_table[position // self.block_size])
                assert self.slots.get((block, position % self.block_size)) == history[position]
        return [
            next_token(h[item.end - 1]) for item, h in zip(batch.sequences, chains, strict=True) if item.needs_logits
        ]

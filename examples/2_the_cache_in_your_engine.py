"""The cache in an engine of your own: which blocks a request gets, what it need not compute, and when to say what."""

from radixkv import KVManager, OutOfBlocks, RadixCache

manager = KVManager(RadixCache(block_size=16), num_blocks=12)


def serve(prompt: list[int]) -> int | None:
    """Serves one prompt; returns how many of its tokens were cached, or None where it has to wait for blocks."""
    sequence = manager.begin(prompt)  # matches and pins what is cached, except the last token
    try:
        manager.grow(sequence, num_tokens=len(prompt))  # blocks for the rest, evicting where needed
    except OutOfBlocks:
        manager.cancel(sequence)  # as if it had not been
        return None
    manager.publish(sequence, prompt)  # from here on, other requests of the same step share it
    try:
        run_model(prompt, sequence.block_table, sequence.num_cached_tokens, manager.copies)
    except RuntimeError:
        manager.withdraw()  # everything is as before the step
        manager.end(sequence)
        raise
    manager.commit()
    manager.end(sequence, prompt)  # its partial block stays cached too
    return sequence.num_cached_tokens


def run_model(prompt, block_table, start, copies):
    """Stands for a step: first the copies of rows, then the tokens from `start` on, into the blocks of the table."""
    print(f"compute {len(prompt) - start} of {len(prompt)} tokens, blocks {block_table.tolist()}, copy {copies}")


assert serve(list(range(100))) == 0
assert serve([*range(90), 7, 8, 9]) == 90  # 5 whole blocks, and 10 rows of the next, copied
assert serve(list(range(1000, 1300))) is None  # longer than the pool
print(manager.sizes)

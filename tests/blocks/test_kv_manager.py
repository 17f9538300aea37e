"""KVManager on a shadow pool: every row of every block remembers whose KV it holds, and every read is checked."""

import random

import numpy as np
import pytest

from radixkv.blocks.allocator import BlockAllocator, OutOfBlocks
from radixkv.blocks.kv_manager import BlockCopy, KVManager, PoolSizes
from radixkv.cache.contract import PartialMatch
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.namespace import LoRA, Salt
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from tests.sampling import few

CACHES = {
    "null": NullCache,
    "flat_hash": FlatHashCache,
    "radix whole": lambda block_size: RadixCache(block_size, partial_blocks=False),
    "radix": RadixCache,
    "radix cost": lambda block_size: RadixCache(block_size, policy="cost"),
}


class Request:
    def __init__(self, tokens, namespace, sequence, keeps_own):
        self.tokens = tokens
        self.namespace = namespace
        self.sequence = sequence
        self.num_computed = sequence.num_cached_tokens
        self.target = self.num_computed
        self.num_duplicates = (0, 0)
        self.keeps_own = keeps_own  # it is run by a worker whose block tables are append-only
        self.table = []  # the worker's


class ShadowEngine:
    """Runs random requests in random steps. A slot holds the history whose KV was computed into it, or poison."""

    def __init__(self, seed, cache, num_blocks):
        self.random = random.Random(seed)
        self.cache = cache
        self.block_size = cache.block_size
        self.first_block = self.random.choice([0, 1, 5])
        self.manager = KVManager(cache, num_blocks, first_block=self.first_block)
        self.num_blocks = num_blocks
        self.slots = {}
        self.live = []
        self.texts = [()]
        self.num_hits = self.num_failed_steps = self.num_refused = self.num_copies = self.num_kept = 0

    def history(self, request, position):
        return (request.namespace, request.tokens[: position + 1])

    def slot(self, request, position):
        return int(request.sequence.block_table[position // self.block_size]), position % self.block_size

    def arrive(self):
        text = self.random.choice(self.texts)
        text = text[: self.random.randint(0, len(text))]
        text += tuple(self.random.randrange(3) for _ in range(self.random.randint(1, 3 * self.block_size + 2)))
        self.texts = [*self.texts[-10:], text]
        namespace = self.random.choice([None, None, None, Salt("a"), LoRA("a")])
        before = self.manager.sizes, self.cache.peek(text, namespace)
        match = self.random.random() < 0.9
        sequence = self.manager.begin(list(text), namespace, match=match)
        assert sequence.num_cached_tokens < (len(text) if match else 1)
        try:
            self.manager.grow(sequence, self.random.randint(sequence.lease.num_tokens, len(text)))
        except OutOfBlocks:
            self.manager.cancel(sequence)
            self.num_refused += 1
            assert (self.manager.sizes, self.cache.peek(text, namespace)) == before
            return None
        self.num_hits += sequence.num_cached_tokens
        request = Request(text, namespace, sequence, keeps_own=self.random.random() < 0.4)
        self.live.append(request)
        return request

    def schedule(self, request):
        """Gives a request its next chunk and publishes it; False if there is no room."""
        sequence = request.sequence
        if not request.keeps_own and request.num_computed < len(request.tokens) and self.random.random() < 0.5:
            self.manager.advance(sequence, list(request.tokens[:-1]))
            request.num_computed = max(request.num_computed, sequence.lease.num_tokens)
        if request.num_computed == len(request.tokens):
            request.tokens += (self.random.randrange(3),)  # a decode step
        target = self.random.randint(request.num_computed + 1, len(request.tokens))
        had_partial = sequence.lease.partial is not None
        fits = self.manager.fits(sequence, target) if self.random.random() < 0.5 else None
        num_cached = sequence.num_cached_tokens
        try:
            self.manager.grow(sequence, target)
            assert fits is None or (fits and sequence.num_cached_tokens == num_cached)
        except OutOfBlocks:
            assert not fits
            return False
        finally:
            if had_partial and sequence.lease.partial is None:  # given up for want of room
                request.num_computed = self.before[id(request)] = sequence.num_cached_tokens
        request.target = max(target, request.num_computed)
        first = sequence.lease.num_tokens
        skipped = self.random.randint(0, first)  # any start up to the lease's end will do
        duplicates = self.manager.publish(
            sequence, list(request.tokens[skipped : request.target]), start=skipped, keep_own=request.keeps_own
        )
        request.num_duplicates = (first, first if request.keeps_own else first + duplicates)
        self.num_kept += duplicates * request.keeps_own
        if request.keeps_own:
            assert sequence.block_table.tolist()[: len(request.table)] == request.table
            request.table = sequence.block_table.tolist()
        return True

    def step(self):
        self.before = {id(r): r.num_computed for r in self.live}
        batch = [r for r in self.random.sample(self.live, len(self.live)) if self.random.random() < 0.7]
        batch = [r for r in batch if self.schedule(r)]
        if self.random.random() < 0.3 and (late := self.arrive()) and self.schedule(late):
            batch.append(late)  # may share what this very step computes
        self.manager.check()
        fails = self.random.random() < 0.2
        if not (fails and self.random.random() < 0.5):
            self.forward(batch, check=not fails)
        if fails:
            self.num_failed_steps += 1
            self.manager.withdraw()
            for request in self.live:
                request.table = request.sequence.block_table.tolist()
                kept = self.before.get(id(request), request.sequence.num_cached_tokens)
                request.num_computed = max(kept, request.sequence.lease.num_tokens)
                if not request.sequence.copy:  # a copy that was cut off with the block it continued
                    limit = len(request.sequence.block_table) * self.block_size
                    request.num_computed = min(request.num_computed, max(limit, request.sequence.lease.num_tokens))
        else:
            self.manager.commit()
            for request in batch:
                request.num_computed = request.target
        self.check()

    def forward(self, batch, check):
        for copy in self.manager.copies:
            self.num_copies += 1
            for row in range(copy.num_tokens):
                self.slots[copy.destination, row] = self.slots[copy.source, row]
        for request in batch:
            low, high = request.num_duplicates
            for position in range(request.num_computed, request.target):
                if not low <= position < high:
                    self.slots[self.slot(request, position)] = self.history(request, position)
        for request in batch if check else ():
            for position in range(request.target):
                assert self.slots[self.slot(request, position)] == self.history(request, position)

    def end(self):
        if not self.live:
            return
        request = self.live.pop(self.random.randrange(len(self.live)))
        if request.sequence.copy:  # its copy was never run
            with pytest.raises(ValueError, match="never copied"):
                self.manager.end(request.sequence, list(request.tokens))
            self.manager.end(request.sequence)
            return
        self.manager.end(request.sequence, list(request.tokens[: request.num_computed]))

    def check(self):
        self.manager.check()
        if self.num_blocks is not None:
            assert self.manager.sizes.num_blocks == self.num_blocks
        assert all((r.sequence.block_table >= self.first_block).all() for r in self.live)
        for block in self.manager.allocator.free_ids():  # a read of a free block finds poison
            for row in range(self.block_size):
                self.slots.pop((int(block), row), None)

    def run(self, num_operations):
        for _ in range(num_operations):
            self.random.choices([self.arrive, self.step, self.end], [3, 5, 2])[0]()
            self.check()
        while self.live:
            self.end()
        self.check()
        sizes = self.manager.sizes
        assert sizes.private == sizes.pinned == 0


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("block_size", few([3, 1, 16], 1))
def test_every_row_read_is_the_readers_own_history(name, block_size):
    totals = np.zeros(5, int)
    for seed in range(40):
        num_blocks = random.Random(seed).choice([None, 6, 12, 40, 200])
        engine = ShadowEngine(seed, CACHES[name](block_size), num_blocks)
        engine.run(60)
        totals += (engine.num_hits, engine.num_failed_steps, engine.num_refused, engine.num_copies, engine.num_kept)
    hits, failed, refused, copies, kept = totals
    assert failed > 20 and refused > 20  # the runs met what they are meant to meet
    assert (hits > 100) == (name != "null")
    assert (kept > 0) == name.startswith("radix")  # a flat hash holds a block twice
    assert (copies > 10) == (name in ("radix", "radix cost") and block_size > 1)


def serve(manager, tokens):
    sequence = manager.begin(tokens)
    manager.grow(sequence, len(tokens))
    manager.publish(sequence, tokens)
    manager.commit()
    manager.end(sequence, tokens)
    return sequence.num_cached_tokens


@pytest.mark.parametrize(
    ("cache", "hits"),
    [
        (FlatHashCache(16), [48, 64, 48, 16, 0]),
        (RadixCache(16, partial_blocks=False), [48, 64, 48, 16, 0]),
        (RadixCache(16), [63, 64, 62, 30, 15]),
        (RadixCache(1), [63, 64, 62, 30, 15]),
    ],
)
def test_at_least_one_token_is_computed(cache, hits):
    cached = list(range(64))
    asked = [cached, [*cached, 99], cached[:63], [*cached[:30], *range(500, 520)], [*cached[:15], *range(500, 520)]]
    manager = KVManager(cache)
    for tokens, hit in zip(asked, hits, strict=True):
        lease = cache.acquire(cached)
        if lease.num_tokens == 0:
            cache.insert(lease, cached, np.arange(1000, 1064))
            cache.commit()
        cache.release(lease)
        sequence = manager.begin(tokens)
        assert sequence.num_cached_tokens == hit
        manager.cancel(sequence)


def test_an_output_is_hit_but_for_its_last_token():
    # prompt 100, output 50: the last generated token was never fed, so it has no KV
    turns = list(range(200))
    for cache, hit in ((FlatHashCache(16), 144), (RadixCache(16), 149), (RadixCache(1), 149)):
        manager = KVManager(cache)
        serve(manager, turns[:149])
        sequence = manager.begin(turns)
        assert sequence.num_cached_tokens == hit
        manager.cancel(sequence)


def test_the_free_queue_of_a_flat_hash():
    cache = FlatHashCache(16)
    manager = KVManager(cache, 11)
    sequence = manager.begin(list(range(20)))
    manager.grow(sequence, 20)
    assert sequence.block_table.tolist() == [0, 1]
    manager.publish(sequence, list(range(20)))
    manager.commit()
    manager.end(sequence)
    waiting = manager.begin(list(range(500, 676)))
    manager.grow(waiting, 176)
    assert waiting.block_table.tolist() == [*range(1, 11), 0]  # unhashed first, hashed last


def test_a_partial_match_is_copied_into_the_first_own_block():
    manager = KVManager(RadixCache(16), 10)
    serve(manager, list(range(40)))
    sequence = manager.begin([*range(36), 99, 98])
    assert (sequence.lease.num_tokens, sequence.num_cached_tokens) == (32, 36)
    assert manager.copies == []  # nowhere to yet
    manager.grow(sequence, 38)
    assert manager.copies == [BlockCopy(source=2, destination=3, num_tokens=4)]
    manager.commit()
    assert manager.copies == []
    manager.end(sequence)
    manager.check()


def test_a_failed_step_and_then_a_match_of_the_whole_block():
    manager = KVManager(RadixCache(4), 10)
    serve(manager, [0, 1, 2, 3, 4, 5])
    tokens = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    other, sequence = manager.begin(tokens), manager.begin(tokens)
    manager.grow(sequence, 9)
    assert sequence.copy and sequence.num_cached_tokens == 6
    manager.withdraw()
    assert sequence.copy is None and sequence.num_cached_tokens == 6  # to be copied when there is a block again
    manager.grow(other, 9)
    manager.publish(other, tokens)
    manager.commit()
    assert manager.advance(sequence, tokens[:-1]) == 4
    assert sequence.lease.partial is None and sequence.num_cached_tokens == 8
    manager.grow(sequence, 9)
    assert manager.copies == []
    manager.check()


def test_a_partial_match_is_given_up_where_it_leaves_no_room():
    manager = KVManager(RadixCache(4), 3)
    serve(manager, list(range(12)))
    sequence = manager.begin([0, 1, 2, 3, 4, 5, 99, 98, 97])  # one block, half of another
    assert sequence.num_cached_tokens == 6
    manager.grow(sequence, 9)  # needs the two others, the half-matched one among them
    assert sequence.num_cached_tokens == 4 and manager.copies == []
    manager.check()


def test_an_allocation_that_fails_changes_nothing():
    manager = KVManager(RadixCache(1), 8)
    serve(manager, list(range(6)))
    sequence = manager.begin([0, 1, 2, 50, 51, 52, 53, 54, 55])
    before = manager.sizes
    with pytest.raises(OutOfBlocks, match="6 blocks wanted; 2 of 8 are free and 3 evictable"):
        manager.grow(sequence, 9)
    assert manager.sizes == before
    manager.cancel(sequence)
    manager.check()
    assert manager.cache.peek(list(range(6))) == 6


def test_a_block_table_never_holds_a_freed_block():
    manager = KVManager(RadixCache(4))
    first, second = manager.begin(list(range(9))), manager.begin(list(range(9)))
    for sequence in (first, second):
        manager.grow(sequence, 9)
    assert manager.publish(first, list(range(9))) == 0
    assert manager.publish(second, list(range(9))) == 8
    assert second.block_table[:2].tolist() == first.block_table[:2].tolist()
    manager.check()
    manager.withdraw()
    manager.check()
    assert len(first.block_table) == len(second.block_table) == 0  # as before the step
    for sequence in (first, second):
        manager.grow(sequence, 9)
    assert not set(second.block_table) & set(first.block_table)
    manager.publish(first, list(range(9)))
    manager.publish(second, list(range(9)))
    manager.commit()
    manager.check()
    assert manager.allocator.num_used == 4  # two shared, two last blocks of their own


def test_a_sequence_keeps_its_own_duplicates_until_it_ends():
    manager = KVManager(RadixCache(4), 7, first_block=1)
    first, second = manager.begin(list(range(9))), manager.begin(list(range(9)))
    for sequence in (first, second):
        manager.grow(sequence, 9)
    assert manager.publish(first, list(range(9)), keep_own=True) == 0
    assert manager.publish(second, list(range(9)), keep_own=True) == 8
    manager.commit()
    manager.check()
    assert first.block_table.tolist() == [1, 2, 3] and second.block_table.tolist() == [4, 5, 6]
    assert manager.sizes == PoolSizes(free=1, private=4, pinned=2, evictable=0)
    manager.end(second, list(range(9)))
    manager.check()
    assert manager.sizes == PoolSizes(free=3, private=1, pinned=2, evictable=1)


def test_withdrawing_a_step_replaces_the_duplicates_that_it_kept():
    manager = KVManager(RadixCache(4), 9)
    serve(manager, list(range(8)))
    sequence = manager.begin(list(range(9)), match=False)
    assert sequence.num_cached_tokens == 0
    manager.grow(sequence, 4)
    manager.commit()  # the first block is computed, and not published
    manager.grow(sequence, 9)
    assert manager.publish(sequence, list(range(9)), keep_own=True) == 8
    assert sequence.block_table.tolist() == [2, 3, 4]
    manager.withdraw()
    manager.check()
    assert sequence.block_table.tolist() == [0, 1] and not sequence.kept
    manager.end(sequence)
    assert manager.sizes == PoolSizes(free=7, private=0, pinned=0, evictable=2)


def test_whether_a_sequence_fits_decides_about_its_partial_match():
    manager = KVManager(RadixCache(4), 3)
    serve(manager, list(range(12)))
    sequence = manager.begin([0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert manager.num_missing(sequence, 9) == 2 and manager.num_available == 1
    assert manager.fits(sequence, 8) and sequence.num_cached_tokens == 6
    assert manager.fits(sequence, 9) and sequence.num_cached_tokens == 4
    assert not manager.fits(sequence, 9, spare=1) and not manager.fits(sequence, 13)
    manager.grow(sequence, 9)
    assert sequence.num_cached_tokens == 4 and manager.fits(sequence, 9, spare=1)  # it needs none


def test_mistakes_of_a_caller_are_named():
    manager = KVManager(RadixCache(4), 4)
    with pytest.raises(ValueError, match="token_ids"):
        manager.begin([])
    with pytest.raises(ValueError, match="num_blocks"):
        KVManager(RadixCache(4), -1)
    with pytest.raises(ValueError, match="num_blocks"):
        KVManager(RadixCache(4), 0)
    with pytest.raises(ValueError, match="first_block: expected an int >= 0, got -1"):
        KVManager(RadixCache(4), 4, first_block=-1)
    sequence = manager.begin(list(range(8)))
    with pytest.raises(ValueError, match="expected blocks for 8 tokens, got 0"):
        manager.publish(sequence, list(range(8)))
    manager.grow(sequence, 8)
    manager.publish(sequence, list(range(8)))
    for call in (manager.end, lambda s: manager.advance(s, [1]), manager.cancel, lambda s: manager.fork(s, [1])):
        with pytest.raises(ValueError, match="sequence"):
            call(sequence)
    manager.commit()
    with pytest.raises(ValueError, match="start: expected at most 8"):
        manager.publish(sequence, [8, 9, 10, 11], start=9)
    manager.grow(sequence, 12)
    with pytest.raises(ValueError, match="expected fewer than 4 after the 8 published, got 4"):
        manager.end(sequence, list(range(12)))
    manager.end(sequence)
    manager.check()


def test_the_allocator_refuses_what_is_not_out():
    allocator = BlockAllocator(8)
    taken = allocator.take(4)
    assert taken.tolist() == [0, 1, 2, 3]
    allocator.free([1])
    for bad in ([1], [7], [-1], [100], [2, 2], [0, 1]):
        with pytest.raises(ValueError, match="block_ids"):
            allocator.free(bad)
    assert allocator.free_ids().tolist() == [1, 4, 5, 6, 7]
    with pytest.raises(OutOfBlocks):
        allocator.take(6)
    assert allocator.take(5).tolist() == [1, 4, 5, 6, 7] and allocator.num_free == 0


def test_ids_below_the_first_are_never_handed_out():
    allocator = BlockAllocator(3, first=2)
    assert allocator.free_ids().tolist() == [2, 3, 4] and allocator.num_free == 3
    assert allocator.take(2).tolist() == [2, 3] and allocator.num_used == 2 and allocator.num_free == 1
    for bad in ([0], [1, 2], [4]):
        with pytest.raises(ValueError, match="2 <= id < 4"):
            allocator.free(bad)
    allocator.free([3])
    assert allocator.free_ids().tolist() == [3, 4]


def test_the_partial_block_of_a_sequence_with_blocks_to_spare():
    """It is the block behind the lease, whatever else the sequence has grown ahead."""
    manager = KVManager(RadixCache(4), 8)
    sequence = manager.begin([1, 2, 3, 4, 5, 6])
    manager.grow(sequence, 16)
    own = sequence.block_table.tolist()
    manager.publish(sequence, [1, 2, 3, 4])
    manager.commit()
    manager.end(sequence, [1, 2, 3, 4, 5, 6])
    manager.check()
    lease = manager.cache.acquire([1, 2, 3, 4, 5, 6, 7])
    assert (lease.block_ids.tolist(), lease.partial) == (own[:1], PartialMatch(own[1], 2))

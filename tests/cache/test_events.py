"""Events: what a subscriber hears is enough to know what the cache holds, always."""

from functools import partial

import pytest

from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventEmitter
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.hashing import BlockHasher
from radixkv.cache.namespace import Interner, LoRA, Media, Salt, parts
from radixkv.cache.null import NullCache
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import pack, unpack

# Called with a block size; each announces the hashes of `sha256_cbor`. A new cache is one line here.
SUBSCRIBED = {
    "flat_hash": partial(FlatHashCache, hash_algorithm="sha256_cbor"),
    "flat_hash_verified": partial(FlatHashCache, hash_algorithm="sha256_cbor", verify=True),
    "radix": partial(RadixCache, partial_blocks=False),
}


class ReplayedIndex:
    """Built from events alone: by hash, the parent's hash, the tokens and the extra keys of a block."""

    def __init__(self):
        self.blocks = {}
        self.events = []

    def __call__(self, number, event):
        assert number == len(self.events)
        self.events.append(event)
        if isinstance(event, BlockStored):
            tokens = unpack(event.token_ids).reshape(len(event.block_hashes), event.block_size).tolist()
            keys = event.extra_keys or (None,) * len(tokens)
            parent = event.parent_block_hash
            for block_hash, block_tokens, block_keys in zip(event.block_hashes, tokens, keys, strict=True):
                assert block_hash not in self.blocks
                self.blocks[block_hash] = (parent, tuple(block_tokens), block_keys)
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                del self.blocks[block_hash]
        else:
            self.blocks = {}

    def check(self):
        """Every hash is that of what was said to be in the block."""
        hasher = BlockHasher("sha256_cbor", 1)
        for block_hash, (parent, tokens, keys) in self.blocks.items():
            assert hasher.digest((hasher.seed if parent is None else parent, tokens, keys)) == block_hash


@pytest.fixture(params=SUBSCRIBED)
def make_subscribed(request):
    return SUBSCRIBED[request.param]


def expected_hashes(run, block_size):
    """The hashes of what a random run's pool holds in its cache, from the contents written there."""
    hasher = BlockHasher("sha256_cbor", block_size)
    hashes = set()
    for block in set(run.contents) - set(run.free):
        tokens, found = [], []
        for position, mark in enumerate(run.contents[block]):
            while isinstance(mark, tuple):
                mark, part = mark
                found.append(part)
                assert part.start == position
            tokens.append(mark)
        hashes.add(list(hasher.chain(hasher.seed, pack(tokens), parts(tuple(found))))[-1])
    return hashes


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_a_replayed_index_is_the_cache(make_subscribed, random_run, block_size, seed):
    cache = make_subscribed(block_size)
    index, latecomer, left = ReplayedIndex(), ReplayedIndex(), ReplayedIndex()
    cache.subscribe(index)
    unsubscribe = cache.subscribe(left)
    run = random_run(cache, seed)
    for _ in range(6):
        run.run(30)
        run.commit()
        assert index.blocks.keys() == expected_hashes(run, block_size)
        index.check()
    assert left.events == index.events
    unsubscribe()
    unsubscribe()
    run.run(20)
    cache.subscribe(latecomer)
    before = len(left.events)
    for _ in range(4):
        run.run(30)
        run.commit()
        assert latecomer.blocks == index.blocks
        assert index.blocks.keys() == expected_hashes(run, block_size)
    assert any(isinstance(event, BlockRemoved) for event in index.events)
    assert len(left.events) == before
    run.finish()
    assert index.blocks == latecomer.blocks == {}


def test_events_come_at_commit_and_at_evict(make_subscribed):
    cache = make_subscribed(2)
    index = ReplayedIndex()
    cache.subscribe(index)
    hasher = BlockHasher("sha256_cbor", 2)
    one, two, three = hasher.chain(hasher.seed, pack([1, 2, 3, 4, 5, 6]))
    lease = cache.acquire([1, 2, 3, 4])
    cache.insert(lease, [1, 2, 3, 4], [0, 1])
    assert index.events == []
    cache.commit()
    assert index.events == [BlockStored((one, two), None, pack([1, 2, 3, 4]), 2)]
    cache.commit()
    cache.insert(lease, [5, 6, 7], [2])
    cache.withdraw()
    assert len(index.events) == 1
    cache.insert(lease, [5, 6, 7], [2])
    cache.commit()
    assert index.events[1:] == [BlockStored((three,), two, pack([5, 6]), 2)]
    cache.release(lease)
    cache.evict(2)
    assert index.events[2:] == [BlockRemoved((three, two))]


def test_only_the_last_copy_is_announced_as_removed():
    cache = FlatHashCache(2)
    index = ReplayedIndex()
    cache.subscribe(index)
    first, second = cache.acquire([1, 2, 3, 4]), cache.acquire([1, 2, 3, 4, 5, 6])
    cache.insert(first, [1, 2, 3, 4], [0, 1])
    cache.insert(second, [1, 2, 3, 4, 5, 6], [5, 6, 7])
    cache.commit()
    assert [len(event.block_hashes) for event in index.events] == [2, 1]
    assert index.events[1].parent_block_hash == index.events[0].block_hashes[1]
    cache.release(second)
    cache.evict(9)
    assert [type(event) for event in index.events[2:]] == [BlockRemoved]
    assert index.events[2].block_hashes == index.events[1].block_hashes
    cache.release(first)
    cache.evict(9)
    assert index.blocks == {}


def test_a_block_evicted_before_its_step_ended_is_never_announced():
    cache = FlatHashCache(1)
    index = ReplayedIndex()
    cache.subscribe(index)
    lease = cache.acquire([1, 2])
    cache.insert(lease, [1, 2], [0, 1])
    cache.release(lease)
    cache.evict(2)
    cache.commit()
    assert index.events == []


def test_a_cache_that_kept_no_tokens_says_so():
    cache = FlatHashCache(1)
    lease = cache.acquire([1])
    cache.insert(lease, [1], [0])
    with pytest.raises(ValueError, match="subscribe: expected an empty cache"):
        cache.subscribe(ReplayedIndex())
    cache.check()


def test_null_announces_nothing():
    index = ReplayedIndex()
    unsubscribe = NullCache(1).subscribe(index)
    unsubscribe()
    assert index.events == []


@pytest.fixture
def heard():
    return []


@pytest.fixture
def emitter(heard):
    emitter = EventEmitter(4)
    emitter.subscribe(lambda number, event: heard.append((number, event)), lambda: None)
    return emitter


def test_the_emitter_hashes_chains_by_parent_block(emitter, heard):
    tokens = pack(range(12))
    namespace = (LoRA("adapter"), Media("x", 2, 4), Salt("s", start=9))
    emitter.stored(None, [7, 3], tokens[:32], namespace)
    emitter.stored(3, [5], tokens[32:], namespace, start=8)
    hasher = BlockHasher("sha256_cbor", 4)
    hashes = tuple(hasher.chain(hasher.seed, tokens, parts(namespace)))
    lora = ("lora", "adapter", "")
    assert heard == [
        (0, BlockStored(hashes[:2], None, tokens[:32], 4, None, None, "adapter", heard[0][1].extra_keys)),
        (1, BlockStored(hashes[2:], hashes[1], tokens[32:], 4, None, None, "adapter", heard[1][1].extra_keys)),
    ]
    assert heard[0][1].extra_keys == ((lora, ("mm", "x", 2)), (lora, ("mm", "x", -2)))
    assert heard[1][1].extra_keys == ((lora, ("cache_salt", "s", 1)),)
    emitter.removed([5, 99])  # no event told of 99
    emitter.cleared()
    assert heard[2:] == [(2, BlockRemoved((hashes[2],))), (3, AllBlocksCleared())]


def test_a_run_ends_where_an_adapter_starts(emitter, heard):
    emitter.stored(None, [0, 1, 2], pack(range(12)), LoRA("adapter", start=4))
    assert [event.lora_name for _, event in heard] == [None, "adapter"]
    assert heard[1][1].parent_block_hash == heard[0][1].block_hashes[0]
    assert heard[0][1].extra_keys is None


def test_the_emitter_wants_a_parent_that_it_knows(emitter, heard):
    with pytest.raises(ValueError, match="parent_block_id"):
        emitter.stored(3, [5], pack(range(4)), start=4)
    with pytest.raises(ValueError, match="parent_block_id"):
        emitter.stored(None, [5], pack(range(4)), start=4)
    assert heard == []


def test_a_failed_subscription_leaves_the_others_as_they_were(emitter, heard):
    emitter.stored(None, [0], pack(range(4)))

    def fail():
        emitter.stored(None, [0], pack(range(4)))
        raise KeyError

    with pytest.raises(KeyError):
        emitter.subscribe(lambda number, event: None, fail)
    emitter.removed([0])
    assert [number for number, _ in heard] == [0, 1]


def test_nobody_listening_costs_nothing(heard):
    emitter = EventEmitter(4)
    assert not emitter.active
    unsubscribe = emitter.subscribe(lambda number, event: heard.append(event), lambda: None)
    assert emitter.active
    unsubscribe()
    assert not emitter.active


def test_unmarking_gives_back_tokens_and_parts():
    interner = Interner()
    tokens = pack(range(100, 112))
    namespace = (LoRA("a"), Salt("a"), Media("x", 5, 3), Salt("b", start=9))
    marked = interner.mark(tokens, namespace)
    assert marked != tokens
    plain, found = interner.unmark(marked)
    assert plain == tokens
    assert parts(found) == parts(namespace)
    assert interner.unmark(marked[4 * 4 : 8 * 4], offset=4) == (tokens[4 * 4 : 8 * 4], (Media("x", 5, 3),))
    assert interner.unmark(tokens) == (tokens, ())
    elsewhere = interner.mark(tokens[5 * 4 :], Media("x", 0, 3))  # the same pair, at another position
    assert interner.unmark(elsewhere) == (tokens[5 * 4 :], (Media("x", 0, 3),))


@pytest.mark.parametrize("name", SUBSCRIBED)
@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_subscriber_that_fails_disturbs_nothing_and_is_told_anew(name, num_failures, caplog):
    """At any event; where it fails again while it is told anew, its subscription ends."""
    for failing in range(12):
        cache = SUBSCRIBED[name](4)
        index, heard, other = ReplayedIndex(), [], ReplayedIndex()
        failures = iter([failing] if num_failures == 1 else [failing, failing + 1])
        fails_at = [next(failures)]

        def callback(number, event, heard=heard, fails_at=fails_at, failures=failures, index=index):
            heard.append(number)
            if number == fails_at[0]:
                fails_at[0] = next(failures, None)
                raise RuntimeError("planted")
            index(len(index.events), event)

        cache.subscribe(callback)
        cache.subscribe(other)
        next_block = 0
        for turn in range(6):
            tokens = [turn // 2, *range(1, 12)]
            lease = cache.acquire(tokens)
            rest = tokens[lease.num_tokens :]
            cache.insert(lease, rest, range(next_block, next_block + len(rest) // 4))
            next_block += len(rest) // 4
            cache.commit()
            cache.release(lease)
            cache.evict(1)
            cache.commit()
            cache.check()
        assert heard == list(range(len(heard)))  # each number once, the failed one too
        has_failed, gave_up = len(heard) > failing, num_failures == 2 and len(heard) > failing + 1
        assert len(other.blocks) == cache.sizes.evictable + cache.sizes.pinned
        if not gave_up:
            assert index.blocks == other.blocks
        assert ("is told everything anew" in caplog.text) == has_failed or failing
        assert not gave_up or ("its subscription ends" in caplog.text and len(heard) == failing + 2)


def test_an_interruption_in_a_callback_goes_on_up_and_the_next_commit_mends_it():
    cache, index = RadixCache(4), ReplayedIndex()
    fails = [True]

    def callback(number, event):
        if fails[0]:
            fails[0] = False
            raise KeyboardInterrupt
        index(len(index.events), event)

    cache.subscribe(callback)
    lease = cache.acquire(range(8))
    cache.insert(lease, range(8), [0, 1])
    with pytest.raises(KeyboardInterrupt):
        cache.commit()
    cache.clear()  # what an engine does then
    cache.commit()
    lease = cache.acquire(range(8))
    cache.insert(lease, range(8), [0, 1])
    cache.commit()
    assert [tokens for _, tokens, _ in index.blocks.values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]

"""The index of a fleet: after any run and any loss of events it says what the caches hold, once it has resynced."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.blocks.allocator import OutOfBlocks
from radixkv.blocks.kv_manager import KVManager
from radixkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.hashing import BlockHasher, extra_keys
from radixkv.cache.namespace import LoRA, Media, Salt, parts
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import pack
from radixkv.fleet.routing.index import FleetIndex
from radixkv.fleet.routing.stream import EventLog, Follower

NAMESPACES = [
    None,
    Salt("a"),
    Salt("b", start=3),
    LoRA("a"),
    LoRA("a", version=2),
    LoRA("a", start=5),
    Media("x", 1, 4),
    Media("y", 3, 40),
    (LoRA("b", "there"), Media("x", 2, 4), Salt("a", start=5)),
    (LoRA("a"), LoRA("b", start=4)),
]
CACHES = [
    partial(RadixCache, partial_blocks=False),
    partial(FlatHashCache, hash_algorithm="sha256"),
    partial(FlatHashCache, hash_algorithm="xxhash_cbor", verify=True),
]


class Engine:
    """A replica without a model: requests through manager and cache, events into batches."""

    def __init__(self, make_cache, block_size, num_blocks, **options):
        self.manager = KVManager(make_cache(block_size), num_blocks)
        self.truth = {}  # by hash, from a subscriber that misses nothing
        self.manager.cache.subscribe(self._hear)
        self.log = EventLog(self.manager.cache, **options)

    def _hear(self, _, event):
        if isinstance(event, BlockStored):
            self.truth.update(dict.fromkeys(event.block_hashes))
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                del self.truth[block_hash]
        else:
            self.truth.clear()

    def serve(self, tokens, namespace):
        sequence = self.manager.begin(tokens, namespace)
        try:
            self.manager.grow(sequence, len(tokens))
        except OutOfBlocks:
            self.manager.cancel(sequence)
            return
        self.manager.publish(sequence, tokens)
        self.manager.commit()
        self.manager.end(sequence, tokens)

    def num_cached(self, tokens, namespace):
        return (
            self.manager.cache.peek(tokens, namespace) // self.manager.cache.block_size * self.manager.cache.block_size
        )


class Texts:
    """Prompts that continue, or diverge from, earlier ones."""

    def __init__(self, rng, block_size):
        self.rng, self.block_size, self.seen = rng, block_size, [([], None)]

    def next(self):
        rng = self.rng
        text, namespace = rng.choice(self.seen)
        text = text[: rng.randint(0, len(text))] if rng.random() < 0.5 else text
        namespace = rng.choice(NAMESPACES) if rng.random() < 0.3 else namespace
        text = text[: 6 * self.block_size] + [rng.randrange(3) for _ in range(rng.randint(1, 3 * self.block_size))]
        self.seen = [*self.seen[-30:], (text, namespace)]
        return text, namespace


class Channel:
    """Delivers batches to a follower: some never, some twice, some late."""

    def __init__(self, rng, follower):
        self.rng, self.follower, self.late = rng, follower, []

    def send(self, numbered):
        self.late.extend([numbered] * self.rng.choice([0, 1, 1, 1, 2]))
        self.rng.shuffle(self.late)
        for _ in range(self.rng.randint(0, len(self.late))):
            self.follower.receive(*self.late.pop())

    def resync(self, log):
        for numbered in self.late:
            self.follower.receive(*numbered)
        self.late = []
        for numbered in log.replay(self.follower.expected):
            self.follower.receive(*numbered)
        if self.follower.expected < log.next_number:  # no longer kept
            log.snapshot()
            self.follower.receive(*log.flush())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from([3, 10_000]))
def test_events_dropped_doubled_and_reordered(seed, block_size, num_kept):
    rng = random.Random(seed)
    index = FleetIndex(block_size)
    engines, channels, texts = {}, {}, Texts(rng, block_size)
    for i, make_cache in enumerate(CACHES):
        name = f"replica{i}"
        engines[name] = Engine(make_cache, block_size, 30, num_kept=num_kept)
        index.add_replica(name)
        channels[name] = Channel(rng, Follower(partial(index.apply, name)))
    for _ in range(3):
        for _ in range(25):
            name = rng.choice(list(engines))
            engines[name].serve(*texts.next())
            if rng.random() < 0.7 and (numbered := engines[name].log.flush()):
                channels[name].send(numbered)
            if rng.random() < 0.04:
                engines[name].manager.reset(rng.choice(NAMESPACES))
            index.tree.check()
        for name, engine in engines.items():
            if numbered := engine.log.flush():
                channels[name].send(numbered)
            channels[name].resync(engine.log)
            assert not channels[name].follower.is_behind
            assert index.num_blocks(name) == len(engine.truth)
        index.tree.check()
        for text, namespace in texts.seen:
            for name, engine in engines.items():
                assert index.num_matched(name, text, namespace) == engine.num_cached(text, namespace)
    index.remove_replica("replica1")
    index.tree.check()
    for text, namespace in texts.seen:
        assert all(not mask & 2 for _, mask in index.match(text, namespace))


def test_without_loss_nothing_needs_a_resync():
    rng = random.Random(1)
    index, texts = FleetIndex(4), Texts(rng, 4)
    engine = Engine(CACHES[0], 4, 40)
    index.add_replica("a")
    follower = Follower(partial(index.apply, "a"))
    for _ in range(300):
        engine.serve(*texts.next())
        if numbered := engine.log.flush():
            assert follower.receive(*numbered) is None
        assert index.num_blocks("a") == len(engine.truth)
        text, namespace = rng.choice(texts.seen)
        assert index.num_matched("a", text, namespace) == engine.num_cached(text, namespace)
    assert engine.manager.num_evicted_blocks > 100


def test_a_publisher_that_began_anew_is_noticed():
    index = FleetIndex(1)
    index.add_replica("a")
    follower = Follower(partial(index.apply, "a"))
    old, new = Engine(CACHES[0], 1, 20), Engine(CACHES[0], 1, 20)
    stale = []
    for token in range(5):
        old.serve([token], None)
        stale.append(old.log.flush())
        follower.receive(*stale[-1])
    assert index.num_blocks("a") == 5
    new.serve([9], None)
    numbered = new.log.flush()
    assert follower.receive(*numbered) is None
    assert index.num_blocks("a") == 1
    follower.receive(*stale[-1])  # of the one before, late
    assert not follower.is_behind
    assert (index.num_blocks("a"), follower.num_duplicates) == (1, 1)


def test_too_far_ahead_the_missing_are_given_up():
    index, texts = FleetIndex(4), Texts(random.Random(3), 4)
    index.add_replica("a")
    engine = Engine(CACHES[0], 4, 40)
    follower = Follower(partial(index.apply, "a"), max_ahead=5)
    batches = []
    while len(batches) < 12:
        engine.serve(*texts.next())
        if numbered := engine.log.flush():
            batches.append(numbered)
    follower.receive(*batches[0])
    assert [follower.receive(*numbered) for numbered in batches[2:7]] == [1] * 5
    assert follower.receive(*batches[7]) is None  # a sixth: goes on from what is there, claiming nothing from before
    assert (follower.expected, follower.is_behind) == (8, False)
    for text, namespace in texts.seen:
        assert index.num_matched("a", text, namespace) <= engine.num_cached(text, namespace)
    assert follower.receive(*batches[1]) is None
    assert follower.num_duplicates == 1


def stored(tokens, parent=None, namespace=None, start=0, block_size=1):
    hasher = BlockHasher("sha256_cbor", block_size)
    found = parts(namespace)
    hashes = tuple(hasher.chain(parent or hasher.seed, pack(tokens), found, start))
    keys = tuple(key for key, _ in zip(extra_keys(found, start, block_size), hashes, strict=False))
    return BlockStored(hashes, parent, pack(tokens), block_size, extra_keys=keys if any(keys) else None)


@pytest.fixture
def index():
    made = FleetIndex(1)
    for name in ("a", "b", "c"):
        made.add_replica(name)
    return made


def test_levels_of_a_match(index):
    index.apply("a", stored([1, 2, 3, 4]))
    index.apply("b", stored([1, 2, 5]))
    index.apply("c", stored([1]))
    assert index.match([1, 2, 3, 9]) == [(1, 0b111), (2, 0b011), (3, 0b001)]
    assert index.match([1, 2, 3, 4, 5]) == [(1, 0b111), (2, 0b011), (4, 0b001)]
    assert index.match([7]) == index.match([]) == []
    assert index.num_matched("b", [1, 2, 5, 6]) == 3


def test_a_block_held_twice_and_one_copy_removed_is_still_there(index):
    cache = FlatHashCache(1)
    log = EventLog(cache)
    first, second = cache.acquire([1, 2]), cache.acquire([1, 2])
    cache.insert(first, [1, 2], [0, 1])
    cache.insert(second, [1, 2], [2, 3])
    cache.commit()
    follower = Follower(partial(index.apply, "a"))
    follower.receive(*log.flush())
    cache.release(first)
    cache.evict(2)
    assert log.flush() is None
    assert index.num_matched("a", [1, 2]) == 2
    cache.release(second)
    cache.evict(2)
    follower.receive(*log.flush())
    assert index.num_matched("a", [1, 2]) == index.num_blocks("a") == 0


def test_a_hole_hides_what_is_behind_it_until_it_is_filled(index):
    event = stored([1, 2, 3])
    index.apply("a", event)
    index.apply("a", BlockRemoved(event.block_hashes[1:2]))
    index.tree.check()
    assert (index.num_matched("a", [1, 2, 3]), index.num_blocks("a")) == (1, 2)
    index.apply("a", stored([2], event.block_hashes[0], start=1))
    index.tree.check()
    assert index.num_matched("a", [1, 2, 3]) == 3


def test_what_can_not_be_placed_claims_nothing(index):
    event = stored([1, 2, 3])
    index.apply("a", stored([3], event.block_hashes[1], start=2))
    index.apply("a", BlockRemoved(event.block_hashes))
    index.apply("a", BlockStored(event.block_hashes, None, event.token_ids, 1, medium="CPU"))
    assert index.num_blocks("a") == 0
    index.apply("a", event)
    index.apply("a", BlockRemoved(event.block_hashes, "CPU"))  # of the copy there
    index.apply("a", event)  # once more
    assert index.num_blocks("a") == 3
    index.apply("a", AllBlocksCleared())
    assert index.num_blocks("a") == 0
    index.tree.check()
    with pytest.raises(ValueError, match="event: expected blocks of 1 tokens, got 2"):
        index.apply("a", stored([1, 2], block_size=2))
    with pytest.raises(ValueError, match="name: expected one of a, b, c, got 'd'"):
        index.apply("d", event)
    with pytest.raises(ValueError, match="name: expected a replica that is not there yet, got 'a'"):
        index.add_replica("a")


def test_namespaces_never_meet(index):
    for name, namespace in (("a", Salt("x")), ("b", LoRA("x")), ("c", None)):
        index.apply(name, stored([1, 2, 3], namespace=namespace))
    assert index.match([1, 2, 3], Salt("x")) == [(3, 0b001)]
    assert index.match([1, 2, 3], LoRA("x")) == [(3, 0b010)]
    assert index.match([1, 2, 3]) == [(3, 0b100)]
    assert index.match([1, 2, 3], Salt("y")) == []
    assert index.match([1, 2, 3], Media("y", 2, 1)) == [(2, 0b100)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4]))
def test_what_was_sent_is_bounded_and_the_least_recently_used_go_first(seed, block_size):
    """Against a plain model: per replica an ordered set of block prefixes."""
    rng = random.Random(seed)
    now = 0.0
    index = FleetIndex(block_size, max_blocks=12, clock=lambda: now)
    model = {"a": {}, "b": {}}
    for name in model:
        index.add_replica(name)
    texts = Texts(rng, block_size)
    for _ in range(60):
        now += 1.0
        text, namespace = texts.next()
        text = text[: 11 * block_size]
        name = rng.choice("ab")
        index.add(name, text, namespace)
        blocks = [(tuple(text[:end]), namespace) for end in range(block_size, len(text) + 1, block_size)]
        held = model[name]
        for block in reversed(blocks):  # parents last: the deepest is the oldest of one use
            key = block_key(*block)
            held.pop(key, None)
            held[key] = now
        while len(held) > 12:
            del held[next(iter(held))]
        if rng.random() < 0.1:
            before = now - rng.randint(1, 20)
            index.expire(before)
            for other in model:
                model[other] = {key: used for key, used in model[other].items() if used >= before}
        index.tree.check()
        for name, held in model.items():
            assert index.num_blocks(name) == len(held)
            text, namespace = rng.choice(texts.seen)
            prefixes = [text[:end] for end in range(block_size, len(text) + 1, block_size)]
            matched = [len(prefix) for prefix in prefixes if block_key(tuple(prefix), namespace) in held]
            assert index.num_matched(name, text, namespace) == max(matched, default=0)


def block_key(prefix, namespace):
    """A prefix of whole blocks with those namespace parts that start in it, as the KV depends on them."""
    from dataclasses import replace

    found = [replace(p, length=1) if isinstance(p, Media) else p for p in parts(namespace) if p.start < len(prefix)]
    return prefix, tuple(found)

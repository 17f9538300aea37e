"""The flat hash against vLLM's rules, and the small inputs that went wrong elsewhere."""

import random

import pytest

from radixkv.cache.contract import CacheCorruption, CacheSizes
from radixkv.cache.flat_hash.cache import FlatHashCache
from radixkv.cache.flat_hash.contents import BlockContent
from radixkv.cache.namespace import LoRA, Media, Salt
from tests.cache.vllm_model import VllmModel


def publish(cache, token_ids, first_block=0, namespace=None):
    lease = cache.acquire(token_ids, namespace)
    rest = token_ids[lease.num_tokens :]
    cache.insert(lease, rest, range(first_block, first_block + len(rest) // cache.block_size))
    cache.commit()
    cache.release(lease)


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        (list(range(64))[:-1], 48),
        (list(range(65))[:-1], 64),
        (list(range(63))[:-1], 48),
        ([*range(30), *range(900, 934)][:-1], 16),
        ([*range(15), *range(900, 949)][:-1], 0),
    ],
)
def test_64_cached_tokens(asked, cached):
    cache = FlatHashCache(16)
    publish(cache, list(range(64)))
    assert cache.peek(asked) == cached


def test_the_free_queue_is_vllms():
    """Free blocks 1..11; a request of 20 tokens takes 1 and 2 and ends: 2 goes first, 1 last."""
    free = list(range(1, 12))
    cache = FlatHashCache(16)
    lease = cache.acquire(list(range(20)))
    mine = [free.pop(0), free.pop(0)]
    cache.insert(lease, list(range(20)), mine)
    cache.commit()
    cache.release(lease)
    free.insert(0, mine[1])  # never hashed: the allocator's, first in line
    assert free + cache.evict(99).tolist() == [*range(2, 12), 1]


def test_blocks_leave_tail_first_and_a_hit_takes_them_out():
    cache = FlatHashCache(1)
    publish(cache, [1, 2, 3], first_block=10)
    publish(cache, [7, 8, 9], first_block=20)
    publish(cache, [1, 2])  # a hit on 10 and 11
    assert cache.evict(9).tolist() == [12, 22, 21, 20, 11, 10]


def test_blocks_of_equal_content_are_kept_side_by_side():
    cache = FlatHashCache(2)
    first, second = cache.acquire([1, 2, 3, 4]), cache.acquire([1, 2, 3, 4])
    assert cache.insert(first, [1, 2, 3, 4], [0, 1]).shape == (0, 2)
    assert cache.insert(second, [1, 2, 3, 4], [5, 6]).shape == (0, 2)
    cache.commit()
    cache.check()
    assert cache.sizes == CacheSizes(4, 0)
    assert cache.acquire([1, 2, 3, 4]).block_ids.tolist() == [0, 1]
    cache.release(second)
    assert cache.evict(9).tolist() == [6, 5]
    assert cache.peek([1, 2, 3, 4]) == 4
    cache.check()


def test_each_block_is_hashed_once_between_acquire_and_insert():
    cache = FlatHashCache(4)
    publish(cache, list(range(16)))
    hashed = []
    digest = cache._hasher.digest
    cache._hasher.digest = lambda value: hashed.append(value[1]) or digest(value)
    tokens = [*range(16), *range(100, 116)]
    lease = cache.acquire(tokens)
    assert len(hashed) == 5  # four hits and the first miss
    cache.advance(lease, tokens[16:24])
    cache.insert(lease, tokens[16:24], [20, 21])
    cache.advance(lease, tokens[24:])
    cache.insert(lease, tokens[24:], [22, 23])
    assert len(hashed) == len(set(hashed)) == 8
    cache.check()


def test_a_remembered_miss_is_not_used_for_other_tokens():
    cache = FlatHashCache(4)
    lease = cache.acquire([1, 2, 3, 4])
    cache.insert(lease, [5, 6, 7, 8], [0])
    assert (cache.peek([1, 2, 3, 4]), cache.peek([5, 6, 7, 8])) == (0, 4)


def test_hash_time_is_what_the_clock_says():
    ticks = iter(range(100))
    cache = FlatHashCache(4, clock_ns=lambda: next(ticks))
    lease = cache.acquire([1, 2, 3, 4])
    assert cache.hash_ns == 1
    cache.insert(lease, [1, 2, 3, 4], [0])
    cache.release(lease)
    assert cache.hash_ns == 2


def serve(cache, prompts):
    """Publishes prompts; returns how many blocks were served that hold something else, and how many were served."""
    held, foreign, served, next_block = {}, 0, 0, 0
    for prompt in prompts:
        lease = cache.acquire(prompt)
        for i, block in enumerate(lease.block_ids.tolist()):
            foreign += held[block] != prompt[: (i + 1) * cache.block_size]
            served += 1
        rest = prompt[lease.num_tokens :]
        blocks = range(next_block, next_block + len(rest) // cache.block_size)
        for i, block in enumerate(blocks):
            held[block] = prompt[: lease.num_tokens + (i + 1) * cache.block_size]
        cache.insert(lease, rest, blocks)
        next_block += len(blocks)
        cache.commit()
        cache.release(lease)
    cache.check()
    return foreign, served


def test_a_digest_of_four_bits_serves_no_foreign_block_when_verified():
    source = random.Random(7)
    prompts = [[source.randrange(50_000) for _ in range(64)] for _ in range(1000)]
    prompts += [prompt[:32] + other[32:] for prompt, other in zip(prompts, reversed(prompts), strict=True)][:100]
    unverified = FlatHashCache(16, digest_bits=4, accept_collisions=True)
    assert serve(unverified, prompts)[0] > 1000
    assert unverified.num_collisions == 0
    verified = FlatHashCache(16, digest_bits=4, verify=True)
    foreign, served = serve(verified, prompts)
    assert foreign == 0
    assert served == 200  # two blocks each of the last hundred, found among all that collide
    assert verified.num_collisions > 900


def test_equal_tokens_after_a_collision_are_not_served():
    """X and Z collide; Y was published after X. A request for Z, Y must not be given X's Y, which has the hash."""
    cache = FlatHashCache(4, digest_bits=1, verify=True)
    seed, bit = cache._hasher.seed, cache._hasher.digest
    x = (0, 0, 0, 0)
    z = next((i,) * 4 for i in range(1, 99) if bit((seed, (i,) * 4, None)) == bit((seed, x, None)))
    y = [5, 5, 5, 5]
    publish(cache, [*x, *y], first_block=0)
    publish(cache, [*z], first_block=10)
    assert cache.peek([*z, *y]) == 4
    publish(cache, [*z, *y], first_block=20)
    assert cache.acquire([*z, *y]).block_ids.tolist() == [10, 20]
    assert cache.acquire([*x, *y]).block_ids.tolist() == [0, 1]
    cache.check()


def test_hashes_that_may_collide_need_acceptance():
    for options in ({"hash_algorithm": "xxhash"}, {"hash_algorithm": "xxhash_cbor"}, {"digest_bits": 64}):
        with pytest.raises(ValueError, match="accept_collisions"):
            FlatHashCache(16, **options)
        FlatHashCache(16, **options, verify=True)
        FlatHashCache(16, **options, accept_collisions=True)
    for options in ({"hash_algorithm": "md5"}, {"hash_algorithm": None}):
        with pytest.raises(ValueError, match="hash_algorithm"):
            FlatHashCache(16, **options)
    for bits in (0, -1, 257, True, 1.5):
        with pytest.raises(ValueError, match="digest_bits"):
            FlatHashCache(16, digest_bits=bits)


def test_content_that_straddles_blocks():
    cache = FlatHashCache(4)
    tokens = [9] * 16
    publish(cache, tokens, namespace=(Media("x", 2, 5), Media("y", 9, 2)))
    assert cache.peek(tokens, (Media("x", 2, 5), Media("y", 9, 2))) == 16
    assert cache.peek(tokens, (Media("x", 2, 5), Media("z", 9, 2))) == 8
    assert cache.peek(tokens, (Media("z", 2, 5), Media("y", 9, 2))) == 0
    assert cache.peek(tokens, (Media("x", 2, 5), Media("y", 10, 2))) == 8
    assert cache.peek(tokens, (LoRA("x"), Media("x", 2, 5), Media("y", 9, 2))) == 0
    assert cache.peek(tokens, (Media("x", 2, 5), Media("y", 9, 2), Salt("t", 8))) == 8


def test_a_block_is_inserted_once():
    cache = FlatHashCache(2)
    publish(cache, [1, 2, 3, 4])
    lease = cache.acquire([5, 6, 7, 8])
    for blocks in ([1, 2], [2, 1], [3, 3]):
        with pytest.raises(ValueError, match="block_ids"):
            cache.insert(lease, [5, 6, 7, 8], blocks)
        cache.check()
    assert lease.num_tokens == 0
    cache.insert(lease, [5, 6, 7, 8], [2, 3])


def test_leases_of_another_cache_are_refused():
    cache, other = FlatHashCache(2), FlatHashCache(2)
    lease = other.acquire([1, 2])
    for use in (cache.release, cache.cancel, cache.unpin_partial, lambda lease: cache.advance(lease, [1])):
        with pytest.raises(ValueError, match="lease"):
            use(lease)
    other.release(lease)


def test_a_lease_that_has_grown_is_not_cancelled():
    cache = FlatHashCache(2)
    lease = cache.acquire([1, 2])
    cache.insert(lease, [1, 2], [0])
    with pytest.raises(ValueError, match="lease"):
        cache.cancel(lease)
    cache.release(lease)
    cache.check()


def test_a_block_evicted_before_its_step_ended_is_not_withdrawn():
    cache = FlatHashCache(1)
    lease = cache.acquire([1, 2])
    cache.insert(lease, [1, 2], [0, 1])
    cache.release(lease)
    assert cache.evict(1).tolist() == [1]
    assert cache.withdraw().tolist() == [0]
    cache.check()
    assert cache.sizes == CacheSizes(0, 0)


def test_check_finds_what_is_wrong():
    def broken(breakage):
        cache = FlatHashCache(1, verify=True)
        publish(cache, [1, 2, 3])
        cache.live = cache.acquire([1, 2])
        cache.check()
        breakage(cache)
        with pytest.raises(CacheCorruption):
            cache.check()

    broken(lambda cache: cache._queue.num_pins.update([0]))
    broken(lambda cache: cache._queue.take(1))
    broken(lambda cache: cache._map.hash_of.pop(2))
    broken(lambda cache: cache._map.held.clear())
    broken(lambda cache: cache._contents.pop(0))
    broken(lambda cache: setattr(cache._contents[1], "token_ids", b"\0" * 4))
    broken(lambda cache: cache._uncommitted.update({9: None}))
    broken(lambda cache: setattr(cache.live, "num_tokens", 1))
    broken(lambda cache: cache.live.cursor.blocks.pop())


@pytest.mark.parametrize("options", [{}, {"verify": True, "digest_bits": 3}], ids=["sha256", "colliding"])
@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("seed", range(10))
def test_random_operations_agree_with_the_model(random_run, block_size, seed, options):
    run = random_run(FlatHashCache(block_size, **options), seed, num_blocks=60, model=VllmModel())
    run.run(300)
    assert run.num_hits
    assert run.num_evicted
    assert run.num_withdrawn
    run.finish()


def test_a_remembered_miss_is_forgotten_once_matched():
    cache = FlatHashCache(2)
    lease = cache.acquire([7, 7, 7, 7])  # misses the first [7, 7]
    publish(cache, [7, 7], first_block=0)
    assert cache.advance(lease, [7, 7]).tolist() == [0]
    cache.insert(lease, [7, 7], [1])  # the second [7, 7] has another hash
    cache.release(lease)
    assert cache.acquire([7, 7, 7, 7]).block_ids.tolist() == [0, 1]


def test_leases_cancelled_after_an_eviction_leave_the_order():
    cache = FlatHashCache(1)
    for block in range(4):
        publish(cache, [block], first_block=block)
    first, second = cache.acquire([0]), cache.acquire([1])
    assert cache.evict(1).tolist() == [2]  # passes over 0 and 1
    cache.cancel(first)
    first = cache.acquire([0])
    assert cache.evict(1).tolist() == [3]  # passes over 0 again
    cache.cancel(first)
    cache.cancel(second)
    cache.check()
    assert cache.evict(9).tolist() == [0, 1]


def test_peek_counts_no_collision():
    cache = FlatHashCache(1, digest_bits=1, verify=True)
    for token in range(4):
        publish(cache, [token], first_block=token)
    counted = cache.num_collisions
    assert counted > 0
    assert cache.peek([9]) == 0
    assert cache.num_collisions == counted


def test_contents_compared_once_are_one_object_afterwards():
    old, new = (BlockContent(None, b"h", b"abcd", None) for _ in range(2))
    child = BlockContent(old, b"i", b"efgh", None)
    assert child.follows(new, b"efgh", None)
    assert child.parent is new

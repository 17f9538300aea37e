"""RadixCache: small inputs that went wrong elsewhere, partial blocks, and random runs of both."""

import random
import time

import numpy as np
import pytest

from radixkv.cache.contract import PartialBlock
from radixkv.cache.namespace import LoRA, Media, Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.radix.node import MAX_SPAN_BYTES
from radixkv.cache.radix.policies import POLICIES


def put(cache, token_ids, first_block, namespace=None, *, partial=False):
    """Publishes a request's tokens as if it had run; returns how many were cached before."""
    lease = cache.acquire(token_ids, namespace)
    hit = lease.num_tokens + (lease.partial.num_tokens if lease.partial else 0)
    rest = token_ids[lease.num_tokens :]
    num_full = len(rest) // cache.block_size
    blocks = np.arange(first_block, first_block + num_full, dtype=np.int32)
    cache.insert(lease, rest, blocks)
    cache.commit()
    left = rest[num_full * cache.block_size :]
    cache.release(lease, PartialBlock(left, first_block + num_full) if partial and len(left) else None)
    cache.check([])
    return hit


def tokens(start, stop):
    return list(range(start, stop))


def test_the_unmatched_half_of_a_split_is_not_refreshed():
    cache = RadixCache(1)
    put(cache, tokens(1, 9), 0)
    put(cache, tokens(101, 109), 100)
    lease = cache.acquire([1, 2, 3, 4, 99])
    cache.release(lease)
    assert sorted(cache.evict(4).tolist()) == [4, 5, 6, 7]
    assert cache.peek(tokens(101, 109)) == 8


def test_evicting_one_block_of_a_long_leaf_frees_exactly_one():
    cache = RadixCache(1)
    put(cache, tokens(0, 8000), 0)
    assert cache.evict(1).tolist() == [7999]
    assert cache.peek(tokens(0, 8000)) == 7999


@pytest.mark.parametrize(
    ("asked", "hit"),
    [
        (tokens(0, 64), 63),
        (tokens(0, 65), 64),
        (tokens(0, 63), 62),
        (tokens(0, 30) + tokens(500, 520), 30),
        (tokens(0, 15) + tokens(500, 520), 15),
    ],
)
def test_partial_blocks_share_to_the_token(asked, hit):
    cache = RadixCache(16)
    put(cache, tokens(0, 64), 0)
    assert cache.peek(asked[:-1]) == hit
    lease = cache.acquire(asked[:-1])
    assert lease.num_tokens + (lease.partial.num_tokens if lease.partial else 0) == hit
    if lease.partial:
        assert lease.partial.block_id == hit // 16  # block i holds tokens 16 i ..
    cache.check([lease])
    cache.release(lease)


def test_a_partial_match_pins_one_block_and_refreshes_nothing():
    cache = RadixCache(16)
    put(cache, tokens(0, 160), 0)
    put(cache, tokens(1000, 1160), 100)
    lease = cache.acquire(tokens(0, 30))
    assert lease.partial is not None and cache.sizes == (2, 18)
    assert sorted(cache.evict(8).tolist()) == list(range(2, 10))  # older, and not pinned
    cache.unpin_partial(lease)
    assert cache.evict(1).tolist() == [1]
    cache.check([lease])


def test_without_partial_blocks_only_whole_ones_match():
    cache = RadixCache(16, partial_blocks=False)
    put(cache, tokens(0, 64), 0)
    assert [cache.peek(tokens(0, n)) for n in (63, 64, 62, 31, 15)] == [48, 64, 48, 16, 0]


def test_a_key_shorter_than_a_block_publishes_nothing_but_its_partial_block():
    cache = RadixCache(64)
    lease = cache.acquire(tokens(0, 63))
    assert lease.num_tokens == 0
    assert len(cache.insert(lease, tokens(0, 63), [])) == 0
    cache.commit()
    assert cache.sizes == (0, 0)
    cache.release(lease, PartialBlock(tokens(0, 63), 7))
    cache.check([])
    assert cache.sizes == (0, 1)
    assert cache.peek(tokens(0, 64)) == 63
    assert cache.evict(5).tolist() == [7]


def test_pinning_part_of_a_span():
    cache = RadixCache(1)
    put(cache, tokens(0, 6), 0)
    lease = cache.acquire(tokens(0, 3))
    assert cache.sizes == (3, 3)
    assert sorted(cache.evict(100).tolist()) == [3, 4, 5]
    cache.release(lease)
    assert cache.sizes == (0, 3)


def test_a_lease_ends_once():
    cache = RadixCache(1)
    put(cache, tokens(0, 4), 0)
    first, second = cache.acquire(tokens(0, 4)), cache.acquire(tokens(0, 4))
    cache.release(first)
    for call in (cache.release, cache.cancel, cache.unpin_partial):
        with pytest.raises(ValueError, match="lease"):
            call(first)
    with pytest.raises(ValueError, match="lease"):
        cache.insert(first, [1], [9])
    cache.check([second])
    assert cache.sizes == (4, 0)


def test_namespaces_keep_apart():
    cache = RadixCache(16)
    spaces = [None, Salt("a"), Salt("b"), LoRA("a"), LoRA("a", version=1), (LoRA("a"), Salt("a"))]
    for i, space in enumerate(spaces):
        assert cache.peek(tokens(0, 40), space) == 0
        assert put(cache, tokens(0, 40), 10 * i, space, partial=True) == 0
    for space in spaces:
        assert cache.peek(tokens(0, 40), space) == 40
        assert cache.peek(tokens(0, 41), space) == 40


def test_equal_placeholders_of_different_media_do_not_meet():
    cache = RadixCache(4)
    text = [1, 2, 3, 4, 5, 6] + [0] * 5 + [9, 9, 9]
    put(cache, text, 0, Media("X", 6, 5), partial=True)
    assert cache.peek(text, Media("X", 6, 5)) == len(text)
    assert cache.peek(text, Media("Y", 6, 5)) == 6
    assert cache.peek(text) == 6


def test_a_private_part_after_a_shared_system_prompt():
    cache = RadixCache(4)
    text = tokens(0, 20)
    put(cache, text, 0, Salt("a", start=10), partial=True)
    assert cache.peek(text, Salt("b", start=10)) == 10
    assert cache.peek(text) == 10
    assert put(cache, text, 50, Salt("b", start=10), partial=True) == 10
    assert cache.peek(text, Salt("b", start=10)) == 20


def test_a_namespace_reaches_what_is_inserted_later():
    cache = RadixCache(4)
    lease = cache.acquire(tokens(0, 4), Salt("a", start=6))
    cache.insert(lease, tokens(0, 4), [0])
    cache.insert(lease, tokens(4, 12), [1, 2])
    cache.commit()
    cache.release(lease)
    assert cache.peek(tokens(0, 12), Salt("a", start=6)) == 12
    assert cache.peek(tokens(0, 12), Salt("b", start=6)) == 6


def test_identical_prompts_in_one_step_are_computed_once():
    cache = RadixCache(16)
    first = cache.acquire(tokens(0, 64))
    cache.insert(first, tokens(0, 64), [0, 1, 2, 3])
    second = cache.acquire(tokens(0, 64))
    assert second.num_tokens == 64 and second.block_ids.tolist() == [0, 1, 2, 3]
    # rows that this step has yet to compute can't be copied
    third = cache.acquire(tokens(0, 30))
    assert third.num_tokens == 16 and third.partial is None
    cache.commit()
    fourth = cache.acquire(tokens(0, 30))
    assert fourth.partial is not None and fourth.partial.num_tokens == 14
    cache.check([first, second, third, fourth])


def test_duplicates_are_told():
    cache = RadixCache(2)
    slow = cache.acquire([1, 2, 3, 4])
    put_quick(cache, [1, 2, 3, 4, 5, 6], 0)
    assert cache.insert(slow, [1, 2, 3, 4, 7, 8], [10, 11, 12]).tolist() == [[10, 0], [11, 1]]
    assert slow.num_tokens == 6
    assert cache.peek([1, 2, 3, 4, 7, 8]) == 6
    cache.commit()
    cache.release(slow)
    cache.check([])


def test_withdraw_cuts_back_everyone():
    cache = RadixCache(2)
    put(cache, tokens(0, 4), 0)
    first = cache.acquire(tokens(0, 8))
    cache.insert(first, tokens(4, 8), [2, 3])
    second, third = cache.acquire(tokens(0, 8)), cache.acquire(tokens(0, 6))
    assert (second.num_tokens, third.num_tokens) == (8, 6)
    assert sorted(cache.withdraw().tolist()) == [2, 3]
    assert [lease.num_tokens for lease in (first, second, third)] == [4, 4, 4]
    cache.check([first, second, third])
    assert cache.peek(tokens(0, 8)) == 4
    # what an aborted step had computed before stays; what it had not is never matched
    cache.release(first)
    cache.cancel(second)
    cache.release(third)
    assert cache.sizes == (0, 2)


def test_a_fuller_block_takes_the_place_of_a_partial_one():
    cache = RadixCache(4)
    put(cache, [1, 2, 3, 4, 5, 6], 0, partial=True)  # a partial block [5, 6] in block 1
    assert cache.peek([1, 2, 3, 4, 5, 6, 7]) == 6
    put(cache, [1, 2, 3, 4, 5, 6, 7], 10, partial=True)  # a partial block [5, 6, 7] in block 10
    assert cache.num_dead_blocks == 1 and cache.evict(1).tolist() == [1]
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8], 20)  # the whole block
    assert cache.evict(1).tolist() == [10]
    assert cache.peek([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    put(cache, [1, 2, 3, 4, 5, 6], 30, partial=True)  # of no use: the whole block is there
    assert cache.num_dead_blocks == 1 and cache.evict(1).tolist() == [30]
    assert cache.sizes == (0, 2)


def test_partial_blocks_that_differ_live_side_by_side():
    cache = RadixCache(8)
    for i in range(20):
        put(cache, [1, 2, 3, i], i, partial=True)
    assert all(cache.peek([1, 2, 3, i, 99]) == 4 for i in range(20))
    assert cache.peek([1, 2, 3, 50, 51]) == 3


def test_a_pinned_partial_block_that_is_replaced_counts_as_pinned_until_it_is_unpinned():
    cache = RadixCache(4)
    put(cache, [1, 2, 3, 4, 5, 6], 0, partial=True)
    reader = cache.acquire([1, 2, 3, 4, 5, 6, 9])
    assert reader.partial is not None and reader.partial.block_id == 1
    put_lease = cache.acquire([1, 2, 3, 4])
    cache.insert(put_lease, [5, 6, 7, 8], [2])
    cache.commit()
    cache.release(put_lease)
    cache.check([reader])
    assert cache.sizes == (2, 1) and cache.num_dead_blocks == 0
    cache.unpin_partial(reader)
    assert cache.num_dead_blocks == 1 and cache.evict(1).tolist() == [1]
    cache.release(reader)
    cache.check([])


def test_a_conversation_stays_one_node_though_each_turn_copies_its_last_block():
    cache = RadixCache(16)
    for turn in range(1, 31):
        text = tokens(0, turn * 50)
        lease = cache.acquire(text)
        cache.insert(lease, text[lease.num_tokens :], np.arange(len(text) // 16, dtype=np.int32) + 1000 * turn)
        cache.commit()
        rest = text[len(text) // 16 * 16 :]
        cache.release(lease, PartialBlock(rest, 10**6 + turn) if rest else None)
        cache.evict(cache.num_dead_blocks)
        cache.check([])
    nodes = [cache.tree.root]
    for node in nodes:
        nodes.extend(node.children.values())
    assert len(nodes) <= 4


def test_partial_blocks_are_refused_where_they_make_no_sense():
    whole = RadixCache(16, partial_blocks=False)
    cache = RadixCache(16)
    lease = whole.acquire([])
    with pytest.raises(ValueError, match="partial_block"):
        whole.release(lease, PartialBlock([1], 0))
    whole.check([lease])
    lease = cache.acquire([])
    for bad in ([], tokens(0, 16)):
        with pytest.raises(ValueError, match="partial_block"):
            cache.release(lease, PartialBlock(bad, 0))
    cache.insert(lease, tokens(0, 16), [0])
    with pytest.raises(ValueError, match="step not committed"):
        cache.release(lease, PartialBlock([1], 0))
    cache.check([lease])


def test_publishing_a_long_prompt_in_chunks_costs_each_chunk_alone():
    cache = RadixCache(16)
    lease = cache.acquire([])
    for i in range(64):
        cache.insert(lease, tokens(i * 2048, (i + 1) * 2048), np.arange(128, dtype=np.int32) + 128 * i)
        cache.commit()
    assert lease.num_tokens == 64 * 2048
    assert all(len(node.span) <= MAX_SPAN_BYTES for node in path(lease.cursor))
    cache.check([lease])


def path(node):
    while node is not None:
        yield node
        node = node.parent


def test_a_conversation_of_500_turns_matches_near_a_memcmp():
    cache = RadixCache(16)
    for turn in range(1, 501):
        put_quick(cache, np.arange(turn * 50, dtype=np.int32), cache.sizes.evictable)
    packed = np.arange(500 * 50, dtype=np.int32).tobytes()
    lease = cache.acquire(packed)
    assert len(list(path(lease.cursor))) <= 8


def put_quick(cache, array, first_block):
    lease = cache.acquire(array)
    start = lease.num_tokens
    count = len(array) // cache.block_size - start // cache.block_size
    cache.insert(lease, array[start:], np.arange(first_block, first_block + count, dtype=np.int32))
    cache.commit()
    cache.release(lease)


def test_eviction_time_does_not_grow_with_the_leaves():
    def evict_time(num_leaves):
        cache = RadixCache(1)
        for i in range(num_leaves):
            put_quick(cache, np.array([10**6 + i, *range(127)], np.int32), i * 128)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            assert len(cache.evict(64)) == 64
            times.append(time.perf_counter() - start)
        return sorted(times)[100]

    assert evict_time(20_000) < 3 * evict_time(1_000)


def test_stored_values_are_no_views():
    cache = RadixCache(1)
    array, blocks = np.arange(10, dtype=np.int32), np.arange(10, dtype=np.int32)
    put(cache, array, 0)
    lease = cache.acquire(array)
    cache.insert(lease, np.arange(10, 20, dtype=np.int32), (held := blocks[:10]) + 100)
    array[:] = 7
    held[:] = 7
    assert cache.peek(np.arange(20)) == 20
    assert lease.block_ids.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c, lease: RadixCache(0), "block_size"),
        (lambda c, lease: RadixCache(16_385), "block_size"),
        (lambda c, lease: RadixCache(1.5), "block_size"),
        (lambda c, lease: RadixCache(policy="best"), "policy"),
        (lambda c, lease: c.peek([-1]), "token_ids"),
        (lambda c, lease: c.acquire([2**31]), "token_ids"),
        (lambda c, lease: c.acquire([0.5]), "token_ids"),
        (lambda c, lease: c.acquire([[1, 2]]), "token_ids"),
        (lambda c, lease: c.acquire(b"abc"), "token_ids"),
        (lambda c, lease: c.acquire([1], "tenant"), "namespace"),
        (lambda c, lease: c.insert(lease, [1, 2, 3], [5]), "block_ids"),
        (lambda c, lease: c.insert(lease, [1, 2], [-5]), "block_ids"),
        (lambda c, lease: c.evict(-1), "num_blocks"),
        (lambda c, lease: c.evict(1.5), "num_blocks"),
    ],
)
def test_bad_arguments_are_named_and_disturb_nothing(call, name):
    cache = RadixCache(1)
    put(cache, tokens(0, 8), 0)
    lease = cache.acquire(tokens(0, 4))
    with pytest.raises(ValueError, match=name):
        call(cache, lease)
    cache.check([lease])
    assert cache.sizes == (4, 4) and lease.num_tokens == 4


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_runs_serve_to_the_token_what_was_put_in(policy, block_size):
    """Unbounded, every hit is the longest common prefix with anything put in; under eviction, never more than that."""
    for seed in range(12):
        rng = random.Random(seed)
        cache = RadixCache(block_size, policy=policy)
        bounded = seed % 2
        texts, next_block = [[]], 0
        for _ in range(60):
            text = rng.choice(texts)
            text = text[: rng.randint(0, len(text))] + [rng.randrange(3) for _ in range(rng.randint(0, 40))]
            expected = max(common(text, other) for other in texts)
            assert cache.peek(text) <= expected
            hit = put(cache, text, next_block, partial=True)
            assert hit <= expected if bounded else hit == expected
            next_block += 100
            texts.append(text)
            cache.evict(cache.num_dead_blocks)
            if bounded:
                wanted = rng.randint(0, 6)
                assert len(cache.evict(wanted)) <= wanted
                cache.check([])
        total = cache.sizes.evictable
        assert len(cache.evict(total)) == total and cache.sizes == (0, 0)
        cache.check([])


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_million_tokens_at_once_are_many_nodes():
    cache = RadixCache(16)
    packed = np.arange(1_000_000, dtype=np.int32)
    put_quick(cache, packed, 0)
    assert max(len(node.span) for node in nodes_of(cache)) <= MAX_SPAN_BYTES
    assert cache.evict(3).tolist() == [62499, 62498, 62497]
    assert cache.peek(packed) == 1_000_000 - 48
    cache.check([])


def nodes_of(cache):
    nodes = [cache.tree.root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def test_leases_that_are_cancelled_leave_no_splits():
    cache = RadixCache(16)
    text = tokens(0, 8000)
    put(cache, text, 0)
    before = len(nodes_of(cache))
    for end in range(1, 8000, 37):
        lease = cache.acquire([*text[:end], 10**6])
        cache.cancel(lease)
        cache.check([])
    assert len(nodes_of(cache)) == before


def test_blocks_evicted_before_their_commit_are_forgotten():
    cache = RadixCache(2, partial_blocks=False)
    lease = cache.acquire([])
    cache.insert(lease, [1, 2], [0])
    cache.commit()
    cache.insert(lease, [3, 4], [1])
    cache.release(lease)
    cache.evict(1)
    lease = cache.acquire([1, 2])
    cache.insert(lease, [5, 6], [2])
    cache.release(lease)
    cache.check([])
    assert cache.withdraw().tolist() == [2]
    cache.check([])
    assert not cache.tree.uncommitted and cache.sizes == (0, 1)


def test_packed_tokens_cannot_reach_into_a_namespace():
    cache = RadixCache(4)
    text = tokens(5, 45)
    put(cache, text, 0, Salt("secret"), partial=True)
    forged = np.array([-1, *text[1:]], np.int32).tobytes()
    assert cache.peek(forged) == 0
    lease = cache.acquire(forged)
    assert lease.num_tokens == 0 and lease.partial is None
    for space in (None, Salt("mine", start=8)):
        with pytest.raises(ValueError, match="token_ids"):
            cache.insert(cache.acquire(tokens(50, 54), space), forged, np.arange(100, 110))
    with pytest.raises(ValueError, match="token_ids"):
        cache.peek(forged, Salt("mine"))
    assert cache.peek(text, Salt("secret")) == 40


def test_a_burst_of_one_step_keeps_its_partial_matches():
    cache = RadixCache(16)
    put(cache, tokens(0, 32), 0)
    leases = []
    for i in range(30):
        lease = cache.acquire([*tokens(0, 26), 1000 + i, *tokens(2000, 2020)])
        assert lease.partial is not None and lease.partial.num_tokens == 10
        cache.insert(lease, [*tokens(16, 26), 1000 + i, *tokens(2000, 2020)], np.arange(100 * i + 100, 100 * i + 110))
        leases.append(lease)
    cache.check(leases)


def test_tokens_are_counted_not_rows():
    cache = RadixCache(16)
    put(cache, tokens(0, 20), 0, partial=True)
    assert cache.num_cached_tokens == 20 and cache.sizes == (0, 2)


def test_a_partial_block_of_packed_negative_ids_is_refused():
    cache = RadixCache(3)
    lease = cache.acquire([0])
    with pytest.raises(ValueError, match=r"partial_block.token_ids: expected ids >= 0, got -1"):
        cache.release(lease, PartialBlock(b"\xff\xff\xff\xff", 0))
    cache.release(lease)
    cache.check()

"""What every cache promises (`radixkv.cache.contract.PrefixCache`), on every cache; NullCache by holding nothing."""

import numpy as np
import pytest

from radixkv.cache.contract import CacheSizes
from radixkv.cache.namespace import LoRA, Media, Salt
from radixkv.cache.null import NullCache
from radixkv.cache.tokens import pack

BLOCK_SIZE = 16


def publish(cache, token_ids, first_block=0, namespace=None):
    """One request, start to end; its blocks are first_block and those after it. Returns what it matched."""
    lease = cache.acquire(token_ids, namespace)
    matched = lease.num_tokens
    rest = token_ids[matched:]
    cache.insert(lease, rest, range(first_block, first_block + len(rest) // cache.block_size))
    cache.commit()
    cache.release(lease)
    cache.check()
    return matched


def expected(cache, num_tokens):
    return 0 if isinstance(cache, NullCache) else num_tokens


@pytest.mark.parametrize("block_size", [0, -1, 16_385, True, 1.0, "16", None])
def test_block_size_is_checked(make_cache, block_size):
    with pytest.raises(ValueError, match="block_size"):
        make_cache(block_size)


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
def test_what_was_published_is_found_again(make_cache, block_size):
    cache = make_cache(block_size)
    tokens = list(range(4 * block_size))
    assert cache.peek(tokens) == 0
    assert publish(cache, tokens) == 0
    assert cache.peek(tokens) == expected(cache, 4 * block_size)
    assert cache.peek(tokens[: 2 * block_size]) == expected(cache, 2 * block_size)
    lease = cache.acquire([*tokens, 1, 2])
    assert lease.num_tokens == expected(cache, 4 * block_size)
    assert lease.block_ids.dtype == np.int32
    assert lease.block_ids.tolist() == list(range(expected(cache, 4)))
    assert cache.sizes == CacheSizes(expected(cache, 4), 0)
    cache.release(lease)
    assert cache.sizes == CacheSizes(0, expected(cache, 4))
    cache.check()


def test_tokens_come_in_any_form(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(64))
    publish(cache, pack(tokens)[: 64 * 4])
    forms = [tokens, tuple(tokens), np.arange(64), np.arange(128, dtype=np.uint16)[:64], np.arange(0, 64), pack(tokens)]
    assert [cache.peek(form) for form in forms] == [expected(cache, 64)] * len(forms)


def test_nothing_is_kept_of_a_larger_array(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens, blocks = np.arange(64), np.arange(4)
    lease = cache.acquire(tokens)
    cache.insert(lease, tokens, blocks)
    tokens[:], blocks[:] = 7, 9
    cache.commit()
    cache.release(lease)
    assert cache.acquire(range(64)).block_ids.tolist() == list(range(expected(cache, 4)))


def test_an_incomplete_block_is_not_published(make_cache):
    cache = make_cache(64)
    assert publish(cache, list(range(63))) == 0
    assert cache.sizes == CacheSizes(0, 0)
    assert cache.peek(list(range(64))) == 0


def test_insert_goes_on_from_the_lease_in_chunks(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(160))
    lease = cache.acquire(tokens)
    for first in range(0, 160, 32):
        cache.advance(lease, tokens[lease.num_tokens : first + 32])
        cache.insert(lease, tokens[lease.num_tokens : first + 32], range(lease.num_tokens // 16, first // 16 + 2))
        cache.commit()
        assert lease.num_tokens == expected(cache, first + 32)
        cache.check()
    cache.release(lease)
    assert cache.peek(tokens) == expected(cache, 160)


def test_advance_gains_what_others_published_since(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(64))
    lease = cache.acquire(tokens)
    publish(cache, tokens)
    assert cache.advance(lease, tokens[:40]).tolist() == list(range(expected(cache, 2)))
    assert lease.num_tokens == expected(cache, 32)
    assert cache.advance(lease, tokens[lease.num_tokens :]).tolist() == list(range(2, 2 + expected(cache, 2)))
    assert cache.advance(lease, []).tolist() == []
    cache.check()
    cache.release(lease)
    cache.check()


def test_a_lease_is_released_once(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(64))
    publish(cache, tokens)
    first, second = cache.acquire(tokens), cache.acquire(tokens)
    cache.release(first)
    for use in (
        lambda: cache.release(first),
        lambda: cache.cancel(first),
        lambda: cache.unpin_partial(first),
        lambda: cache.advance(first, tokens),
        lambda: cache.insert(first, tokens, range(4)),
    ):
        with pytest.raises(ValueError, match="lease"):
            use()
    assert cache.sizes == CacheSizes(expected(cache, 4), 0)
    cache.check()
    cache.release(second)
    assert cache.sizes == CacheSizes(0, expected(cache, 4))


def test_pinned_blocks_are_not_evicted(make_cache):
    cache = make_cache(1)
    publish(cache, [1, 2, 3, 4, 5, 6])
    lease = cache.acquire([1, 2, 3, 9])
    assert cache.sizes == CacheSizes(expected(cache, 3), expected(cache, 3))
    assert cache.evict(2).tolist() == [5, 4][: expected(cache, 2)]
    assert cache.evict(100).tolist() == [3][: expected(cache, 1)]
    cache.check()
    cache.release(lease)
    assert cache.evict(100).tolist() == [2, 1, 0][: expected(cache, 3)]
    assert cache.peek([1]) == 0
    cache.check()


def test_evict_gives_exactly_what_was_asked(make_cache):
    cache = make_cache(1)
    publish(cache, list(range(8000)))
    assert cache.evict(0).tolist() == []
    assert cache.evict(1).tolist() == [7999][: expected(cache, 1)]
    assert cache.peek(list(range(8000))) == expected(cache, 7999)


def test_a_cancelled_lease_changes_nothing(make_cache):
    evicted = []
    for is_cancelled in (True, False):
        cache = make_cache(1)
        publish(cache, [1, 2], first_block=0)
        publish(cache, [5, 6], first_block=2)
        if is_cancelled:
            cache.cancel(cache.acquire([1, 2]))
            cache.check()
        evicted.append(cache.evict(2).tolist())
    assert evicted[0] == evicted[1] and len(evicted[0]) == expected(cache, 2)


def test_withdraw_undoes_a_failed_step(make_cache):
    cache = make_cache(BLOCK_SIZE)
    old, new, other = list(range(32)), list(range(96)), [*range(64), *range(500, 532)]
    publish(cache, old)
    first = cache.acquire(new)
    cache.insert(first, new[first.num_tokens :], range(10, 16) if isinstance(cache, NullCache) else range(10, 14))
    second = cache.acquire(other)  # reaches into what the same step computes
    assert second.num_tokens == expected(cache, 64)
    cache.insert(second, other[second.num_tokens :], range(20, 26))
    assert sorted(cache.withdraw().tolist()) == [10, 11, 12, 13, 20, 21][: expected(cache, 6)]
    assert (first.num_tokens, second.num_tokens) == (expected(cache, 32), expected(cache, 32))
    assert cache.peek(new) == cache.peek(other) == expected(cache, 32)
    assert cache.withdraw().tolist() == []
    cache.check()
    cache.insert(second, other[second.num_tokens :], range(20, 26))  # the same request again, alone
    cache.commit()
    assert cache.peek(other) == expected(cache, 96)
    cache.release(first)
    cache.release(second)
    cache.check()
    assert cache.sizes == CacheSizes(0, expected(cache, 6))


def test_an_aborted_request_leaves_what_it_computed(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(160))
    lease = cache.acquire(tokens)
    cache.insert(lease, tokens[:80], range(5))
    cache.commit()
    cache.release(lease)
    assert cache.peek(tokens) == expected(cache, 80)
    cache.check()


def test_namespaces_never_meet(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(48))
    namespaces = [
        None,
        Salt("a"),
        Salt("b"),
        LoRA("a"),
        LoRA("b"),
        LoRA("a", path="elsewhere"),
        LoRA("a", version=1),
        (LoRA("a"), Salt("a")),
        (LoRA("b"), Salt("a")),
    ]
    for i, namespace in enumerate(namespaces):
        assert publish(cache, tokens, first_block=3 * i, namespace=namespace) == 0
    for i, namespace in enumerate(namespaces):
        lease = cache.acquire(tokens, namespace)
        assert lease.block_ids.tolist() == list(range(3 * i, 3 * i + expected(cache, 3)))
        cache.release(lease)
    assert cache.peek(tokens, (Salt("a"), LoRA("b"))) == expected(cache, 48)  # the order given says nothing
    cache.check()


@pytest.mark.parametrize("kind", [Salt, LoRA])
def test_a_namespace_starts_where_it_says(make_cache, kind):
    cache = make_cache(BLOCK_SIZE)
    tokens = list(range(64))
    publish(cache, tokens, namespace=kind("a", start=20))
    assert cache.peek(tokens, kind("a", start=20)) == expected(cache, 64)
    for other in (None, kind("b", start=20), kind("a", start=21)):
        assert cache.peek(tokens, other) == expected(cache, 16)
    assert cache.peek(tokens, kind("a")) == 0


def test_media_part_at_the_first_placeholder(make_cache):
    cache = make_cache(BLOCK_SIZE)
    tokens = [*range(20), *[9] * 30, *range(30)]
    publish(cache, tokens, namespace=Media("x", 20, 30))
    assert cache.peek(tokens, Media("x", 20, 30)) == expected(cache, 80)
    assert cache.peek(tokens, Media("y", 20, 30)) == expected(cache, 16)
    assert cache.peek(tokens) == expected(cache, 16)


BAD_TOKENS = [[-1], [2**31], [1.5], ["x"], [[1, 2]], b"abc", np.zeros((2, 2), np.int32)]
BAD_NAMESPACES = ["tenant", 7, ("a",), Salt("a", start=-1), Media("x", 0, 0), [Salt("a")]]


def test_bad_arguments_are_named_and_disturb_nothing(make_cache):
    cache = make_cache(4)
    publish(cache, list(range(16)))
    live = cache.acquire(list(range(8)))

    def state():
        cache.check()
        return cache.sizes, live.num_tokens, cache.peek(list(range(16)))

    before = state()
    for tokens in BAD_TOKENS:
        for use in (
            lambda: cache.peek(tokens),  # noqa: B023
            lambda: cache.acquire(tokens),  # noqa: B023
            lambda: cache.advance(live, tokens),  # noqa: B023
            lambda: cache.insert(live, tokens, [7, 8, 9]),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="token_ids"):
                use()
            assert state() == before
    for namespace in BAD_NAMESPACES:
        for look in (cache.peek, cache.acquire):
            with pytest.raises(ValueError, match="namespace"):
                look([1, 2], namespace)
            assert state() == before
    for blocks in ([7], [], [7, -1], [7, 2**31], [7.5, 8.5], np.zeros((2, 1), np.int32)):
        with pytest.raises(ValueError, match="block_ids"):
            cache.insert(live, list(range(8)), blocks)
        assert state() == before
    for count in (-1, 1.5, True, "1", None):
        with pytest.raises(ValueError, match="num_blocks"):
            cache.evict(count)
        assert state() == before
    if not cache.partial_blocks:
        with pytest.raises(ValueError, match="partial_block"):
            cache.release(live, ([1], 9))
        assert state() == before
    cache.release(live)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_random_operations(make_cache, random_run, block_size, seed):
    cache = make_cache(block_size)
    run = random_run(cache, seed).run(200)
    if not isinstance(cache, NullCache):
        assert run.num_hits
        assert run.num_evicted
        assert run.num_withdrawn
    run.finish()


def test_a_block_is_taken_once(make_cache):
    """Held already, whether pinned or not, or twice in one call: refused, and nothing changes."""
    cache = make_cache(4)
    publish(cache, list(range(12)), 5)
    lease = cache.acquire(list(range(100, 108)))
    for blocks in ([20, 20], [5, 20], [20, 7], [6, 6]):
        if isinstance(cache, NullCache):
            break
        with pytest.raises(ValueError, match="block_ids: expected blocks that are not cached yet, each once, got"):
            cache.insert(lease, list(range(100, 108)), blocks)
        cache.check()
        assert cache.peek(list(range(100, 108))) == lease.num_tokens == 0
    cache.insert(lease, list(range(100, 108)), [20, 21])
    cache.commit()
    cache.release(lease)
    given_up = cache.evict(2).tolist()
    lease = cache.acquire(list(range(200, 208)))
    cache.insert(lease, list(range(200, 208)), given_up or [1, 2])  # what it gave up may come back
    cache.release(lease)
    cache.check()


def test_clear_begins_anew_from_any_state(make_cache):
    """Also from one that an interruption left half done: here all that a cache is made of is broken on purpose."""
    cache = make_cache(4)
    publish(cache, list(range(40)), 0)
    held = cache.acquire(list(range(40)))
    cache.insert(cache.acquire(list(range(500, 508))), list(range(500, 508)), [50, 51])  # a step under way
    watch = cache.watch(list(range(40)))
    for part in (getattr(cache, "tree", None), getattr(cache, "_map", None), getattr(cache, "_queue", None)):
        for name in list(vars(part)) if hasattr(part, "__dict__") else []:
            if name not in ("watches", "_watched"):
                setattr(part, name, None)
    cache.clear()
    cache.check()
    assert cache.sizes == CacheSizes(0, 0) and cache.peek(list(range(40))) == 0
    if not isinstance(cache, NullCache):
        with pytest.raises(ValueError, match="lease"):
            cache.release(held)
        with pytest.raises(ValueError, match="watch"):
            cache.unwatch(watch)
    assert publish(cache, list(range(40)), 0) == 0
    assert cache.peek(list(range(40))) == expected(cache, 40)

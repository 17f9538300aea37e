"""Matches of several groups, with what each holds put there and taken away by hand."""

import pytest

from radixkv.cache.contract import CacheCorruption
from radixkv.cache.flat_hash.grouped import GroupedHashCache
from radixkv.cache.flat_hash.groups import GroupLayout
from radixkv.cache.layers import FullAttention, Recurrent, Window

PROMPT = list(range(30))
FULL, WINDOW, STATE = range(3)  # groups; block i of a table of group g is 100 * g + i


def filled():
    """A cache that 18 and then 30 tokens have passed: windows and states before 16 and 28."""
    layout = GroupLayout.of((FullAttention(1), Window(1, 5), Recurrent(4, 0)), block_size=4)
    cache = GroupedHashCache(layout)
    for num_tokens, start in ((18, 0), (30, 16)):
        hashes = cache.hashes(PROMPT[:num_tokens])
        tables = [[100 * group + i for i in range(8)] for group in range(3)]
        for end in (num_tokens // 4 * 4, num_tokens):
            cache.publish(hashes, num_tokens, 0, tables, start, end)
            start = end
    cache.check()
    return cache


def match(cache, num_tokens=30):
    return cache.match(cache.hashes(PROMPT[:num_tokens]), num_tokens)


def test_a_match_has_what_each_group_goes_on_from():
    found = match(filled())
    assert (found.num_tokens, found.junction) == (28, 0)
    assert found.tables == [list(range(7)), [None] * 6 + [106], [None] * 6 + [206]]


def test_a_missing_state_is_a_junction():
    cache = filled()
    cache.forget([206])
    found = match(cache)
    assert (found.num_tokens, found.junction) == (16, 28)
    assert found.tables == [[0, 1, 2, 3], [None] * 3 + [103], [None] * 3 + [203]]


def test_what_one_kind_cuts_off_another_has_to_go_on_from():
    cache = filled()
    cache.forget([206, 103])  # windows go on at 28, states at 16
    found = match(cache)
    assert (found.num_tokens, found.junction, found.tables) == (0, 28, [[], [], []])


def test_full_attention_ends_at_the_first_miss():
    cache = filled()
    cache.forget([5])
    assert match(cache).num_tokens == 16
    cache.forget([0])
    assert (match(cache).num_tokens, match(cache).junction) == (0, 0)


def test_one_token_is_left_to_compute():
    assert [match(filled(), n).num_tokens for n in (28, 29, 16, 17, 1)] == [16, 28, 0, 16, 0]


def test_blocks_of_one_hash_are_kept_side_by_side():
    cache = filled()
    hashes = cache.hashes(PROMPT)
    cache.publish(hashes, 30, 0, [[50 + 100 * group + i for i in range(8)] for group in range(3)], 0, 28)
    assert match(cache).tables[STATE][-1] == 206  # the oldest
    cache.forget([206, 2])
    assert match(cache).tables[STATE][-1] == 256
    assert match(cache).tables[FULL] == [0, 1, 52, 3, 4, 5, 6]
    cache.check()


def test_a_state_moves_to_a_copy():
    cache = filled()
    cache.move(STATE, 206, 299)
    assert (206 in cache, 299 in cache) == (False, True)
    assert match(cache).tables[STATE][-1] == 299
    cache.check()


def test_check_sees_a_block_of_two_groups():
    cache = filled()
    cache._register(cache._maps[WINDOW], b"another", 203)
    with pytest.raises(CacheCorruption, match="two groups"):
        cache.check()

"""Layouts of groups as vLLM makes them, worked out by hand."""

import pytest

from radixkv.cache.flat_hash.groups import GroupLayout
from radixkv.cache.layers import FullAttention, Recurrent, Window

FULL, WINDOW, STATE = FullAttention(100), Window(100, 50), Recurrent(5000, 7)


def sizes(layers):
    layout = GroupLayout.of(layers)
    return layout.num_pages, [(type(group.layer).__name__[0], group.num_layers) for group in layout.groups]


def test_groups_are_as_large_as_the_smallest_bucket():
    assert sizes((STATE, STATE, STATE, FULL) * 10) == (10, [("R", 10)] * 3 + [("F", 10)])
    assert sizes((FULL, WINDOW) * 12) == (12, [("F", 12), ("W", 12)])
    assert sizes((FULL,) * 7) == (7, [("F", 7)])
    # 52 layers in groups of 10: six, of nearly one size
    assert sizes((*(WINDOW,) * 5, FULL) * 10 + (WINDOW,) * 2) == (10, [("W", 9)] * 4 + [("W", 8)] * 2 + [("F", 10)])
    assert sizes((*(STATE,) * 3, FULL) * 6 + (STATE, STATE, FULL)) == (7, [("R", 7), ("R", 7), ("R", 6), ("F", 7)])


def test_buckets_of_nearly_one_size_are_one_group_each():
    assert sizes((FULL,) * 7 + (WINDOW,) * 10) == (10, [("F", 7), ("W", 10)])
    assert sizes((FULL,) * 6 + (WINDOW,) * 9) == (6, [("F", 6), ("W", 5), ("W", 4)])


def test_a_block_of_attention_holds_a_state():
    assert GroupLayout.of((FULL, WINDOW)).block_size == 16
    layout = GroupLayout.of((FULL, STATE))  # 50 tokens of KV
    assert (layout.block_size, layout.page_bytes, layout.block_bytes) == (64, 6400, 6400)
    layout = GroupLayout.of((FULL, STATE), block_size=48)  # as long as is asked for: the page is the state's
    assert (layout.block_size, layout.page_bytes) == (48, 5000)
    assert GroupLayout.of((FULL, Recurrent(6400, 0))).block_size == 64
    assert GroupLayout.of((FULL, Recurrent(6401, 0))).block_size == 80


def test_hits_end_inside_blocks_in_fine_mode_alone():
    assert GroupLayout.of((FULL, STATE), match_unit=16).is_fine
    assert not GroupLayout.of((FULL, STATE)).is_fine
    assert not GroupLayout.of((FULL, STATE), match_unit=64).is_fine
    assert not GroupLayout.of((FULL, WINDOW), match_unit=4).is_fine
    assert not GroupLayout.of((FULL, WINDOW, STATE), match_unit=16).is_fine
    assert not GroupLayout.of((STATE, STATE), match_unit=1).is_fine  # a single group


def test_where_passes_end():
    layout = GroupLayout.of((FULL, STATE), match_unit=16)  # blocks of 64
    ends = layout.chunk_end
    assert ends(0, 1000, 0, 500) == 448  # whole blocks
    assert ends(448, 1000, 0, 500) == 896
    assert ends(0, 1000, 0, 5000) == 960  # the last whole block before the end
    assert ends(960, 1000, 0, 5000) == 992  # the last position that can be hit
    assert ends(992, 1000, 0, 5000) == 1000
    assert ends(80, 1000, 0, 5000) == 128  # from inside a block to its end
    assert ends(0, 1000, 200, 5000) == 192  # a junction, in whole blocks
    assert ends(192, 1000, 200, 5000) == 960  # which lies in the block begun
    assert ends(0, 1000, 0, 40) == 40  # a budget below a block
    assert ends(0, 10, 0, 5000) == 10
    assert GroupLayout.of((FULL, STATE)).chunk_end(960, 1000, 0, 5000) == 1000
    assert GroupLayout.of((FULL, WINDOW)).chunk_end(0, 1000, 200, 300) == 300


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ((), {}, "layers: expected at least one, got none"),
        (
            (FullAttention(100), Window(50, 9)),
            {},
            r"layers: expected attention layers of equal token_bytes, got \[50, 100\]",
        ),
        ((FULL, STATE), {"block_size": 0}, "block_size: expected an int in 1..16384, got 0"),
        ((FULL, STATE), {"match_unit": 24}, "match_unit: expected a divisor of block_size 64, got 24"),
        ((FULL, STATE), {"match_unit": 16.0}, "match_unit: expected a divisor of block_size 64, got 16.0"),
        ((FULL, STATE), {"match_unit": 0}, "match_unit: expected a divisor of block_size 64, got 0"),
    ],
)
def test_bad_layouts_are_named(layers, options, message):
    with pytest.raises(ValueError, match=message):
        GroupLayout.of(layers, **options)

"""Pages are counted by their holders; a layout says how many each thing of a model takes."""

import random

import numpy as np
import pytest

from radixkv.blocks.pages import OutOfPages, PageLayout, PagePool
from radixkv.cache.layers import FullAttention, Recurrent, Window


def test_pages_are_free_when_their_last_holder_gives_them_back():
    pool = PagePool(4, 64)
    pages = pool.take(3)
    assert pool.missing(2) == 1 and pool.missing(1) == 0
    pool.share(pages[:2])
    pool.free(pages)
    assert pool.num_used == 2 and pool.missing(3) == 1
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 4 are free"):
        pool.take(3)
    pool.free(pages[:2])
    assert pool.num_used == 0 and len(pool.take(4)) == 4


def test_pages_that_nothing_holds_are_refused():
    pool = PagePool(None, 64)
    pages = pool.take(2)
    pool.free(pages[:1])
    for call in (pool.free, pool.share):
        with pytest.raises(ValueError, match=f"pages: expected pages in use, got {pages[0]}"):
            call(pages)
    assert pool.num_used == 1


def test_holders_are_counted_as_in_a_plain_dict():
    rng = random.Random(1)
    pool, holders = PagePool(200, 1), {}
    for _ in range(3_000):
        kind = rng.random()
        held = sorted(holders)
        some = np.array(rng.sample(held, rng.randint(0, min(len(held), 9))), np.int32)
        if kind < 0.4 and (wanted := rng.randint(0, 12)) <= 200 - len(holders):
            taken = pool.take(wanted).tolist()
            assert not holders.keys() & set(taken)
            holders |= dict.fromkeys(taken, 1)
        elif kind < 0.6:
            pool.share(some)
            holders |= {page: holders[page] + 1 for page in some.tolist()}
        else:
            pool.free(some)
            holders |= {page: holders[page] - 1 for page in some.tolist()}
            holders = {page: count for page, count in holders.items() if count}
        assert pool.num_used == len(holders)
        assert pool.missing(201 - len(holders)) == 1


def test_a_layout_counts_whole_pages_of_each_layer():
    layers = (FullAttention(10), FullAttention(10), Window(10, 20), Window(10, 20), Window(5, 9), Recurrent(1_000, 30))
    layout = PageLayout.of(layers, block_size=16)
    assert layout.page_bytes == 80  # a block of the smallest layer that keeps KV
    assert (layout.kv_pages, layout.state_pages, layout.windows) == (4, 13, {20: 4, 9: 1})
    assert [layout.row_pages(position) for position in (0, 1, 63, 64, 67)] == [0, 1, 24, 0, 2]
    assert layout.window_blocks(20, 16) == range(1)
    assert layout.window_blocks(20, 51) == range(2, 4)
    assert layout.window_blocks(20, 52) == range(2, 4) and layout.window_blocks(17, 48) == range(2, 3)
    with pytest.raises(ValueError, match="layers: expected at least one of full attention"):
        PageLayout.of((Window(5, 9),))

"""Rules are found from what an operation does, here a made-up one: each pattern that libraries were seen to have."""

from __future__ import annotations

import logging

import pytest
import torch
from radixkv_kernels import attention_row_rule, paged_attention, row_rules
from radixkv_kernels.row_rules import MOST_ROWS, STEP, RowRule, cancelling, cover, measure

DEPTH = 384


def made_up(kernel, calls=None):
    """An operation whose row at a place among so many rows is what kernel `kernel(rows, place)` makes of it."""

    def way(rows):
        if calls is not None:
            calls.append(rows)
        return torch.tensor([float(kernel(rows, place)) for place in range(rows)])[:, None]

    return way


def mod_6(rows, place):
    """The last rows mod 6 are computed by another kernel; from 60 rows all are."""
    return 2 if rows >= 60 else int(place >= rows // 6 * 6)


PATTERNS = {
    "all alike": lambda rows, place: 0,
    "below 4 rows another kernel": lambda rows, place: rows < 4,
    "below 16 rows if 24 * rows <= depth": lambda rows, place: rows < 16 and 24 * rows <= DEPTH,
    "33, 37, 256 and 1024 rows": lambda rows, place: sum(rows >= border for border in (33, 37, 256, 1024)),
    "two threads, 60 and 208 rows": lambda rows, place: sum(rows >= border for border in (60, 208)),
    "two threads share the rows": lambda rows, place: min((rows + 1) // 2, rows // 2) < 4,
    "another library at 64": lambda rows, place: rows >= 64,
    "the last rows mod 6": mod_6,
    "the last rows mod 6 of a tile of 32": lambda rows, place: mod_6(min(32, rows - place // 32 * 32), place % 32),
    "short tails of tiles": lambda rows, place: place // 32 == rows // 32 and rows % 32 < 11,
    "eight threads": lambda rows, place: rows // 8 < 4,
    "odd sizes alone": lambda rows, place: rows if rows % 48 else 0,
}


def of_bits(kernel, pieces):
    return {kernel(size, place) for size in pieces for place in range(size)}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_number_of_rows_has_the_same_bits(name):
    kernel = PATTERNS[name]
    rule = measure(name, lambda: [made_up(kernel)], 8)
    assert rule.holds
    seen = set()
    for rows in (*range(1, 300), 511, 512, 513, 1000, 1023, 1024, 1025, 2048, 2049, 5000):
        pieces = rule.pieces(rows)
        assert sum(pieces) >= rows and rule.padded(rows) == sum(pieces) and rule.pieces(sum(pieces)) == pieces
        seen |= of_bits(kernel, set(pieces))
        assert len(seen) == 1, (rows, pieces)


@pytest.mark.parametrize("name", PATTERNS)
def test_padding_is_small_where_the_pattern_allows_it(name):
    """Against the cheapest cover by any multiples of 2 that agree."""
    kernel, call = PATTERNS[name], 8
    rule = measure(name, lambda: [made_up(kernel)], call)
    (kind,) = of_bits(kernel, {rule.sizes[0]})
    agreeing = [size for size in range(4, 2050, 2) if of_bits(kernel, {size}) == {kind}]
    for rows in (1, 5, 17, 40, 100, 300, 1000):
        pieces = rule.pieces(rows)
        best = cover(rows, agreeing, call)
        cost, least = (sum(found) + call * len(found) for found in (pieces, best))
        assert cost <= 1.5 * least + call, (rows, pieces, best)


def test_where_everything_agrees_there_is_one_piece_of_little_padding():
    calls = []
    rule = measure("plain", lambda: [made_up(lambda rows, place: 0, calls), made_up(lambda rows, place: 1, calls)], 8)
    for rows in range(1, MOST_ROWS + 1):
        (size,) = rule.pieces(rows)
        assert rows <= size < rows + (STEP if rows <= 64 else 16 if rows <= 1024 else 64)
    assert rule.unrestricted and "every number of rows tried agrees" in str(rule)
    assert len(calls) == len(set(calls)), "a size is measured once, and the second way not at all"


def test_sizes_that_differ_are_computed_in_the_other_way():
    """Rows first agree up to 32; rows as columns give the same bits up to 128."""
    ways = [made_up(lambda rows, _: rows > 32), made_up(lambda rows, _: 2 * (rows > 128))]
    rule = measure("two ways", lambda: ways, 48)
    assert rule.pieces(30) == (32,) and rule.way(32) == 0
    assert rule.pieces(61) == (64,) and rule.way(64) == 1
    assert set(rule.pieces(1000)) <= {size for size in rule.sizes if size <= 128}
    assert all(rule.way(size) == (size > 32) for size in rule.sizes)
    assert "rows as columns at" in str(rule)


def test_the_largest_part_is_chosen_and_by_nothing_that_varies():
    """Kernels for up to 6 rows and for more: the latter, each time, though small sizes come first."""
    found = {str(measure("two", lambda: [made_up(lambda rows, _: rows > 6)], 8)) for _ in range(3)}
    (text,) = found
    assert "not of 4, 6" in text


def test_batches_that_differ_are_no_agreement():
    """[cells, rows, numbers]: all rows of all of them."""
    rule = measure("batches", lambda: [lambda rows: torch.arange(2.0)[:, None, None].expand(2, rows, 1)], 8)
    assert not rule.holds


def test_where_nothing_agrees_it_is_said(caplog):
    with caplog.at_level(logging.WARNING, "radixkv_kernels"):
        rule = measure("hopeless", lambda: [made_up(lambda rows, place: place == rows - 1)], 8)
    assert "hopeless" in caplog.text
    assert not rule.holds and rule.pieces(30) == (32,)
    with pytest.raises(ValueError, match=r"hopeless.*deterministic=False.*MKL_CBWR=AUTO,STRICT"):
        rule.require()


def test_a_rule_by_hand_holds_for_multiples():
    rule = RowRule("any")
    assert rule.holds and rule.pieces(5) == (8,) and rule.padded(4100) == 4100
    rule.require()


@pytest.mark.parametrize("call_rows", [1, 8, 48])
def test_covers_are_the_cheapest(call_rows):
    """Against all sums of up to four sizes."""
    sizes = [4, 10, 24]
    sums = {(): 0}
    for _ in range(4):
        sums |= {tuple(sorted((*pieces, size))): sum(pieces) + size for pieces in sums for size in sizes}
    for rows in range(1, 41):
        least = min(total + call_rows * len(pieces) for pieces, total in sums.items() if total >= rows)
        found = cover(rows, sizes, call_rows)
        assert sum(found) >= rows and sum(found) + call_rows * len(found) == least
    assert sum(cover(5000, sizes, call_rows)) >= 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth"), [(7, 64), (300, 65), (128, 2)])
def test_products_of_the_data_are_zero(rows, depth, dtype):
    x, y = cancelling(rows, depth, dtype=dtype)
    assert x.shape == (1, depth) and y.shape == (rows, depth) and x.dtype == dtype
    # products of float32 numbers are exact in float64, and so are sums of pairs
    terms = (x.double() * y.double()).sort(1)[0]
    assert torch.equal(terms, -terms.flip(1)) and x.count_nonzero() >= depth - 1


def test_a_rule_is_measured_once_for_each_number_of_threads(monkeypatch):
    monkeypatch.setattr(row_rules, "_rules", {})
    before = torch.get_num_threads()
    try:
        rules = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            rules.append(attention_row_rule(torch.float32, 16))
        torch.set_float32_matmul_precision("high")
        rules.append(attention_row_rule(torch.float32, 16))
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(before)
    assert rules[0] is rules[2] and rules[0] is not rules[1] and rules[3] is not rules[0]


def test_attention_without_a_rule_is_right_and_warns_once(monkeypatch, caplog):
    """Bits are promised where the rule holds; `attention_row_rule` tells."""
    monkeypatch.setattr(row_rules, "_rules", {})
    cache = torch.randn(4, 16, 2, 64)
    arguments = {
        "block_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
    }
    q = torch.randn(3, 4, 64)
    want = paged_attention(q, cache, cache, implementation="reference", **arguments)
    monkeypatch.setattr(row_rules, "row_bits", lambda found: None)
    with caplog.at_level(logging.WARNING, "radixkv_kernels"):
        for _ in range(2):
            got = paged_attention(q, cache, cache, implementation="torch", **arguments)
    assert [record for record in caplog.messages if "depend on the batch" in record and "halves" not in record] == (
        caplog.messages[-1:]
    )
    torch.testing.assert_close(got, want)
    assert not attention_row_rule(torch.float32, 64).holds


def test_a_rule_is_measured_in_the_state_that_setting_threads_leaves(monkeypatch):
    """MKL chooses otherwise before the first `torch.set_num_threads` of a process than after it."""
    monkeypatch.setattr(row_rules, "_rules", {})
    happened = []
    setter = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: happened.append(count) or setter(count))
    way = made_up(PATTERNS["all alike"])
    row_rules.rule_of("x", "x", lambda: happened.append("measured") or [way], call_rows=8)
    assert happened[0] == torch.get_num_threads() and "measured" in happened

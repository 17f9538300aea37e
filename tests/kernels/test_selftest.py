"""The self-test that ships for users' machines holds on this one, and can fail."""

from __future__ import annotations

from radixkv_kernels import selftest


def test_rows_keep_their_bits_here():
    assert selftest.differences(head_dims=(64, 80), num_kv_heads=2) == []


def test_it_finds_what_it_looks_for(monkeypatch):
    """33 rows leave a tail of one row, which other code computes."""
    monkeypatch.setattr(selftest, "ROWS", (33,))
    assert selftest.differences(head_dims=(64,), num_kv_heads=2)

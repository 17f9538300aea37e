"""The self-test that ships for users' machines holds on this one, and can fail."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import row_rules, selftest
from radixkv_kernels.torch_impl import cells

from tests.sampling import few


@pytest.mark.parametrize("head_dims", few([[64, 80], [16, 256]], 1), ids=str)
def test_rows_keep_their_bits_here(head_dims):
    assert selftest.differences(head_dims=head_dims, num_kv_heads=2) == []


def test_it_finds_what_it_looks_for(monkeypatch):
    """A fused kernel whose last rows are off by one unit in the last place where their number is 36."""
    fused = cells._fused

    def wrong(scale, q, *others):
        lse, out = fused(scale, q, *others)
        if q.shape[2] == 36:
            lse[:, :, -1:] = torch.nextafter(lse[:, :, -1:], torch.tensor(torch.inf))
        return lse, out

    monkeypatch.setattr(row_rules, "_rules", {})
    rule, halves = cells.rule_of_cells(True, torch.float32, 64, 64)
    rule.ways[36] = 0  # a wrong rule
    monkeypatch.setattr(cells, "_fused", wrong)
    monkeypatch.setattr(selftest, "rule_of_cells", lambda *_: (rule, halves))
    assert selftest.differences(head_dims=(64,), num_kv_heads=2)

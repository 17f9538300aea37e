"""Products by rules of rows, with libraries that are made up: a row has the same bits among any number of rows."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import row_rules

from radixkv.engine.model import row_linear


def library(kernel):
    """x @ weight.T, off by what `kernel(rows, place)` says."""

    def product(x, weight, bias):
        off = torch.tensor([float(kernel(x.shape[0], place)) for place in range(x.shape[0])])
        found = (x.double() @ weight.double().T).float() + off[:, None] / 64
        return found if bias is None else found + bias

    return product


LIBRARIES = {
    "borders": (lambda rows, _: sum(rows >= n for n in (33, 37, 256)), lambda rows, _: 5),
    "columns beyond 32": (lambda rows, _: rows > 32, lambda rows, _: 2 * (rows > 128)),
    "columns alone": (lambda rows, place: place, lambda rows, _: 0),
    "mod 6": (lambda rows, place: int(place >= rows // 6 * 6), lambda rows, place: place),
    "columns between": (lambda rows, _: 30 < rows < 100, lambda rows, _: 3 * (rows < 30 or rows > 70)),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_rows_have_one_kind_of_bits(name, biased, monkeypatch):
    monkeypatch.setattr(row_rules, "_rules", {})
    monkeypatch.setattr(row_linear, "_WAYS", tuple(map(library, LIBRARIES[name])))
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(520, 24, generator=gen), torch.randn(10, 24, generator=gen)
    bias = torch.randn(10, generator=gen) if biased else None
    want = torch.cat([row_linear.linear(row, weight, bias) for row in x.split(1)])
    for rows in (1, 2, 5, 31, 32, 33, 36, 37, 60, 65, 101, 129, 208, 255, 257, 520):
        got = row_linear.linear(x[:rows], weight, bias)
        assert got.shape == (rows, 10) and got.is_contiguous() and torch.equal(got, want[:rows])
    assert torch.equal(row_linear.linear(x.T.contiguous().T[3:50], weight, bias), want[3:50])


def test_pieces_begin_at_aligned_addresses(monkeypatch):
    """Rows of 7 numbers put the second piece anywhere."""
    monkeypatch.setattr(row_rules, "_rules", {})
    begun = []

    def product(x, weight, bias):
        begun.append(x.data_ptr() % row_linear.ALIGNMENT)
        return library(lambda rows, place: rows > 6)(x, weight, bias)

    monkeypatch.setattr(row_linear, "_WAYS", (product,))
    row_linear.linear(torch.randn(40, 7)[1:], torch.randn(3, 7), None)
    assert set(begun) == {0}

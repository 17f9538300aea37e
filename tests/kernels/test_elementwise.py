"""What is computed element by element, or row by row without a product, has the same bits at every place of a buffer.

Vectorised bodies and scalar tails differ in torch's silu, gelu and sigmoid: these are not used where bits are promised.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

ELEMENTS = {
    "exp": torch.exp,
    "exp in place": lambda x: x.clone().exp_(),
    "erf": torch.erf,
    "tanh": torch.tanh,
    "log": lambda x: x.abs().log(),
    "quotient": lambda x: x / (1 + torch.exp(-x)),
    "quotient in place": lambda x: torch.full_like(x, 3.7).div_(x),
    "product and sum": lambda x: torch.full_like(x, 0.3).mul_(x).add_(x),
    "addcmul": lambda x: torch.full_like(x, 1.3).addcmul_(x, x),
    "maximum": lambda x: torch.maximum(x, x * 0.5),
}
ROWS = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "amax": lambda x: x.amax(-1),
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],), None, 1e-6),
}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements(name, threads):
    function = ELEMENTS[name]
    x = torch.randn(4099, generator=torch.Generator().manual_seed(0)) * 3
    want = function(x)
    for start in range(17):
        for count in (*range(1, 35), 100, 1000):
            part = x[start : start + count]
            assert torch.equal(function(part), want[start : start + count])
            assert torch.equal(function(part.clone()), want[start : start + count])
    assert torch.equal(function(x[:, None].repeat(1, 3)[:, 1]), want)
    assert torch.equal(function(x.repeat(40))[4099 * 20 : 4099 * 21], want)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("width", [5, 64, 256, 300])
def test_rows(name, width, threads):
    """Half of each row's terms cancel the others."""
    function = ROWS[name]
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(0))
    x[:, : width // 2] = -x[:, width - width // 2 :].flip(1)
    want = function(x)
    for start in range(9):
        for count in (1, 2, 3, 4, 5, 8, 33, 61):
            part = x[start : start + count]
            assert torch.equal(function(part), want[start : start + count])
            assert torch.equal(function(part.clone()), want[start : start + count])
    assert torch.equal(function(x.repeat(300, 1))[:70], want)

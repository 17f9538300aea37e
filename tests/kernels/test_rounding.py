"""The bound that tests of attention use lets roundings pass and notices more."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels import merge_states

from tests.kernels.problems import Shape, exact, make

SHAPE = Shape(q_lens=(1, 9, 40), seq_lens=(700, 260, 40))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_planted_error_of_a_few_units_is_noticed(dtype):
    """Out off by one and a half of what is allowed, itself some units of the last place; or one lse by twice that."""
    problem = make(Shape(**{**vars(SHAPE), "dtype": dtype}))
    want = exact(problem)
    out, lse = problem.run()
    want.check(out, lse)
    with pytest.raises(AssertionError, match="out: error"):
        want.check(out.double() * (1 + 1.5 * want.allowed / want.out.norm()), lse)
    assert want.allowed < 12 * torch.finfo(dtype).eps * want.out.norm()
    lse[3, 1] += 12 * want.lse_variance[3, 1].sqrt()
    with pytest.raises(AssertionError, match="lse"):
        want.check(out, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dropped_key_is_noticed(dtype):
    """The one that weighs least on the sequence of 700."""
    problem = make(Shape(**{**vars(SHAPE), "q_lens": (1,), "seq_lens": (700,), "dtype": dtype}))
    whole = exact(problem)
    keys, values = problem.keys[0], problem.values[0]
    problem.keys[0], problem.values[0] = keys[1:], values[1:]
    problem.shape = Shape(**{**vars(problem.shape), "seq_lens": (699,)})
    less = exact(problem)
    with pytest.raises(AssertionError):
        whole.check(less.out.to(dtype).double(), less.lse)


def test_rows_that_see_nothing_have_no_error_at_all():
    want = exact(make(Shape(q_lens=(2,), seq_lens=(0,))))
    out, lse = torch.zeros(2, 4, 64), torch.full((2, 4), -torch.inf)
    want.check(out, lse)
    with pytest.raises(AssertionError):
        want.check(out + 1e-30, lse)
    with pytest.raises(AssertionError, match="nothing"):
        want.check(out, lse.clamp_min(-1e30))


def test_an_order_of_merging_is_within_it():
    problem = make(Shape(q_lens=(4,), seq_lens=(512,), causal=False))
    want = exact(problem)
    parts = []
    for start in range(0, 512, 64):
        problem.keys, problem.values = (
            [x[start : start + 64]] for x in (make(problem.shape).keys[0], make(problem.shape).values[0])
        )
        shape, problem.shape = problem.shape, Shape(**{**vars(problem.shape), "seq_lens": (64,)})
        parts.append(exact(problem))
        problem.shape = shape
    for order in (parts, parts[::-1]):
        merged = merge_states([p.out.float() for p in order], [p.lse.float() for p in order], implementation="torch")
        want.check(*merged)

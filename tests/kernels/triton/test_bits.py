"""torch.equal of Triton attention in the interpreter: which program computes a cell never changes a result."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from radixkv_kernels import paged_attention, triton_impl
from radixkv_kernels.triton_impl import attention
from radixkv_kernels.triton_impl.config import Config
from triton.runtime import interpreter

from tests.kernels.problems import FP8, Shape, make
from tests.sampling import few

pytestmark = pytest.mark.usefixtures("exact_interpreter")

FEATURES = [
    {"dtype": torch.float32, "num_q_heads": 3},
    {"dtype": torch.bfloat16, "num_q_heads": 4, "sinks": True, "block_size": 3},
    {"dtype": torch.float16, "num_q_heads": 1, "window": 150, "softcap": 20.0, "block_size": 48},
    {"dtype": torch.bfloat16, "num_q_heads": 12, "kv_dtype": FP8, "scales": "head", "num_kv_heads": 2},
]


@pytest.fixture(params=few(range(len(FEATURES)), 1))
def features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    chosen = FEATURES[request.param]
    if chosen["dtype"] == torch.float32:
        config = Config(64, 64, 64, 4, 2, "ieee")
        monkeypatch.setattr(triton_impl, "find_config", lambda spec, tensors: config)
    return {"num_kv_heads": 1, **chosen}


def attend(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = paged_attention(**call, implementation="triton")
    return out, lse


def one_sequence(call: dict[str, Any], s: int, first: int, last: int, start: int, seq_len: int) -> dict[str, Any]:
    """Rows [first, last) of sequence s of a call, alone; start is its first row, seq_len what it has by then."""
    return call | {
        "q": call["q"][start + first : start + last],
        "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32),
        "block_table": call["block_table"][s : s + 1],
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32),
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_of_a_product_has_its_bits_at_any_place_of_a_tile(transposed: bool) -> None:
    """What the interpreter must give for any of this to be tested on it."""
    gen = np.random.default_rng(0)

    def handle(values: np.ndarray) -> interpreter.TensorHandle:
        return interpreter.TensorHandle(values, tl.float32)

    row, b = gen.standard_normal((1, 64), np.float32), gen.standard_normal((64, 64), np.float32)
    a = gen.standard_normal((64, 64), np.float32)
    a[::3] = row
    zeros = handle(np.zeros((64, 64), np.float32))
    dot = interpreter.interpreter_builder.create_dot
    got = dot(handle(a), handle(b.T if transposed else b), zeros, None, 0).data[::3]
    assert (got == got[0]).all()
    assert np.allclose(got[0], (row.astype(np.float64) @ (b.T if transposed else b))[0], atol=1e-4)


def test_alone_equals_batched_in_any_order(features: dict[str, Any]) -> None:
    problem = Shape((1, 1, 5, 2), (150, 1, 300, 64), **features)
    call = make(problem).call
    out, lse = attend(call)
    starts = [0, 1, 2, 7]
    for s in range(4):
        n = problem.q_lens[s]
        alone, alone_lse = attend(one_sequence(call, s, 0, n, starts[s], problem.seq_lens[s]))
        assert torch.equal(alone, out[starts[s] : starts[s] + n])
        assert torch.equal(alone_lse, lse[starts[s] : starts[s] + n])
    order = [2, 0, 3, 1]
    rows = torch.cat([torch.arange(starts[s], starts[s] + problem.q_lens[s]) for s in order])
    lens = torch.tensor([problem.q_lens[s] for s in order])
    shuffled = call | {
        "q": call["q"][rows],
        "cu_seqlens_q": torch.cat([torch.zeros(1), lens.cumsum(0)]).int(),
        "block_table": call["block_table"][order],
        "seq_lens": call["seq_lens"][order],
    }
    assert torch.equal(attend(shuffled)[0], out[rows])


def test_whole_equals_chunked_and_cached_equals_new(features: dict[str, Any]) -> None:
    length = 150
    heads = {"num_q_heads": 2 * features["num_kv_heads"]}
    call = make(Shape((length,), (length,), **(features | heads))).call
    out, lse = attend(call)
    rng = random.Random(0)
    borders = [0, *sorted(rng.sample(range(1, length), 3)), length]
    for first, last in itertools.pairwise(borders):
        part, part_lse = attend(one_sequence(call, 0, first, last, 0, last))
        assert torch.equal(part, out[first:last]) and torch.equal(part_lse, lse[first:last])
    # All but the last token cached: a decode step.
    assert torch.equal(attend(one_sequence(call, 0, length - 1, length, 0, length))[0], out[-1:])


def test_number_of_programs_a_tile_changes_nothing(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(Shape((1, 2), (2500, 200), **features)).call
    results = []
    for processors in (1, 6, 100):  # all folded by one program; by runs of 2,048; by single cells
        monkeypatch.setattr(attention, "num_processors", lambda device, n=processors: n)
        results.append(attend(call))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_where_blocks_lie_and_how_they_are_listed_changes_nothing(features: dict[str, Any]) -> None:
    first = attend(make(Shape((2, 1), (200, 90), **features)).call)
    for change in ({"ragged": True}, {"layout": "interleaved"}, {"layout": "hnd"}):
        out, lse = attend(make(Shape((2, 1), (200, 90), **features, **change)).call)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])

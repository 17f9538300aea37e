"""Triton kernels in the interpreter: inputs that went wrong elsewhere, cache writes, merging, fp8 codes, bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from radixkv_kernels import (
    UnsupportedImplementation,
    copy_blocks,
    merge_states,
    paged_attention,
    store_kv,
)
from radixkv_kernels.triton_impl import attention
from radixkv_kernels.triton_impl.numerics import decode_e4m3, encode_e4m3, tanh

from tests.kernels.triton import triton_interpreter
from tests.kernels.triton.attention_problems import FP8, Problem

pytestmark = pytest.mark.usefixtures("exact_interpreter")


def both(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse) of triton and of the float64 reference."""
    call = problem.build() | changes
    out, lse = paged_attention(**call, implementation="triton")
    exact, exact_lse = paged_attention(**(call | {"out": None}), implementation="reference")
    return out, lse, exact, exact_lse


def close(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, exact, exact_lse = both(problem, **changes)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
    return out, lse


def test_a_row_that_sees_nothing_is_zero_and_minus_infinity_with_or_without_sinks() -> None:
    for sinks in (False, True):
        out, lse = close(Problem(seq_lens=(0, 3), q_lens=(1, 1), sinks=sinks))
        assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())


def test_rows_after_the_last_sequence_are_left_alone() -> None:
    call = Problem(seq_lens=(5,), q_lens=(2,)).build()
    call["q"] = torch.cat([call["q"], torch.full_like(call["q"], torch.nan)])
    call["out"] = torch.full_like(call["q"], 7.0)
    out, _ = paged_attention(**call, implementation="triton")
    assert bool((out[2:] == 7).all()) and bool(out[:2].isfinite().all())


def test_one_token_and_no_token() -> None:
    close(Problem(seq_lens=(1,), q_lens=(1,)))
    empty = Problem(seq_lens=(4,), q_lens=(0,)).build()
    out, _ = paged_attention(**empty, implementation="triton")
    assert out.shape[0] == 0


@pytest.mark.parametrize("processors", [1, 4, 200])
def test_more_programs_than_cells_and_several_runs(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    out, lse, exact, exact_lse = both(
        Problem(seq_lens=(4200, 3), q_lens=(1, 1), dtype=torch.float16, group=4, block_size=48)
    )
    torch.testing.assert_close(out.float(), exact.float(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)


def test_huge_scores_stay_finite_under_a_soft_cap() -> None:
    problem = Problem(seq_lens=(140,), q_lens=(3,), softcap=30.0)
    for scale in (1e4, -1e4):
        out, lse = close(problem, scale=scale)
        assert bool(out.isfinite().all()) and bool(lse.isfinite().all())


def test_the_window_edge_is_the_same_in_prefill_and_decode() -> None:
    # V is one-hot in the token's own column, so a column of the output is non-zero exactly where its token was seen.
    for q_len in (1, 40):
        problem = Problem(seq_lens=(60,), q_lens=(q_len,), window=7, group=1)
        call = problem.build()
        table = call["block_table"][0].long()
        call["v_cache"] = torch.full_like(call["v_cache"], torch.nan)
        for t in range(60):
            call["v_cache"][table[t // 16], t % 16] = torch.eye(64)[t]
        out, _ = paged_attention(**call, implementation="triton")
        for row in range(q_len):
            position = 60 - q_len + row
            seen = out[row, 0].nonzero().flatten().tolist()
            assert seen == list(range(max(0, position - 6), position + 1))


def test_a_sink_counts_once_split_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for processors in (1, 64):
        monkeypatch.setattr(attention, "num_processors", lambda device, n=processors: n)
        results.append(close(Problem(seq_lens=(400,), q_lens=(1,), sinks=True)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_offsets_past_two_to_the_32() -> None:
    # One sparse allocation holds K, V and q at strides of 2**31 elements and more; only touched pages exist.
    stride, heads, dim = 2**31, 1, 32
    memory = torch.empty(2 * stride + 2**20, dtype=torch.float16)
    k_cache = memory.as_strided((3, 16, heads, dim), (stride, dim, dim, 1))
    v_cache = memory.as_strided((3, 16, heads, dim), (stride, dim, dim, 1), 2**12)
    q = memory.as_strided((3, 2, dim), (stride, dim, 1), 2**14)
    out = memory.as_strided((3, 2, dim), (stride, dim, 1), 2**15)
    generator = torch.Generator().manual_seed(0)
    for tensor in (k_cache, v_cache, q):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    call: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([40], dtype=torch.int32),
    }
    paged_attention(q, k_cache, v_cache, **call, out=out, implementation="triton")
    exact = paged_attention(
        q.contiguous(), k_cache.contiguous(), v_cache.contiguous(), **call, implementation="reference"
    )
    torch.testing.assert_close(out, exact, rtol=2e-3, atol=2e-3)
    new = torch.randn(1, heads, dim, generator=generator).half()
    store_kv(new, new, k_cache, v_cache, torch.tensor([2 * 16 + 5]), implementation="triton")
    assert torch.equal(k_cache[2, 5], new[0]) and torch.equal(v_cache[2, 5], new[0])
    pair = (torch.tensor([2]), torch.tensor([1]), torch.tensor([6]))
    copy_blocks(k_cache, v_cache, *pair, implementation="triton")
    assert torch.equal(k_cache[1, :6], k_cache[2, :6])


def test_what_triton_lacks_is_refused_with_the_reason() -> None:
    call = Problem().build()
    with pytest.raises(UnsupportedImplementation, match="alibi_slopes"):
        paged_attention(**call, alibi_slopes=torch.ones(2), implementation="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_store_kv_writes_what_the_reference_writes(dtype: torch.dtype, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    num_tokens, heads = 9, 3
    k = (torch.randn(num_tokens, heads, 40, generator=generator) * 300).to(dtype)
    v = torch.randn(heads, num_tokens, 72, generator=generator).to(dtype).transpose(0, 1)
    slots = torch.tensor([3, -1, 40, 0, 47, 12, 13, -1, 30])
    scales = {"k_scale": 0.5, "v_scale": torch.tensor([0.25, 2.0, 3.0])}
    caches = {}
    for implementation in ("triton", "reference"):
        cache = torch.zeros(3, 2, heads, 16, 72).to(FP8 if fp8 else dtype).transpose(2, 3)
        k_cache, v_cache = cache[:, 0, :, :, :40], cache[:, 1]
        store_kv(k, v, k_cache, v_cache, slots, **(scales if fp8 else {}), implementation=implementation)
        caches[implementation] = cache.view(torch.uint8) if fp8 else cache
    assert torch.equal(caches["triton"], caches["reference"])


def test_copy_blocks_copies_leading_rows_only() -> None:
    generator = torch.Generator().manual_seed(2)
    k_cache = torch.randn(6, 5, 2, 24, generator=generator)
    v_cache = torch.randn(6, 2, 5, 40, generator=generator).transpose(1, 2)
    pairs = (torch.tensor([0, 1, 0]), torch.tensor([2, 3, 4]), torch.tensor([0, 5, 3]))
    expected = (k_cache.clone(), v_cache.clone())
    copy_blocks(*expected, *pairs, implementation="reference")
    copy_blocks(k_cache, v_cache, *pairs, implementation="triton")
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merge_states_with_empties_as_the_identity(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    outs = torch.randn(4, 3, 5, 24, generator=generator).to(dtype)
    lses = torch.randn(4, 3, 5, generator=generator) * 3
    lses[1], outs[1] = -math.inf, math.nan
    lses[:, 0], outs[:, 0] = -math.inf, math.nan
    lses[2, 1], outs[2, 1] = torch.randn(5, generator=generator), 1.0
    lses[[0, 3], 1] = -math.inf
    out, lse = merge_states(outs, lses, implementation="triton")
    exact, exact_lse = merge_states(outs, lses, implementation="reference")
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-6)
    assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())
    assert torch.equal(out[1], outs[2, 1]) and torch.equal(lse[1], lses[2, 1])


@triton.jit
def codes_kernel(code_ptr, value_ptr, back_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = decode_e4m3(tl.load(code_ptr + offsets), value_ptr.dtype.element_ty)
    tl.store(value_ptr + offsets, value)
    tl.store(back_ptr + offsets, encode_e4m3(value.to(tl.float32)))


@triton.jit
def encode_kernel(x_ptr, code_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(code_ptr + offsets, encode_e4m3(tl.load(x_ptr + offsets)))


@triton.jit
def tanh_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y_ptr + offsets, tanh(tl.load(x_ptr + offsets)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_codes_decode_exactly_and_encode_back(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values, back = torch.empty(256, dtype=dtype), torch.empty(256, dtype=torch.uint8)
    codes_kernel[(1,)](codes, values, back, N=256)
    torch.testing.assert_close(values, codes.view(FP8).to(dtype), rtol=0, atol=0, equal_nan=True)
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal(back[finite], codes[finite])
    assert bool(((back[~finite] & 0x7F) == 0x7F).all())


def test_fp8_encoding_rounds_to_nearest_even_and_saturates() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4096, generator=generator) * torch.exp(4 * torch.randn(4096, generator=generator))
    edges = [0.0, -0.0, 2**-9, 2**-10, 3 * 2**-10, 2**-6, 447.9, 448.0, 1e9, -1e9, math.inf, -math.inf, 17.0, 19.0]
    x[: len(edges)] = torch.tensor(edges)
    codes = torch.empty(4096, dtype=torch.uint8)
    encode_kernel[(1,)](x, codes, N=4096)
    assert torch.equal(codes, x.clamp(-448, 448).to(FP8).view(torch.uint8))


def test_tanh_is_accurate_near_zero_too() -> None:
    x = torch.cat([torch.linspace(-12, 12, 2048), torch.logspace(-20, 0, 2048)]).float()
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, N=4096)
    exact = torch.tanh(x.double())
    assert float(((y - exact) / exact.abs().clamp_min(1e-30)).abs().max()) < 6e-7


@triton.jit
def stray_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + 1, tl.load(x_ptr + N))


def test_a_stray_address_is_noticed() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="OutOfBounds"):
        stray_kernel[(1,)](torch.zeros(8), N=8)


def test_bf16_conversion_rounds_to_nearest_even() -> None:
    x = torch.randn(10000, generator=torch.Generator().manual_seed(5))
    bits = triton_interpreter.float_to_bf16(x.numpy())
    assert np.array_equal(bits, x.bfloat16().view(torch.uint16).numpy())

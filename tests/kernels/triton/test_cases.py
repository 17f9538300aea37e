"""What the Triton kernels alone have: splits of a tile's work, fp8 codes, tanh, and an interpreter to be trusted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from radixkv_kernels.triton_impl import attention
from radixkv_kernels.triton_impl.numerics import decode_e4m3, encode_e4m3, tanh

from tests.kernels.problems import FP8, Shape, check, make
from tests.kernels.triton import triton_interpreter

pytestmark = pytest.mark.usefixtures("exact_interpreter")


@pytest.mark.parametrize("processors", [1, 4, 200])
def test_more_programs_than_cells_and_several_runs(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    shape = Shape((1, 1), (4200, 3), num_q_heads=4, num_kv_heads=1, dtype=torch.float16, block_size=48)
    check(make(shape), "triton")


def test_a_sink_counts_once_split_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(Shape((1,), (400,), num_q_heads=2, num_kv_heads=1, sinks=True))
    results = []
    for processors in (1, 64):
        monkeypatch.setattr(attention, "num_processors", lambda device, n=processors: n)
        check(problem, "triton")
        results.append(problem.run("triton"))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


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

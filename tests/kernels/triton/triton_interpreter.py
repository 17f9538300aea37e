"""Triton's interpreter made exact in bfloat16, and made to notice addresses outside the launch's tensors.

The interpreter keeps bf16 as uint16 bits and computes on those bits as if they were integers, and truncates where it
should round to nearest even. Its products are a library's, in which the bits of a row may depend on the row's place in
the tile. `install()` replaces the arithmetic by float32 arithmetic with one rounding and one order of adding, and
checks every load and store against the tensors passed to the launch (a wrong address would read whatever memory is
there).

Used by the tests of Triton kernels only. Works on triton 3.6 and 3.7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel touched memory that belongs to none of its arguments."""


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    """uint16 bits -> float32, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits, to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(values.shape)


def install() -> None:
    """Patches the interpreter of this process, once. Raises AttributeError on a triton that lacks what it patches."""
    builder = interpreter.InterpreterBuilder
    if not hasattr(builder, "radixkv_installed"):
        _make_bf16_exact(builder)
        _check_bounds(builder)
        _patch_language_once()
        # Loop variables are plain ints here, and constexpr lacks this one operator with an int on the left.
        tl.constexpr.__rmod__ = lambda self, other: tl.constexpr(getattr(other, "value", other) % self.value)
        builder.radixkv_installed = True


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    return interpreter.TensorHandle(bf16_to_float(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(values: np.ndarray) -> Any:
    return interpreter.TensorHandle(float_to_bf16(values), tl.bfloat16)


def _make_bf16_exact(builder: Any) -> None:
    originals = {
        name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp", "create_dot", "binary_op", "unary_op")
    }

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar:
            return source
        source = _widen(source)
        if target.scalar == tl.bfloat16:
            return _narrow(source.data.astype(np.float32))
        return originals["cast_impl"](self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if _is_bf16(source) or target.scalar == tl.bfloat16:
            return cast_impl(self, source, target)
        return originals["create_fp_to_fp"](self, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        """Adds in one order for every row, as a GPU does; libraries choose another for some places in a tile."""
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return originals["create_dot"](self, a, b, accumulator, *options)
        total = accumulator.data
        left, right = (np.ascontiguousarray(_widen(x).data, dtype=total.dtype) for x in (a, b))
        return interpreter.TensorHandle(np.einsum("ik,kj->ij", left, right) + total, accumulator.dtype.scalar)

    def binary_op(self: Any, a: Any, b: Any, operation: Any) -> Any:
        if not (_is_bf16(a) or _is_bf16(b)):
            return originals["binary_op"](self, a, b, operation)
        result = operation(_widen(a).data, _widen(b).data)
        return interpreter.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _narrow(result)

    def unary_op(self: Any, a: Any, operation: Any) -> Any:
        return _narrow(operation(_widen(a).data)) if _is_bf16(a) else originals["unary_op"](self, a, operation)

    def get_bf16(self: Any, value: float) -> Any:
        return _narrow(np.array([value], dtype=np.float32))

    for replacement in (cast_impl, create_fp_to_fp, create_dot, binary_op, unary_op, get_bf16):
        setattr(builder, replacement.__name__, replacement)


def _check_bounds(builder: Any) -> None:
    spans: list[tuple[int, int]] = []
    start_launch = interpreter.GridExecutor._init_args_hst
    end_launch = interpreter.GridExecutor._restore_args_dev
    load, store = builder.create_masked_load, builder.create_masked_store

    def init_args(self: Any, arguments: Any, keywords: Any) -> Any:
        host = start_launch(self, arguments, keywords)
        spans[:] = [_span(value) for value in (*host[0], *host[1].values()) if hasattr(value, "untyped_storage")]
        return host

    def restore_args(self: Any, arguments: Any, host: Any, keywords: Any, host_keywords: Any) -> None:
        # CPU tensors were used in place; copying each storage onto itself would touch every page of a sparse one.
        if any(getattr(value, "is_cuda", False) for value in (*arguments, *keywords.values())):
            end_launch(self, arguments, host, keywords, host_keywords)

    def check(what: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
        if addresses.size == 0:
            return
        lowest, highest = int(addresses.min()), int(addresses.max())
        if any(first <= lowest and highest + size <= last for first, last in spans):
            return
        inside = np.zeros(addresses.shape, bool)
        for first, last in spans:
            inside |= (addresses >= first) & (addresses + size <= last)
        if not inside.all():
            program = interpreter.interpreter_builder.grid_idx
            raise OutOfBounds(f"{what}: {int((~inside).sum())} of {addresses.size} addresses, program {program}")

    def create_masked_load(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        check("load", pointers, mask)
        return load(self, pointers, mask, *options)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *options)

    interpreter.GridExecutor._init_args_hst = init_args
    interpreter.GridExecutor._restore_args_dev = restore_args
    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store


def _span(tensor: Any) -> tuple[int, int]:
    """First and one past the last byte of a tensor's own elements, strides included."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _patch_language_once() -> None:
    """A jit function called from a kernel patches all of triton.language again and restores it: skip that, it is the
    larger part of the run time."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if tl.core.is_builtin(tl.core.load):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = call

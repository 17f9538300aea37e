"""A caller's arguments: checked, and brought to the form that `contract.py` gives to implementations.

A mistake is a ValueError with the argument's name, what was expected and what came. `check_*` look at shapes, dtypes
and devices and never synchronise; `check_*_contents` read the tensors, so they run on CPU tensors, or on any with
`validate=True`.

A caller may say in two ways where a sequence's KV lies. Rectangular: `block_table` [num_seqs, max_blocks] with
`seq_lens` [num_seqs]. Ragged (FlashInfer's): `kv_indptr` [num_seqs + 1], `kv_indices` [n], `last_block_len` [num_seqs].
Both become `BlockLists`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .contract import FLOAT_DTYPES, FP8, AttentionSpec, AttentionTensors, UnsupportedImplementation, expect

INT_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 2048


def device_of(name: str, tensor: Tensor) -> torch.device:
    """Where a tensor is; raises ValueError for what is no tensor, or a sparse one."""
    expect(isinstance(tensor, Tensor), name, "a tensor", type(tensor).__name__)
    expect(tensor.layout == torch.strided, name, "a dense tensor", tensor.layout)
    return tensor.device


def check_written(name: str, tensor: Tensor) -> None:
    """What a call writes to: every element has a place of its own, and no gradient of it is wanted."""
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    expect(not shared, name, "strides above 0, as it is written to", tensor.stride())
    expect(not tensor.requires_grad, name, "requires_grad=False, as it is written to", True)


def output(name: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where a call writes its result: the caller's tensor, checked, or a new one."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensor(name, out, shape, (dtype,), device)
    check_written(name, out)
    return out


def stacked(name: str, states: Tensor | Sequence[Tensor]) -> Tensor:
    """A tensor as it is; a sequence of equal tensors as one."""
    if isinstance(states, Tensor):
        return states
    expect(isinstance(states, Sequence) and len(states) > 0, name, "a tensor or a sequence of them", states)
    for state in states:
        expect(device_of(name, state) == states[0].device, name, f"device {states[0].device}", state.device)
        expect(state.shape == states[0].shape, name, f"shape {list(states[0].shape)}", list(state.shape))
    return torch.stack(list(states))


def as_int32(values: Tensor) -> Tensor:
    """Ids and lengths as int32. What does not fit becomes the largest that does, out of any range, and not small."""
    if values.dtype == torch.int32:
        return values
    return values.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Type, rank, sizes (None: any), dtype, device."""
    place = device_of(name, tensor)
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if fits and tensor.dtype in dtypes and place == device and not tensor.requires_grad:
        return  # before any message is put together: every call comes here six times
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    expect(fits, name, f"shape {wanted}", list(tensor.shape))
    expect(tensor.dtype in dtypes, name, " or ".join(str(d) for d in dtypes), tensor.dtype)
    expect(tensor.device == device, name, f"device {device}", tensor.device)
    wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
    expect(not wants_gradient, name, "torch.no_grad() around the call, as there is no backward pass", "requires_grad")


def check_caches(k_cache: Tensor, v_cache: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Two caches of the same blocks, heads and dtype; only head_dim may differ."""
    check_tensor("k_cache", k_cache, (None, None, None, None), dtypes, device)
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    check_tensor("v_cache", v_cache, (num_blocks, block_size, num_kv_heads, None), (k_cache.dtype,), device)
    expect(1 <= block_size <= MAX_BLOCK_SIZE, "k_cache", f"block_size (dim 1) of 1 to {MAX_BLOCK_SIZE}", block_size)
    expect(num_kv_heads >= 1, "k_cache", "at least one KV head (dim 2)", num_kv_heads)


def check_written_caches(k_cache: Tensor, v_cache: Tensor) -> torch.device:
    """Two caches that a call writes to; returns their device."""
    device = device_of("k_cache", k_cache)
    check_caches(k_cache, v_cache, (*FLOAT_DTYPES, FP8), device)
    check_written("k_cache", k_cache)
    check_written("v_cache", v_cache)
    return device


def check_query(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> torch.device:
    """Rows of q and two caches of the same or fp8 dtype, with heads that fit; returns their device."""
    device = device_of("q", q)
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES, device)
    check_caches(k_cache, v_cache, (q.dtype, FP8), device)
    head_dim = q.shape[2]
    expect(k_cache.shape[3] == head_dim, "k_cache", f"head_dim (dim 3) {head_dim}, as q has", k_cache.shape[3])
    check_heads(q.shape[1], k_cache.shape[2], head_dim, v_cache.shape[3])
    return device


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> None:
    """Group sizes are whole numbers; head sizes within what the implementations are built for."""
    expect(
        num_q_heads > 0 and num_q_heads % num_kv_heads == 0,
        "q",
        f"num_q_heads (dim 1) a multiple of num_kv_heads = {num_kv_heads}",
        num_q_heads,
    )
    for name, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        expect(dim >= 1, name, "at least 1", dim)
        if dim > MAX_HEAD_DIM:
            raise UnsupportedImplementation(
                f"{name} {dim}: no implementation goes beyond {MAX_HEAD_DIM} (so not MLA's latent cache either)"
            )


def check_options(scale: float, window: int | None, softcap: float | None) -> None:
    """The plain numbers of paged_attention."""
    expect(isinstance(scale, (int, float)) and math.isfinite(scale), "scale", "a finite number", scale)
    expect(window is None or (type(window) is int and window >= 1), "window", "None or an int >= 1", window)
    capped = isinstance(softcap, (int, float)) and 0 < softcap < math.inf
    expect(softcap is None or capped, "softcap", "None or a number > 0", softcap)


def normalise_scale(name: str, scale: float | Tensor | None, num_kv_heads: int, device: torch.device) -> Tensor | None:
    """A float, a one-element tensor or one per KV head -> [num_kv_heads] float32, stride 0 where there is one."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        number = isinstance(scale, (int, float)) and math.isfinite(scale)
        expect(number, name, "None, a finite number or a tensor", scale)
        return torch.full((1,), float(scale), dtype=torch.float32, device=device).expand(num_kv_heads)
    expect(scale.device == device, name, f"device {device}", scale.device)
    expect(scale.is_floating_point(), name, "a floating-point tensor", scale.dtype)
    flat = scale.reshape(-1).float()
    expect(scale.numel() in (1, num_kv_heads), name, f"1 or {num_kv_heads} elements", list(scale.shape))
    return flat.expand(num_kv_heads) if flat.numel() == 1 else flat.contiguous()


def normalise_per_head(name: str, values: Tensor | None, num_q_heads: int, device: torch.device) -> Tensor | None:
    """Sinks and ALiBi slopes: [num_q_heads] of any float dtype -> float32, contiguous."""
    if values is None:
        return None
    check_tensor(name, values, (num_q_heads,), (*FLOAT_DTYPES, torch.float64), device)
    return values.float().contiguous()


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The part of AttentionSpec and AttentionTensors that says where KV lies; same names, same meaning."""

    block_ids: Tensor
    block_indptr: Tensor | None
    block_stride: int
    max_blocks: int
    seq_lens: Tensor


def block_lists(
    block_table: Tensor | None,
    seq_lens: Tensor | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    last_block_len: Tensor | None,
    block_size: int,
    device: torch.device,
    validate: bool,
) -> BlockLists:
    """The one way or the other; ValueError for both, for neither and for half of one."""
    if block_table is not None:
        ragged = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "last_block_len": last_block_len}
        given = [name for name, value in ragged.items() if value is not None]
        expect(not given, "block_table", "a block table or kv_indptr, not both", given)
        if seq_lens is None:
            raise ValueError("seq_lens: expected a tensor beside block_table, got None")
        return _from_table(block_table, seq_lens, device)
    if kv_indptr is None or kv_indices is None or last_block_len is None:
        raise ValueError("block_table: expected it, or kv_indptr, kv_indices and last_block_len together, got None")
    expect(seq_lens is None, "seq_lens", "None beside kv_indptr (last_block_len says it)", "a tensor")
    return _from_indices(kv_indptr, kv_indices, last_block_len, block_size, device, validate)


def _from_table(block_table: Tensor, seq_lens: Tensor, device: torch.device) -> BlockLists:
    """The table as a flat view; copies only where its rows are not stride 1 or its dtype is not int32."""
    check_tensor("block_table", block_table, (None, None), INT_DTYPES, device)
    num_seqs, max_blocks = block_table.shape
    check_tensor("seq_lens", seq_lens, (num_seqs,), INT_DTYPES, device)
    table = as_int32(block_table)
    if max_blocks > 1 and table.stride(1) != 1:
        table = table.contiguous()
    stride = table.stride(0) if num_seqs > 1 else max_blocks
    length = (num_seqs - 1) * stride + max_blocks if num_seqs and max_blocks else 0
    flat = table.as_strided((length,), (1,))
    return BlockLists(flat, None, stride, max_blocks, as_int32(seq_lens).contiguous())


def _from_indices(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_block_len: Tensor,
    block_size: int,
    device: torch.device,
    validate: bool,
) -> BlockLists:
    """Ragged lists as they are; seq_lens by arithmetic on the device, max_blocks exact where `validate`."""
    check_tensor("kv_indptr", kv_indptr, (None,), INT_DTYPES, device)
    expect(kv_indptr.numel() >= 1, "kv_indptr", "at least one entry", 0)
    check_tensor("kv_indices", kv_indices, (None,), INT_DTYPES, device)
    check_tensor("last_block_len", last_block_len, (kv_indptr.numel() - 1,), INT_DTYPES, device)
    indptr = as_int32(kv_indptr).contiguous()
    counts = indptr[1:] - indptr[:-1]
    max_blocks = kv_indices.numel()
    if validate:
        expect(int(indptr[0]) == 0, "kv_indptr", "a first entry of 0", int(indptr[0]))
        expect(bool((counts >= 0).all()), "kv_indptr", "a non-decreasing sequence", indptr.tolist())
        expect(int(indptr[-1]) <= max_blocks, "kv_indptr", f"a last entry of at most {max_blocks}", int(indptr[-1]))
        bad = (counts > 0) & ((last_block_len < 1) | (last_block_len > block_size))
        expect(not bool(bad.any()), "last_block_len", f"values in [1, {block_size}]", last_block_len.tolist())
        max_blocks = int(counts.max()) if counts.numel() else 0
    seq_lens = as_int32(torch.where(counts > 0, (counts - 1) * block_size + last_block_len, 0))
    return BlockLists(as_int32(kv_indices).contiguous(), indptr, 0, max_blocks, seq_lens)


def check_attention_contents(spec: AttentionSpec, tensors: AttentionTensors) -> None:
    """Lengths and block ids in range: every id that a row may read, and only those. O(num_seqs * max_blocks)."""
    cu, lens = _host(tensors.cu_seqlens_q), _host(tensors.seq_lens)
    q_lens = cu[1:] - cu[:-1]
    expect(cu[0] == 0, "cu_seqlens_q", "a first entry of 0", cu[0])
    if not len(lens):
        return
    num_tokens = tensors.q.shape[0]
    if q_lens.min() < 0 or cu[-1] > num_tokens or lens.min() < 0:
        expect(q_lens.min() >= 0, "cu_seqlens_q", "a non-decreasing sequence", cu.tolist())
        expect(cu[-1] <= num_tokens, "cu_seqlens_q", f"a last entry of at most num_tokens = {num_tokens}", cu[-1])
        expect(False, "seq_lens", "values >= 0", lens.tolist())
    num_blocks = (lens + spec.block_size - 1) // spec.block_size
    if tensors.block_indptr is None:
        starts = np.arange(len(lens)) * spec.block_stride
        limit = np.full(len(lens), spec.max_blocks)
    else:
        indptr = _host(tensors.block_indptr)
        starts, limit = indptr[:-1], indptr[1:] - indptr[:-1]
    if (num_blocks > limit).any():
        s = int((num_blocks > limit).argmax())
        raise ValueError(
            f"seq_lens: expected at most block_size * blocks = {spec.block_size * int(limit[s])} tokens "
            f"of sequence {s}, got {int(lens[s])}"
        )
    columns = np.arange(int(num_blocks.max()))
    used = (columns < num_blocks[:, None]) & (q_lens > 0)[:, None]
    if spec.window is not None:
        used &= columns >= (np.maximum(lens - q_lens - spec.window + 1, 0) // spec.block_size)[:, None]
    ids = tensors.block_ids.cpu().numpy().reshape(-1).take((starts[:, None] + columns)[used])
    if len(ids):
        low, high, total = int(ids.min()), int(ids.max()), tensors.k_cache.shape[0]
        expect(low >= 0 and high < total, "block_table", f"ids in [0, {total})", low if low < 0 else high)


def _host(values: Tensor) -> np.ndarray:
    return values.cpu().numpy().astype(np.int64)


def check_copy_contents(src: Tensor, dst: Tensor, num_tokens: Tensor, num_blocks: int, block_size: int) -> None:
    """Block ids and row counts in range, destinations distinct and no source among them. O(num_pairs log num_pairs)."""
    for name, ids in (("src_blocks", src), ("dst_blocks", dst)):
        low, high = int(ids.min()), int(ids.max())
        expect(low >= 0 and high < num_blocks, name, f"ids in [0, {num_blocks})", low if low < 0 else high)
    low, high = int(num_tokens.min()), int(num_tokens.max())
    expect(low >= 0 and high <= block_size, "num_tokens", f"counts in [0, {block_size}]", low if low < 0 else high)
    expect(dst.unique().numel() == dst.numel(), "dst_blocks", "distinct ids", dst.tolist())
    both = torch.isin(src, dst)
    expect(not bool(both.any()), "dst_blocks", "no block that is also a source", src[both].tolist())

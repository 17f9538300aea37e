"""The two ways a caller may say where a sequence's KV lies, brought to one form. Called by `api.py`.

Rectangular: `block_table` [num_seqs, max_blocks] with `seq_lens` [num_seqs]. Ragged (FlashInfer's): `kv_indptr`
[num_seqs + 1], `kv_indices` [n], `last_block_len` [num_seqs].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .validate import INT_DTYPES, as_int32, check_tensor, expect


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The part of AttentionSpec and AttentionTensors that says where KV lies; same names, same meaning."""

    block_ids: Tensor
    block_indptr: Tensor | None
    block_stride: int
    max_blocks: int
    seq_lens: Tensor


def from_table(block_table: Tensor, seq_lens: Tensor, device: torch.device) -> BlockLists:
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


def from_indices(
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

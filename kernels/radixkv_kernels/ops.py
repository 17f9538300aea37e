"""The calls as torch operators `torch.ops.radixkv.*`, for torch.compile(fullgraph=True), export and CUDA graphs.

Importing this module registers them; nothing else in the package needs it. Plain tensors and numbers only, so scales
are tensors here; arguments otherwise as in `api.py`, which runs and validates the call. Forward only: no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import api
from .contract import PlanConfig, PlanTensors

_library = torch.library.Library("radixkv", "DEF")
_library.define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor cu_seqlens_q, *, float? scale=None, bool causal=True, int? window=None, float? softcap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "str implementation='auto') -> (Tensor out, Tensor lse)"
)
_library.define(
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor cu_seqlens_q, Tensor num_items, Tensor items, Tensor row_token, Tensor row_seq, Tensor row_base, "
    "Tensor row_slots, Tensor slot_cells, Tensor(a!) workspace, *, int cell_size, int tile_rows, float? scale=None, "
    "bool causal=True, int? window=None, float? softcap=None, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, str implementation='auto') -> (Tensor out, Tensor lse)"
)
_library.define(
    "store_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, str implementation='auto') -> ()"
)
_library.define(
    "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor src_blocks, Tensor dst_blocks, Tensor num_tokens, *, "
    "str implementation='auto') -> ()"
)
_library.define("merge_states(Tensor outs, Tensor lses, *, str implementation='auto') -> (Tensor out, Tensor lse)")


def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    result = api.paged_attention(
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        implementation=implementation,
    )
    assert isinstance(result, tuple)
    return result


def _tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    num_items: Tensor,
    items: Tensor,
    row_token: Tensor,
    row_seq: Tensor,
    row_base: Tensor,
    row_slots: Tensor,
    slot_cells: Tensor,
    workspace: Tensor,
    *,
    cell_size: int,
    tile_rows: int,
    causal: bool = True,
    window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A plan's `PlanTensors` one by one; cell_size, tile_rows: as the plan was made with."""
    config = PlanConfig(
        k_cache.shape[1],
        q.shape[1],
        k_cache.shape[2],
        cell_size,
        causal,
        window,
        tile_rows,
        kv_itemsize=k_cache.itemsize,
    )
    result = api.tree_attention(
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        plan=PlanTensors(config, num_items, items, row_token, row_seq, row_base, row_slots, slot_cells),
        workspace=workspace,
        causal=causal,
        window=window,
        return_lse=True,
        **options,
    )
    assert isinstance(result, tuple)
    return result


def _paged_attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Tensor, **__: object
) -> tuple[Tensor, Tensor]:
    num_tokens, num_q_heads = q.shape[:2]
    out = q.new_empty(num_tokens, num_q_heads, v_cache.shape[3])
    return out, q.new_empty(num_tokens, num_q_heads, dtype=torch.float32)


def _merge_states_fake(outs: Tensor, lses: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _writes_in_place(*_: Tensor, **__: object) -> None:
    """The fake of an operator that only mutates."""


for _name, _kernel, _fake in (
    ("paged_attention", _paged_attention, _paged_attention_fake),
    ("tree_attention", _tree_attention, _paged_attention_fake),
    ("store_kv", api.store_kv, _writes_in_place),
    ("copy_blocks", api.copy_blocks, _writes_in_place),
    ("merge_states", api.merge_states, _merge_states_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"radixkv::{_name}", _fake, lib=_library)

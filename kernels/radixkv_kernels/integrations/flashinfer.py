"""FlashInfer's two paged wrappers, `plan` then `run`, with its argument names, layouts and base-2 lse.

What we don't build raises UnsupportedImplementation when it is asked for. The float workspace and the choices of a
backend there are hints that change nothing here: there is nothing to plan, `plan` keeps the tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..api import paged_attention
from ..contract import UnsupportedImplementation


class _PagedWrapper:
    def __init__(self, float_workspace_buffer: Tensor | None, kv_layout: str, use_cuda_graph: bool) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
        _refuse(
            use_cuda_graph, "use_cuda_graph", "capture radixkv_kernels.paged_attention itself, it never synchronises"
        )
        self._kv_layout = kv_layout
        self._planned: dict[str, Any] | None = None
        self._shape: tuple[int, int, int, int] | None = None

    def _plan(
        self,
        shape: tuple[int, int, int, int],
        pos_encoding_mode: str,
        rope_scale: float | None,
        rope_theta: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        **tensors: Any,
    ) -> None:
        _refuse(pos_encoding_mode != "NONE", "pos_encoding_mode", "apply the rotation before the call")
        _refuse(rope_scale is not None or rope_theta is not None, "rope_scale", "apply the rotation before the call")
        self._shape = shape
        self._planned = {
            "window": None if window_left < 0 else window_left + 1,
            "softcap": logits_soft_cap or None,
            "scale": sm_scale,
            **tensors,
        }

    def _run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        sinks: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self._planned is None or self._shape is None:
            raise ValueError("plan: expected to be called before run, got no plan")
        pair = paged_kv_cache.unbind(1) if isinstance(paged_kv_cache, Tensor) else paged_kv_cache
        k_cache, v_cache = (c.transpose(1, 2) if self._kv_layout == "HND" else c for c in pair)
        given = (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1])
        if given != self._shape:
            names = "(num_qo_heads, num_kv_heads, head_dim, page_size)"
            raise ValueError(f"q: expected the planned {names} {self._shape}, got {given}")
        planned = dict(self._planned)
        if q_scale is not None:
            planned["scale"] = q_scale * (q.shape[2] ** -0.5 if planned["scale"] is None else planned["scale"])
        result = paged_attention(
            q, k_cache, v_cache, k_scale=k_scale, v_scale=v_scale, out=out, sinks=sinks, return_lse=True, **planned
        )
        result_out, natural = result
        if not return_lse:
            return result_out
        base2 = natural / math.log(2)
        return result_out, base2 if lse is None else lse.copy_(base2)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """One new token a sequence: FlashInfer's decode wrapper.

    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    >>> indptr, indices, last = torch.tensor([0, 2, 3]), torch.tensor([3, 0, 5]), torch.tensor([5, 9])
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16, q_data_type=torch.float32)
    >>> wrapper.run(torch.randn(2, 8, 64), torch.randn(8, 2, 16, 2, 64)).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Keeps the batch: indptr [batch + 1], indices [n], last_page_len [batch] int32, on the device of `run`.

        The dtypes are read off the tensors given to `run`. O(1).
        """
        self._plan(
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            pos_encoding_mode,
            rope_scale,
            rope_theta,
            window_left,
            logits_soft_cap,
            sm_scale,
            kv_indptr=indptr,
            kv_indices=indices,
            last_block_len=last_page_len,
            cu_seqlens_q=torch.arange(indptr.numel(), dtype=torch.int32, device=indptr.device),
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q [batch, num_qo_heads, head_dim]; a pair of caches, or one [pages, 2, ..], in the wrapper's layout.

        Returns out, or (out, lse [batch, num_qo_heads] float32, base 2).
        """
        return self._run(q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, sinks)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Any number of new tokens a sequence: FlashInfer's prefill wrapper.

    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    >>> indptr, indices, last = torch.tensor([0, 2, 3]), torch.tensor([3, 0, 5]), torch.tensor([5, 9])
    >>> wrapper.plan(torch.tensor([0, 4, 7]), indptr, indices, last, 8, 2, 64, 16, causal=True)
    >>> wrapper.run(torch.randn(7, 8, 64), torch.randn(8, 2, 16, 2, 64)).shape
    torch.Size([7, 8, 64])
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Keeps the batch: qo_indptr, paged_kv_indptr [batch + 1], paged_kv_indices [n], and the last pages' lengths.

        Custom masks and fp16 reduction raise UnsupportedImplementation. O(1).
        """
        masked = custom_mask is not None or packed_custom_mask is not None
        _refuse(masked, "custom_mask", "only causal, windowed and full attention")
        _refuse(use_fp16_qk_reduction, "use_fp16_qk_reduction", "sums are float32")
        self._plan(
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            pos_encoding_mode,
            rope_scale,
            rope_theta,
            window_left,
            logits_soft_cap,
            sm_scale,
            causal=causal,
            kv_indptr=paged_kv_indptr,
            kv_indices=paged_kv_indices,
            last_block_len=paged_kv_last_page_len,
            cu_seqlens_q=qo_indptr,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q [total_q, num_qo_heads, head_dim]; otherwise as in `BatchDecodeWithPagedKVCacheWrapper.run`."""
        return self._run(q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, sinks)


def _refuse(asked: bool, name: str, reason: str) -> None:
    if asked:
        raise UnsupportedImplementation(f"{name}: {reason}")

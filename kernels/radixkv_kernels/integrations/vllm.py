"""A backend of attention for vLLM (v1): a row's bits don't depend on its batch, and shared KV is read once a step.

On a GPU it is vLLM's CUSTOM backend (`--attention-backend CUSTOM`); on a CPU, where vLLM has one backend and looks at
no choice, it takes that one's name. `register()` does either, in each process of vLLM; a plugin of
`vllm.general_plugins` is the place to call it from. It works with vLLM's scheduler and with any other.

Options are in vLLM's `--additional-config '{"radixkv_kernels": {"tree_attention": "on"}}'`. "auto", the default, reads
shared KV once where that saves enough on a CPU, and never on a GPU, where block tables have to be fetched from the
device for it, once a step. "on" does so wherever KV is shared, "off" never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..api import paged_attention, store_kv
from ..plan.tree_plan import TreePlan
from ..tree_plans import MODES, TreePlans

OPTIONS = "radixkv_kernels"
_FP8 = ("fp8", "fp8_e4m3")
_KV_DTYPES = ("auto", *_FP8)


@dataclass
class RadixMetadata:
    """One batch, for the layers of one group.

    Attributes:
        num_tokens: rows of the batch; those after them are padding.
        query_start_loc, seq_lens, block_table: [num_seqs + 1], [num_seqs], [num_seqs, max_blocks] int32.
        plans: by the layers' window; none where no KV is shared, or too little of it.
    """

    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    plans: Mapping[int | None, TreePlan]


class RadixMetadataBuilder(AttentionMetadataBuilder[RadixMetadata]):
    """Makes each batch's metadata, and finds in its block tables what is shared.

    Args:
        kv_cache_spec, layer_names, vllm_config, device: vLLM's.

    Attributes:
        plans: of this group's batches.

    Raises:
        NotImplementedError: the model asks for what is not handled; names all of it.
        ValueError: a bad option.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        impls = [layer.impl for layer in layers.values()]
        model, first = vllm_config.model_config, impls[0]
        refused = {
            "layers of which only some cap their scores": len({impl.softcap is None for impl in impls}) > 1,
            "media that see both ways": model.is_mm_prefix_lm,
            "windows that begin behind the prompt": model.rswa_window is not None,
            "masks that are not causal": vllm_config.attention_config.use_non_causal,
        }
        _refuse([what for what, is_asked in refused.items() if is_asked])
        mode = tree_attention_of(vllm_config.additional_config)
        if mode == "auto" and device.type != "cpu":
            mode = "off"
        self.plans = TreePlans(
            [impl.window for impl in impls],
            num_q_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            block_size=kv_cache_spec.block_size,
            dtype=model.dtype,
            device=device,
            mode=mode,
            kv_dtype=torch.float8_e4m3fn if first.is_fp8 else None,
            softcap=first.softcap is not None,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RadixMetadata:
        """Returns a batch's metadata.

        Raises:
            NotImplementedError: a mask that is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            _refuse(["masks that are not causal"])
        num_seqs = common.num_reqs
        cu_seqlens, seq_lens = common.query_start_loc[: num_seqs + 1], common.seq_lens[:num_seqs]
        table = common.block_table_tensor[:num_seqs]
        plans: Mapping[int | None, TreePlan] = {}
        if self.plans.mode != "off" and num_seqs > 1 and not fast_build:
            lens = seq_lens.cpu().numpy().astype(np.int64)
            used = -(-lens // self.kv_cache_spec.block_size)
            tables = [row[:end] for row, end in zip(table.cpu().numpy(), used.tolist(), strict=True)]
            # Nothing here names a request, so a sequence goes by its row.
            cu = common.query_start_loc_cpu[: num_seqs + 1].numpy().astype(np.int64)
            plans = self.plans.of(range(num_seqs), tables, lens, cu)
        return RadixMetadata(common.num_actual_tokens, cu_seqlens, seq_lens, table, plans)


class RadixAttentionImpl(AttentionImpl[RadixMetadata]):
    """One layer's attention.

    Args: vLLM's. A cache is [num_blocks, num_kv_heads, block_size, 2 * head_size], keys before values, any strides.

    Raises:
        NotImplementedError: encoders, other quantised caches than fp8 e4m3, ALiBi on a GPU.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refused = []
        if attn_type != AttentionType.DECODER:
            refused.append(f"attention of type {attn_type}")
        if kv_cache_dtype not in _KV_DTYPES:
            refused.append(f"KV of dtype {kv_cache_dtype}")
        if alibi_slopes is not None and not current_platform.is_cpu():
            refused.append("ALiBi on a GPU")
        _refuse(refused)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.window = sliding_window
        self.softcap = logits_soft_cap or None
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.kv_cache_dtype = kv_cache_dtype
        self.is_fp8 = kv_cache_dtype in _FP8
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RadixMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of query [>= num_tokens, num_heads, head_size] over the cache to output, and returns it.

        A call without metadata is vLLM's measuring of memory, and gives zeros. Raises NotImplementedError where the
        output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            _refuse(["quantised outputs"])
        if attn_metadata is None:
            return output.fill_(0)
        rows = slice(attn_metadata.num_tokens)
        k_cache, v_cache, scales = self._caches(layer, kv_cache)
        paged_attention(
            query[rows],
            k_cache,
            v_cache,
            cu_seqlens_q=attn_metadata.query_start_loc,
            block_table=attn_metadata.block_table,
            seq_lens=attn_metadata.seq_lens,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            out=output[rows],
            plan=attn_metadata.plans.get(self.window),
            validate=False,  # vLLM made the tables; to look at them in each layer would cost as much as attention
            **scales,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes keys and values of the rows that slot_mapping has, negative slots left out."""
        rows = slice(slot_mapping.shape[0])
        k_cache, v_cache, scales = self._caches(layer, kv_cache)
        store_kv(key[rows], value[rows], k_cache, v_cache, slot_mapping, validate=False, **scales)

    def _caches(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        if self.is_fp8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        by_token = kv_cache.transpose(1, 2)
        scales: dict[str, Any] = {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if self.is_fp8 else {}
        return by_token[..., : self.head_size], by_token[..., self.head_size :], scales


class RadixAttentionBackend(AttentionBackend):
    """What vLLM asks before it takes the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(_KV_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's list whose place this takes."""
        return _member().name

    @staticmethod
    def get_impl_cls() -> type[RadixAttentionImpl]:
        """Its layers."""
        return RadixAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RadixMetadataBuilder]:
        """Its batches."""
        return RadixMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to 256, on a GPU from 32 on."""
        return (1 if current_platform.is_cpu() else 32) <= head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's bits are its own, however it is batched, chunked or cached."""
        return True


def _refuse(what: list[str]) -> None:
    if what:
        raise NotImplementedError(f"radixkv's attention does not handle: {'; '.join(what)}")


def tree_attention_of(additional_config: Any) -> str:
    """Returns the mode of tree attention in vLLM's additional_config; raises ValueError that names a bad option."""
    options = additional_config.get(OPTIONS, {}) if isinstance(additional_config, dict) else {}
    if not isinstance(options, dict) or options.keys() - {"tree_attention"}:
        raise ValueError(f"additional_config[{OPTIONS!r}]: expected a mapping with tree_attention, got {options!r}")
    mode = options.get("tree_attention", "auto")
    if mode not in MODES:
        raise ValueError(f"additional_config[{OPTIONS!r}]: tree_attention: expected one of {MODES}, got {mode!r}")
    return str(mode)


def register() -> None:
    """Makes it vLLM's CUSTOM backend; on a CPU, the one that vLLM has. Calling it again does nothing. O(1)."""
    register_backend(_member(), f"{__name__}.{RadixAttentionBackend.__qualname__}")
    selector._cached_get_attn_backend.cache_clear()


def unregister() -> None:
    """Undoes `register`, for models that are loaded later. O(1)."""
    _member().clear_override()
    selector._cached_get_attn_backend.cache_clear()


def _member() -> AttentionBackendEnum:
    return AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM

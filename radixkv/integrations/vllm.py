"""RadixCache and KVManager in place of vLLM's KVCacheManager: hits to the token, nothing of vLLM is patched.

    vllm serve MODEL --scheduler-cls radixkv.integrations.vllm.RadixScheduler

vLLM's scheduler takes hits that are no multiple of a block, and its workers copy blocks before a forward pass
(`SchedulerOutput.kv_cache_block_copies`, made for hybrid models); so a request that leaves a cached one inside a block
copies that block and computes the rest. Sources: vLLM 0.32, `vllm/v1/core/kv_cache_manager.py` and
`vllm/v1/core/sched/scheduler.py`.

Options are in vLLM's `--additional-config '{"radixkv": {...}}'`: `policy`, the name of an eviction policy ("lru"), and
`partial_blocks`, false for hits of whole blocks ("true").
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import vllm
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request, RequestStatus, StreamingUpdate
from vllm.v1.utils import tensor_data

from radixkv.cache import events
from radixkv.cache.namespace import LoRA, Media, Namespace, Part, Salt
from radixkv.cache.radix.cache import RadixCache
from radixkv.cache.tokens import unpack
from radixkv.integrations.tables import SequenceTables
from radixkv.integrations.vllm_plugin import check_version

check_version(vllm.__version__)

# What is asked of a KVCacheManager in the vLLM that this was written for: with more, it may miss what it is told.
_KNOWN = frozenset(
    {
        "allocate_slots",
        "cache_blocks",
        "create_kv_cache_blocks",
        "estimate_cached_tokens",
        "evict_blocks",
        "finalize_partial_tail_offloads",
        "free",
        "get_block_ids",
        "get_block_ids_for_computed_tokens",
        "get_blocks",
        "get_computed_blocks",
        "get_computed_blocks_for_connector",
        "get_num_common_prefix_blocks",
        "make_prefix_cache_stats",
        "new_step_starts",
        "pop_blocks_for_free",
        "prefix_cache_lookup_enabled",
        "record_blocks_for_zeroing",
        "record_prefix_cache_stats",
        "remove_skipped_blocks",
        "reset_prefix_cache",
        "take_boundary_state_offloads",
        "take_events",
        "take_kv_cache_block_copies",
        "take_new_block_ids",
        "truncate_computed_blocks",
        "usage",
    }
)
_OPTIONS = {"policy": str, "partial_blocks": bool}


class RadixKVCacheManager(KVCacheManager):
    """Takes the place of a KVCacheManager that has just been made, with its pool and its configuration.

    Args:
        plain: what it takes the place of; not to be used any more.
        cache: an empty cache of the same block size.

    Attributes:
        tables: the requests' blocks. Ids are vLLM's; its null block 0 is never handed out.
    """

    def __init__(self, plain: KVCacheManager, cache: RadixCache) -> None:
        self.__dict__.update(plain.__dict__)
        num_blocks = self.kv_cache_config.num_blocks - 1
        self.tables = SequenceTables(cache, num_blocks, first_block=1, publishes=self.enable_caching)
        self._is_zeroing = self.kv_cache_config.needs_kv_cache_zeroing
        self._new_block_ids: list[int] = []
        self._events: list[events.Event] = []
        if self.enable_kv_cache_events:
            cache.subscribe(lambda _, event: self._events.append(event))

    # ---- a step

    def new_step_starts(self) -> None:
        """The step before has run, or is ahead of this one on the device's stream."""
        self.tables.begin_step()

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Matches a waiting request; the count may end inside a block."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        num_cached = self.tables.look_up(
            request.request_id,
            request._all_token_ids,
            namespace_of(request),
            most=max_cache_hit_length,
            spare=self.watermark_blocks,
        )
        return self.get_blocks(request.request_id), num_cached, 0

    def get_computed_blocks_for_connector(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """As `get_computed_blocks`: one group of layers cannot diverge."""
        return *self.get_computed_blocks(request), False

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Gives a request blocks, as vLLM's own does, for what it computes in this step."""
        if num_external_computed_tokens or delay_cache_blocks or num_encoder_tokens:
            raise NotImplementedError("radixkv: KV from outside, and KV of encoders")
        computed = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        waits = has_scheduled_reqs and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        new = self.tables.allocate(
            request.request_id,
            request._all_token_ids,
            namespace_of(request),
            num_slots=min(computed + num_lookahead_tokens, self.max_model_len),
            num_computed=computed,
            whole=min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0,
            spare=self.watermark_blocks if waits else 0,
            reserved=reserved_blocks,
        )
        if new is None:
            return None
        if self._is_zeroing:
            self._new_block_ids += new
        return self._blocks(new)

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        """Returns the copies of the step; their sources stay as they are until its forward pass is enqueued."""
        return [KVCacheBlockCopy(copy.source, copy.destination) for copy in self.tables.end_step()], []

    def take_new_block_ids(self) -> list[int]:
        """Returns the blocks handed out since the last call, for workers that zero them before they copy."""
        new, self._new_block_ids = self._new_block_ids, []
        return new

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publishes what a request has computed."""
        self.tables.publish(request.request_id, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Takes back the blocks of a request that has ended, was aborted or is preempted."""
        self.tables.drop(request.request_id, request.num_computed_tokens - request.num_output_placeholders)

    def reset_prefix_cache(self) -> bool:
        """Forgets all that is cached, also while requests run: those go on with what they have, and share no more."""
        self.tables.reset()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # ---- what the scheduler asks about

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold."""
        return self.tables.usage

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Returns the blocks of a request."""
        return self._blocks(self.tables.table(request_id))

    def estimate_cached_tokens(self, request: Request) -> int:
        """Returns how many of its tokens are cached."""
        return self.tables.num_cached(request.request_id)

    def take_events(self) -> list[KVCacheEvent]:
        """Returns what the cache stored and removed since the last call, as vLLM's own events."""
        kind, window = self.kv_cache_event_metadata[0]
        found: list[KVCacheEvent] = [_event(event, kind, window) for event in self._events]
        self._events.clear()
        return found

    # ---- what full attention without a connector has no use for

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Full attention skips none."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Raises NotImplementedError: it is for KV that failed to come from outside."""
        raise NotImplementedError("radixkv: eviction of blocks by their ids")

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Raises NotImplementedError: it is for KV that a connector still writes."""
        raise NotImplementedError("radixkv: blocks that are freed later")

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Raises NotImplementedError: it is for KV that failed to come from outside."""
        raise NotImplementedError("radixkv: KV from outside")

    def _blocks(self, block_ids: list[int]) -> KVCacheBlocks:
        blocks = self.block_pool.blocks
        return self.create_kv_cache_blocks(([blocks[i] for i in block_ids],))


class RadixScheduler(Scheduler):
    """vLLM's scheduler on the tree; with async scheduling it is made as a `RadixAsyncScheduler`.

    Raises:
        NotImplementedError: the configuration asks for what is not handled; names all of it.
        ValueError: a bad option.
    """

    kv_cache_manager: RadixKVCacheManager

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> RadixScheduler:
        is_async = vllm_config.scheduler_config.async_scheduling
        return super().__new__(RadixAsyncScheduler if is_async and cls is RadixScheduler else cls)

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        options = options_of(vllm_config.additional_config)
        refused = unsupported(vllm_config, kv_cache_config)
        if options.get("partial_blocks", True) and (current_platform.is_out_of_tree() or current_platform.is_tpu()):
            refused.append(f'copies of blocks on {current_platform.device_name} (set "partial_blocks": false)')
        if refused:
            raise NotImplementedError(f"radixkv's scheduler does not handle: {'; '.join(refused)}")
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        cache = RadixCache(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size, **options)
        self.kv_cache_manager = RadixKVCacheManager(self.kv_cache_manager, cache)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        # The last token of the turn before was sampled and not computed; the next turn's begin in its place.
        tables = self.kv_cache_manager.tables
        tables.rewind(session.request_id, session.num_computed_tokens)
        if update.mm_features:  # whose blocks are under another namespace than the request began with
            tables.keep_apart(session.request_id)
        super()._update_request_as_session(session, update)


class RadixAsyncScheduler(RadixScheduler, AsyncScheduler):
    """The same where the next step is scheduled while one runs."""


def options_of(additional_config: Any) -> dict[str, Any]:
    """Returns the options of `RadixCache` in vLLM's additional_config; raises ValueError that names a bad one."""
    options = additional_config.get("radixkv", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(options, dict):
        raise ValueError(f"additional_config['radixkv']: expected a mapping, got {options!r}")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"additional_config['radixkv']: expected one of {', '.join(_OPTIONS)}, got {name!r}")
        if not isinstance(value, _OPTIONS[name]):
            raise ValueError(f"{name}: expected a {_OPTIONS[name].__name__}, got {value!r}")
    return options


def unsupported(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Returns what a configuration asks for and the tree does not handle, in words."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    refused = []
    if vllm_config.speculative_config is not None:
        refused.append("speculative decoding")
    if (transfer := vllm_config.kv_transfer_config) is not None:
        refused.append(f"the KV connector {transfer.kv_connector}")
    if len(groups) != 1:
        refused.append(f"{len(groups)} KV cache groups (it handles one, of full attention)")
    elif not _is_full_attention(groups[0].kv_cache_spec):
        refused.append(f"KV of {type(groups[0].kv_cache_spec).__name__} (it handles full attention)")
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size != 1:
        refused.append("context parallelism")
    if vllm_config.model_config.is_encoder_decoder:
        refused.append("encoder-decoder models")
    if vllm_config.model_config.is_diffusion:
        refused.append("diffusion models")
    if vllm_config.aux_output_config.enabled:
        refused.append("auxiliary outputs kept by slot (routed experts)")
    if vllm_config.observability_config.kv_cache_metrics:
        refused.append("residency metrics of blocks (kv_cache_metrics)")
    return refused


def _is_full_attention(spec: Any) -> bool:
    if type(spec) is UniformTypeKVCacheSpecs:
        return all(_is_full_attention(inner) for inner in spec.kv_cache_specs.values())
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec)


def namespace_of(request: Request) -> Namespace | None:
    """Returns what a request's KV depends on besides its tokens: adapter, salt, media, embeddings given as a prompt."""
    parts: list[Part] = []
    if (lora := request.lora_request) is not None:
        parts.append(LoRA(lora.lora_name, lora.lora_path or ""))
    if request.cache_salt:
        parts.append(Salt(request.cache_salt))
    for feature in request.mm_features or ():
        place = feature.mm_position
        parts.append(Media(feature.identifier, place.offset, place.length))
    if request.prompt_embeds is not None:
        digest = hashlib.sha256(tensor_data(request.prompt_embeds)).hexdigest()
        parts.append(Media(f"embeddings {digest}", 0, len(request.prompt_embeds)))
    return tuple(parts) or None


def _event(event: events.Event, kind: str, window: int | None) -> KVCacheEvent:
    if isinstance(event, events.AllBlocksCleared):
        return AllBlocksCleared()
    if isinstance(event, events.BlockRemoved):
        return BlockRemoved(block_hashes=list(event.block_hashes), medium="GPU", group_idx=0)
    keys = None
    if event.extra_keys is not None:  # vLLM's events leave out what kind a key is of
        keys = [of and tuple(key[1:] if key[0] == "mm" else key[1] for key in of) for of in event.extra_keys]
    return BlockStored(
        block_hashes=list(event.block_hashes),
        parent_block_hash=event.parent_block_hash,
        token_ids=unpack(event.token_ids).tolist(),
        block_size=event.block_size,
        lora_id=None,
        medium="GPU",
        lora_name=event.lora_name,
        extra_keys=keys,
        group_idx=0,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def check_fit(theirs: type, ours: type, version: str) -> None:
    """Raises ImportError unless `ours` takes all that is asked of `theirs`, and every method of that is known."""
    public = {name for name in vars(theirs) if not name.startswith("_")}
    if unknown := public - _KNOWN:
        raise ImportError(
            f"vllm {version}: {theirs.__name__} has methods that radixkv does not know: {sorted(unknown)}"
        )
    for name in sorted(public & vars(ours).keys()):
        if callable(method := vars(theirs)[name]):
            taken = inspect.signature(vars(ours)[name]).parameters
            if unknown := inspect.signature(method).parameters.keys() - taken.keys():
                raise ImportError(
                    f"vllm {version}: {theirs.__name__}.{name} takes {sorted(unknown)}, unknown to radixkv"
                )


check_fit(KVCacheManager, RadixKVCacheManager, vllm.__version__)

"""vLLM's scheduler over a worker without a model: each row of each block remembers whose KV it holds.

A row's content is a hash of all that its KV depends on: the tokens up to it, adapter, salt and media. A sampled token
is a function of the last row's, so right tokens and right rows are the same thing, and no model has to run. As vLLM's
workers do, this one appends to block tables, zeroes blocks, copies all sources before it writes any destination, and
lets every row of a step be written before any is read.
"""

from types import SimpleNamespace
from unittest.mock import Mock

from tests.integrations.vllm_engines import VOCABULARY, engine_args


def make_scheduler(model, *, tree, block_size, num_blocks, is_async=False, **options):
    """Returns vLLM's scheduler, with its own index or the tree, of a model of one attention layer."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from radixkv.integrations.vllm import RadixScheduler

    init_none_hash(sha256)
    config = EngineArgs(**engine_args(model, tree=tree, num_blocks=num_blocks) | options).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    layer = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kind = RadixScheduler if tree else AsyncScheduler if is_async else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=Mock(),
        block_size=block_size,
        log_stats=True,
    )
    scheduler.max_num_encoder_input_tokens = 1000  # as of a model that takes images
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    return scheduler


def make_request(
    name,
    prompt,
    *,
    max_tokens=1,
    block_size=16,
    salt=None,
    lora=None,
    images=(),
    priority=0,
    scored=False,
    resumable=False,
):
    """Returns vLLM's request; `images` are (identifier, offset, length)."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        name,
        list(prompt),
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=1 if scored else None),
        None,
        priority=priority,
        resumable=resumable,
        cache_salt=salt,
        lora_request=LoRARequest(lora, 1, f"/{lora}") if lora else None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=image, mm_position=PlaceholderRange(offset, length)
            )
            for image, offset, length in images
        ],
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def row_hashes(tokens, salt, lora, images):
    """What the KV of each position depends on, in one number."""
    starts = {offset: image for image, offset, _ in images}
    found, last = [], hash((salt, lora))
    for position, token in enumerate(tokens):
        last = hash((last, token, starts.get(position)))
        found.append(last)
    return found


def sampled(row_hash):
    return 3 + row_hash % (VOCABULARY - 3)


def continuation(request):
    """The tokens that a request must get, whatever is cached."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        tokens.append(sampled(row_hashes(tokens, *depends_on(request))[-1]))
    return tokens[request.num_prompt_tokens :]


def depends_on(request):
    images = [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
    return request.cache_salt, request.lora_request and request.lora_request.lora_name, images


class ShadowWorker:
    """Executes scheduled steps.

    Attributes:
        num_copies, num_computed_tokens: so far.
        drops_copies: the control: without the copied rows something must be seen to be wrong.
        salts: of requests by name; to be filled in.
    """

    def __init__(self, block_size, drops_copies=False):
        self.block_size = block_size
        self.drops_copies = drops_copies
        self.num_copies = self.num_computed_tokens = 0
        self.salts = {}  # no KV depends on them, and none is to be shared across them
        self.slots = {}  # (block, row) -> row hash
        self.requests = {}  # name -> tokens, hashes, table

    def execute(self, step):
        from vllm.v1.outputs import ModelRunnerOutput

        for name in step.finished_req_ids:
            self.requests.pop(name, None)
        for block in step.new_block_ids_to_zero or ():
            self.slots |= {(block, row): None for row in range(self.block_size)}
        copies = [] if self.drops_copies else step.kv_cache_block_copies or []
        self.num_copies += len(copies)
        assert len({to for _, to in copies}) == len(copies)
        self.slots |= {
            (to, row): self.slots.get((source, row)) for source, to in copies for row in range(self.block_size)
        }
        starts = {}
        for new in step.scheduled_new_reqs:
            of = SimpleNamespace(
                cache_salt=self.salts.get(new.req_id), lora_request=new.lora_request, mm_features=new.mm_features
            )
            self.requests[new.req_id] = SimpleNamespace(
                tokens=list(new.prompt_token_ids),
                num_prompt_tokens=len(new.prompt_token_ids),
                table=list(new.block_ids[0]),
                depends_on=depends_on(of),
            )
            starts[new.req_id] = new.num_computed_tokens
        known = step.scheduled_cached_reqs
        for name, block_ids, start, num_outputs in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, known.num_output_tokens, strict=True
        ):
            request = self.requests[name]
            if name in known.resumed_req_ids:
                request.table = []
                del request.tokens[request.num_prompt_tokens + num_outputs :]  # what it sampled when it was preempted
            request.table += block_ids[0] if block_ids else []
            starts[name] = start
        names = list(step.num_scheduled_tokens)
        ends = {name: starts[name] + step.num_scheduled_tokens[name] for name in names}
        for name in names:
            request = self.requests[name]
            assert ends[name] <= len(request.tokens), f"{name}: more is scheduled than was sampled"
            request.hashes = row_hashes(request.tokens, *request.depends_on)
            for position in range(starts[name], ends[name]):
                self.slots[self.slot(request, position)] = request.hashes[position]
        tokens = []
        for name in names:
            request = self.requests[name]
            for position in range(ends[name]):
                assert self.slots.get(self.slot(request, position)) == request.hashes[position], (name, position)
            self.num_computed_tokens += step.num_scheduled_tokens[name]
            is_last = ends[name] == len(request.tokens)
            tokens.append([sampled(request.hashes[-1])] if is_last else [])
            request.tokens += tokens[-1]
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
        )

    def slot(self, request, position):
        block = request.table[position // self.block_size]
        assert block > 0, "the null block"
        return block, position % self.block_size

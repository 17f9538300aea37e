"""Our attention as vLLM's backend: the numbers of vLLM's own kernels, and the same bits with shared KV read once."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: `make test-vllm` runs these in an environment of their own")

# isort: split
from tests.integrations.vllm_engines import VOCABULARY, Engine, save_tiny_llama, save_tiny_model

# isort: split
import random

import torch
from radixkv_kernels.integrations import vllm as ours
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from tests.integrations.vllm_engines import engine_args

CPU = pytest.mark.skipif(not current_platform.is_cpu(), reason="compared with vLLM's kernels for CPUs")
BLOCK_SIZE = 32


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def attention():
    """Our attention in vLLM, for one test."""
    ours.register()
    yield ours
    ours.unregister()


class Batch:
    """New rows of some sequences, whose older keys and values are in blocks of a cache that vLLM laid out."""

    def __init__(self, *, num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        self.sizes = {"num_heads": num_heads, "head_size": head_size, "num_kv_heads": num_kv_heads}
        self.dtype = dtype
        lens, rows = [70, 333, 1, 200, 64], [1, 40, 1, 200, 1]
        self.num_tokens = sum(rows)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32)
        self.query_start_loc = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        width = -(-max(lens) // BLOCK_SIZE)
        self.block_table = (torch.randperm(5 * width) + 1).view(5, width).int()
        self.num_blocks = 5 * width + 1
        self.query = torch.randn(self.num_tokens, num_heads, head_size, dtype=dtype)
        self.kv = torch.randn(2, sum(lens), num_kv_heads, head_size, dtype=dtype)  # of all positions, by sequence
        positions = torch.cat([torch.arange(n) for n in lens])
        owner = torch.repeat_interleave(torch.arange(5), torch.tensor(lens))
        self.slots = self.block_table[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE

    def cache(self, dtype):
        shape = self.num_blocks, self.sizes["num_kv_heads"], BLOCK_SIZE, 2 * self.sizes["head_size"]
        return torch.zeros(shape, dtype=dtype)

    def attend(self, impl, layer, metadata, kv_cache_dtype="auto"):
        """Stores all keys and values, and attends with the new rows."""
        cache = self.cache(torch.uint8 if kv_cache_dtype != "auto" else self.dtype)
        impl.do_kv_cache_update(layer, *self.kv, cache, self.slots)
        out = torch.full_like(self.query, torch.nan)
        assert impl.forward(layer, self.query, *self.kv, cache, metadata, out) is out
        return out

    def ours(self, impl, layer, **options):
        """As our metadata has it."""
        metadata = ours.RadixMetadata(self.num_tokens, self.query_start_loc, self.seq_lens, self.block_table, {})
        return self.attend(impl, layer, metadata, **options)

    def theirs(self, impl, layer, **options):
        """As CPU_ATTN has it."""
        window = impl.sliding_window
        scheduled = cpu_attn.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=5,
            num_heads=self.sizes["num_heads"],
            num_kv_heads=self.sizes["num_kv_heads"],
            head_dim=self.sizes["head_size"],
            seq_lens=self.seq_lens,
            dtype=self.dtype,
            query_start_loc=self.query_start_loc,
            causal=True,
            sliding_window_size=window,
            isa=layer.isa,
            enable_kv_split=False,
            kv_cache_dtype=options.get("kv_cache_dtype", "auto"),
        )
        metadata = cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=self.num_tokens,
            max_query_len=200,
            query_start_loc=self.query_start_loc,
            max_seq_len=333,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slots,
            scheduler_metadata=scheduled,
        )
        return self.attend(impl, layer, metadata, **options)


FEATURES = {
    "plain": {},
    "one head of KV for all": {"num_kv_heads": 1},
    "heads of their own": {"num_kv_heads": 8},
    "window": {"sliding_window": 50},
    "window of one": {"sliding_window": 1},
    "softcap": {"logits_soft_cap": 0.7},
    "softcap of zero is none": {"logits_soft_cap": 0.0},
    "sinks": {"sinks": torch.linspace(-2, 5, 8)},
    "sinks and window": {"sinks": torch.linspace(-2, 5, 8), "sliding_window": 77},
    "alibi": {"alibi_slopes": [2.0**-i for i in range(1, 9)]},
    "bfloat16": {"dtype": torch.bfloat16},
}


def make_pair(model, options):
    """Returns a batch, our layer and vLLM's, made by the same arguments, and vLLM's layer that they serve."""
    options = dict(options)
    shape = {name: options.pop(name) for name in ("num_kv_heads", "dtype") if name in options}
    batch = Batch(**shape)
    kv_cache_dtype = options.setdefault("kv_cache_dtype", "auto")
    arguments = batch.sizes | {"scale": 0.3, "alibi_slopes": None, "sliding_window": None} | options
    with set_current_vllm_config(EngineArgs(**engine_args(model, tree=False)).create_engine_config()):
        impls = ours.RadixAttentionImpl(**arguments), cpu_attn.CPUAttentionBackendImpl(**arguments)
    scales = {"k": 0.02, "v": 0.05} if kv_cache_dtype != "auto" else {"k": 1.0, "v": 1.0}
    layer = SimpleNamespace(
        isa=cpu_attn._get_attn_isa(batch.dtype, BLOCK_SIZE, 64, kv_cache_dtype),
        **{f"_{name}_scale": torch.tensor(scale) for name, scale in scales.items()},
        **{f"_{name}_scale_float": scale for name, scale in scales.items()},
    )
    return batch, *impls, layer


@CPU
@pytest.mark.parametrize("feature", FEATURES)
def test_the_numbers_of_vllms_own_kernels(model, feature):
    batch, impl, plain, layer = make_pair(model, FEATURES[feature])
    found, expected = batch.ours(impl, layer), batch.theirs(plain, layer)
    assert torch.isfinite(found).all()
    tolerance = 2e-2 if batch.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    if FEATURES[feature].keys() & {"sliding_window", "sinks", "alibi_slopes"} or impl.softcap:
        batch, without, _, layer = make_pair(model, {})  # the feature shows: without it the numbers are others
        assert not torch.allclose(batch.ours(without, layer), expected, atol=tolerance, rtol=tolerance)


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_nearer_to_the_unquantised_than_vllms_own(model, dtype):
    """vLLM's kernels for CPUs cut what does not fit into an fp8 number off; ours round it to the nearest."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's own kernels of fp8 need AVX-512")
    batch, impl, plain, layer = make_pair(model, {"dtype": dtype, "kv_cache_dtype": "fp8"})
    found, theirs = (of(one, layer, kv_cache_dtype="fp8") for of, one in ((batch.ours, impl), (batch.theirs, plain)))
    batch, impl, _, layer = make_pair(model, {"dtype": dtype})
    exact = batch.ours(impl, layer)
    ours_off, theirs_off = ((x - exact).float().abs().mean() for x in (found, theirs))
    assert 0.2 * theirs_off < ours_off < 0.8 * theirs_off


@CPU
def test_padding_rows_are_left_alone(model):
    batch, impl, _, layer = make_pair(model, {})
    whole = batch.ours(impl, layer)
    batch.query = torch.cat([batch.query, torch.full((3, 8, 64), torch.nan)])
    padded = batch.ours(impl, layer)
    assert torch.equal(padded[:-3], whole) and padded[-3:].isnan().all()


def test_without_metadata_the_output_is_zero(model):
    batch, impl, _, layer = make_pair(model, {})
    assert not impl.forward(layer, batch.query, None, None, None, None, torch.ones(3, 4)).any()


# ---- in vLLM's engine


def prompts(seed, num_requests=24):
    """Prompts most of which begin with several cells of the same tokens."""
    choose = random.Random(seed)
    roots = [[choose.randrange(3, VOCABULARY) for _ in range(600)] for _ in range(2)]
    for _ in range(num_requests):
        root = choose.choice(roots)[: choose.choice([600, 600, 320, 100])]
        yield root + [choose.randrange(3, VOCABULARY) for _ in range(choose.randint(1, 60))]


def serve(model, **options):
    """Returns every request's tokens."""
    with Engine(model, **{"num_blocks": 600, **options}) as engine:
        for i, prompt in enumerate(prompts(3)):
            engine.add(str(i), prompt, max_tokens=12)
        return {name: list(done.outputs[0].token_ids) for name, done in engine.finish().items()}


def mode(tree_attention):
    return {"additional_config": {ours.OPTIONS: {"tree_attention": tree_attention}}}


@pytest.fixture(scope="session")
def plain_tokens(model):
    return serve(model, tree=False)


@CPU
@pytest.mark.parametrize(
    ("tree", "block_size", "tree_attention"), [(False, 32, "auto"), (True, 16, "on"), (True, 128, "on")]
)
def test_the_tokens_of_plain_vllm(model, plain_tokens, attention, tree, block_size, tree_attention):
    assert serve(model, tree=tree, block_size=block_size, **mode(tree_attention)) == plain_tokens


@CPU
def test_shared_kv_is_read_once_with_the_same_bits(model, attention, monkeypatch):
    """Every call of every layer with a plan is made again without."""
    seen = {"planned": 0, "alone": 0}

    def both(query, *caches, plan, out, **options):
        found = paged_attention(query, *caches, plan=plan, out=out, **options)
        seen["planned" if plan is not None else "alone"] += 1
        assert torch.equal(found, paged_attention(query, *caches, **options))
        return found

    paged_attention = ours.paged_attention
    monkeypatch.setattr(ours, "paged_attention", both)
    # Small steps and room for half of the requests: chunks, preemptions, rows that change places.
    serve(model, tree=True, num_blocks=90, max_num_batched_tokens=200, max_model_len=800, **mode("on"))
    assert seen["planned"] > 40 and seen["alone"] > 4


@CPU
@pytest.mark.parametrize(("kind", "feature"), [("gemma2", "softcap"), ("mistral", "window"), ("bloom", "alibi_slopes")])
def test_other_models(tmp_path, attention, monkeypatch, kind, feature):
    """Soft-capped scores and layers that take turns with windows; windows alone; ALiBi."""
    folder = save_tiny_model(tmp_path / kind, kind)
    found = serve(folder, tree=kind == "bloom", **mode("on"))
    make = ours.RadixAttentionImpl.__init__

    def without(impl, *arguments, **options):
        make(impl, *arguments, **options)
        setattr(impl, feature, None)

    with monkeypatch.context() as changed:
        changed.setattr(ours.RadixAttentionImpl, "__init__", without)
        control = serve(folder, tree=False)
    ours.unregister()
    plain = serve(folder, tree=False)
    assert found == plain and control != plain


# ---- what is refused, and by which name


@pytest.mark.parametrize(
    ("options", "named"),
    [({"attn_type": "encoder_only"}, "attention of type encoder_only"), ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2")],
)
def test_what_is_not_handled_is_refused_by_name(options, named):
    with pytest.raises(NotImplementedError, match=f"does not handle: .*{named}"):
        ours.RadixAttentionImpl(8, 64, 1.0, 2, **options)


@pytest.mark.parametrize("options", [3, {"tree": "on"}, {"tree_attention": "yes"}, {"tree_attention": None}])
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=r"radixkv_kernels.*tree_attention"):
        ours.tree_attention_of({ours.OPTIONS: options})


def test_options():
    assert ours.tree_attention_of({}) == "auto"
    assert ours.tree_attention_of({ours.OPTIONS: {"tree_attention": "off"}}) == "off"

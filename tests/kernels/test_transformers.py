"""attn_implementation="radixkv" against "eager" on tiny random models: whole models, their caches and ways to generate.

What a mask means is tested in `test_transformers_masks.py`.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from radixkv_kernels import UnsupportedImplementation

transformers = pytest.importorskip("transformers", minversion="5.0")

from radixkv_kernels.integrations.transformers import register  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3": ("Gemma3Text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
}


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def pair_of(cls, config, dtype=torch.float32):
    """The same weights with eager attention and with ours; each model has a config of its own, which it writes to."""
    register()
    torch.manual_seed(0)
    models = [
        cls._from_config(copy.deepcopy(config), attn_implementation=name).to(dtype).eval()
        for name in ("eager", "radixkv")
    ]
    models[1].load_state_dict(models[0].state_dict())
    assert [model.config._attn_implementation for model in models] == ["eager", "radixkv"]
    return models


def model_pair(kind):
    name, extra = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    return pair_of(getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM"), config)


def roundoff(want):
    """What two orders of adding may differ by: a layer's longest sums, one after the other, of numbers like `want`."""
    terms = SIZES["num_hidden_layers"] * (2 * SIZES["hidden_size"] + SIZES["intermediate_size"] + 64)
    return terms * torch.finfo(torch.float32).eps * float(want.abs().max())


def assert_same(got, want, real=slice(None)):
    assert float((got - want)[real].abs().max()) <= roundoff(want[real])


def padded(side):
    """Three prompts of 19, 3 and 11 tokens."""
    torch.manual_seed(1)
    ids, mask = torch.zeros(3, 19, dtype=torch.long), torch.zeros(3, 19, dtype=torch.long)
    for row, n in enumerate((19, 3, 11)):
        where = slice(19 - n, 19) if side == "left" else slice(0, n)
        ids[row, where] = torch.randint(2, 97, (n,))
        mask[row, where] = 1
    return ids, mask


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@torch.no_grad()
def test_logits(kind):
    eager, ours = model_pair(kind)
    ids = torch.randint(2, 97, (2, 23))
    assert_same(ours(ids).logits, eager(ids).logits)


@kinds
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_logits(kind, side):
    eager, ours = model_pair(kind)
    ids, mask = padded(side)
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    got = ours(ids, attention_mask=mask, position_ids=position_ids).logits
    want = eager(ids, attention_mask=mask, position_ids=position_ids).logits
    real = mask.bool()
    assert_same(got, want, real)
    if "gemma" not in kind and side == "left":
        alone = ours(ids[1:2, -3:]).logits
        assert_same(got[1, -3:], alone[0])


@kinds
@torch.no_grad()
def test_generate(kind):
    eager, ours = model_pair(kind)
    ids, mask = padded("left")
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    options["attention_mask"] = torch.ones(1, 19, dtype=torch.long)
    assert torch.equal(ours.generate(ids[:1], **options), eager.generate(ids[:1], **options))


CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"
CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "sliding": {"cache_implementation": "sliding_window"},
    "hybrid": {"cache_implementation": "hybrid"},
    "quantised": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_generate_with_every_cache(kind, cache):
    if (kind, cache) == ("gemma3", "quantised"):
        pytest.skip("transformers has no quantised cache of sliding layers")
    eager, ours = model_pair(kind)
    ids, mask = padded("left")
    options = {"max_new_tokens": 12, "do_sample": False, **CACHES[cache]}
    for rows in (slice(None), slice(1, 2)):
        batch = {**options, "attention_mask": mask[rows]}
        assert torch.equal(ours.generate(ids[rows], **batch), eager.generate(ids[rows], **batch))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_several_new_tokens_at_once(kind):
    """Drafts of a model, and drafts looked up in the prompt; then chunks into a static cache."""
    eager, ours = model_pair(kind)
    ids = padded("left")[0][:1]
    for way in (lambda model: {"assistant_model": model}, lambda _: {"prompt_lookup_num_tokens": 3}):
        want, got = (model.generate(ids, max_new_tokens=20, do_sample=False, **way(model)) for model in (eager, ours))
        assert torch.equal(got, want)
    logits = []
    for model in (eager, ours):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        for chunk in (ids[:, :7], ids[:, 7:12], ids[:, 12:]):
            last = model(chunk, **{CACHE: cache}).logits
        logits.append(last)
    assert_same(logits[1], logits[0])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_packed_sequences(kind):
    eager, ours = model_pair(kind)
    position_ids = torch.tensor([[*range(7), *range(9), *range(7)]])
    options = {"position_ids": position_ids, "use_cache": False}
    ids = torch.randint(2, 97, (1, 23))
    got = ours(ids, **options).logits
    assert_same(got, eager(ids, **options).logits)
    assert_same(got[:, 7:16], ours(ids[:, 7:16]).logits)


def image_types(first, end, padding):
    """token_type_ids [2, 20] of an image at [first, end), its second row moved behind left padding; and the mask."""
    types, mask = torch.zeros(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
    types[0, first:end] = 1
    types[1, padding + first : padding + end] = 1
    mask[1, :padding] = 0
    return types, mask


@pytest.mark.parametrize("where", [(0, 9, 0), (0, 9, 3), (5, 14, 0), (5, 14, 4), (11, 20, 0), (0, 3, 5), (0, 20, 0)])
@torch.no_grad()
def test_gemma3_with_an_image_anywhere(where):
    types, mask = image_types(*where)
    text = transformers.Gemma3TextConfig(**SIZES, **KINDS["gemma3"][1])
    tokens = {"image_token_index": 96, "boi_token_index": 94, "eoi_token_index": 95, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, **tokens)
    eager, ours = pair_of(transformers.Gemma3ForConditionalGeneration, config)
    assert ours.config.text_config._attn_implementation == "radixkv"
    ids = torch.randint(2, 90, (2, 20))
    options = {"attention_mask": mask, "token_type_ids": types}
    assert_same(ours(ids, **options).logits, eager(ids, **options).logits, mask.bool())


@pytest.mark.parametrize("padding", [0, 5])
@torch.no_grad()
def test_paligemma_prefix(padding):
    types, mask = image_types(0, 9, padding)
    vision = {**VISION, "projection_dim": 64}
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**SIZES), vision_config=vision, projection_dim=64, image_token_index=96
    )
    eager, ours = pair_of(transformers.PaliGemmaForConditionalGeneration, config)
    ids = torch.randint(2, 90, (2, 20))
    options = {"attention_mask": mask, "token_type_ids": 1 - types}  # here the prefix is type 0
    assert_same(ours(ids, **options).logits, eager(ids, **options).logits, mask.bool())


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OTHERS = {
    "an encoder": lambda: (transformers.BertModel, transformers.BertConfig(**SMALL)),
    "windows to both sides": lambda: (
        transformers.ModernBertModel,
        transformers.ModernBertConfig(**{**SMALL, "num_hidden_layers": 3}, local_attention=6, pad_token_id=0),
    ),
    "chunks": lambda: (
        transformers.Llama4TextModel,
        transformers.Llama4TextConfig(**SIZES, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=6),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_models_that_mask_otherwise(kind, side):
    eager, ours = pair_of(*OTHERS[kind]())
    ids, mask = padded(side)
    got, want = (model(ids, attention_mask=mask).last_hidden_state for model in (ours, eager))
    assert_same(got, want, mask.bool())


@torch.no_grad()
def test_cross_attention():
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(vocab_size=97, d_model=32, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes)
    eager, ours = pair_of(transformers.BartModel, config)
    ids, mask = padded("right")
    got, want = (
        model(ids, attention_mask=mask, decoder_input_ids=ids[:, :7]).last_hidden_state for model in (ours, eager)
    )
    assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@kinds
@torch.no_grad()
def test_autocast(kind, dtype):
    """Keys come in float32 out of the rotation there, values in autocast's dtype."""
    eager, ours = model_pair(kind)
    ids, mask = padded("left")
    exact = eager(ids, attention_mask=mask).logits[mask.bool()]
    with torch.autocast("cpu", dtype=dtype):
        want, got = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (eager, ours))
        assert got.dtype == want.dtype
        assert ours.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False).shape == (3, 22)
    # each rounds every product to dtype: ours where eager does, and not where it keeps float32
    assert float((got - exact).norm()) <= 2 * float((want - exact).norm()) + torch.finfo(dtype).eps * exact.norm()


@torch.no_grad()
@pytest.mark.slow
def test_compiled_models():
    _, ours = model_pair("llama")
    ids, mask = padded("left")
    compiled = torch.compile(ours, backend="eager")
    assert torch.equal(compiled(ids, attention_mask=mask).logits, ours(ids, attention_mask=mask).logits)


def test_refusals():
    _, ours = model_pair("llama")
    ids = torch.randint(2, 97, (1, 6))
    with pytest.raises(UnsupportedImplementation, match="forward only"):
        ours(ids)
    hole = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(UnsupportedImplementation, match="gap"), torch.no_grad():
        ours(ids, attention_mask=hole)
    config = transformers.GenerationConfig(max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match="radixkv is not supported for continuous batching"), torch.no_grad():
        ours.generate_batch([[5, 6, 7]], generation_config=config)


# ---- experts: a tie that roundoff decides


def gpt_oss(dtype):
    """eager and ours, with experts that weigh much, so that another choice of experts shows."""
    config = transformers.GptOssConfig(
        **{**SIZES, "num_hidden_layers": 4}, num_local_experts=32, num_experts_per_tok=4, sliding_window=6
    )
    models = pair_of(transformers.GptOssForCausalLM, config, dtype)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in models[0].named_parameters():
            scale = (weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0) * (2.0 if "experts" in name else 1.0)
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    models[1].load_state_dict(models[0].state_dict())
    return models


def logits_and_choices(model, ids, forced=None):
    """Logits, each layer's router logits and its chosen experts [tokens, 4]; forced: experts to take instead."""
    routers, choices = [], []

    def route(layer):
        def hook(module, inputs, output):
            scores, _, chosen = output
            if forced is not None:
                chosen = forced[layer]
            routers.append(scores)
            choices.append(chosen)
            return scores, torch.softmax(scores.gather(1, chosen), 1, dtype=scores.dtype), chosen

        return hook

    hooks = [block.mlp.router.register_forward_hook(route(i)) for i, block in enumerate(model.model.layers)]
    try:
        return model(ids).logits, routers, choices
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_gpt_oss_differs_from_eager_by_its_experts_alone():
    """In float32 the two agree. In bfloat16 roundoff decides near ties between experts: there they differ by a lot.

    With eager's experts given to both, ours is as near to float32 (of the same weights) as eager is, in every layer's
    router and in the logits. What is left free to choose differs at tokens alone whose own experts, or those of an
    earlier token of the sequence, were chosen otherwise.
    """
    eager, ours = gpt_oss(torch.bfloat16)
    exact = copy.deepcopy(eager).float()
    same = copy.deepcopy(ours).float()
    ids = torch.randint(2, 97, (2, 200), generator=torch.Generator().manual_seed(6))
    want, routed, chosen = logits_and_choices(eager, ids)
    true, true_routed, _ = logits_and_choices(exact, ids, chosen)
    whole = roundoff(true) * 2  # four layers
    assert float((logits_and_choices(same, ids, chosen)[0] - true).abs().max()) <= whole
    forced, forced_routed, _ = logits_and_choices(ours, ids, chosen)
    pairs = [(forced, want, true), *zip(forced_routed, routed, true_routed, strict=True)]
    for got, eagers, float32 in pairs:
        slack = torch.finfo(torch.bfloat16).eps * float32.norm()
        assert (got - float32).norm() <= 2 * (eagers - float32).norm() + slack
    # what bfloat16 explains, by eager's own distance from float32
    explained = 4 * float((want - true).abs().max())
    assert float((forced - want).abs().max()) <= explained
    free, _, own = logits_and_choices(ours, ids)
    flipped = torch.zeros(2, 200, dtype=torch.bool)
    for mine, eagers in zip(own, chosen, strict=True):
        flipped |= (mine.sort(-1).values != eagers.sort(-1).values).any(-1).view(2, 200)
    since = flipped.cummax(1).values
    assert float(((free - want).abs().amax(-1) * ~since).max()) <= explained


OWN_ATTENTION = {
    "Bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "Mpt": {"vocab_size": 97, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "XGLM": {"vocab_size": 97, "d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_models_that_never_call_an_attention_function_still_hide_what_the_mask_hides(kind):
    """They add the mask to their scores: a boolean one would hide nothing."""
    config = getattr(transformers, f"{kind}Config")(**OWN_ATTENTION[kind])
    eager, ours = pair_of(getattr(transformers, f"{kind}ForCausalLM"), config)
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    want, got = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (eager, ours))
    assert torch.equal(want, got)
    changed = ids.clone()
    changed[:, -1] = 3  # nothing before it sees it
    assert torch.equal(
        ours(changed, attention_mask=mask).logits[:, 4:-1], ours(ids, attention_mask=mask).logits[:, 4:-1]
    )

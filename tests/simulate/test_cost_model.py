"""Shapes against published sizes; rooflines against numbers worked out by hand; fits against known machines."""

import random
from dataclasses import replace

import pytest

from radixkv.cache.flat_hash.groups import GroupLayout
from radixkv.cache.layers import FullAttention
from radixkv.simulate import FEATURES, GPUS, Fitted, Roofline, StepLoad
from radixkv.simulate.model_shapes import MODEL_SHAPES, Experts

HYBRID = (("qwen3.5-35b-a3b", 1), ("kimi-linear-48b-a3b", 2), ("gemma-3-27b", 1))

# billions of weights, of bytes and of weights active a token, as published (0: not), and bytes of KV a token
PUBLISHED = {
    "llama-3-8b": (8.03, 0, 0, 131_072),
    "llama-3-70b": (70.55, 0, 0, 327_680),
    "llama-2-7b": (6.74, 0, 0, 524_288),
    "qwen3-32b": (32.76, 0, 0, 262_144),
    "smollm2-135m": (0.1345, 0, 0, 23_040),
    "qwen3.5-35b-a3b": (35, 0, 3, 20_480),
    "qwen3-next-80b-a3b": (80, 0, 0, 24_576),
    "nemotron-nano-9b-v2": (8.89, 0, 0, 16_384),
    "kimi-linear-48b-a3b": (48, 0, 3, 8_064),
    "gpt-oss-20b": (20.91, 12.8 * 1.024**3, 3.61, 24_576),
    "gpt-oss-120b": (116.83, 60.8 * 1.024**3, 5.13, 36_864),
    "gemma-3-27b": (27.01, 0, 0, 81_920),
    "deepseek-v3": (671, 0, 37, 70_272),
}


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_shapes_have_their_published_sizes(name):
    shape = MODEL_SHAPES[name]
    billions, gigabytes, active, kv_bytes = PUBLISHED[name]
    plain = replace(
        shape,
        element_bytes=1,
        feed_forwards=tuple(
            replace(layer, element_bytes=None) if isinstance(layer, Experts) else layer for layer in shape.feed_forwards
        ),
    )
    # What is known from the name alone is rounded.
    assert plain.memory_bytes == pytest.approx(billions * 1e9, rel=0.025 if billions in (35, 48, 80) else 0.002)
    if gigabytes:
        assert shape.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    if active:
        assert shape.num_layer_weights + shape.num_output_weights == pytest.approx(active * 1e9, rel=0.031)
    assert shape.kv_bytes_per_token == kv_bytes


def test_hybrid_shapes_keep_what_vllm_keeps():
    # Megabytes of a state, and tokens in a block
    for name, state_element_bytes, megabytes, block_size in (
        ("qwen3.5-35b-a3b", 2, 32.9, 544),
        ("qwen3.5-35b-a3b", 4, 64.4, 1056),
        ("qwen3-next-80b-a3b", 2, 39.5, 544),
    ):
        shape = replace(MODEL_SHAPES[name], state_element_bytes=state_element_bytes)
        assert shape.state_bytes == pytest.approx(megabytes * 1e6, rel=0.002)
        assert GroupLayout.of(shape.layers).block_size == block_size
    kinds = {name: [count for _, _, count in shape.kinds] for name, shape in MODEL_SHAPES.items()}
    assert kinds["qwen3.5-35b-a3b"] == [30, 10]
    assert kinds["qwen3-next-80b-a3b"] == [36, 12]
    assert kinds["nemotron-nano-9b-v2"] == [27, 4]
    assert kinds["kimi-linear-48b-a3b"] == [20, 7]
    assert (kinds["gpt-oss-20b"], kinds["gpt-oss-120b"]) == ([12, 12], [18, 18])
    assert kinds["gemma-3-27b"] == [52, 10]
    assert MODEL_SHAPES["deepseek-v3"].layers == (FullAttention(576 * 2),) * 61
    assert len(GroupLayout.of(MODEL_SHAPES["gemma-3-27b"].layers).groups) == 7


def test_experts_are_read_as_a_batch_grows():
    shape = MODEL_SHAPES["deepseek-v3"]
    assert shape.num_layer_weights + shape.num_output_weights == pytest.approx(37e9, rel=0.02)  # active a token
    # One token reads what it multiplies with; very many read everything but the vocabulary.
    assert shape.weight_bytes(1) == pytest.approx(shape.num_layer_weights * shape.element_bytes)
    everything = shape.memory_bytes - 2 * shape.num_output_weights * shape.element_bytes
    assert shape.weight_bytes(10**6) == pytest.approx(everything)
    assert shape.weight_bytes(1) < shape.weight_bytes(2) < shape.weight_bytes(64) < everything


def test_one_decode_reads_the_weights_and_its_kv():
    cost = Roofline.of("llama-3-8b", "h100-sxm")
    shape = MODEL_SHAPES["llama-3-8b"]
    load = StepLoad(num_decode_tokens=1, num_logits=1, num_decode_kv_tokens=1000, num_unique_kv_tokens=1000)
    weights = 2 * (shape.num_layer_weights + shape.num_output_weights)
    assert cost.step_s(load) == pytest.approx(1e-3 + (weights + 1001 * 131_072) / (0.85 * 3.35e12))


def test_a_long_prefill_is_bound_by_operations_and_grows_with_its_square():
    cost = Roofline.of("llama-3-8b", "h100-sxm", tree_attention=True)
    n = 8192
    pairs = n * (n + 1) // 2
    load = StepLoad(num_prefill_tokens=n, num_prefill_seqs=1, num_prefill_pairs=pairs)
    linear = 2 * n * MODEL_SHAPES["llama-3-8b"].num_layer_weights / (0.7 * 989.4e12)
    quadratic = pairs * 4 * 32 * 32 * 128 / (0.6 * 989.4e12)
    written = n * 131_072 / (0.85 * 3.35e12)
    assert cost.step_s(load) == pytest.approx(1e-3 + linear + quadratic + written)


def test_a_decode_reads_and_writes_its_states():
    cost = Roofline.of("qwen3.5-35b-a3b", "h200")
    with_and_without = [
        cost.step_s(StepLoad(num_decode_tokens=n, num_decode_kv_tokens=8000, num_unique_kv_tokens=8000)) for n in (1, 2)
    ]
    shape, speed = cost.shape, 0.85 * 4.8e12
    weights = shape.weight_bytes(2) - shape.weight_bytes(1)
    assert (with_and_without[1] - with_and_without[0]) * speed == pytest.approx(
        weights + 2 * shape.state_bytes + 20_480, rel=1e-6
    )


def test_a_prompt_computes_its_states_and_moves_them_once_a_chunk():
    cost = replace(Roofline.of("nemotron-nano-9b-v2", "h200"), step_overhead_s=0.0)
    shape, speed, flops = cost.shape, 0.85 * 4.8e12, 0.6 * 989.4e12
    short, long = (StepLoad(num_prefill_tokens=n, num_prefill_seqs=1) for n in (1, 100_000))
    assert cost.step_s(short) * speed == pytest.approx(shape.weight_bytes(1) + 2 * shape.state_bytes + 16_384, rel=1e-6)
    states = 100_000 * 27 * 4 * 128 * 80 * 128 / flops
    linear = 2 * 100_000 * shape.num_layer_weights / (0.7 * 989.4e12)
    assert cost.step_s(long) == pytest.approx(linear + states + 100_000 * 16_384 / speed)


def test_windows_limit_what_is_seen():
    cost = replace(Roofline.of("gpt-oss-20b", "h200"), step_overhead_s=0.0)
    layer = 2 * 8 * 64 * 2  # bytes of KV a token
    loads = [StepLoad(num_decode_tokens=1, num_decode_kv_tokens=n, num_unique_kv_tokens=n) for n in (100, 128, 10_000)]
    times = [cost.step_s(load) * 0.85 * 4.8e12 for load in loads]
    assert times[1] - times[0] == pytest.approx(24 * layer * 28)
    assert times[2] - times[1] == pytest.approx(12 * layer * 9_872)
    # Of a prompt's pairs, layers with windows compute 128 a token.
    chunk = StepLoad(num_prefill_tokens=1000, num_prefill_seqs=1, num_prefill_pairs=1000 * 9_500)
    without = cost.step_s(chunk._replace(num_prefill_pairs=0))
    pairs = (cost.step_s(chunk) - without) * 0.6 * 989.4e12 / (4 * 64 * 64)
    assert pairs == pytest.approx(12 * 1000 * 9_500 + 12 * 1000 * 128)
    assert chunk.within(20_000) == chunk


def test_tree_attention_reads_shared_kv_once():
    plain = Roofline.of("llama-3-8b", "h100-sxm")
    tree = Roofline.of("llama-3-8b", "h100-sxm", tree_attention=True)

    def saved(unique, logical):
        load = StepLoad(0, 64, 64, 0, 0, logical, unique, 0)
        return (plain.step_s(load) - tree.step_s(load)) * 0.85 * 3.35e12 / 131_072  # in tokens

    # 32 on 20,000 shared tokens: 82 MB a layer do not fit into the L2 cache; on 2,000 they do.
    assert saved(20_000, 32 * 20_000) == pytest.approx(32 * 20_000 - 1.2 * 20_000)
    assert saved(2_000, 32 * 2_000) == pytest.approx(2_000 + 31 * 2_000 / 2 - 1.2 * 2_000)
    assert saved(64_000, 64_000) == pytest.approx(0, abs=1e-3)  # nothing shared: nothing gained, nothing lost


def test_more_of_anything_never_takes_less_time():
    rng = random.Random(0)
    costs = [
        Roofline.of(shape, "h200", gpus, tree_attention=tree)
        for shape, gpus in (("llama-3-8b", 1), ("llama-3-70b", 8), ("deepseek-v3", 8), *HYBRID)
        for tree in (False, True)
    ]
    for _ in range(200):
        unique = rng.randrange(1000)
        load = StepLoad(*(rng.randrange(2000) for _ in range(4)), rng.randrange(10**6), unique + 500, unique, 5)
        for name in StepLoad._fields:
            more = load._replace(**{name: getattr(load, name) + rng.randrange(1, 500)})
            for cost in costs:
                assert cost.step_s(more) >= cost.step_s(load) > 0


def test_many_gpus_share_the_work_and_talk():
    load = StepLoad(num_prefill_tokens=4096, num_prefill_seqs=1, num_prefill_pairs=4096 * 2048)
    four, eight = (Roofline.of("llama-3-70b", "h100-sxm", n).step_s(load) for n in (4, 8))
    assert four / 2 < eight < four


def test_the_pool_is_what_the_weights_leave():
    assert Roofline.of("llama-3-8b", "h100-sxm").num_blocks(16) == int((72e9 - 16_060_522_496) // (16 * 131_072))
    with pytest.raises(ValueError, match="num_gpus: expected enough for llama-3-70b's 141 GB"):
        Roofline.of("llama-3-70b", "h100-sxm")
    with pytest.raises(ValueError, match="shape: expected one of llama-3-8b"):
        Roofline.of("llama", "h100-sxm")
    with pytest.raises(ValueError, match="gpu: expected one of h100-sxm"):
        Roofline.of("llama-3-8b", "h100")


def test_every_gpu_says_where_its_numbers_are_from():
    assert all(gpu.source and gpu.flops_per_s > gpu.bytes_per_s for gpu in GPUS.values())


def random_load(rng):
    return StepLoad(
        num_prefill_tokens=rng.randrange(2000),
        num_decode_tokens=rng.randrange(64),
        num_logits=rng.randrange(64),
        num_prefill_seqs=rng.randrange(8),
        num_prefill_pairs=rng.randrange(10**6),
        num_decode_kv_tokens=rng.randrange(10**5),
        num_unique_kv_tokens=0,
        num_copied_tokens=rng.randrange(100),
    )


def test_a_fit_finds_the_machine_that_was_measured():
    rng = random.Random(1)
    machine = Fitted((1e-3, 2e-4, 0.0, 1e-5, 2e-8, 1e-7, 3e-5, 0.0))
    loads = [random_load(rng) for _ in range(60)]
    found = Fitted.to(loads, [machine.step_s(load) for load in loads])
    for load in [random_load(rng) for _ in range(20)]:
        assert found.step_s(load) == pytest.approx(machine.step_s(load), rel=1e-3)
    assert min(found.seconds) >= 0


def test_a_fit_needs_enough_steps():
    with pytest.raises(ValueError, match="times_s: expected one for each of >= 8 loads, got 3"):
        Fitted.to([StepLoad()] * 3, [1.0] * 3)
    assert len(FEATURES) == 8

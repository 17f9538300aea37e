"""Shapes against published sizes; rooflines against numbers worked out by hand; fits against known machines."""

import random

import pytest

from radixkv.simulate import FEATURES, GPUS, Fitted, Roofline, StepLoad
from radixkv.simulate.model_shapes import MODEL_SHAPES


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llama-3-8b", 8.03, 131_072),
        ("llama-3-70b", 70.55, 327_680),
        ("llama-2-7b", 6.74, 524_288),
        ("qwen3-32b", 32.76, 262_144),
        ("smollm2-135m", 0.1345, 23_040),
        ("deepseek-v3-like", 671, 35_136),
    ],
)
def test_shapes_have_their_published_sizes(name, billions, kv_bytes):
    shape = MODEL_SHAPES[name]
    assert shape.memory_bytes / shape.element_bytes == pytest.approx(billions * 1e9, rel=0.002)
    assert shape.kv_bytes_per_token == kv_bytes


def test_experts_are_read_as_a_batch_grows():
    shape = MODEL_SHAPES["deepseek-v3-like"]
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
        for shape, gpus in (("llama-3-8b", 1), ("llama-3-70b", 8), ("deepseek-v3-like", 8))
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

"""deterministic=True: a row's logits are the same bits alone, batched, chunked, cached, and shared within a step."""

import random

import pytest
import torch
import torch.nn.functional as F
from radixkv_kernels import row_rules
from radixkv_kernels.row_rules import cancelling

from radixkv.engine.model import row_linear
from radixkv.engine.model.checkpoint import load_checkpoint
from radixkv.engine.model.layers import InvariantArithmetic, rms_norm
from radixkv.engine.model.transformer import Decoder
from radixkv.engine.model.weights import Model
from tests.engine.model.sequences import Sequence, every_row, runner_of, step
from tests.engine.model.tiny_checkpoints import checkpoint, tokens
from tests.sampling import few
from tests.shared_files import shared_file

DTYPES = [torch.float32, torch.bfloat16]
KINDS = ["stories260k", "tiny_gpt", "llama_biases", "llama_linear", "mistral_window", "qwen3"]
LENGTHS = (52, 35, 17, 3)


def model_of(kind, dtype):
    source = shared_file("models/stories260k") if kind == "stories260k" else kind
    source = source if kind in ("stories260k", "tiny_gpt") else checkpoint(kind)[0]
    return load_checkpoint(source, dtype=dtype).model


def prompts_of(lengths):
    return [tokens(length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", few(KINDS, 3))
def test_random_batches_and_chunks_change_no_bit(kind, dtype):
    model, prompts = model_of(kind, dtype), prompts_of(LENGTHS)
    alone = [every_row(runner_of(model), prompt) for prompt in prompts]
    for seed in range(3):
        rng = random.Random(seed)
        block_size = rng.choice((1, 8, 16))
        runner = runner_of(model, block_size=block_size, num_blocks=sum(LENGTHS) + 8)
        blocks = rng.sample(range(runner.num_blocks), runner.num_blocks)
        sequences = [
            Sequence(prompt, [blocks.pop() for _ in range(-(-len(prompt) // block_size))]) for prompt in prompts
        ]
        while running := [s for s in range(len(prompts)) if sequences[s].left]:
            chosen = rng.sample(running, rng.randint(1, len(running)))
            parts = [(sequences[s], min(sequences[s].left, rng.choice((1, 1, 2, 5, 16, 33)))) for s in chosen]
            rows = step(runner, parts)
            for s, row in zip(chosen, rows, strict=True):
                assert torch.equal(row, alone[s][sequences[s].computed - 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_cached_prefix_changes_no_bit(kind, dtype):
    """The whole prompt cold, then the same blocks read by another sequence, and rows of one copied into its own."""
    model, (first, other) = model_of(kind, dtype), prompts_of((50, 30))
    runner = runner_of(model, block_size=8)
    second = first[:37] + other
    alone = every_row(runner_of(model, block_size=8), second)
    step(runner, [(Sequence(first, range(7)), len(first))])
    table = [0, 1, 2, 3, *range(20, 26)]
    warm = Sequence(second, table, computed=37)
    (row,) = step(runner, [(warm, len(second) - 37)], copies=[(4, 20, 5)])
    assert torch.equal(row, alone[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_prefix_computed_in_the_same_step_changes_no_bit(kind, dtype):
    """One sequence reads blocks that another writes in this step; a third recomputes them and writes nothing there."""
    model, (first, other) = model_of(kind, dtype), prompts_of((40, 25))
    second = first[:32] + other
    alone = every_row(runner_of(model, block_size=8), second)[-1]
    runner = runner_of(model, block_size=8)
    writer = Sequence(first, range(5))
    reader = Sequence(second, [0, 1, 2, 3, *range(10, 14)], computed=32)
    again = Sequence(second, [0, 1, 2, 3, *range(20, 24)], read_only=32)
    rows = step(runner, [(reader, reader.left), (again, again.left), (writer, writer.left)])
    assert torch.equal(rows[0], alone)
    assert torch.equal(rows[1], alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_break_it(threads):
    torch.set_num_threads(threads)  # the fixture of the package sets it back
    try:
        model, (prompt, other) = model_of("tiny_gpt", torch.float32), prompts_of((70, 9))
        (alone,) = step(runner_of(model), [(Sequence(prompt, range(5)), 70)])
        parts = [(Sequence(other, [9]), 9), (Sequence(prompt, range(5)), 70)]
        assert torch.equal(step(runner_of(model), parts)[1], alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size_in", "size_out"), few([(576, 960), (65, 7), (1536, 576), (172, 64), (64, 512), (880, 384)], 2)
)
def test_rows_of_linear_layers(size_in, size_out, dtype, biased, is_packed, threads):
    """Rows at any place among any number of rows have the bits that they have four at a time.

    Half of them have an exact product of zero, so that what remains is the order of adding.
    """
    torch.manual_seed(0)
    x0, weight = cancelling(size_out, size_in, dtype=dtype, seed=1)
    x = torch.randn(1056, size_in).to(dtype)
    x[::2] = x0
    bias = torch.randn(size_out).to(dtype) if biased else None
    if is_packed:
        if not row_linear.packs(dtype):
            pytest.skip(f"no packed weights of {dtype} on this CPU")
        weight = row_linear.packed(weight)
    arithmetic = InvariantArithmetic()
    torch.set_num_threads(threads)  # the fixture of the package sets it back
    try:
        expected = torch.cat([arithmetic.linear(part, weight, bias) for part in x.split(4)])
        for num_rows in (1, 2, 3, 5, 13, 32, 33, 61, 112, 208, 209, 1056):
            for place in (0, 7, 1056 - num_rows):
                rows = x[place : place + num_rows]
                assert torch.equal(arithmetic.linear(rows, weight, bias), expected[place : place + num_rows])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_nothing_agrees_no_runner_is_made(dtype, monkeypatch):
    """And none that has been made computes anything with another number of threads."""
    model, prompt = model_of("tiny_gpt", dtype), tokens(9, 0)
    monkeypatch.setattr(row_rules, "_rules", {})
    before = runner_of(model)
    want = every_row(runner_of(model), prompt)
    monkeypatch.setattr(row_rules, "row_bits", lambda found: None)
    monkeypatch.setattr(row_rules, "_rules", {})
    with pytest.raises(ValueError, match=r"deterministic: .* linear .*pass deterministic=False.*MKL_CBWR=AUTO,STRICT"):
        runner_of(model)
    torch.set_num_threads(2)
    try:
        before.k_cache.fill_(7)
        with pytest.raises(ValueError, match="deterministic"):
            step(before, [(Sequence(prompt, [0]), 9)], copies=[(0, 1, 5)])
        assert (before.k_cache == 7).all()
    finally:
        torch.set_num_threads(1)
    plain = every_row(runner_of(model, deterministic=False), prompt)
    torch.testing.assert_close(plain, want, rtol=0.1, atol=0.1)  # that it computes at all


def test_attention_without_a_rule_is_refused_too(monkeypatch):
    model = model_of("tiny_gpt", torch.float32)
    monkeypatch.setattr(row_rules, "_rules", {})
    runner_of(model)
    kept = {key: rule for key, rule in row_rules._rules.items() if rule.name.startswith("linear")}
    monkeypatch.setattr(row_rules, "_rules", kept)
    monkeypatch.setattr(row_rules, "row_bits", lambda found: None)
    with pytest.raises(ValueError, match=r"deterministic: .* fused attention, float32, head_dim 64"):
        runner_of(model)


def test_weights_begin_at_aligned_addresses(monkeypatch):
    """As in the trial: some libraries choose by it."""
    monkeypatch.setattr(row_linear, "packs", lambda dtype: False)
    model = model_of("tiny_gpt", torch.float32)
    odd = model.weights.mapped(lambda w: torch.cat((w.new_zeros(1), w.flatten()))[1:].view(w.shape))
    weights = Decoder(Model(model.config, odd), deterministic=True).weights
    for tensor in (weights.head, *(getattr(weights.layers[0], name) for name in ("qkv", "o", "gate_up", "down"))):
        assert tensor.data_ptr() % row_linear.ALIGNMENT == 0
    assert weights.head is weights.embedding or not model.config.tied_embeddings


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_are_packed_where_rows_keep_their_bits(deterministic, monkeypatch):
    """Packed products give what plain ones give, but for rounding, and leave the embedding and the caller's alone."""
    model, prompt = model_of("tiny_gpt", torch.float32), tokens(9, 0)
    if not row_linear.packs(torch.float32):
        pytest.skip("no packed weights on this CPU")
    before = model.weights.layers[0].qkv.clone()
    runner = runner_of(model, deterministic=deterministic)
    assert all(product.is_packed for product in runner.products())
    got = every_row(runner, prompt)
    assert torch.equal(model.weights.layers[0].qkv, before)
    monkeypatch.setattr(row_linear, "packs", lambda dtype: False)
    plain = runner_of(model, deterministic=deterministic)
    assert not any(product.is_packed for product in plain.products())
    want = every_row(plain, prompt)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_weights_stay_as_they_are_where_packed_rows_differ(monkeypatch):
    """The rule of packed products does not hold, the others do."""
    monkeypatch.setattr(row_rules, "_rules", {})

    def product(x, weight, bias):
        return x.new_ones(weight.shape[0]) * torch.arange(float(len(x)))[:, None]

    monkeypatch.setattr(row_linear, "_PACKED_WAYS", (product,))
    runner = runner_of(model_of("tiny_gpt", torch.float32))
    assert not any(product.is_packed for product in runner.products())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [7, 172, 880])
def test_rows_of_elementwise_layers(size, activation, dtype):
    torch.manual_seed(0)
    x = (torch.randn(48, 2 * size) * 3).to(dtype)
    arithmetic, weight = InvariantArithmetic(), torch.randn(2 * size).to(dtype)
    gated, normed = arithmetic.gated(x, activation), rms_norm(x, weight, 1e-5)
    for num_rows in (1, 2, 3, 7, 16, 33):
        for start in (0, 1, 5):
            rows = x[start : start + num_rows].clone()
            assert torch.equal(arithmetic.gated(rows, activation), gated[start : start + num_rows])
            assert torch.equal(rms_norm(rows, weight, 1e-5), normed[start : start + num_rows])


@pytest.mark.parametrize(("name", "approximate"), [("silu", ""), ("gelu", "none"), ("gelu_tanh", "tanh")])
def test_invariant_activations_are_the_functions_of_that_name(name, approximate):
    """To the roundings of the formula: relative ones of each step, and absolute ones where terms cancel."""
    gate = torch.linspace(-120, 120, 4001)
    x, u = gate.double(), 2.0**-24
    exact = F.silu(x) if name == "silu" else F.gelu(x, approximate=approximate)
    ours = InvariantArithmetic().gated(torch.stack((gate, torch.ones_like(gate)), 1), name)[:, 0]
    steps, absolute = torch.full_like(x, 6), torch.full_like(x, 1e-36)  # exp, sum, quotient, product; underflow
    if name == "gelu_tanh":  # five roundings of what goes into exp, which makes them relative ones
        absolute += 2.0**-52 * x.abs()  # 1 + tanh cancels below 0, in float64
        steps += 5 * 1.6 * (x + 0.045 * x**3).abs()
    if name == "gelu":  # 1 + erf cancels below 0
        absolute += 0.5 * x.abs() * 4 * u
    assert ((ours.double() - exact).abs() <= steps * u * exact.abs() + absolute).all()

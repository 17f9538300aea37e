"""Does this machine keep the promise of equal bits? `python -m radixkv.engine.selftest`

The engine's exactness (a cache hit gives the same logits, bit for bit, as a miss, alone or batched, whole or chunked)
rests on how this machine's libraries add up a row: measured, not proven. This computes rows of the model's products in
many batches, of data whose exact results are zero so that any other order of adding shows, and runs the model in random
schedules against each request alone without a cache, comparing every logit; with one thread and with two. On a CPU it
prints which numbers of rows were found to agree. Run it on every kind of machine that is to rely on it.
"""

import argparse
import random
import sys

import torch
from radixkv_kernels.row_rules import cancelling, measured, normal

from radixkv.blocks.config import CacheConfig
from radixkv.engine.engine import Engine
from radixkv.engine.model.row_linear import Product, linear, packed
from radixkv.scheduling.request import SamplingParams
from radixkv.scheduling.scheduler import SchedulerConfig
from radixkv.scheduling.sequence import Sequence


def compare(
    model: str, cache: str, seed: int, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[int, int]:
    """Serves requests that share prefixes, then each alone without a cache.

    Returns:
        (rows of logits compared, tokens that came from the cache).

    Raises:
        AssertionError: two rows differ; the message says where, and by how much.
    """
    rng = random.Random(seed)
    engine, logits = _engine(model, cache, rng.choice([24, 100, 512]), dtype, device)
    vocab_size = engine.runner.config.vocab_size
    shared = [rng.randrange(vocab_size) for _ in range(rng.randint(20, 200))]
    prompts = [
        shared[: rng.randint(1, len(shared))] + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        for _ in range(6)
    ]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    generations = []
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params, request_id=str(index))
        generations.append(engine.generation(str(index)))
        for _ in range(rng.randint(0, 2)):
            engine.step()
    while engine.has_unfinished_requests:
        engine.step()
    num_rows = 0
    for index, prompt in enumerate(prompts):
        alone, alone_logits = _engine(model, "null", 2048, dtype, device)
        alone.generate([prompt], params)
        for (_, position), row in alone_logits.items():
            mine = logits[str(index), position]
            num_rows += 1
            if not torch.equal(mine, row):
                largest = (mine - row).abs().max().item()
                raise AssertionError(
                    f"{cache}, seed {seed}, request {index}, position {position}: differ by {largest:g}"
                )
    return num_rows, sum(generation.num_cached_tokens for generation in generations)


def compare_rows(product: Product, seed: int) -> int:
    """Rows of one product on the CPU in batches of random sizes, against the same rows four at a time.

    Returns:
        How many rows were compared.

    Raises:
        AssertionError: two differ.
    """
    size_in, size_out, dtype, is_biased, _ = product
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    x, weight = cancelling(size_out, size_in, dtype=dtype, seed=seed)
    most = 640 if size_in * size_out < 1 << 23 else 96
    rows = normal(gen, most, size_in, dtype=dtype)
    rows[::2] = x
    bias = normal(gen, size_out, dtype=dtype) if is_biased else None
    if product.is_packed:
        weight = packed(weight)
    expected = torch.cat([linear(part, weight, bias) for part in rows.split(4)])
    num_rows = 0
    for _ in range(6):
        count = rng.choice((rng.randint(1, 40), rng.randint(1, most)))
        chosen = torch.randint(0, most, (count,), generator=gen)
        num_rows += count
        if not torch.equal(linear(rows[chosen], weight, bias), expected[chosen]):
            threads = torch.get_num_threads()
            raise AssertionError(f"{product}, {threads} threads: {count} rows differ")
    return num_rows


Logits = dict[tuple[str, int], torch.Tensor]  # of the row from which a request's token at a position was sampled


def _engine(
    model: str, cache: str, budget: int, dtype: torch.dtype | None, device: str | None
) -> tuple[Engine, Logits]:
    engine = Engine.from_pretrained(
        model,
        cache=CacheConfig(cache),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget),
        num_blocks=128,
        deterministic=True,
        dtype=dtype,
        device=device,
    )
    logits: Logits = {}

    def keep(sequence: Sequence, row: torch.Tensor) -> None:
        logits[sequence.request.request_id, sequence.num_tokens] = row.clone()

    engine.on_logits = keep
    return engine, logits


def main() -> None:
    """Runs the check that the command line asks for; exits with status 1 where two rows differ."""
    parser = argparse.ArgumentParser(prog="python -m radixkv.engine.selftest", description=__doc__)
    parser.add_argument("--model", default="tiny_gpt", help="a preset, a Hugging Face folder or a .gguf file")
    parser.add_argument("--runs", type=int, default=4, help="random schedules of each cache (4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    before = torch.get_num_threads()
    try:
        for threads in sorted({1, 2, before}):
            torch.set_num_threads(threads)
            _run(given.model, dtype, given.device, given.runs, f"{threads} thread{'s' if threads > 1 else ''}")
    finally:
        torch.set_num_threads(before)
    for rule in measured():
        print(rule)
    print(f"{len(measured())} rules of rows, measured in {sum(rule.seconds for rule in measured()):.1f} s")


def _run(model: str, dtype: torch.dtype, device: str | None, runs: int, threads: str) -> None:
    engine, _ = _engine(model, "null", 512, dtype, device)
    if engine.runner.device.type == "cpu":
        rows = sum(compare_rows(product, seed) for product in engine.runner.products() for seed in range(runs))
        print(f"{threads}, linear layers: {rows} rows equal bit for bit")
    for cache in ("flat_hash", "radix"):
        num_rows = num_cached = 0
        for seed in range(runs):
            rows, cached = compare(model, cache, seed, dtype, device)
            num_rows, num_cached = num_rows + rows, num_cached + cached
            print(f"\r{cache}: {seed + 1} of {runs} schedules", end="", file=sys.stderr, flush=True)
        print(f"\r{threads}, {cache}: {num_rows} rows of logits equal bit for bit, {num_cached} tokens from the cache")


if __name__ == "__main__":
    main()

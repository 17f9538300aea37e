"""Random shapes with random features against float64: pairs that no list has."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels.problems import FP8, Shape, check, make
from tests.sampling import few

NUM_SHAPES, SHAPES_A_TEST = 600, 30


def random_shape(seed: int) -> Shape:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 1, 2, 3, 4])
    q_lens, seq_lens = [], []
    for _ in range(rng.randint(1, 5)):
        n = rng.choice([0, 1, 2, rng.randint(1, 40), rng.randint(1, 300), rng.randint(200, 900)])
        q_lens.append(rng.choice([1, 1, min(n, rng.randint(1, 8)), min(n, rng.randint(1, 60)), 0]) if n else 1)
        seq_lens.append(n)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    return Shape(
        q_lens=tuple(q_lens),
        seq_lens=tuple(seq_lens),
        num_q_heads=kv_heads * rng.choice([1, 2, 3, 4, 5, 8, 11]),
        num_kv_heads=kv_heads,
        head_dim=rng.choice([32, 40, 64, 72, 96, 100, 128, 160, 200, 256]),
        v_head_dim=rng.choice([None, None, None, 32, 100]),
        block_size=rng.choice([1, 2, 5, 8, 16, 16, 32, 100, 256, 512, 777, 2048]),
        dtype=dtype,
        kv_dtype=rng.choice([None, None, FP8]),
        layout=rng.choice(["nhd", "hnd", "interleaved", "token_interleaved", "dim_strided"]),
        causal=rng.random() < 0.8,
        window=rng.choice([None, None, rng.randint(1, 400)]),
        softcap=rng.choice([None, None, None, 10.0]),
        sinks=rng.random() < 0.25,
        alibi=rng.random() < 0.15,
        scales=rng.choice(["none", "none", "tensor", "head"]),
        ragged=rng.random() < 0.3,
        seed=seed,
    )


@pytest.mark.parametrize("start", few(range(0, NUM_SHAPES, SHAPES_A_TEST), 5))
def test_random_shapes(start):
    for seed in range(start, start + SHAPES_A_TEST):
        shape = random_shape(seed)
        try:
            check(make(shape))
        except Exception as error:
            raise AssertionError(f"{shape}: {error}") from error

"""Every pair of features of paged_attention against float64, with all that may not be read poisoned by NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.pairwise import pairwise_rows
from tests.kernels.problems import FP8, Shape, check, make
from tests.sampling import few

BATCHES = {
    "decode": ((1, 1, 1, 1), (1, 17, 255, 700)),
    "prefill": ((5, 130), (5, 130)),
    "chunked": ((33, 1), (600, 256)),
    "drafts": ((4, 3, 4), (400, 3, 90)),
    "mixed with empty rows": ((1, 40, 0, 1, 2, 1), (0, 300, 7, 513, 2, 0)),
    "two runs": ((1, 9), (2300, 2049)),
}
FEATURES = {
    "batch": list(BATCHES),
    "heads": [(1, 1), (2, 2), (4, 1), (6, 2), (5, 1), (14, 2), (12, 1), (16, 1), (24, 1)],
    "head_dim": [32, 64, 80, 96, 128, 192, 256],
    "v_head_dim": [None, 48],
    "block_size": [1, 3, 16, 48, 256, 2048],
    "dtypes": [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, FP8),
        (torch.bfloat16, FP8),
    ],
    "scales": ["none", "tensor", "head"],
    "layout": ["nhd", "hnd", "interleaved", "token_interleaved", "dim_strided"],
    "causal": [True, False],
    "window": [None, 1, 7, 256, 300],
    "softcap": [None, 5.0],
    "sinks": [False, True],
    "alibi": [False, True],
    "ragged": [False, True],
}


def shape_of(row: dict, seed: int) -> Shape:
    q_lens, seq_lens = BATCHES[row["batch"]]
    plain = {k: v for k, v in row.items() if k not in ("batch", "heads", "dtypes")}
    return Shape(
        q_lens=q_lens,
        seq_lens=seq_lens,
        num_q_heads=row["heads"][0],
        num_kv_heads=row["heads"][1],
        dtype=row["dtypes"][0],
        kv_dtype=row["dtypes"][1],
        seed=seed,
        **plain,
    )


ROWS = pairwise_rows(FEATURES)
# most rows above leave the fused kernel for one feature or another; these keep to it
FUSED = {**FEATURES, "v_head_dim": [None], "softcap": [None], "alibi": [False], "scales": ["none", "tensor"]}
FUSED_ROWS = pairwise_rows(FUSED, seed=1)


@pytest.mark.parametrize("index", few(range(len(ROWS)), 40))
def test_pairs_of_features(index):
    check(make(shape_of(ROWS[index], index)))


@pytest.mark.parametrize("index", few(range(len(FUSED_ROWS)), 40))
def test_pairs_of_features_of_the_fused_kernel(index):
    check(make(shape_of(FUSED_ROWS[index], 1000 + index)))


@pytest.mark.parametrize("index", range(0, len(ROWS), 9))
def test_reference_agrees_with_dense_float64(index):
    problem = make(shape_of({**ROWS[index], "dtypes": (torch.float32, None)}, index))
    check(problem, "reference")

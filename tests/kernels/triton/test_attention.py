"""The real Triton attention kernels in the interpreter, against float64: feature pairs and cases that went wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from radixkv_kernels import paged_attention, triton_impl
from radixkv_kernels.triton_impl import attention
from radixkv_kernels.triton_impl.config import Config

from tests.kernels.triton.attention_problems import Problem, exactly, pairwise
from tests.sampling import few

pytestmark = pytest.mark.usefixtures("exact_interpreter")

LENGTHS = {
    "decode": ((1, 130, 0, 140), (1, 1, 1, 1)),
    "prefill": ((9, 137), (9, 6)),
    "mixed": ((150, 3, 128, 64), (1, 3, 2, 0)),
}
FACTORS = {
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "fp8": (False, True),
    "lengths": tuple(LENGTHS),
    "group": (1, 3, 5, 6, 7, 12, 16, 24),
    "num_kv_heads": (1, 2),
    "dims": ((64, 64), (80, 80), (96, 32), (128, 128), (192, 128), (256, 256), (40, 72)),
    "block_size": (1, 3, 16, 48, 2048),
    "layout": ("nhd", "hnd", "interleaved"),
    "causal": (True, False),
    "window": (None, 5, 100),
    "softcap": (None, 20.0),
    "sinks": (False, True),
    "scales": ("none", "tensor", "head"),
    "ragged": (False, True),
    "processors": (1, 64),
}
PAIRS = pairwise(FACTORS, seed=3)


def problem_of(row: dict[str, Any], seed: int) -> Problem:
    values = {name: value for name, value in row.items() if name not in ("lengths", "dims", "processors")}
    seq_lens, q_lens = LENGTHS[row["lengths"]]
    head_dim, v_head_dim = row["dims"]
    return Problem(
        seq_lens=seq_lens, q_lens=q_lens, head_dim=head_dim, v_head_dim=v_head_dim, seed=seed, **values
    )  # fmt: skip


def check(problem: Problem, monkeypatch: pytest.MonkeyPatch, processors: int = 8) -> None:
    """Triton with no more error than roundings explain, on a device of so many processors."""
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    if problem.dtype == torch.float32:
        # The shipped float32 tiles are small, and the interpreter's time goes by the number of tiles.
        big = Config(64, 64, 256, 4, 2, "ieee")
        monkeypatch.setattr(triton_impl, "find_config", lambda spec, tensors: big)
    call = problem.build()
    out, lse = paged_attention(**call, implementation="triton")
    exactly(call, problem).check(out, lse)


@pytest.mark.parametrize("index", few(range(len(PAIRS)), 6))
def test_every_pair_of_features(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PAIRS[index]
    check(problem_of(row, seed=index), monkeypatch, row["processors"])

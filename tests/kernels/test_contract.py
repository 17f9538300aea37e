"""What every registered implementation owes: the functions of the contract, and the numbers of float64."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from radixkv_kernels import UnsupportedImplementation
from radixkv_kernels.contract import Implementation
from radixkv_kernels.selection import IMPLEMENTATIONS, Entry, _load, _pick, select_implementation
from radixkv_kernels.triton_impl import attention

from tests.kernels.pairwise import pairwise_rows
from tests.kernels.problems import FP8, Shape, check, make
from tests.sampling import few

CPU = torch.device("cpu")
BATCHES = {
    "decode": ((1, 1, 1, 1), (1, 130, 0, 140)),
    "prefill": ((9, 6), (9, 137)),
    "mixed": ((1, 3, 2, 0), (150, 3, 128, 64)),
}
FEATURES = {
    "batch": list(BATCHES),
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "fp8": [False, True],
    "group": [1, 3, 5, 6, 7, 12, 16, 24],
    "num_kv_heads": [1, 2],
    "dims": [(64, 64), (80, 80), (96, 32), (128, 128), (192, 128), (256, 256), (40, 72)],
    "block_size": [1, 3, 16, 48, 2048],
    "layout": ["nhd", "hnd", "interleaved"],
    "causal": [True, False],
    "window": [None, 5, 100],
    "softcap": [None, 20.0],
    "sinks": [False, True],
    "scales": ["none", "tensor", "head"],
    "ragged": [False, True],
    "processors": [1, 64],
}
"""Small enough for the interpreter; processors: of the device, by which triton deals out its work."""
ROWS = pairwise_rows(FEATURES, seed=3)


def shape_of(row: dict, seed: int) -> Shape:
    q_lens, seq_lens = BATCHES[row["batch"]]
    named = (
        "num_kv_heads",
        "block_size",
        "dtype",
        "layout",
        "causal",
        "window",
        "softcap",
        "sinks",
        "scales",
        "ragged",
    )
    return Shape(
        q_lens,
        seq_lens,
        num_q_heads=row["group"] * row["num_kv_heads"],
        head_dim=row["dims"][0],
        v_head_dim=row["dims"][1],
        kv_dtype=FP8 if row["fp8"] else None,
        seed=seed,
        **{name: row[name] for name in named},
    )


@pytest.mark.parametrize("index", few(range(len(ROWS)), 5))
def test_every_pair_of_features(index, implementation, monkeypatch):
    monkeypatch.setattr(attention, "num_processors", lambda device: ROWS[index]["processors"])
    check(make(shape_of(ROWS[index], index)), implementation)


def test_the_functions_of_the_contract_with_its_arguments(implementation):
    module = select_implementation(implementation, CPU)
    for name, member in inspect.getmembers(Implementation, inspect.isfunction):
        if not name.startswith("_"):
            want = list(inspect.signature(member).parameters)[1:]
            assert list(inspect.signature(getattr(module, name)).parameters) == want, name


@pytest.mark.parametrize("alibi", [False, True])
def test_what_is_not_supported_is_refused_with_the_reason(alibi, implementation):
    problem = make(Shape((1, 3), (20, 3), alibi=alibi))
    try:
        check(problem, implementation)
    except UnsupportedImplementation as error:
        assert alibi and str(error).startswith(f"implementation {implementation!r}: alibi_slopes")


def test_auto_takes_the_first_that_prefers_the_device_and_is_installed(monkeypatch):
    for device, installed, want in (
        ("cuda", True, "triton"),
        ("cuda", False, "torch"),
        ("cpu", True, "torch"),
        ("xpu", False, "torch"),
    ):
        requires = "torch" if installed else "no_such_package"
        monkeypatch.setitem(IMPLEMENTATIONS, "triton", Entry(".triton_impl", requires, ("cuda",)))
        assert _pick.__wrapped__(device) == want
    with pytest.raises(UnsupportedImplementation, match="implementation 'triton': no_such_package is not installed"):
        _load.__wrapped__("triton")


@pytest.mark.parametrize("name", ["", "Torch", None, ["torch"]])
def test_an_unknown_name_is_refused_with_those_that_are_known(name):
    with pytest.raises(ValueError, match=re.escape(f"implementation: expected one of {('auto', *IMPLEMENTATIONS)}")):
        select_implementation(name, CPU)

"""What runs on a GPU, tried in triton's interpreter: the checks of plans and the rows of their timing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from experiments.gpu import checks, timing

pytestmark = pytest.mark.usefixtures("exact_interpreter")


def test_checks_of_plans():
    lengths = {"seq_lens": (700, 1, 0, 820, 64), "q_lens": (1, 1, 1, 3, 0)}
    some = [dataclasses.replace(checks.Case("small"), **lengths, head_dim=64, v_head_dim=64, num_kv_heads=1)]
    rows = list(checks.check_tree(torch.device("cpu"), some))
    assert [row["passed"] for row in rows] == [True] and rows[0]["num_items"] > 1


def test_rows_of_timing(monkeypatch):
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    processors = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: None)  # a peer that fails is named
    config = SimpleNamespace(num_q_heads=2, num_kv_heads=1, head_dim=64, block_size=16, repeats=2)
    timed = []

    def measure(functions, repeats):
        timed.extend(functions)
        return dict.fromkeys(functions, 2.0)

    config.tree = (timing.Case(2, 256, 32), timing.Case(2, 0, 32))
    rows = list(timing.tree_rows(config, {"copy_gb_s": 1.0}, measure, lambda: True))
    assert [row["passed"] for row in rows] == [True, True] and set(timed) == {"tree", "paged", "sdpa"}
    assert "TypeError" in rows[0]["not_timed"]["flex"]
    assert rows[0]["unique_gb_s"] == pytest.approx(2 * 320 * 64 * 2 / 2.0 / 1e6)
    assert rows[0]["plan_us_a_layer"] > 0 and rows[0]["ideal"] == 2 * 288 / 320
    assert not list(timing.tree_rows(config, {}, measure, lambda: False))

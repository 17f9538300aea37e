"""What the tests of kernels share: every registered implementation, each as it runs on the CPU."""

from __future__ import annotations

import pytest
import torch
from radixkv_kernels.selection import IMPLEMENTATIONS


@pytest.fixture
def quick_interpreter(exact_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton in the interpreter, whose time goes by the number of tiles: the shipped float32 tiles are small."""
    from radixkv_kernels import triton_impl
    from radixkv_kernels.triton_impl.config import Config

    find, large = triton_impl.find_config, Config(64, 64, 256, 4, 2, "ieee")
    monkeypatch.setattr(
        triton_impl, "find_config", lambda spec, t: large if t.q.dtype == torch.float32 else find(spec, t)
    )


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """Each name of the registry in turn: what holds for one implementation holds for all."""
    entry = IMPLEMENTATIONS[request.param]
    if not entry.is_installed:
        pytest.skip(f"{entry.requires} is not installed")
    if entry.requires == "triton":
        request.getfixturevalue("quick_interpreter")
    return request.param

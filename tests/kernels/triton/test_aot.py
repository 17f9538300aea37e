"""Shipped kernels compiled ahead of time for GPUs that are not here: no spill, shared memory in bounds, MMA."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

KERNELS = pathlib.Path(__file__).parents[3] / "kernels"


def run_aot(*options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(KERNELS), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "radixkv_kernels.aot", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_sample_of_what_is_shipped_compiles_cleanly(arch: str) -> None:
    made = run_aot("--quick", "--arch", arch)
    assert made.returncode == 0, made.stdout + made.stderr
    kinds = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}
    assert kinds[arch] in made.stdout


@pytest.mark.slow
def test_all_that_is_shipped_compiles_cleanly() -> None:
    made = run_aot()
    assert made.returncode == 0, made.stdout + made.stderr


def test_an_unknown_architecture_is_named() -> None:
    made = run_aot("--arch", "sm_1")
    assert made.returncode == 2 and "sm_1" in made.stderr

"""Runs before any test imports triton: kernels on the CPU run in triton's interpreter.

Test modules of Triton kernels use the fixture `exact_interpreter`. Helper modules are imported as `tests.PLACE.NAME`.
"""

import os

import pytest
from hypothesis import Phase, settings

os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads that spin while they wait make small models ten times slower where two processes share two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time where a run must not depend on chance; elsewhere new ones are looked for.
settings.register_profile("ci", derandomize=True)
# One failure is enough to know, and is not read (`make mutants`).
settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.generate])
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def exact_interpreter() -> None:
    """Makes the interpreter exact in bfloat16 and check every address, from here on."""
    from tests.kernels.triton import triton_interpreter

    triton_interpreter.install()

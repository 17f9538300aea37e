"""Which parameters of a test run in `make test`: a few, evenly spread; all of them in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], keep: int) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `keep` of them, the first among them, are fast; the rest are slow."""
    values = list(values)
    kept = {index * len(values) // keep for index in range(keep)}
    return [value if index in kept else _slow(value) for index, value in enumerate(values)]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

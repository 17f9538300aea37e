"""Every public name of the kernels has a docstring, every call an example, and the examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
import radixkv_kernels
import torch

FOLDER = Path(radixkv_kernels.__file__).parent
MODULES = {
    ".".join(("radixkv_kernels", *path.relative_to(FOLDER).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(FOLDER.rglob("*.py"))
}
WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>> " in path.read_text()]
GIVEN = {"np": np, "torch": torch, **{name: getattr(radixkv_kernels, name) for name in radixkv_kernels.__all__}}
"""What examples take as imported."""


def without_docstring(body: list[ast.stmt], within: str) -> list[str]:
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{within}.{node.name}"
            found += [] if ast.get_docstring(node) else [name]
            found += without_docstring(node.body, name) if isinstance(node, ast.ClassDef) else []
    return found


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    tree = ast.parse(MODULES[name].read_text())
    assert ast.get_docstring(tree) and not without_docstring(tree.body, name)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name):
    done = doctest.testmod(importlib.import_module(name), extraglobs=GIVEN)
    assert done.attempted and not done.failed


def test_calls_have_examples():
    data = {"PlanStats", "PlanTensors", "UnsupportedImplementation"}
    without = {name for name in radixkv_kernels.__all__ if ">>> " not in (example_of(name) or "")}
    assert without == data


def example_of(name: str) -> str | None:
    """The docstring of a name, those of its methods included."""
    found = getattr(radixkv_kernels, name)
    methods = vars(found).values() if inspect.isclass(found) else ()
    return "\n".join(
        inspect.getdoc(one) or ""
        for one in (found, *methods)
        if one is found or callable(one) or isinstance(one, staticmethod)
    )

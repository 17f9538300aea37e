"""`from radixkv import Name`: each name is what it says, type checkers see it, and nothing loads before it is used."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import radixkv

ROOT = Path(__file__).parents[1]


def loaded_by(code):
    """Returns which heavy packages a program loads."""
    code = f"import sys\n{code}\nprint(*sorted({{'torch', 'numpy', 'triton'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_neither_torch_nor_numpy():
    assert loaded_by("import radixkv; dir(radixkv); radixkv.__all__") == []
    assert loaded_by("from radixkv import RadixCache, KVManager, Scheduler, make_router, open_trace") == ["numpy"]
    assert "torch" in loaded_by("from radixkv import Engine")


@pytest.mark.parametrize("name", radixkv.__all__)
def test_a_name_is_the_object_of_its_module(name):
    value = getattr(radixkv, name)
    assert value.__name__ == name
    assert getattr(import_module(value.__module__), name) is value
    assert name in dir(radixkv)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(radixkv.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"radixkv.{module}" for name, module in radixkv._MODULES.items()}


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match="module 'radixkv' has no attribute 'RadixTree'"):
        radixkv.RadixTree  # noqa: B018
    with pytest.raises(ImportError, match="RadixTree"):
        from radixkv import RadixTree  # noqa: F401

"""Every Python block of the READMEs runs as it stands, by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    (name, block)
    for name in ("README.md", "kernels/README.md")
    for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BLOCKS)])
def test_example(name, block):
    if "import transformers" in block:
        pytest.importorskip("transformers", minversion="5.0")
    exec(compile(block, name, "exec"), {"__name__": "example"})


def test_there_are_examples():
    assert sum(name == "README.md" for name, _ in BLOCKS) >= 2 and len(BLOCKS) >= 7

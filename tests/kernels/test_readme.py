"""Every Python block of kernels/README.md runs as it stands, by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "kernels" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example(block):
    if "import transformers" in block:
        pytest.importorskip("transformers", minversion="5.0")
    exec(compile(block, str(README), "exec"), {"__name__": "example"})


def test_there_are_examples():
    assert len(BLOCKS) >= 5

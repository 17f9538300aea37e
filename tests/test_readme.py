"""Every Python block of the READMEs runs as it stands, by itself; every command in the documents is one that exists."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from unittest import mock

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


# ---- commands

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "kernels/README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "paper_notes").glob("*.md")),
]
MODULES = re.compile(r"python -m (?:experiments|radixkv)[^`\n#]*")
TARGETS = re.compile(r"(?:(?<=`)|(?<=\n))make [a-z-]+[^`\n#]*")
COMMANDS = sorted(
    {
        " ".join(found.split())
        for path in DOCUMENTS
        for pattern in (MODULES, TARGETS)
        for found in pattern.findall(
            re.sub(r"^```python\n.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        )
        if "..." not in found
    }
)


@cache
def help_of(module):
    """What `python -m` prints of a module and its subcommand; in this process, as most of them import torch."""
    shown = io.StringIO()
    with mock.patch.object(sys, "argv", [*module, "--help"]), redirect_stdout(shown), pytest.raises(SystemExit) as done:
        runpy.run_module(module[0], run_name="__main__", alter_sys=True)
    assert not done.value.code
    return shown.getvalue()


def targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists_with_its_options(command, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    words = shlex.split(command.rstrip(".,;:)"))
    if words[0] == "make":
        assert words[1] in targets()
        return
    module, options = words[2], [word for word in words[3:] if word.startswith("--")]
    if module == "experiments" and words[3:] and not words[3].startswith("-"):
        module = f"experiments.{words[3]}"
    if module in ("radixkv.engine.selftest", "radixkv_kernels.selftest"):  # no options, and no --help: they run
        assert not options
        return
    shown = help_of((module, "why") if words[3:4] == ["why"] else (module,))
    for option in options:
        assert option.partition("=")[0] in shown, f"{option} is no option of {module}"


def test_there_are_commands():
    assert len(COMMANDS) > 30


def test_every_claim_has_a_figure_a_command_and_a_verdict():
    rows = [
        line.strip().strip("|").split(" | ")
        for line in (ROOT / "paper_notes" / "CLAIMS.md").read_text().splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| claim |"))
    ]
    assert len(rows) > 30
    for row in rows:
        assert len(row) == 4 and all(cell.strip() for cell in row), row
        commands = re.findall(r"`((?:python -m|pytest|make) [^`]+)`", row[2])
        assert commands, f"no command: {row[0]}"
        for command in commands:
            words = shlex.split(command)
            if words[0] == "make":
                assert words[1] in targets(), command
            elif words[0] == "pytest":
                paths = [ROOT / word for word in words[1:] if word.startswith("tests/")]
                assert paths and all(path.exists() for path in paths), command
            elif words[2].startswith("experiments."):
                assert (ROOT / "experiments" / f"{words[2].removeprefix('experiments.')}.py").exists(), command

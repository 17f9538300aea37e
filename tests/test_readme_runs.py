"""Every command of the READMEs runs: as it stands, or as the table below says, and prints no warning.

A command that matches no line of the table fails, and so does a block of neither Python nor commands that is not
listed. Python blocks run in `test_readme.py`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("make", "python", "pip", "pytest")


@dataclass(frozen=True)
class Rule:
    """What runs in a command's place.

    Attributes:
        command: the whole of it, as a pattern.
        runs: in its place; `\\1` is a group of the pattern, {out} a folder of its own. None: nothing can.
        why: it does not run as it stands.
    """

    command: str
    runs: str | None
    why: str


OUT = "results go elsewhere, and small"
RULES = (
    Rule(r"make compare", "make compare ARGS='--limit 100 --out {out}'", OUT),
    Rule(r"make compare ARGS=\"--trace my.jsonl (.*)\"", r"make compare ARGS='--trace my.jsonl \1 --out {out}'", OUT),
    Rule(
        r"make compare ARGS=\"--trace FILE... (.*)\"",
        r"make compare ARGS='--trace my.jsonl \1 --out {out}'",
        "the files are no part of the package",
    ),
    Rule(r"make inspect", "make inspect", "as it stands"),
    Rule(r"make inspect ARGS=\"...\"", "make inspect ARGS='my.jsonl'", "the dots are the reader's"),
    Rule(r"python -m radixkv.inspect( why my.jsonl 17)?", r"python -m radixkv.inspect\1", "as it stands"),
    Rule(r"make index-cost", "make index-cost ARGS='--smoke --out {out}'", OUT),
    Rule(r"make experiments ARGS=\"--only chat\"", "make experiments ARGS='--only chat --out {out}'", OUT),
    Rule(r"make experiments", "make experiments ARGS='--only work_savings --out {out}'", "the others run one by one"),
    Rule(r"make report", "make report ARGS='--only work_savings --out {out}'", "all of it takes a quarter of an hour"),
    Rule(r"make model", "python -m radixkv.engine.model.fetch --help", "it downloads 98 MB"),
    Rule(r"make mutants", "make mutants ARGS='pinned'", "all of them take minutes: `pinned` plants some"),
    Rule(r"make test-cpus", "make test-cpus ARGS='--list'", "all levels take an hour"),
    Rule(r"make test-vllm( VLLM=vllm)?", None, "it installs gigabytes"),
    Rule(r"make (test|test-slow)", r"make test ARGS='tests/test_arrows.py'", "this is one of the tests"),
    Rule(r"python -m experiments", "python -m experiments --out {out}", OUT),
    Rule(r"python -m experiments NAME --smoke", "python -m experiments hash_choice --smoke --out {out}", "one for all"),
    Rule(
        r"python -m experiments\.routing --backend ray --replicas 2",
        "python -m experiments.routing --help",
        "Ray is an extra; tests/fleet/test_ray_replicas.py runs it where it is installed",
    ),
    Rule(r"python -m experiments\.inside_vllm .*", "python -m experiments.inside_vllm --help", "it takes a model"),
    Rule(r"python -m (experiments\.\w+)(?: --full)?", r"python -m \1 --smoke --out {out}", OUT),
    Rule(r"python -m (radixkv\.engine|radixkv_kernels)\.selftest", r"python -m \1.selftest", "as it stands"),
    Rule(
        r"python -m radixkv_kernels\.aot",
        "python -m radixkv_kernels.aot --quick --arch sm_90",
        "all of it takes a quarter of an hour",
    ),
    Rule(
        r"python -m radixkv_kernels\.triton_impl\.tuner ARCH",
        "python -m radixkv_kernels.triton_impl.tuner --help",
        "a table takes five minutes, and would be written into the package",
    ),
    Rule(r"python -m pytest( tests/\S+)+", "python -m pytest -q tests/test_names.py", "they are tests of this suite"),
    Rule(r"pip install (\.|'\.\[(\w+)\]')", None, "make has installed it; the extra has to exist"),
)
# Blocks that show what a command prints begin so; theirs are not commands.
SHOWN = ("embedded: 2,022 requests", "radixkv/")


def blocks(text: str) -> list[tuple[str, str]]:
    """Every fenced block: its language, its text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands_of(path: Path) -> list[str]:
    """Every command of a document: in blocks, in indented lines, and between backticks, also over two lines."""
    text = path.read_text()
    found = []
    for language, block in blocks(text):
        if language != "python":
            found += [line for line in block.splitlines() if line.split(" ")[0] in PROGRAMS]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found += [line.strip() for line in re.findall(r"^    (.+)$", prose, re.MULTILINE)]
    found += [span for span in re.findall(r"`([^`]+)`", prose) if span.split()[0] in PROGRAMS and " " in span]
    return [" ".join(command.partition(" #")[0].split()) for command in found]


COMMANDS = sorted({command for path in DOCUMENTS for command in commands_of(path)})


def rule_of(command: str) -> tuple[Rule, re.Match[str]]:
    for rule in RULES:
        if match := re.fullmatch(rule.command, command):
            return rule, match
    raise AssertionError(f"no rule says how to try {command!r}: add one to RULES")


def test_every_block_is_python_or_commands_or_listed():
    assert len(COMMANDS) > 20
    for path in DOCUMENTS:
        for language, block in blocks(path.read_text()):
            first = block.lstrip().partition("\n")[0]
            assert language == "python" or first.split(" ")[0] in PROGRAMS or first.startswith(SHOWN), (path, first)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_rule(command):
    rule, match = rule_of(command)
    if rule.runs is None and command.startswith("pip") and match.group(2):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert match.group(2) in extras


def test_no_rule_is_idle():
    used = {rule_of(command)[0].command for command in COMMANDS}
    assert not [rule.command for rule in RULES if rule.command not in used]


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if rule_of(command)[0].runs])
def test_a_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    for name in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"):  # of the make that runs this
        monkeypatch.delenv(name, raising=False)
    rule, match = rule_of(command)
    assert rule.runs is not None
    trace = tmp_path / "my.jsonl"
    lines = [f'{{"prompt": "You are a helpful agent. Book flight {i // 3} for guest {i}."}}' for i in range(20)]
    trace.write_text("\n".join(lines))
    runs = match.expand(rule.runs).replace("{out}", str(tmp_path / "out")).replace("my.jsonl", str(trace))
    program, *rest = shlex.split(runs)
    if program == "make":  # with the interpreter that runs this, and what is installed there
        rest = [
            "-C",
            str(ROOT),
            "-o",
            f"{sys.prefix}/ready",
            f"VENV={sys.prefix}",
            "BIN=" + str(Path(sys.executable).parent),
            *rest,
        ]
    command_line = [sys.executable if program == "python" else program, *rest]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{runs}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    told = [line for line in (done.stdout + done.stderr).splitlines() if "warning" in line.lower()]
    assert not told, told

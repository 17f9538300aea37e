"""What docs/adding_*.md show works as it stands: a file more, or a class and its name, in a copy of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(tmp_path):
    for name in ("radixkv", "experiments", "kernels", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def passes(copy, *arguments):
    """Tests of the copy, those that a page names, on what was added."""
    run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *arguments)


def example(name):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"adding_{name}.md").read_text(), re.DOTALL)
    return block


def run(copy, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "kernels")))}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def test_an_experiment_is_one_file(copy):
    (copy / "experiments" / "repeats.py").write_text(example("an_experiment"))
    assert "when every request repeats the one before?" in run(copy, "-m", "experiments")
    run(copy, "-m", "experiments", "--smoke", "--only", "repeats")
    (copy / "results").mkdir(exist_ok=True)
    shutil.copy(copy / "results" / "smoke" / "repeats.json", copy / "results")
    run(copy, "-m", "experiments", "--report", "--only", "repeats")
    assert "How many prompt tokens does a cache find" in (copy / "results" / "report.html").read_text()
    rows = json.loads((copy / "results" / "repeats.json").read_text())["rows"]
    assert {row["cache"]: row["hit_rate"] for row in rows}["radix"] == pytest.approx(2 * 63 / (3 * 64))


def test_a_reader_is_one_file(copy):
    (copy / "radixkv" / "traces" / "readers" / "quiz.py").write_text(example("a_reader"))
    trace = copy / "my.jsonl"
    trace.write_text("".join(json.dumps({"question": f"What is {i}?", "id": i, "odd": "x"}) + "\n" for i in range(3)))
    shown = run(copy, "-m", "experiments.compare", "--trace", str(trace), "--cache", "radix", "--block-size", "1")
    assert "read as quiz; 3 requests" in shown and "(bytes)" in shown and "odd is not understood" in shown
    assert "quiz" in run(copy, "-m", "radixkv.inspect", "--help")
    passes(copy, "tests/traces/test_formats.py")


def test_a_policy_is_one_file(copy):
    (copy / "radixkv" / "cache" / "radix" / "policies" / "largest.py").write_text(example("a_policy"))
    assert "largest" in run(copy, "-m", "experiments.eviction", "--help")
    passes(copy, "tests/cache/test_policies.py", "tests/cache/test_docs.py", "-k", "largest or doc")
    passes(copy, "tests/cache/test_contract.py")


def test_a_router_is_one_class_and_its_name(copy):
    path = copy / "radixkv" / "fleet" / "routing" / "policies.py"
    text = path.read_text()
    assert text.count("ROUTERS: dict[str, type[Router]] = {") == 1
    mark = "ROUTERS: dict[str, type[Router]] = {"
    added, entry = example("a_router").split("ROUTERS = {")
    path.write_text(text.replace(mark, f"{added.rstrip()}\n\n\n{mark}{entry.partition('...')[0].rstrip()}"))
    code = """
from experiments.routing import SOURCES, Config, replay
assert "fewest_requests" in Config().routers
source = SOURCES["chat"]
row = replay(source, list(source.requests())[:40], "fewest_requests", 2, None)
print(row["router"], row["num_requests"])
"""
    assert run(copy, "-c", code) == "fewest_requests 40\n"
    passes(copy, "tests/fleet/routing/test_routers.py", "tests/fleet/test_fleet.py")

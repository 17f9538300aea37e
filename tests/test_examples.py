"""The programs of examples/ run as they stand, and so do the examples in docstrings."""

import doctest
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
WITH_EXAMPLES = [  # the kernels' examples have a test of their own
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "radixkv").rglob("*.py"))
    if ">>> " in path.read_text()
]
# what each program must print, as it stands for what the program shows
PRINTED = {
    "1_replay_a_trace": ["no bound  flat_hash", "no bound      radix"],
    "2_the_cache_in_your_engine": ["compute 3 of 93 tokens", "PoolSizes(free="],
    "3_the_engine": ["tokens, 0 cached", "radixkv:prefix_cache_hits_total"],
    "4_the_kernels": ["largest difference from plain attention"],
    "5_a_router": ["round_robin", "longest_match", "cache_aware"],
}


@pytest.mark.parametrize("program", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_a_program(program, monkeypatch, capsys):
    assert 15 <= len(program.read_text().splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(program)])
    runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(words in printed for words in PRINTED[program.stem]), printed


def test_every_program_is_known():
    assert {path.stem for path in PROGRAMS} == PRINTED.keys()


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module(name):
    found = doctest.testmod(import_module(name))
    assert found.attempted and not found.failed


def test_the_main_classes_have_examples():
    wanted = {"radixkv.blocks.kv_manager", "radixkv.engine.engine", "radixkv.scheduling.scheduler"}
    assert wanted <= set(WITH_EXAMPLES)

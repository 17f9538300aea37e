"""Every experiment, in the order in which a reader wants them: each file of `experiments` that has an ENTRY."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
PARTS = {
    "prefixes": "What a prefix cache buys",
    "index": "What the index costs",
    "serving": "In an engine",
    "policies": "Which next, and which goes",
    "fleet": "Many replicas",
    "growth": "Growth and leaks",
    "kernels": "Attention",
}
"""The parts of the report, in its order."""


@dataclass(frozen=True)
class Entry:
    """What makes a file an experiment: `ENTRY = Entry("index", seconds=2)` in it.

    Arguments are literals: the catalog reads them without importing the file, which may load torch.

    Attributes:
        part: a key of PARTS.
        seconds: what it takes on two cores as the report runs it; with --smoke under thirty.
        place: in its part; entries without one come last, by name.
        report: arguments with which the report runs it.
        name: its module in this package, and its JSON; from its file.
        docstring: question, expectation and commands; from its file.
    """

    part: str
    seconds: int
    place: int = 99
    report: tuple[str, ...] = ()
    name: str = ""
    docstring: str = ""

    @property
    def question(self) -> str:
        return self.docstring.partition("\n")[0]

    @property
    def expectation(self) -> str:
        """The paragraphs of the docstring after the question, without the commands."""
        paragraphs = self.docstring.partition("\n")[2].strip().split("\n\n")
        return "\n\n".join(text for text in paragraphs if not text.startswith("    "))

    @property
    def command(self) -> str:
        return " ".join(("python -m experiments", self.name, *self.report))

    def load(self) -> Any:
        """Imports its module; some load torch."""
        return import_module(f"experiments.{self.name}")


@cache
def entries() -> tuple[Entry, ...]:
    """Returns every experiment. Cost: each file is parsed once a process.

    Raises:
        ValueError: an ENTRY names no part of the report, or its arguments are no literals.
    """
    order = list(PARTS)
    return tuple(sorted(_entries(), key=lambda entry: (order.index(entry.part), entry.place, entry.name)))


def _entries() -> Iterator[Entry]:
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            match node:
                case ast.Assign([ast.Name("ENTRY")], ast.Call() as call):
                    arguments = [ast.literal_eval(each) for each in call.args]
                    named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
                    docstring = ast.get_docstring(tree) or ""
                    found = replace(Entry(*arguments, **named), name=path.stem, docstring=docstring)
                    if found.part not in PARTS:
                        raise ValueError(f"{path}: expected a part of {', '.join(PARTS)}, got {found.part!r}")
                    yield found


def find(name: str) -> Entry | None:
    """Returns the experiment of that name."""
    return next((entry for entry in entries() if entry.name == name), None)

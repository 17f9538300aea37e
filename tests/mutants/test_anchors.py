"""Every fault finds its place in the present source; the planter finds by syntax tree and refuses what is unclear."""

import ast
from pathlib import Path

import pytest

from tests.mutants.anchors import Module, planted, read_modules
from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]

SOURCE = '''\
"""Steps."""

LIMITS = {"steps": 3}


def traced(function):
    return function


class Stepper:
    size = 1

    @property
    def rest(self):
        return self.left

    @rest.setter
    def rest(self, value):
        self.left = value

    @traced
    def step(self, left, é="è"):
        é = "é"; left = self.pop(left)  # on one line
        if left > 3:
            self.log(
                "left",  # a comment
                left,
            )
            self.done = self.done + [
                left,
            ]
        elif left == 2:
            return
        for each in self.rows:
            self.close(each)
            self.row(each)
        return f"{left + 1} of {self.size:{self.width}}" f"{left}"

    def order(self):
        def rank(row):
            return row.left
        best = max(self.rows, key=lambda row: row.left + row.size)
        return rank(best), list(row for row in self.rows)


class Other:
    def order(self):
        return self.left
'''


@pytest.fixture
def modules(tmp_path):
    paths = tmp_path / "steps.py", tmp_path / "folder" / "__init__.py"
    paths[1].parent.mkdir()
    paths[0].write_text(SOURCE, encoding="utf-8")
    paths[1].write_text("def traced(function):\n    return function\n", encoding="utf-8")
    return [Module(path, path.read_text(encoding="utf-8")) for path in paths]


def test_every_fault_finds_its_place():
    modules, wrong = read_modules(ROOT), []
    for fault in FAULTS:
        try:
            module, text = planted(modules, fault)
            compile(text, module.path, "exec")
        except (LookupError, ValueError, SyntaxError) as error:
            wrong.append(f"{fault.name}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


LOG = """self.log(
                "left",  # a comment
                left,
            )"""
LIST = """[
                left,
            ]"""
WORDS = '''f"{left + 1} of {self.size:{self.width}}" f"{left}"'''
CLOSE = SOURCE[: SOURCE.index("self.close(")].count("\n") + 1
STEP = SOURCE[SOURCE.index("    @traced") : SOURCE.index("\n    def order")]


@pytest.mark.parametrize(
    ("at", "find", "replace", "old", "new"),
    [
        # Statements.
        ("Stepper.step", "self.log('left', left)", "", LOG, "pass\n\n\n"),
        ("Stepper.step", "left = self.pop(left)", "left = 'ß'", "left = self.pop(left)", "left = 'ß'"),
        (
            "Stepper.step",
            "self.close(each)\nself.row(each)",
            "break",
            "self.close(each)\n            self.row(each)",
            "break\n",
        ),
        (
            "Stepper.step",
            "if left == 2: return",
            "left = 0",
            "elif left == 2:\n            return",
            "else:\n            left = 0",
        ),
        ("Stepper.rest", "self.left = value", "", "self.left = value", "pass"),
        (
            "Stepper.order",
            "def rank(row): return row.left",
            "rank = id",
            "def rank(row):\n            return row.left",
            "rank = id\n",
        ),
        ("Stepper", "size = 1", "size = 2", "size = 1", "size = 2"),
        ("Stepper", STEP, "step = 0", STEP, "    step = 0" + "\n" * STEP.count("\n")),
        # Expressions.
        ("Stepper.step", "self.done + [left]", "a or b", f"self.done + {LIST}", "(a or b\n\n)"),
        ("Stepper.step", "left > 3", "False", "left > 3", "(False)"),
        ("Stepper.step", "'è'", "'ß'", '"è"', "('ß')"),
        ("Stepper.step", "left + 1", "left", WORDS, "(f'{left} of {self.size:{self.width}}{left}')"),
        ("Stepper.step", "self.width", "9", WORDS, "(f'{left + 1} of {self.size:{9}}{left}')"),
        ("Stepper.order", "row.left + row.size", "row.size", "row.left + row.size", "(row.size)"),
        ("Stepper.order", "lambda row: row.left + row.size", "None", "lambda row: row.left + row.size", "(None)"),
        ("Stepper.order", "(row for row in self.rows)", "[]", "(row for row in self.rows)", "([])"),
        ("Stepper.rest", "self.left", "0", "self.left", "(0)"),
        ("Stepper.order.rank", "row.left", "0", "row.left", "(0)"),
        # Of a module.
        ("steps:", "{'steps': 3}", "{}", '{"steps": 3}', "({})"),
        ("steps:", "'Steps.'", "", '"""Steps."""', "pass"),
        ("steps:traced", "function", "None", "function\n\n", "(None)\n\n"),
    ],
)
def test_a_piece_is_found_in_whatever_layout(modules, at, find, replace, old, new):
    """Nothing else of the text changes, and no line moves."""
    module, text = planted(modules, Fault("it", at, find, replace))
    assert module.name == "steps"
    assert text == SOURCE.replace(old, new, 1)
    assert text.count("\n") == SOURCE.count("\n")
    ast.parse(text)


def test_a_package_has_the_name_of_its_folder(modules):
    module, text = planted(modules, Fault("it", "folder:traced", "return function", "return None"))
    assert (module.path.name, text) == ("__init__.py", "def traced(function):\n    return None\n")


@pytest.mark.parametrize(
    ("at", "find", "replace", "error", "words"),
    [
        ("Stepper.step", "self.close(row)", "", LookupError, ["it: ", "Stepper.step", "found 0", "'self.close(each)'"]),
        ("Stepper.step", "self.log('left', left)\nreturn", "", LookupError, ["found 0", "self.log("]),
        ("Stepper.step", "each", "left", LookupError, ["found 2", f"steps.py:{CLOSE}", f"steps.py:{CLOSE + 1}"]),
        (
            "Stepper.oder",
            "rank(best)",
            "",
            LookupError,
            ["no Stepper.oder", "like it: ['Stepper.order'", "in: ['steps:Stepper.order']"],
        ),
        ("other:Stepper.order", "rank(best)", "", LookupError, ["no other:Stepper.order", "'steps:Stepper.order'"]),
        ("traced", "return function", "", LookupError, ["found 2", "steps.py:7", "__init__.py:2"]),
        ("Stepper.step", "left > 3", "", ValueError, ["it: expected an expression", "left > 3"]),
        ("Stepper.step", "left >", "0", ValueError, ["it: expected Python"]),
        ("Stepper.step", "", "0", ValueError, ["it: expected Python"]),
    ],
)
def test_what_is_unclear_is_refused(modules, at, find, replace, error, words):
    with pytest.raises(error) as caught:
        planted(modules, Fault("it", at, find, replace))
    assert [word for word in words if word not in str(caught.value)] == []

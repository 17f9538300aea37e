"""Finds the place of a fault by function and syntax tree, and splices the fault into the text of the file.

A fault says where by the qualified name of a function or class, and what by a piece of Python in it: an expression, or
consecutive statements. The piece is compared as a syntax tree, so layout, comments and quotes do not matter, nor does
the folder that the file is in.
"""

import ast
import copy
import difflib
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("radixkv", "kernels/radixkv_kernels", "experiments")

Piece = list[ast.AST]


@dataclass
class Module:
    path: Path
    text: str

    @property
    def name(self) -> str:
        """The file's name without folder and ending; of a package, the name of its folder."""
        return self.path.parent.name if self.path.stem == "__init__" else self.path.stem

    @cached_property
    def scopes(self) -> dict[str, list[ast.AST]]:
        """The functions and classes by qualified name, several where a name is defined again; under "" the module."""
        tree = ast.parse(self.text)
        scopes: dict[str, list[ast.AST]] = {"": [tree]}
        _collect(tree, "", scopes)
        return scopes

    def named(self, at: str) -> list[ast.AST]:
        """Returns the functions or classes that a fault's `at` names in this module."""
        module_name, _, name = at.rpartition(":")
        if module_name not in ("", self.name) or not all(part in self.text for part in name.split(".")):
            return []  # most modules need not be parsed
        return self.scopes.get(name, [])


class Place(NamedTuple):
    module: Module
    scope: ast.AST
    nodes: Piece


def read_modules(root: Path) -> list[Module]:
    """Returns every module of the packages of the checkout at `root`."""
    paths = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return [Module(path, path.read_text(encoding="utf-8")) for path in paths]


def planted(modules: list[Module], fault) -> tuple[Module, str]:
    """Returns the module that a fault belongs to, and its text with the fault in it. Writes nothing.

    The lines outside keep their numbers, unless the replacement has more lines than what it replaces.

    Raises:
        LookupError: the piece does not stand exactly once in the functions or classes of that name.
        ValueError: the piece or its replacement is no Python, or statements are to replace a part of a statement.
    """
    try:
        wanted, new = _piece(fault.find), _piece(fault.replace or "pass")
    except SyntaxError as error:
        raise ValueError(f"{fault.name}: expected Python to find and to replace it by: {error}") from error
    places = [
        Place(module, scope, nodes)
        for module in modules
        for scope in module.named(fault.at)
        for nodes in _occurrences(scope, wanted)
    ]
    if len(places) != 1:
        found = [f"{place.module.path}:{place.nodes[0].lineno}" for place in places]
        raise LookupError(
            f"{fault.name}: expected once in {fault.at}: {fault.find!r}, found {len(places)}: "
            f"{', '.join(found) or _near_misses(modules, fault.at, wanted)}. Mend tests/mutants/faults.py"
        )
    module, scope, nodes = places[0]
    parents = {child: node for node in ast.walk(scope) for child in ast.iter_child_nodes(node)}
    if isinstance(parents.get(nodes[0]), ast.Expr):  # an expression that is a statement
        nodes = [parents[nodes[0]]]
    if isinstance(nodes[0], ast.expr) and isinstance(new[0], ast.stmt):
        raise ValueError(f"{fault.name}: expected an expression in place of {fault.find!r}, got {fault.replace!r}")
    whole = node = nodes[0]
    while (node := parents.get(node)) is not None:
        if isinstance(node, ast.JoinedStr):  # before Python 3.12, what is in an f-string does not know its place
            whole = node
    if whole is not nodes[0]:
        nodes, new = [whole], [copy.deepcopy(whole, {id(nodes[0]): new[0]})]
    return module, _spliced(module.text, nodes, new)


def _collect(node: ast.AST, prefix: str, scopes: dict[str, list[ast.AST]]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scopes.setdefault(prefix + child.name, []).append(child)
            inner = f"{prefix}{child.name}."
        if not isinstance(child, ast.expr):
            _collect(child, inner, scopes)


def _piece(source: str) -> Piece:
    """Returns an expression or one statement or more; a statement that is an expression counts as one."""
    body = ast.parse(textwrap.dedent(source).strip()).body
    if not body:
        raise SyntaxError("there is none")
    return [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Expr) else list(body)


def _occurrences(scope: ast.AST, wanted: Piece) -> list[Piece]:
    """Returns each expression, or run of statements, whose tree is the wanted one."""
    found = []
    dumps = [ast.dump(node) for node in wanted]
    for node in ast.walk(scope):
        if isinstance(wanted[0], ast.expr):
            runs = [[node]]
        else:
            bodies = [value for _, value in ast.iter_fields(node) if isinstance(value, list)]
            runs = [body[i : i + len(wanted)] for body in bodies for i in range(len(body) - len(wanted) + 1)]
        found += [run for run in runs if type(run[0]) is type(wanted[0]) and [*map(ast.dump, run)] == dumps]
    return found


def _near_misses(modules: list[Module], at: str, wanted: Piece) -> str:
    """Returns what is like the piece in the place named; without such a place, the names like it."""
    scopes = [scope for module in modules for scope in module.named(at)]
    if scopes:
        lines = {line.strip() for scope in scopes for line in ast.unparse(scope).splitlines()}
        first_line = ast.unparse(wanted[0]).splitlines()[0]
        return f"like it: {difflib.get_close_matches(first_line, lines, cutoff=0.5)}"
    names = {known for module in modules for known in module.scopes}
    holders = [
        f"{module.name}:{known}"
        for module in modules
        for known, scopes in module.scopes.items()
        if any(_occurrences(scope, wanted) for scope in scopes)
    ]
    inmost = [
        holder for holder in holders if not any(inner != holder and inner.startswith(holder) for inner in holders)
    ]
    like = difflib.get_close_matches(at.rpartition(":")[2], names)
    return f"no {at}; names like it: {like}; the piece stands in: {inmost}"


def _spliced(text: str, old: Piece, new: Piece) -> str:
    """Writes nodes in the place of others. Blank lines make up for the lines that they are fewer."""
    encoded = text.encode()
    lines = encoded.splitlines(keepends=True)
    first_line = min(node.lineno for node in (old[0], *getattr(old[0], "decorator_list", ())))
    begin = sum(map(len, lines[: first_line - 1])) + old[0].col_offset
    end = sum(map(len, lines[: old[-1].end_lineno - 1])) + old[-1].end_col_offset
    source = "\n".join(map(ast.unparse, new))
    if isinstance(old[0], ast.If) and encoded.startswith(b"elif", begin):
        source = "else:\n" + textwrap.indent(source, "    ")
    gap = "\n" * (encoded.count(b"\n", begin, end) - source.count("\n"))
    if isinstance(old[0], ast.expr):
        source = f"({source}{gap})"
    else:
        source = textwrap.indent(source, " " * old[0].col_offset).lstrip() + gap
    return (encoded[:begin] + source.encode() + encoded[end:]).decode()

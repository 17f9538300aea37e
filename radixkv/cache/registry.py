"""Classes that are found because their file lies in a folder: eviction policies, placements, retentions."""

from collections.abc import Iterable
from importlib import import_module
from inspect import getmembers, isclass
from pkgutil import iter_modules
from typing import Any


def find_classes(base: Any, package: str, folders: Iterable[str]) -> dict[str, Any]:
    """Returns the subclass of `base` of each file of a package, by its `name`.

    Args:
        base: has a class attribute `name`.
        package: its name.
        folders: its paths.

    Raises:
        ValueError: a file does not hold exactly one, or one of a name that is taken.
    """
    found: dict[str, Any] = {}
    taken = {base.name}
    for file in iter_modules(folders):
        module = import_module(f"{package}.{file.name}")
        here: list[Any] = [
            each
            for _, each in getmembers(module, isclass)
            if issubclass(each, base) and each.__module__ == module.__name__
        ]
        if len(here) != 1:
            raise ValueError(f"{module.__name__}: expected one subclass of {base.__name__}, got {len(here)}")
        (one,) = here
        if one.name in found or one.name in taken:
            raise ValueError(f"{module.__name__}: expected a name that is not taken, got {one.name!r}")
        found[one.name] = one
    return found

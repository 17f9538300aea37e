"""Real text that every Python carries: its language reference (as `help()` shows it) and its built-ins' docstrings.

Deterministic for one Python version. Nothing is downloaded, no source file is needed.
"""

import inspect
import io
import itertools
import math
import operator
import time
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal

# Types and modules that stay as they are; into `sys` and `builtins` test runners and shells put their own hooks.
_TYPES = (str, bytes, list, dict, set, int, float, memoryview, deque, OrderedDict, date, datetime, timedelta, Decimal)
_OWNERS = (*_TYPES, io.StringIO, io.BufferedReader, io.TextIOWrapper, itertools, math, operator, time)
_MIN_DOCUMENT_CHARS, _MAX_DOCUMENT_CHARS = 3_000, 25_000
_MIN_ENTRY_CHARS, _MAX_ENTRY_CHARS = 40, 1_200


@dataclass(frozen=True, slots=True)
class Entry:
    """A function and what its docstring says: owner "str", name "str.split"."""

    owner: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class PythonDocs:
    """The corpus.

    Attributes:
        documents: (title, text) of 3,000 to 25,000 characters each, by title.
        entries: docstrings, by owner, then name.
    """

    documents: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]


def load_python_docs() -> PythonDocs:
    """Collects the corpus; about half a million characters.

    Warns (RuntimeWarning) where an installation comes without `pydoc_data`; documents are then made of docstrings.

    Raises:
        ValueError: this Python was built without docstrings.

    Cost: 20 ms.
    """
    entries = tuple(entry for owner in _OWNERS for entry in _entries(owner))
    if not entries:
        raise ValueError("workload: 'embedded' is made of docstrings, and this Python was built without them")
    topics = _topics()
    if not topics:
        warnings.warn(
            "this Python lacks pydoc_data: the embedded workload has fewer documents, made of docstrings",
            RuntimeWarning,
            stacklevel=2,
        )
        for owner in dict.fromkeys(entry.owner for entry in entries):
            text = "\n\n".join(f"{e.name}\n\n{e.text}" for e in entries if e.owner == owner)
            topics[owner] = text
    documents = tuple(
        (title, _whole_paragraphs(text)) for title, text in sorted(topics.items()) if len(text) >= _MIN_DOCUMENT_CHARS
    )
    return PythonDocs(documents, entries)


def paragraphs(text: str) -> list[str]:
    """Returns a document's paragraphs of some length, white space as it was."""
    return [part for part in text.split("\n\n") if len(part) >= 40]


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return dict(topics)


def _whole_paragraphs(text: str) -> str:
    if len(text) <= _MAX_DOCUMENT_CHARS:
        return text
    end = text.rfind("\n\n", 0, _MAX_DOCUMENT_CHARS)
    return text[: end if end > 0 else _MAX_DOCUMENT_CHARS]


def _entries(owner: object) -> list[Entry]:
    owner_name = getattr(owner, "__name__", "")
    found = []
    for name in sorted(vars(owner)):
        member = getattr(owner, name)
        if name.startswith("_") or not callable(member):
            continue
        text = inspect.getdoc(member) or ""
        if len(text) >= _MIN_ENTRY_CHARS:
            found.append(Entry(owner_name, f"{owner_name}.{name}", text[:_MAX_ENTRY_CHARS]))
    return found

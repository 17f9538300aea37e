"""Reading files that may be damaged: any error of a parser becomes a ValueError that names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns any error in the block into a ValueError that begins with the path. Memory and interrupts pass through."""
    try:
        yield
    except MemoryError:
        raise
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # parsers of bytes raise what they like: lookups, overflows, errors of their own
        raise ValueError(f"{path}: can't be read ({type(error).__name__}: {error})") from error


def json_object(path: Path) -> dict[str, Any]:
    """Returns a JSON file's object. Raises ValueError for anything else, by the file's name."""
    with reading(path):
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {type(values).__name__}")
        return values

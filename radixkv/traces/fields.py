"""Fields: a JSON object of a record that remembers what was read of it. What is left is what its reader dropped.

A reader takes what it understands with `get` and `inside`; `radixkv.traces.trace` asks for the rest with `unread`
when the record was understood, and says it aloud.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from radixkv.traces.problems import BadRecord
from radixkv.traces.values import kind, shown

_INDEX = re.compile(r"\[\d+\]")


class Fields:
    """A decoded JSON object.

    Attributes:
        value: it.
        name: what errors call it, such as `messages[3]`; empty for the record itself.
    """

    __slots__ = ("_dropped", "_ignored", "_inside", "_read", "name", "value")

    def __init__(
        self, value: Any, name: str = "", ignored: frozenset[str] = frozenset(), what: str = "a JSON object"
    ) -> None:
        """Raises BadRecord if `value` is no object.

        Args:
            ignored: keys that change no prompt: they may stay unread.
            what: the object, for the error.
        """
        if not isinstance(value, dict):
            raise BadRecord(f"{name}: expected {what}, got {kind(value)}".removeprefix(": "))
        self.value, self.name, self._ignored = value, name, ignored
        self._read: set[str] = set()
        self._inside: list[Fields] = []
        self._dropped: list[tuple[str, Any]] = []

    def __contains__(self, key: str) -> bool:
        """Whether there is such a key and it holds something; does not read it."""
        return self.value.get(key) is not None

    def get(self, key: str) -> Any:
        """Reads a key with all that is inside it. None where it is absent."""
        self._read.add(key)
        return self.value.get(key)

    def inside(self, key: str, ignored: frozenset[str], at: int | None = None, what: str = "a JSON object") -> "Fields":
        """Reads the object under a key, or of the list there the one at a place: what is read of it, it remembers.

        Raises:
            BadRecord: it is no object.
        """
        value = self.get(key)
        name = f"{self.path(key)}[{at}]" if at is not None else self.path(key)
        found = Fields(value if at is None else value[at], name, ignored, what)
        self._inside.append(found)
        return found

    def drop(self, key: str, value: Any) -> None:
        """Says of a part of a list that it is not read."""
        self._dropped.append((key, value))

    def path(self, key: str) -> str:
        """What errors call a key of this object."""
        return f"{self.name}.{key}".removeprefix(".")

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yields the keys that were neither read nor ignored, with their values; those that hold nothing aside.

        A key's name says where it stands, without the numbers of lists: `messages[].mood`.
        """
        rest = self.value.keys() - self._read - self._ignored
        left = [(key, value) for key, value in self.value.items() if key in rest] if rest else []
        for key, value in (*left, *self._dropped):
            if value not in (None, "", [], {}):
                yield _INDEX.sub("[]", self.path(key if key.isascii() and key.isprintable() else shown(key))), value
        for inside in self._inside:
            yield from inside.unread()


def num_chars(value: Any) -> int:
    """Returns how many characters a decoded JSON value has as JSON."""
    return len(json.dumps(value, ensure_ascii=False))

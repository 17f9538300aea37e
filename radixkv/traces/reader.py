"""What every format provides: how it is recognised, and a reader: a record in, an item out that yields its requests.

A reader never sees files, order, or where an error is; `radixkv.traces.trace` sees to those, and to the keys that a
reader did not read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from radixkv.traces.chat import ChatEncoder
from radixkv.traces.fields import Fields
from radixkv.traces.request import TraceRequest


class Item(Protocol):
    """A record that was understood."""

    @property
    def num_requests(self) -> int:
        """0 or more."""

    @property
    def timestamps_s(self) -> Sequence[float] | None:
        """One per request, or None where the record has none."""

    @property
    def num_bytes(self) -> int:
        """About what keeping the item in memory costs, encoded tokens included."""

    def request(self, turn: int) -> TraceRequest:
        """Returns request `turn` in 0..num_requests."""


class Reader(Protocol):
    """Turns records of one format into items."""

    @property
    def ignored(self) -> frozenset[str]:
        """Keys of a record that change no prompt: they may stay unread."""

    def parse(self, record: Fields, number: int, ordinal: int) -> Item:
        """Checks a record.

        Args:
            record: decoded JSON, or a CSV row by the names of its columns; what is not read of it is said aloud.
            number: line or element in its file, from 1.
            ordinal: a number that no other record of the trace has.

        Raises:
            BadRecord: saying which field is wrong, and how.
        """


@dataclass(frozen=True, slots=True)
class Format:
    """A format whose records are JSON objects.

    Attributes:
        name: what a trace says it was read as.
        recognises: whether a record is of it, from its keys; formats are asked in the order of `formats.py`.
        make: its reader.
        has_text: its tokens are a tokenizer's.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    make: Callable[[ChatEncoder], Reader]
    has_text: bool = False

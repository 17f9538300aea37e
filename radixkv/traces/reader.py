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


class RowReader(Reader, Protocol):
    """Turns rows of text below a header into items."""

    def decode(self, line: str) -> Mapping[str, Any]:
        """Returns a row by the names of its columns. Raises BadRecord where it is none."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A format whose records are JSON objects.

    Attributes:
        name: what a trace says it was read as.
        keys: some of which a record of it has; for the message about a record that is of no format.
        recognises: whether a record is of it, from its keys.
        make: its reader.
        tokens: what its tokens are, as prints name it; None: a tokenizer's, of its text.
        caveat: what is to be kept in mind of hits in such a trace.
        sharing_known: whether it tells what requests share; where it does not, hits mean nothing.
        rank: a format of a lower one is asked first whether a record is its own.
    """

    name: str
    keys: tuple[str, ...]
    recognises: Callable[[Mapping[str, Any]], bool]
    make: Callable[[ChatEncoder], Reader]
    tokens: str | None = None
    caveat: str = ""
    sharing_known: bool = True
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows of text below a header that names the columns.

    Attributes:
        name, tokens, caveat, sharing_known: as in `JsonFormat`.
        column: which its header has; for the message about a record that is of no format.
        recognises: whether a line is its header.
        make: its reader, from the header. Raises BadRecord where a column is missing.
    """

    name: str
    column: str
    recognises: Callable[[str], bool]
    make: Callable[[str], RowReader]
    tokens: str | None = None
    caveat: str = ""
    sharing_known: bool = True


Format = JsonFormat | RowFormat

"""Reader of Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, arrivals and lengths alone.

What such requests share is unknown, so here they share nothing: hits are 0 and mean nothing; arrivals and lengths do.
"""

from collections.abc import Sequence
from typing import Any

from radixkv.traces.fields import Fields
from radixkv.traces.fresh_tokens import unshared_tokens
from radixkv.traces.problems import BadRecord
from radixkv.traces.reader import RowFormat
from radixkv.traces.request import TraceRequest
from radixkv.traces.values import length_of, seconds_of, shown

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_header(line: str) -> bool:
    """Tells whether a line names the columns of such a trace, in any order."""
    return set(_COLUMNS) <= set(_fields(line))


class LengthReader:
    """Rows of a CSV file after its header."""

    ignored: frozenset[str] = frozenset()

    def __init__(self, header: str) -> None:
        """Raises BadRecord if `header` lacks a column."""
        names = _fields(header)
        missing = [name for name in _COLUMNS if name not in names]
        if missing:
            raise BadRecord(f"expected a header with {', '.join(_COLUMNS)}, got {shown(header)}")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise BadRecord(f"expected a header with a name for each column, got {shown(twice[0])} twice")
        self._names = names

    def decode(self, line: str) -> dict[str, Any]:
        """Returns a row by the names of its columns. Raises BadRecord if it has more or fewer."""
        fields = _fields(line)
        if len(fields) != len(self._names):
            raise BadRecord(f"expected {len(self._names)} columns, got {len(fields)}")
        return dict(zip(self._names, fields, strict=True))

    def parse(self, record: Fields, number: int, ordinal: int) -> "LengthRequest":
        time, num_input, num_output = map(record.get, _COLUMNS)
        timestamp_s = seconds_of(time, _COLUMNS[0])
        assert timestamp_s is not None
        return LengthRequest(
            length_of(_integer(num_input), _COLUMNS[1]),
            length_of(_integer(num_output), _COLUMNS[2]),
            timestamp_s,
            ordinal,
            number,
        )


class LengthRequest:
    """One row."""

    def __init__(self, num_input: int, num_output: int, timestamp_s: float, ordinal: int, number: int) -> None:
        self._num_input, self._num_output = num_input, num_output
        self._ordinal, self._number = ordinal, number
        self.num_requests = 1
        self.timestamps_s = (timestamp_s,)
        self.num_bytes = 500

    def request(self, turn: int) -> TraceRequest:
        return TraceRequest(
            f"request{self._number}",
            unshared_tokens(self._ordinal, self._num_input),
            unshared_tokens(self._ordinal, self._num_output, start=self._num_input),
            self.timestamps_s[0],
        )


def _fields(line: str) -> Sequence[str]:
    return [field.strip().strip('"') for field in line.split(",")]


def _integer(text: str) -> int | str:
    """Returns the number that a field spells, or the field, for the error to show."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


AZURE = RowFormat(
    "azure",
    "ContextTokens",
    is_header,
    LengthReader,
    tokens="lengths",
    caveat="a trace of lengths does not tell what is shared: hits mean nothing",
    sharing_known=False,
)

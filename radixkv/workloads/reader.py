"""What every format's reader provides: a decoded record in, an item out that yields its requests by turn.

A reader never sees files, order, or where an error is; `radixkv.workloads.trace` sees to those.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from radixkv.workloads.request import TraceRequest


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
        """Returns request `turn` in 0..num_requests. Raises BadRecord if its text can't be encoded to any token."""


class Reader(Protocol):
    """Turns decoded records of one format into items."""

    def parse(self, value: Any, number: int, ordinal: int) -> Item:
        """Checks a record.

        Args:
            value: decoded JSON, or the text of a CSV row.
            number: line or element in its file, from 1.
            ordinal: a number that no other record of the trace has.

        Raises:
            BadRecord: saying which field is wrong, and how.
        """

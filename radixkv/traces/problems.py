"""What can be wrong with a trace, and the counts of an iteration that went on all the same."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_MAX_EXAMPLES = 5
# A trace whose keys are data must not fill memory with their names.
_MAX_NAMES = 100
OTHER_KEYS = "(other keys)"


class TraceError(ValueError):
    """A trace, or one line of it, can't be read.

    Attributes:
        path: the file.
        where: "line 12" or "element 12" (from 1); empty where the file as a whole is meant.
        reason: what is wrong, without file and line.
    """

    def __init__(self, path: Path | str, where: str, reason: str) -> None:
        self.path, self.where, self.reason = str(path), where, reason
        super().__init__(f"{path}: {where}: {reason}" if where else f"{path}: {reason}")


class BadRecord(ValueError):
    """One record breaks its format; the caller, which knows file and line, turns it into a TraceError."""


@dataclass(slots=True)
class UnreadKey:
    """A key that no reader understands.

    Attributes:
        num_times: how often it came.
        num_chars: of its values as JSON; num_record_chars: of the records that have it.
    """

    num_times: int = 0
    num_chars: int = 0
    num_record_chars: int = 0

    @property
    def share(self) -> float:
        """Of its records' characters."""
        return self.num_chars / self.num_record_chars if self.num_record_chars else 0.0


@dataclass(slots=True)
class Odd:
    """How many requests are odd in one way, and where the first of them is."""

    num_requests: int = 0
    first: str = ""

    def add(self, where: str, num_requests: int) -> None:
        self.first = self.first or where
        self.num_requests += num_requests


@dataclass(slots=True)
class ReadCounts:
    """What one iteration of a trace met so far; `remarks` says it in words.

    Attributes:
        num_requests: requests yielded.
        num_bad: records skipped because they can't be read (`skip_bad=True` only).
        num_without_output: conversations without an assistant message: they yield no request.
        num_empty: requests of no tokens among those yielded.
        untimed: requests without a timestamp where others have one.
        unordered: requests with a timestamp that was not looked at, because none of the first have one.
        examples: the errors of the first few skipped records.
        unread: by where they stand, the keys that were not understood, such as `messages[].mood`.
    """

    num_requests: int = 0
    num_bad: int = 0
    num_without_output: int = 0
    num_empty: int = 0
    untimed: Odd = field(default_factory=Odd)
    unordered: Odd = field(default_factory=Odd)
    examples: list[TraceError] = field(default_factory=list)
    unread: dict[str, UnreadKey] = field(default_factory=dict)

    def add_bad(self, error: TraceError) -> None:
        """Counts a skipped record and keeps its error if it is among the first."""
        self.num_bad += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(error)

    def add_unread(self, found: Iterable[tuple[str, int]], num_record_chars: int) -> None:
        """Counts the unread keys of one record, with the characters of each."""
        names = set()
        for name, num_chars in found:
            if name not in self.unread and len(self.unread) >= _MAX_NAMES:
                name = OTHER_KEYS
            key = self.unread.setdefault(name, UnreadKey())
            key.num_times += 1
            key.num_chars += num_chars
            names.add(name)
        for name in names:
            self.unread[name].num_record_chars += num_record_chars

    def remarks(self) -> list[str]:
        """Returns what a reader of results must know of the requests, a line each."""
        lines = []
        if self.num_bad:
            lines.append(f"{_are(self.num_bad, 'record')} not readable and left out, such as")
            lines += [f"  {error}" for error in self.examples]
        if self.num_without_output:
            lines.append(f"{_are(self.num_without_output, 'conversation')} without an answer and left out")
        if self.num_empty:
            lines.append(f"{_are(self.num_empty, 'request')} empty and counted as of no tokens")
        if self.untimed.num_requests:
            lines.append(
                f"{_are(self.untimed.num_requests, 'request')} without a timestamp, the first at {self.untimed.first}: "
                "where others have one, each keeps its place behind the record before it"
            )
        if self.unordered.num_requests:
            lines.append(
                f"{_are(self.unordered.num_requests, 'request')} in the order of the file in spite of a timestamp, the "
                f"first at {self.unordered.first}: none of the file's first requests has one"
            )
        for name, key in sorted(self.unread.items(), key=lambda item: -item[1].num_chars):
            times = f"{key.num_times:,} time" + "s" * (key.num_times != 1)
            lines.append(f"{name} is not understood and was not read: {times}, {key.share:.1%} of its records' text")
        return lines


def _are(count: int, noun: str) -> str:
    return f"{count:,} {noun} is" if count == 1 else f"{count:,} {noun}s are"

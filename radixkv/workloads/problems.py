"""What can be wrong with a trace, and the counts of an iteration that went on all the same."""

from dataclasses import dataclass, field
from pathlib import Path

_MAX_EXAMPLES = 5


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
    """One record breaks its format; who knows file and line turns it into a TraceError."""


@dataclass(slots=True)
class ReadCounts:
    """What one iteration of a trace met so far.

    Attributes:
        num_requests: requests yielded.
        num_bad: records skipped because they can't be read (`skip_bad=True` only).
        num_without_output: conversations without an assistant message: they yield no request.
        examples: the errors of the first few skipped records.
    """

    num_requests: int = 0
    num_bad: int = 0
    num_without_output: int = 0
    examples: list[TraceError] = field(default_factory=list)

    def add_bad(self, error: TraceError) -> None:
        """Counts a skipped record and keeps its error if it is among the first."""
        self.num_bad += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(error)

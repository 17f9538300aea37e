"""What a placement declares: at which positions of a request a checkpoint is to be made."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Visit(NamedTuple):
    """A request as a placement sees it.

    Attributes:
        num_tokens: of its prompt.
        start: position of the checkpoint that it goes on from; 0: none.
        num_shared: leading tokens of the prompt that an earlier request has too.
        fork: where earlier requests first part after `start`, at the border of a block; 0: nowhere.
        turns: positions where turns of the chat end, ascending.
        named: positions that the caller asks for.
    """

    num_tokens: int
    start: int
    num_shared: int
    fork: int = 0
    turns: tuple[int, ...] = ()
    named: tuple[int, ...] = ()


class Placement:
    """Positions at which a request leaves checkpoints. Subclasses say which.

    Attributes:
        name: what it is called in options and reports.
        keeps_output: whether the end of the output is one.
    """

    name = "none"
    keeps_output = False

    def positions(self, visit: Visit) -> Iterable[int]:
        """Returns positions; those outside start + 1 .. num_tokens are left out."""
        return ()


@dataclass(frozen=True)
class Placements:
    """Several placements; the first that asks for a position gives its reason.

    Attributes:
        parts: the placements.
    """

    parts: tuple[Placement, ...]

    @property
    def keeps_output(self) -> bool:
        """Whether the end of the output is a position."""
        return any(part.keeps_output for part in self.parts)

    def positions(self, visit: Visit) -> dict[int, str]:
        """Returns the names of the placements by the positions that they ask for, ascending."""
        found: dict[int, str] = {}
        start, end = visit.start, visit.num_tokens
        for part in self.parts:
            for position in part.positions(visit):
                if start < position <= end and position not in found:
                    found[position] = part.name
        return dict(sorted(found.items())) if len(found) > 1 else found

"""What was found for the plan before, kept with all that it rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

T = TypeVar("T")


class Memo:
    """The last result of each part of planning. An empty one makes a plan from scratch."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, object]] = {}

    def keep(self, part: str, basis: tuple[object, ...], make: Callable[[], T]) -> T:
        """The part's last result where it rested on equal arrays and objects, else what `make` returns. O(their bytes).

        The result must be a function of `basis` and of the planner's configuration alone, and must not be written to.
        """
        data = [(of.shape, of.tobytes()) if isinstance(of, np.ndarray) else of for of in basis]
        known = self._known.get(part)
        if known is not None and known[0] == data:
            return cast("T", known[1])
        result = make()
        self._known[part] = data, result
        return result

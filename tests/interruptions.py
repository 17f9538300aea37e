"""Raises KeyboardInterrupt at the n-th line that is run in some files: for tests that nothing half done is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted_at(line: int, files: tuple[str, ...], call: Callable[[], Any]) -> bool:
    """Calls, and raises before the `line`-th line (from 1) of files that end so; whether the call got that far."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False

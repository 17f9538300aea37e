"""Raises KeyboardInterrupt at the n-th line that is run in some modules: for tests that nothing half done is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def interrupted_at(line: int, modules: tuple[ModuleType, ...], call: Callable[[], Any]) -> bool:
    """Calls, and raises before the `line`-th line (from 1) of these modules; whether the call got that far."""
    files = {module.__file__ for module in modules}
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
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

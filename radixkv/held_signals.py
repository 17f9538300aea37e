"""Signals wait for a safe point: a Ctrl-C never comes between two lines that belong together."""

from __future__ import annotations

# Twice a step: the functions of `signal` look every handler up in an enum in vain, which takes twenty times as long.
import _signal
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Those that people and supervisors send, and timers of test runners. KILL and STOP can't be held.
HELD = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1") if hasattr(signal, name)
)
Handler = Callable[[int, FrameType | None], Any]


class HeldSignals:
    """Made by `held_signals`: holds what arrives until it is let through."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._waiting: list[int] = []
        self._is_open = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._handlers[number](number, frame)
        else:
            self._waiting.append(number)

    def _take_over(self) -> None:
        # Python runs handlers in the main thread, between any two of its lines; other threads are not interrupted.
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in HELD:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._arrived)

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._arrived:  # another one was set in the meantime
                _signal.signal(number, handler)
        self._deliver()

    def _deliver(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            self._handlers[number](number, None)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Within, signals come as they arrive, those that waited first: for long calls that may be left at any line."""
        self._is_open = True
        try:
            self._deliver()
            yield
        finally:
            self._is_open = False


@contextmanager
def held_signals() -> Iterator[HeldSignals]:
    """Holds SIGINT and its like until the block ends, where Python code handles them; may be nested.

    Only the main thread has signals to hold; in any other this does nothing. Cost: some 5 us.
    """
    held = HeldSignals()
    try:
        held._take_over()
        yield held
    finally:
        held._give_back()

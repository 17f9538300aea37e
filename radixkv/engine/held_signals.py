"""Signals wait for a safe point: a Ctrl-C never comes between two lines that belong together."""

from __future__ import annotations

# Twice a step: the functions of `signal` look every handler up in an enum in vain, which takes twenty times as long.
import _signal
import signal
import sys
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
    """A block in which SIGINT and its like wait, where Python code handles them; they come when it ends. May be nested.

        with HeldSignals() as signals:
            ...  # no signal comes here
            with signals.let_through():
                ...  # here they come as ever

    Python runs handlers in the main thread alone, so in any other thread this does nothing. Cost: some 5 us.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._waiting: list[int] = []
        self._is_open = False
        self._holder: FrameType | None = None

    def __enter__(self) -> HeldSignals:
        if threading.get_ident() == threading.main_thread().ident:
            self._holder = sys._getframe(1)
            try:
                for number in HELD:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _signal.signal(number, self._arrived)
            except BaseException:
                self._give_back()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._handlers[number](number, frame)
            return
        self._waiting.append(number)
        while frame is not None and frame is not self._holder:
            frame = frame.f_back
        if frame is None:  # the block was left without its end being run: a debugger's doing
            self._give_back()

    def _give_back(self) -> None:
        self._holder = None
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._arrived:  # else another one was set in the meantime
                _signal.signal(number, handler)
        self._deliver()

    def _deliver(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            self._handlers[number](number, sys._getframe())

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Within, signals come as they arrive, those that waited first: for long calls that may be left at any line."""
        self._is_open = True
        try:
            self._deliver()
            yield
        finally:
            self._is_open = False

"""Ctrl-C and SIGTERM, deferred to points at which a command may end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Self

from metaq.cli import render

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
EXIT_SIGNAL: Final = 128
"""Exit code of a process ended by a signal, minus the number of the signal."""


class Interrupts:
    """Defers the first signal to the next `pause`; a second one is raised at once.

    An exception during a send would leave the outcome of lines unknown. Ctrl-C is
    raised as KeyboardInterrupt, SIGTERM as SystemExit. For the main thread; does
    nothing in others.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._may_end = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            before = signal.getsignal(number)
            # Do not replace another handler, or SIG_IGN.
            if before in {signal.default_int_handler, signal.SIG_DFL}:
                self._before[number] = before
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # the earlier one
        self._before.clear()

    @property
    def is_pending(self) -> bool:
        """Whether a signal has arrived."""
        return self._first is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let signals end the block; raise one that has arrived before."""
        self._may_end = True
        try:
            if self._first is not None:
                _raise(self._first)
            yield
        finally:
            self._may_end = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        is_second = self._first is not None
        self._first = number
        if number == signal.SIGINT:
            render.leave_echo()
        if self._may_end or is_second:
            _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_SIGNAL + number)

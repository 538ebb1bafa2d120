"""Signs of a disk that is slow, or hangs: the same for data directories and journals.

A sync that is slow is told when it ends. One that does not end is noticed by a question
to the thread that waits for it: one at a time, so that nothing piles up.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

SILENCE_S_MAX: Final = 30.0
"""A thread that takes longer to answer waits for a disk that hangs: a group of the
largest size on a slow disk takes less."""

_log = logging.getLogger(__name__)


class SilenceWatch:
    """Notices that the thread of a directory does not answer. Owner: the loop."""

    def __init__(self, subject: str, path: Path) -> None:
        """Watch the thread of a directory.

        Args:
            subject: of the lines in the log.
            path: the directory.
        """
        self.is_silent = False
        """The disk hangs: the thread has not answered for too long."""
        self._subject = subject
        self._path = path
        self._asked_s: float | None = None
        """Since when a question has been under way; None: none is."""
        self._answered_s = float("-inf")

    def tick(self, now_s: float, interval_s: float, ask: Callable[[], None]) -> None:
        """Ask when the last answer is older than `interval_s`, unless one is due.

        Args:
            now_s: the monotonic clock.
            interval_s: seconds from an answer to the next question.
            ask: has the thread call `on_answer` on the loop's thread.
        """
        if self._asked_s is None:
            if now_s - self._answered_s >= interval_s:
                self._asked_s = now_s
                ask()
        elif not self.is_silent and now_s - self._asked_s > SILENCE_S_MAX:
            self.is_silent = True
            _log.error("%s does not answer: directory=%s", self._subject, self._path)

    def on_answer(self, now_s: float) -> None:
        """Take note that the thread is not waiting; also unasked."""
        self._answered_s, self._asked_s = now_s, None
        if self.is_silent:
            self.is_silent = False
            _log.warning("%s answers again: directory=%s", self._subject, self._path)


def tell_slow_sync(path: Path, took_s: float, slow_sync_ms: int) -> None:
    """Warn of a sync that took longer than `slow_sync_ms`."""
    if took_s * 1000 > slow_sync_ms:
        _log.warning("slow sync: file=%s duration_ms=%d", path, round(took_s * 1000))

"""Log of failing handlers: the first failure of a kind with its traceback.

A kind is the type of the error and the line that raised it. A handler that fails with
every message would else bury the log; repetitions are counted (`failure_count`)
and told at DEBUG.
"""

import logging
import traceback
from typing import Final

KINDS_MAX: Final = 100
"""Kinds that are remembered; errors of code that is made anew all the time are many."""


class FailureLog:
    """The failures of one `run`. Owner: its handling; on the loop."""

    def __init__(self, log: logging.Logger) -> None:
        """Know no kind yet; write to `log`."""
        self._log = log
        self._kinds: set[tuple[type[BaseException], str, int]] = set()

    def tell(self, text: str, error: BaseException, *, is_last: bool) -> None:
        """Write one line, and the traceback where it is the first of its kind.

        Args:
            text: the line.
            error: the handler's exception.
            is_last: the message is given up: never below WARNING.
        """
        kind = _kind_of(error)
        is_new = kind not in self._kinds and len(self._kinds) < KINDS_MAX
        if is_new:
            self._kinds.add(kind)
        level = logging.WARNING if is_new or is_last else logging.DEBUG
        self._log.log(level, "%s", text, exc_info=error if is_new else None)


def _kind_of(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Return the type of an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    if not frames:
        return type(error), "", 0
    return type(error), frames[0].filename, frames[0].lineno or 0

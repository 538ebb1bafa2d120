"""Log lines of a command, on standard error: few by default, more with `-v`.

A command prints its outcome as one sentence (`render.say`). Log lines explain it; with
`-v` they begin with time, level and name of the logger, so that they are not mistaken
for that sentence.

    default          errors, and warnings of the command itself, as sentences
    -v, a broker     from INFO on; some third-party libraries from WARNING on
    -vv              everything
"""

import logging
from typing import Final

import click

from metaq.cli.render import SPEAKER, printable_lines
from metaq.model import printable

FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
OWN: Final = "metaq.cli."
RAISED: Final = "metaq.client.consume.consumer_life"
"""Logger whose errors are raised too, so that the command prints them itself."""
CHATTY: Final = ("apscheduler", "asyncio", "py4j")
"""Third-party loggers that log every job and packet at INFO."""


class _Lines(logging.Handler):
    """Handler that writes to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            click.echo(printable_lines(self.format(record)), err=True)
        except BrokenPipeError:
            # Standard error is closed; the command continues.
            return
        except Exception:  # noqa: BLE001  # as handlers of `logging` do
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Keeps messages on one line by escaping; tracebacks have more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # its name
        """Return the line of a record, its message escaped."""
        record.message = printable(record.message)
        return super().formatMessage(record)


SHOWN: Final = _Lines()
SHOWN.setFormatter(_Formatter(f"{SPEAKER}%(message)s"))


def _is_shown_always(record: logging.LogRecord) -> bool:
    if record.name.startswith(OWN):
        return record.levelno >= logging.WARNING
    return record.levelno >= logging.ERROR and record.name != RAISED


def be_quiet() -> None:
    """Show errors, and the command's own warnings; called for every command."""
    if SHOWN not in logging.getLogger().handlers:
        logging.getLogger().addHandler(SHOWN)
        SHOWN.addFilter(_is_shown_always)


def show(level: int) -> None:
    """Show records from a level on; of `CHATTY` from WARNING on, unless DEBUG."""
    be_quiet()
    SHOWN.removeFilter(_is_shown_always)
    SHOWN.setFormatter(_Formatter(FORMAT))
    logging.getLogger().setLevel(level)
    for name in CHATTY:
        quiet = level >= logging.INFO
        logging.getLogger(name).setLevel(logging.WARNING if quiet else level)

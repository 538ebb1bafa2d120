"""Log lines of a command, on standard error: few by default, more with `-v`.

A command says in one sentence how it ended (`render.say`). The client's log explains
why: it has time, level and the name of the logger before the text, so that it is not
taken for the command's own sentence.

    default          errors, and warnings of the command itself, as sentences
    -v, a broker     from INFO on; other people's libraries from WARNING on
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
"""Logger whose errors end the command as well, which prints them as its sentence."""
CHATTY: Final = ("apscheduler", "asyncio", "py4j")
"""Loggers that log every job and packet at INFO."""


class _Lines(logging.Handler):
    """Writes to the present standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            click.echo(printable_lines(self.format(record)), err=True)
        except BrokenPipeError:
            # Standard error is closed, and the command goes on.
            return
        except Exception:  # noqa: BLE001  # how handlers treat what they cannot write
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Keeps a message on one line, with any name in it; a traceback has more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # its name
        """Return the line of a record."""
        record.message = printable(record.message)
        return super().formatMessage(record)


SHOWN: Final = _Lines()
SHOWN.setFormatter(_Formatter(f"{SPEAKER}%(message)s"))


def _is_shown_always(record: logging.LogRecord) -> bool:
    if record.name.startswith(OWN):
        return record.levelno >= logging.WARNING
    return record.levelno >= logging.ERROR and record.name != RAISED


def be_quiet() -> None:
    """Show errors and warnings only; every command begins with it."""
    if SHOWN not in logging.getLogger().handlers:
        logging.getLogger().addHandler(SHOWN)
        SHOWN.addFilter(_is_shown_always)


def show(level: int) -> None:
    """Show everything from a level on; below INFO, of other people's libraries too."""
    be_quiet()
    SHOWN.removeFilter(_is_shown_always)
    SHOWN.setFormatter(_Formatter(FORMAT))
    logging.getLogger().setLevel(level)
    for name in CHATTY:
        quiet = level >= logging.INFO
        logging.getLogger(name).setLevel(logging.WARNING if quiet else level)

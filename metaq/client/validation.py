"""Numbers that users give: refused at the call where they mean nothing. Pure."""

import datetime as dt
import math
from typing import Final

from metaq.errors import ConfigError
from metaq.model import MAX_OFFSET, Millis

SECONDS_MAX: Final = 1_000_000_000
"""Longest time: three decades. Clocks of the system take some more, and no infinity."""

EPOCH: Final = dt.datetime.fromtimestamp(0, dt.UTC)
"""Zero of the times of messages."""

WHOLE_MAX: Final = 2**63 - 1

WIRE_BYTES_MAX: Final = 2**31 - 1
"""Largest size that a get can ask for: 32 bits, signed."""


def wrong_type(name: str, wanted: str, value: object) -> TypeError:
    """Return the error of an argument of another type than the wanted one."""
    return TypeError(
        f"{name}: expected {wanted}, got {type(value).__name__} {value!r:.80}"
    )


def check_seconds(name: str, value: object, *, may_be_zero: bool = True) -> None:
    """Refuse a value that is no time from 0 to SECONDS_MAX.

    Args:
        name: of the option or argument, for the error.
        value: what was given.
        may_be_zero: 0 is a time, too.

    Raises:
        TypeError: no number, or a boolean.
        ConfigError: not a number (NaN), or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number of seconds (int or float)", value)
    if not 0 <= value <= SECONDS_MAX or (value == 0 and not may_be_zero):
        low = "0" if may_be_zero else "more than 0"
        raise ConfigError(
            f"{name}: expected {low} to {SECONDS_MAX} seconds, got {_shown(value)}"
        )


def check_timeout(timeout: float | None) -> None:
    """Refuse a time-out that is neither None nor a time; see `check_seconds`.

    Raises:
        TypeError, ConfigError: it is neither.
    """
    if timeout is not None:
        check_seconds("timeout", timeout)


def check_whole(name: str, value: object, low: int, high: int = WHOLE_MAX) -> None:
    """Refuse a value that is no whole number from `low` to `high`.

    Raises:
        TypeError: no `int` (those of other libraries are none), or a boolean.
        ConfigError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "a whole number (int)", value)
    if not low <= value <= high:
        is_open = high == WHOLE_MAX and value < low
        upper = "or more" if is_open else f"to {high}"
        raise ConfigError(f"{name}: expected {low} {upper}, got {_shown(value)}")


def check_offset(name: str, value: object) -> None:
    """Refuse a value that is no offset.

    Raises:
        ConfigError: no whole number of 0 or more in 63 bits.
    """
    check_whole(name, value, 0, MAX_OFFSET)


def moment_ms(name: str, value: object) -> Millis:
    """Return a moment in ms since 1970, rounded up, and 0 for an earlier one.

    Args:
        name: of the argument, for the error.
        value: what was given.

    Raises:
        ConfigError: it has no time zone.
        TypeError: it is no `datetime`.
    """
    if not isinstance(value, dt.datetime):
        raise wrong_type(name, "a datetime with a time zone", value)
    if value.utcoffset() is None:
        raise ConfigError(
            f"{name}: expected a time with a time zone, got {value.isoformat()}"
            " without one"
        )
    return Millis(max(0, -((EPOCH - value) // dt.timedelta(milliseconds=1))))


def moment_of(ms: int) -> dt.datetime:
    """Return the moment so many ms after 1970, with the time zone UTC."""
    return EPOCH + dt.timedelta(milliseconds=ms)


def _shown(value: float) -> str:
    """Return a number for a sentence: int() of a user may have a million digits."""
    if isinstance(value, int) and not -WHOLE_MAX <= value <= WHOLE_MAX:
        digits = int(value.bit_length() * math.log10(2))
        return f"about {'-' if value < 0 else ''}10^{digits}"
    return repr(value)

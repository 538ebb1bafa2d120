"""Checks of numbers and times in arguments and options. Pure."""

import datetime as dt
import math
from typing import Final

from metaq.errors import ConfigError
from metaq.model import MAX_OFFSET, Millis

SECONDS_MAX: Final = 1_000_000_000
"""Maximum time in seconds, about three decades; system clocks accept no infinity."""

EPOCH: Final = dt.datetime.fromtimestamp(0, dt.UTC)
"""Start of the times of messages."""

WHOLE_MAX: Final = 2**63 - 1

WIRE_BYTES_MAX: Final = 2**31 - 1
"""Maximum size that a get can request: a signed number of 32 bits."""


def wrong_type(name: str, wanted: str, value: object) -> TypeError:
    """Return the error about an argument of a wrong type."""
    return TypeError(
        f"{name}: expected {wanted}, got {type(value).__name__} {value!r:.80}"
    )


def check_seconds(name: str, value: object, *, may_be_zero: bool = True) -> None:
    """Refuse a value that is not a number of seconds from 0 to SECONDS_MAX.

    Args:
        name: name of the option or argument, for the error.
        value: the value.
        may_be_zero: whether 0 is accepted.

    Raises:
        TypeError: not a number, or a boolean.
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
    """Refuse a time-out that is neither None nor valid seconds; see `check_seconds`.

    Raises:
        TypeError, ConfigError: it is neither.
    """
    if timeout is not None:
        check_seconds("timeout", timeout)


def check_whole(name: str, value: object, low: int, high: int = WHOLE_MAX) -> None:
    """Refuse a value that is not a whole number from `low` to `high`.

    Raises:
        TypeError: not an `int` (integers of other libraries are not), or a boolean.
        ConfigError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "a whole number (int)", value)
    if not low <= value <= high:
        is_open = high == WHOLE_MAX and value < low
        upper = "or more" if is_open else f"to {high}"
        raise ConfigError(f"{name}: expected {low} {upper}, got {_shown(value)}")


def check_offset(name: str, value: object) -> None:
    """Refuse a value that is not an offset.

    Raises:
        TypeError: not an `int`, or a boolean.
        ConfigError: negative, or more than 63 bits.
    """
    check_whole(name, value, 0, MAX_OFFSET)


def moment_ms(name: str, value: object) -> Millis:
    """Return a `datetime` in ms since 1970, rounded up; 0 for earlier ones.

    Args:
        name: name of the argument, for the error.
        value: the value.

    Raises:
        ConfigError: it has no time zone.
        TypeError: it is not a `datetime`.
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
    """Return the `datetime` at `ms` since 1970, in UTC."""
    return EPOCH + dt.timedelta(milliseconds=ms)


def _shown(value: float) -> str:
    """Return a number as text; one with too many digits is abbreviated."""
    if isinstance(value, int) and not -WHOLE_MAX <= value <= WHOLE_MAX:
        digits = int(value.bit_length() * math.log10(2))
        return f"about {'-' if value < 0 else ''}10^{digits}"
    return repr(value)

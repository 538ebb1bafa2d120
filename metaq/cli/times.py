"""Points in time as people write them, and as we print them."""

import datetime as dt
import re

from metaq.model import Millis

DIGITS_OF_MILLISECONDS = 12
"""A number of so many digits, or more, is in milliseconds."""


def parse_time(text: str) -> Millis:
    """Read ISO 8601, or a number of seconds (or, from 12 digits on, ms) since 1970.

    Args:
        text: `2026-01-31`, `2026-01-31T12:00`, `2026-01-31T12:00:00+01:00`, or a
            number; without a zone it is local time.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII):
        whole = text.partition(".")[0]
        is_ms = len(whole) >= DIGITS_OF_MILLISECONDS
        return Millis(int(whole) if is_ms else int(float(text) * 1000))
    try:
        # Python reads more than people write: digits without any sign among them.
        is_date = re.match(r"\d{4}-\d\d-\d\d", text, re.ASCII)
        moment = dt.datetime.fromisoformat(text if is_date else "")
        # A time without a zone is the user's local time.
        return Millis(int(moment.astimezone().timestamp() * 1000))
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(
            f"expected a time such as 2026-01-31T12:00 or 1769857200, got '{text}'"
        ) from error


def format_time(moment: Millis | None) -> str | None:
    """Return ISO 8601 in UTC with milliseconds; None for an unknown time."""
    if moment is None:
        return None
    try:
        text = dt.datetime.fromtimestamp(moment / 1000, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return text.isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""Expiry: a header says for how long a message is worth reading. Pure.

    expires-in      2000      milliseconds from the time in the message's id

A message of a Java broker, whose ids have no time, never expires; nor does one whose
header is no number, and a dead letter has no such header any more.
"""

from typing import Final

from metaq.model import HeaderPairs, MessageId, Millis, id_time

EXPIRES_IN: Final = "expires-in"

EXPIRY_MARK: Final = b"h.expires-in="
"""These bytes are in every record that may expire, and in some others."""

_DIGITS_MAX: Final = 15
"""Longer numbers are no times."""


def expiry_of(message_id: MessageId, headers: HeaderPairs) -> Millis | None:
    """Return when a message expires, ms since 1970; None: never."""
    for name, value in reversed(headers):
        if name == EXPIRES_IN:
            stamped_ms = id_time(message_id)
            is_time = value.isdigit() and len(value) <= _DIGITS_MAX
            if stamped_ms is None or not is_time:
                return None
            return Millis(stamped_ms + int(value))
    return None

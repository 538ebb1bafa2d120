"""Expiry: a header that limits the time for which a message is delivered. Pure.

    expires-in      2000      milliseconds from the time in the message's id

Messages of a Java broker, whose ids have no time, never expire, nor do messages whose
header is not a number. Dead letters do not have the header.
"""

from typing import Final

from metaq.model import HeaderPairs, MessageId, Millis, id_time

EXPIRES_IN: Final = "expires-in"

EXPIRY_MARK: Final = b"h.expires-in="
"""Bytes in every record that may expire, and in some others."""

_DIGITS_MAX: Final = 15
"""Maximum number of digits; a longer number is not a time."""


def expiry_of(message_id: MessageId, headers: HeaderPairs) -> Millis | None:
    """Return the time when a message expires, ms since 1970; None: never."""
    for name, value in reversed(headers):
        if name == EXPIRES_IN:
            stamped_ms = id_time(message_id)
            is_time = value.isdigit() and len(value) <= _DIGITS_MAX
            if stamped_ms is None or not is_time:
                return None
            return Millis(stamped_ms + int(value))
    return None

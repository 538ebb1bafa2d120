"""Requests and replies: two headers of a message, and the bytes of its reply. Pure.

    reply-to        7/0f3c...      broker and mailbox of the requester
    correlation     42             number of the request there

    reply           kind u8 | data       kind 0: the result of the handler
                                         kind 1: text of its exception, UTF-8

The broker of a mailbox reads neither.
"""

import re
from typing import Final, NamedTuple

from metaq.model import BrokerId, HeaderPairs

REPLY_TO: Final = "reply-to"
CORRELATION: Final = "correlation"

_PLACE: Final = re.compile(rb"(\d{1,9})/([0-9a-f]{32})")
_NUMBER: Final = re.compile(rb"\d{1,18}")
_RETURNED: Final = b"\x00"
_RAISED: Final = b"\x01"


class ReplyAddress(NamedTuple):
    """Mailbox of the requester, and the number of its request."""

    broker_id: BrokerId
    mailbox: str
    correlation: int

    def headers(self) -> HeaderPairs:
        """Return the headers with this address."""
        place, number = f"{self.broker_id}/{self.mailbox}", str(self.correlation)
        return (REPLY_TO, place.encode()), (CORRELATION, number.encode())


def reply_address(headers: HeaderPairs) -> ReplyAddress | None:
    """Return the address for the reply to a message; None: it wants none."""
    found = dict(headers)
    place = _PLACE.fullmatch(found.get(REPLY_TO, b""))
    number = found.get(CORRELATION, b"")
    if place is None or not _NUMBER.fullmatch(number):
        return None
    return ReplyAddress(BrokerId(int(place[1])), place[2].decode(), int(number))


def encode_reply(data: bytes) -> bytes:
    """Return the bytes of a reply."""
    return _RETURNED + data


def encode_error(text: str) -> bytes:
    """Return the bytes of a reply that reports a failure of the handler."""
    return _RAISED + text.encode(errors="replace")


def decode_reply(payload: bytes) -> tuple[bytes, str | None]:
    """Return the data of a reply, or the text of an error.

    Bytes that are not a reply count as an error, because their sender is unknown.
    """
    if payload[:1] == _RETURNED:
        return payload[1:], None
    return b"", payload[1:].decode(errors="replace")

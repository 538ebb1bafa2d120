"""Receipts of delayed messages: parsing, and look-up in the record."""

from typing import Final, NamedTuple, TypeAlias

from metaq.delay.records import DelayHead, DelayKind
from metaq.errors import RemoteProtocolError, ServerError
from metaq.model import Offset
from metaq.protocol.decimals import parse_i64
from metaq.record.ids import ids_from

RecordKey: TypeAlias = tuple[int, int, int]
"""Tier, due time and offset of a record."""

CANCELLED: Final = b"cancelled"
DELIVERED: Final = b"delivered"
"""Delivered, or due and about to be."""
UNKNOWN: Final = b"unknown"
REMEMBERED_MAX: Final = 10_000
"""Cancelled messages that are remembered, so that a repeated cancel gets the same
answer even after the due time."""


class Receipt(NamedTuple):
    """Identifies one delayed message; the sender got it in the reply to its put."""

    tier: int
    offset: Offset
    due_ms: int
    id: int


def parse_receipt(payload: bytes) -> Receipt:
    """Parse the payload of a cancel.

    Raises:
        ServerError: it is no receipt.
    """
    words = payload.split(b" ")
    if len(words) != len(Receipt._fields):
        raise ServerError(f"cancel: expected 4 numbers, got {len(words)} words")
    try:
        tier, offset, due_ms, number = (parse_i64(word, "receipt") for word in words)
    except RemoteProtocolError as error:
        raise ServerError(f"cancel: {error}") from error
    return Receipt(tier, Offset(offset), due_ms, number)


def message_index(receipt: Receipt, topic: str, head: DelayHead) -> int | None:
    """Return the position of a message in its record; None: it is not in it."""
    found = head.kind, head.topic, head.due_ms
    if found != (DelayKind.MESSAGES, topic, receipt.due_ms):
        return None
    ids = ids_from(head.id, head.messages)
    return ids.index(receipt.id) if receipt.id in ids else None

"""`cancel`: one message is taken back, by its receipt, before its time comes.

A record in its tier says so, stored before it is answered. Meanwhile the tier stops in
front of that message: where the record is refused it is delivered, only later.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

from metaq.broker.delay_tier import DelayTier
from metaq.broker.internal_logs import InternalLogs
from metaq.delay.plan import TIERS, is_done
from metaq.delay.records import DelayHead, DelayKind, encode_cancelled
from metaq.errors import RemoteProtocolError, ServerError
from metaq.model import Offset
from metaq.protocol.commands import Cancel
from metaq.protocol.decimals import parse_i64
from metaq.record.ids import ids_from
from metaq.storage.log_removal import outcome_of

Place: TypeAlias = tuple[int, int, int]
"""Tier, due time and offset of a record."""

CANCELLED: Final = b"cancelled"
DELIVERED: Final = b"delivered"
"""Or about to be: its time has come."""
UNKNOWN: Final = b"unknown"
REMEMBERED_MAX: Final = 10_000
"""Cancelled messages for which a repeated cancel is answered alike, also when their
time is over."""


class CancelOwner(Protocol):
    """The service as a cancel uses it."""

    cancelled: dict[tuple[int, int, int], None]
    cancelled_count: int

    @property
    def logs(self) -> InternalLogs:
        """Return what appends to `__delays`."""

    def hold(self, place: Place) -> None:
        """Stop a tier in front of a record."""

    def release(self, place: Place) -> None:
        """Stop it no longer, once it has read what is stored now."""

    @property
    def tiers(self) -> Sequence[DelayTier]:
        """Return the tiers, in order."""

    def now_ms(self) -> int:
        """Return the time that due times are compared with."""

    def is_dropped(self, topic: str, tier: int, offset: int) -> bool:
        """Return whether a record is of a topic that was deleted since."""


class Receipt(NamedTuple):
    """The name of one message that waits, as its sender got it."""

    tier: int
    offset: Offset
    due_ms: int
    id: int


def parse_receipt(payload: bytes) -> Receipt:
    """Return the receipt in a cancel.

    Raises:
        ServerError: it is none.
    """
    words = payload.split(b" ")
    if len(words) != len(Receipt._fields):
        raise ServerError(f"cancel: expected 4 numbers, got {len(words)} words")
    try:
        tier, offset, due_ms, number = (parse_i64(word, "receipt") for word in words)
    except RemoteProtocolError as error:
        raise ServerError(f"cancel: {error}") from error
    return Receipt(tier, Offset(offset), due_ms, number)


async def cancel(delays: CancelOwner, command: Cancel) -> bytes:
    """Take one message back; return what became of it.

    Raises:
        ServerError: the receipt is none.
        MetaqError: the outcome is not known: it is to be asked again.
    """
    receipt = parse_receipt(command.payload)
    if not 0 <= receipt.tier < TIERS:
        return UNKNOWN
    tier = delays.tiers[receipt.tier]
    found = await tier.read_head(receipt.offset)
    if found is None:
        return UNKNOWN
    head, size_bytes = found
    place = _place_of(receipt, command.topic, head)
    if place is None:
        return UNKNOWN
    if delays.is_dropped(command.topic, receipt.tier, receipt.offset):
        return UNKNOWN
    name = receipt.tier, int(receipt.offset), receipt.id
    if name in delays.cancelled:
        return CANCELLED
    key = receipt.due_ms, int(receipt.offset)
    is_over = receipt.due_ms <= delays.now_ms() or key <= tier.reached
    if is_over or is_done(tier.steps, key):
        return DELIVERED
    payload = encode_cancelled(head, place, receipt.id, receipt.offset, size_bytes)
    held = (receipt.tier, *key)
    delays.hold(held)
    try:
        error = await outcome_of(partial(delays.logs.append, tier.log_id, payload))
        if error is not None:
            raise error
    finally:
        delays.release(held)
    delays.cancelled[name] = None
    if len(delays.cancelled) > REMEMBERED_MAX:
        del delays.cancelled[next(iter(delays.cancelled))]
    delays.cancelled_count += 1
    return CANCELLED


def _place_of(receipt: Receipt, topic: str, head: DelayHead) -> int | None:
    """Return the place of a message in its record; None: it is not there."""
    found = head.kind, head.topic, head.due_ms
    if found != (DelayKind.MESSAGES, topic, receipt.due_ms):
        return None
    ids = ids_from(head.id, head.messages)
    return ids.index(receipt.id) if receipt.id in ids else None

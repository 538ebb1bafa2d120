"""Payloads of the commands of queue groups. Pure.

Reply to `take`, in a `value`:

    byte  0           4          8         12
          +-----------+----------+---------+--------------+----------------------+
          | partition | lease    | count   | 18 x count   | the records, as runs |
          | i32       | u32, ms  | u32     | deliveries   | (`record/runs.py`)   |
          +-----------+----------+---------+--------------+----------------------+

    delivery      offset i64 | delivery u64 | deliveries so far u16

Payload of `settle`; the texts follow the last entry, in the order of their entries:

    entry         offset i64 | delivery u64 | verb u8 | argument i64

    verb     1 ack     2 nack            3 release  4 extend         5 reject
    argument 0         delay, ms; -1: as 0          lease from now,  bytes of its
                       the group has it             ms, 1 or more    text, UTF-8

The 200 has one word per entry, separated by spaces: `ok`, `done` (the message was done
before), `lost` (another delivery has it), `later` (its dead letter is not stored yet).
"""

import enum
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from metaq.errors import RemoteProtocolError
from metaq.model import Offset
from metaq.protocol.decimals import I64_MAX

_TAKEN: Final = Struct(">iII")
_DELIVERY: Final = Struct(">qQH")
_ENTRY: Final = Struct(">qQBq")

SETTLE_COUNT_MAX: Final = 10_000
"""Maximum number of entries in one `settle`."""
REASON_BYTES_MAX: Final = 1024
"""Longest text of a reject, bytes."""
GROUP_DELAY: Final = -1
"""Argument of a nack: the delay is that of the group's schedule."""


class SettleVerb(enum.IntEnum):
    """Kinds of settlements."""

    ACK = 1
    """Done."""
    NACK = 2
    """Deliver it again, after a delay; the delivery counts."""
    RELEASE = 3
    """Deliver it again: it was not handled, and the delivery does not count."""
    EXTEND = 4
    """Extend the lease."""
    REJECT = 5
    """Never deliver it again: it goes to the dead letters or is dropped."""


class Word(enum.StrEnum):
    """Outcome of one entry of a `settle`."""

    OK = "ok"
    DONE = "done"
    """The message was done before."""
    LOST = "lost"
    """Another delivery has the message; nothing changed."""
    LATER = "later"
    """The message is not delivered any more; storing its dead letter is retried."""


class QueueDelivery(NamedTuple):
    """One message delivered to a worker."""

    offset: Offset
    delivery: int
    """Number of this delivery, u64; unique in the queue."""
    deliveries: int
    """Number of deliveries of the message, including this one; 1 or more."""


class Settlement(NamedTuple):
    """One entry of a `settle`."""

    offset: Offset
    delivery: int
    verb: SettleVerb
    argument: int = 0
    """Milliseconds of a nack (GROUP_DELAY: the group's delay) or extend."""
    text: str = ""
    """Reason of a reject."""


class TakenReply(NamedTuple):
    """Reply to a `take`."""

    partition: int
    lease_ms: int
    """Lease of the messages, in milliseconds, from the broker's reply on."""
    deliveries: Sequence[QueueDelivery]
    """In the order in which to handle them; empty: no message came in time."""
    records_at: int
    """Position of the runs in the payload."""


def encode_taken(
    partition: int, lease_ms: int, deliveries: Sequence[tuple[Offset, int, int]]
) -> bytes:
    """Return the part of a reply's payload before the runs."""
    head = _TAKEN.pack(partition, lease_ms, len(deliveries))
    return head + b"".join([_DELIVERY.pack(*each) for each in deliveries])


def decode_taken(payload: bytes) -> TakenReply:
    """Decode the part of a reply's payload before the runs.

    Raises:
        RemoteProtocolError: it is truncated, or a number is out of range.
    """
    found = list[QueueDelivery]()
    if len(payload) >= _TAKEN.size:
        partition, lease_ms, count = _TAKEN.unpack_from(payload)
        end = _TAKEN.size + count * _DELIVERY.size
        if end <= len(payload):
            rows = _DELIVERY.iter_unpack(payload[_TAKEN.size : end])
            found = list(map(QueueDelivery._make, rows))
            if all(offset >= 0 and count >= 1 for offset, _, count in found):
                return TakenReply(partition, lease_ms, found, end)
    raise RemoteProtocolError(
        f"take: no deliveries in {len(payload)} bytes, {found[:1]}"
    )


def encode_settlements(
    entries: Sequence[tuple[Offset, int, SettleVerb, int, str]],
) -> bytes:
    """Return the payload of a `settle`; a reason is truncated to REASON_BYTES_MAX.

    Args:
        entries: each a `Settlement`, or a tuple of its fields.
    """
    heads, texts = list[bytes](), list[bytes]()
    for offset, delivery, verb, argument, text in entries:
        if verb is SettleVerb.REJECT:
            raw = text.encode(errors="replace")[:REASON_BYTES_MAX]
            # Drop a character that was cut.
            texts.append(raw.decode(errors="ignore").encode())
            argument = len(texts[-1])
        heads.append(_ENTRY.pack(offset, delivery, verb, argument))
    return b"".join(heads + texts)


def decode_settlements(payload: bytes, count: int) -> list[Settlement]:
    """Decode the payload of a `settle` with `count` entries.

    Raises:
        RemoteProtocolError: it is too short or too long, there are too many entries, or
            one is invalid.
    """
    at = count * _ENTRY.size
    if not 1 <= count <= SETTLE_COUNT_MAX or len(payload) < at:
        raise RemoteProtocolError(
            f"settle: expected 1 to {SETTLE_COUNT_MAX} deliveries, got {count} in"
            f" {len(payload)} bytes"
        )
    entries = list[Settlement]()
    for offset, delivery, number, argument in _ENTRY.iter_unpack(payload[:at]):
        verb, low, high = _VERBS.get(number, _NO_VERB)
        if offset < 0 or not low <= argument <= high:
            raise RemoteProtocolError(
                f"settle: no entry is offset {offset}, verb {number}, argument"
                f" {argument}"
            )
        text = ""
        if verb is SettleVerb.REJECT:
            text = payload[at : at + argument].decode(errors="replace")
            at += argument
        entries.append(Settlement(offset, delivery, verb, argument, text))
    if at != len(payload):
        raise RemoteProtocolError(
            f"settle: expected {at} bytes for {count} deliveries, got {len(payload)}"
        )
    return entries


_VERBS: Final[dict[int, tuple[SettleVerb, int, int]]] = {
    1: (SettleVerb.ACK, 0, 0),
    2: (SettleVerb.NACK, GROUP_DELAY, I64_MAX),
    3: (SettleVerb.RELEASE, 0, 0),
    4: (SettleVerb.EXTEND, 1, I64_MAX),
    5: (SettleVerb.REJECT, 0, REASON_BYTES_MAX),
}
"""Number of a verb → the verb, and the range of its argument, inclusive."""
_NO_VERB: Final = (SettleVerb.ACK, 0, -1)
_WORDS: Final = {each.value: each for each in Word}


def encode_words(words: Sequence[Word]) -> bytes:
    """Return the body of the 200 to a `settle`."""
    return " ".join(words).encode()


def decode_words(body: str, count: int) -> list[Word]:
    """Decode the body of the 200 to a `settle` of `count` entries.

    Raises:
        RemoteProtocolError: the number of words differs, or a word is unknown.
    """
    try:
        found = [_WORDS[each] for each in body.split(" ")]
    except KeyError:
        found = []
    if len(found) != count:
        raise RemoteProtocolError(f"settle: expected {count} words, got {body[:80]!r}")
    return found

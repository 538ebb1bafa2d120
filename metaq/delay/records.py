"""Records of `__delays`: waiting messages, cancellations, progress. Pure.

The payload of a record, all numbers big-endian. In partitions 0..3, the tiers:

    byte  0      1     9     17          21      23         27     29
          +------+-----+-----+-----------+-------+----------+------+-------+------+
          | kind | due | id  | partition | tries | messages | size | topic | body |
          | u8   | i64 | i64 | i32       | u16   | u32      | u16  | UTF-8 |      |
          +------+-----+-----+-----------+-------+----------+------+-------+------+

    kind 1, messages    `id`: of the first message; partition: -1 for any; `tries`:
                        number of refusals by the target; `size`: of the topic's name;
                        body: records as in a segment, which get new ids on delivery
    kind 2, cancelled   cancels the message `id` of another record; body: offset of
                        that record, i64, and the message's share of its bytes, u32;
                        due time and topic are those of that record, `messages` is the
                        index of the message in it

and in partition 4 the progress, complete in each record:

    byte  0      1          9
          +------+----------+-----------------+----------------+------------------+
          | 3 u8 | sequence | 4 x steps n u16 | dropped: n u16 | n dropped topics |
          |      | u64      | and n steps     |                |                  |
          +------+----------+-----------------+----------------+------------------+

    step                due i64 | offset i64 | seen i64, of a tier, the newest first
    dropped topic       4 offsets i64, one of each tier | size u16 | name, UTF-8

A record of a tier is done if its offset is below `seen` of a step and its (due, offset)
is not above that of the step, or if its topic was dropped and its offset is below the
dropped topic's. The record with the highest sequence is valid, which need not be the
last one. `tests/delay/test_records.py` pins the bytes.
"""

import enum
import struct
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from metaq.delay.plan import NOTHING_DONE, TIERS, Progress, Steps
from metaq.errors import CorruptRecordError
from metaq.model import MessageId, Offset

TOPIC: Final = "__delays"
PROGRESS_PARTITION: Final = TIERS

_HEAD: Final = Struct(">BqqiHIH")
_CANCELLED: Final = Struct(">qI")
_STATE: Final = Struct(">BQ")
_COUNT: Final = Struct(">H")
_STEP: Final = Struct(">qqq")
_DROPPED: Final = Struct(f">{TIERS}qH")
TRIES_MAX: Final = 2**16 - 1
"""A higher count of refusals is stored as this."""


class DelayKind(enum.IntEnum):
    """Kind of a record."""

    MESSAGES = 1
    CANCELLED = 2
    STATE = 3


class DelayHead(NamedTuple):
    """Head of a record of a tier."""

    kind: DelayKind
    due_ms: int
    id: MessageId
    topic: str
    partition: int
    tries: int
    messages: int
    size_bytes: int
    """Size of the head; the body follows."""


class DelayState(NamedTuple):
    """Content of a record of partition 4."""

    sequence: int = 0
    steps: Sequence[Steps] = ((NOTHING_DONE,),) * TIERS
    """Steps of each tier, newest first."""
    dropped: Mapping[str, Sequence[int]] = {}
    """Deleted topics → offset in each tier, below which their records are dropped."""


def encode_head(
    due_ms: int,
    first_id: MessageId,
    topic: str,
    partition: int,
    messages: int,
    *,
    tries: int = 0,
    kind: DelayKind = DelayKind.MESSAGES,
) -> bytes:
    """Return the head of a record of a tier; its body follows."""
    name = topic.encode()
    tries = min(tries, TRIES_MAX)
    head = _HEAD.pack(kind, due_ms, first_id, partition, tries, messages, len(name))
    return head + name


def encode_cancelled(
    head: DelayHead, index: int, message_id: int, at: Offset, size_bytes: int
) -> bytes:
    """Return the payload of the record that cancels one message.

    Args:
        head: head of the record with the message.
        index: index of the message in that record, 0 or more.
        message_id: id of the message.
        at: offset of that record.
        size_bytes: size of that record.
    """
    # The shares of all messages add up to the size of the record.
    start, end = (size_bytes * each // head.messages for each in (index, index + 1))
    return encode_head(
        head.due_ms,
        MessageId(message_id),
        head.topic,
        head.partition,
        index,
        kind=DelayKind.CANCELLED,
    ) + _CANCELLED.pack(at, end - start)


def decode_head(payload: bytes) -> DelayHead:
    """Return the head of a record of a tier.

    Raises:
        CorruptRecordError: the payload is not that of such a record.
    """
    try:
        fields = _HEAD.unpack_from(payload)
        word, due_ms, number, partition, tries, messages, size = fields
        kind, end = DelayKind(word), _HEAD.size + size
        topic = payload[_HEAD.size : end].decode()
    except (struct.error, ValueError) as error:
        raise CorruptRecordError(f"no record of a delay: {error}") from error
    if kind is DelayKind.STATE or end > len(payload) or not topic or due_ms < 0:
        raise CorruptRecordError(f"no record of a delay: kind={word} topic={topic!r}")
    first_id = MessageId(number)
    return DelayHead(kind, due_ms, first_id, topic, partition, tries, messages, end)


def cancelled_at(payload: bytes, head: DelayHead) -> tuple[Offset, int]:
    """Return the offset of a cancelled message's record, and its share of the bytes.

    Raises:
        CorruptRecordError: the body has another size.
    """
    if len(payload) != head.size_bytes + _CANCELLED.size:
        raise CorruptRecordError(f"no record of a cancelled message: {head}")
    offset, part = _CANCELLED.unpack_from(payload, head.size_bytes)
    return Offset(offset), part


def encode_state(state: DelayState) -> bytes:
    """Return the payload of a record of progress."""
    parts = [_STATE.pack(DelayKind.STATE, state.sequence)]
    for steps in state.steps:
        parts += [_COUNT.pack(len(steps)), *(_STEP.pack(*step) for step in steps)]
    parts.append(_COUNT.pack(len(state.dropped)))
    for topic, offsets in state.dropped.items():
        name = topic.encode()
        parts += [_DROPPED.pack(*offsets, len(name)), name]
    return b"".join(parts)


def decode_state(payload: bytes) -> DelayState:
    """Return the content of a record of progress.

    Raises:
        CorruptRecordError: the payload is not that of such a record of this version.
    """
    dropped: dict[str, Sequence[int]] = {}
    tiers, position = list[Steps](), _STATE.size
    try:
        kind, sequence = _STATE.unpack_from(payload)
        for _ in range(TIERS):
            (count,) = _COUNT.unpack_from(payload, position)
            start, position = position, position + _COUNT.size + count * _STEP.size
            numbers = _STEP.iter_unpack(payload[start + _COUNT.size : position])
            tiers.append(tuple(map(Progress._make, numbers)))
        (count,) = _COUNT.unpack_from(payload, position)
        position += _COUNT.size
        for _ in range(count):
            *offsets, size = _DROPPED.unpack_from(payload, position)
            start = position + _DROPPED.size
            position = start + size
            dropped[payload[start:position].decode()] = tuple(offsets)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptRecordError(f"no record of progress: {error}") from error
    if kind != DelayKind.STATE or position != len(payload) or not all(tiers):
        raise CorruptRecordError(f"no record of progress: kind={kind}")
    return DelayState(sequence, tuple(tiers), dropped)

"""The values everybody speaks of: numbers with units, and frozen names.

Mixing an offset with a position is a type error; conversion happens in named
functions (`Segment.position_of`, for example).
"""

from dataclasses import dataclass
from typing import Final, NewType

Offset = NewType("Offset", int)
"""A byte address in a partition's whole history; the next put's is the log end."""

Position = NewType("Position", int)
"""A byte distance from the start of one file."""

SizeBytes = NewType("SizeBytes", int)
"""A number of bytes."""

MessageId = NewType("MessageId", int)
"""A signed 64-bit id stamped by a broker (section 8 of the broker spec)."""

Millis = NewType("Millis", int)
"""Milliseconds; since 1970 (UTC) where a point in time is meant."""

BrokerId = NewType("BrokerId", int)
"""A broker's number, 0..1023 (it is also the worker part of message ids)."""

RANDOM_PARTITION: Final = -1
"""The partition number of a put that leaves the choice to the broker."""

MAX_OFFSET: Final = Offset(2**63 - 1)
"""What a get sends to ask for the end of the log."""


@dataclass(frozen=True, slots=True, order=True)
class LogId:
    """A partition as its broker's disk knows it: `<topic>-<partition>`."""

    topic: str
    """Topic name; may itself contain '-'."""
    partition: int
    """Partition number on this broker, 0 or more."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """A partition as the whole cluster knows it: the unit of order and ownership."""

    topic: str
    """Topic name."""
    broker_id: BrokerId
    """The broker that takes its puts."""
    partition: int
    """Partition number on that broker, 0 or more."""

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_id}-{self.partition}"


@dataclass(frozen=True, slots=True)
class Message:
    """The decoded application value of one record."""

    topic: str
    """Topic it was put to."""
    data: bytes
    """Application bytes, attribute block removed."""
    attribute: str | None
    """Application attribute; None when the record has none, "" when it is empty."""
    id: MessageId
    """Id stamped by the broker."""
    partition: TopicPartition
    """Where it lies."""
    offset: Offset
    """Offset of its record's first byte."""
    next_offset: Offset
    """Offset of the record that follows: what a reader asks for next."""

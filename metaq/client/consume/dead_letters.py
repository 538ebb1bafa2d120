"""Dead letters: the message, with its origin and the error in headers. Pure.

A dead letter has the data, attribute, key and headers of the message, and after them
these headers, UTF-8 texts:

    dead-letter.origin      test/0-3@4096            topic, partition, offset
    dead-letter.id          123
    dead-letter.cause       ValueError: no number    type and text of the last error
    dead-letter.group       g                        this and the rest: of consumers
    dead-letter.attempts    6
    dead-letter.at_ms       1700000000000            when it was given up
    dead-letter.traceback   Traceback (most ...      may be missing

Dead letters of Spark's source have the first three: they must be equal when they are
sent again, so they have no time. A dead letter that is given up itself has only the
headers of its last origin.
"""

import traceback
from collections.abc import Sequence
from typing import Final, NamedTuple

from metaq.client.partitioner import KeyHash, OutgoingMessage, parse_partition
from metaq.errors import ConfigError
from metaq.model import HeaderPairs, Message, MessageId, Millis, Offset, TopicPartition

PREFIX: Final = "dead-letter."

ERROR_CHARS_MAX: Final = 200
"""Longer names of errors are cut."""

TEXT_CHARS_MAX: Final = 1000
"""Longer texts of errors are cut: headers are part of the message's size."""

TRACEBACK_CHARS_MAX: Final = 4000
"""Longer tracebacks are cut; the end is kept, with the last calls and the error."""


class Origin(NamedTuple):
    """Origin of a dead letter, and the reason for it."""

    partition: TopicPartition
    """Partition of the message."""
    offset: Offset
    """Offset of its record's first byte."""
    id: MessageId
    """Its id."""
    error: str
    """Name of the last error's type; "" in dead letters of Spark's source."""
    text: str
    """Text of the last error, cut to `TEXT_CHARS_MAX`."""
    group: str = ""
    """The consumer group that could not handle it; "" for Spark's source."""
    attempts: int = 1
    """Number of times that it was handed to the handler."""
    at_ms: Millis | None = None
    """When it was given up, in milliseconds since 1970 (UTC)."""
    traceback: str = ""
    """Traceback of the last error, at most `TRACEBACK_CHARS_MAX` characters; "" when
    unknown."""


def origin_of(
    message: Message, *, group: str, error: BaseException, attempts: int, at_ms: Millis
) -> Origin:
    """Return the origin for the headers of a dead letter."""
    calls = traceback.format_exception(error) if error.__traceback__ else ()
    return Origin(
        partition=message.partition,
        offset=message.offset,
        id=message.id,
        group=group,
        error=type(error).__name__[:ERROR_CHARS_MAX],
        text=str(error)[:TEXT_CHARS_MAX],
        attempts=attempts,
        at_ms=at_ms,
        traceback="".join(calls)[-TRACEBACK_CHARS_MAX:],
    )


def letter_headers(own: HeaderPairs, origin: Origin) -> HeaderPairs:
    """Return the headers of a dead letter: the message's `own`, and its origin."""
    fields = {
        "origin": f"{origin.partition}@{origin.offset}",
        "id": str(origin.id),
        "cause": f"{origin.error}: {origin.text}" if origin.error else origin.text,
    }
    if origin.group:
        fields["group"] = origin.group
        fields["attempts"] = str(origin.attempts)
    if origin.at_ms is not None:
        fields["at_ms"] = str(origin.at_ms)
    if origin.traceback:
        fields["traceback"] = origin.traceback
    kept = (pair for pair in own if not pair[0].startswith(PREFIX))
    added = (
        (PREFIX + name, text.encode(errors="surrogatepass"))
        for name, text in fields.items()
    )
    return (*kept, *added)


def read_origin(message: Message) -> Origin | None:
    """Return the origin of a dead letter; None for any other message."""
    fields = {
        name.removeprefix(PREFIX): value.decode(errors="replace")
        for name, value in message.header_pairs
        if name.startswith(PREFIX)
    }
    try:
        source, _, offset = fields["origin"].rpartition("@")
        topic, _, partition = source.rpartition("/")
        error, has_type, text = fields["cause"].partition(": ")
        if "group" not in fields or not has_type:
            error, text = "", fields["cause"]
        at_ms = fields.get("at_ms")
        return Origin(
            partition=parse_partition(topic, partition),
            offset=Offset(int(offset)),
            id=MessageId(int(fields["id"])),
            error=error,
            text=text,
            group=fields.get("group", ""),
            attempts=int(fields.get("attempts", "1")),
            at_ms=None if at_ms is None else Millis(int(at_ms)),
            traceback=fields.get("traceback", ""),
        )
    except (KeyError, ValueError, ConfigError):
        return None


class DeadLetterSelector:
    """A producer's selector for dead letters, which keeps their order.

    It chooses by the key; without a key, by the partition of the failed message.
    """

    def __init__(self) -> None:
        self._by_key = KeyHash()

    def __call__(
        self, topic: str, partitions: Sequence[TopicPartition], message: OutgoingMessage
    ) -> TopicPartition:
        """Return one of the partitions."""
        key = message.key
        if key is None:
            key = dict(message.headers)[PREFIX + "origin"].rpartition(b"@")[0]
        return self._by_key(topic, partitions, message._replace(key=key))

"""Dead letters: the origin of a message, in its attribute. Pure.

A dead letter has the data of the message, and this attribute, one line of JSON in
ASCII:

    {"dead_letter": 1, "topic": "test", "partition": "0-3", "offset": 4096,
     "id": 123, "attribute": null, "group": "g", "error": "ValueError",
     "text": "no number", "attempts": 6, "at_ms": 1700000000000,
     "traceback": "Traceback (most recent call last): ..."}

`dead_letter` is the version of the format; `attribute` is the message's own; `at_ms`
is when it was given up; `traceback` may be missing. Readers ignore fields that they do
not know.
"""

import json
import traceback
from typing import Any, Final, NamedTuple

from metaq.client.partitioner import parse_partition
from metaq.errors import LocalProtocolError
from metaq.model import Message, MessageId, Millis, Offset, TopicPartition

FORMAT: Final = 1
"""Value of `dead_letter`."""

ERROR_CHARS_MAX: Final = 200
"""Longer names of errors are cut."""

TEXT_CHARS_MAX: Final = 1000
"""Longer texts of errors are cut: the attribute is part of the message's size."""

TRACEBACK_CHARS_MAX: Final = 4000
"""Length to which longer tracebacks are cut; the end is kept: last calls and error."""


class Origin(NamedTuple):
    """Origin of a dead letter, and the reason for it."""

    partition: TopicPartition
    """Partition of the message."""
    offset: Offset
    """Offset of its record's first byte."""
    id: MessageId
    """Its id."""
    attribute: str | None
    """Its own attribute; None when it has none."""
    group: str
    """The consumer group that could not handle it."""
    error: str
    """Type of the last error, by its name."""
    text: str
    """Text of the last error, cut to `TEXT_CHARS_MAX`."""
    attempts: int
    """Number of times that the handler had it."""
    at_ms: Millis
    """When it was given up, in milliseconds since 1970 (UTC)."""
    traceback: str = ""
    """Traceback of the last error, at most `TRACEBACK_CHARS_MAX` characters; "" when
    unknown."""


def origin_of(
    message: Message, *, group: str, error: BaseException, attempts: int, at_ms: Millis
) -> Origin:
    """Return the origin in the attribute of a dead letter."""
    return Origin(
        partition=message.partition,
        offset=message.offset,
        id=message.id,
        attribute=message.attribute,
        group=group,
        error=type(error).__name__[:ERROR_CHARS_MAX],
        text=str(error)[:TEXT_CHARS_MAX],
        attempts=attempts,
        at_ms=at_ms,
        traceback=_traceback_of(error),
    )


def _traceback_of(error: BaseException) -> str:
    if error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(error))[-TRACEBACK_CHARS_MAX:]


def encode_origin(origin: Origin) -> str:
    """Return the attribute of a dead letter."""
    place = origin.partition
    fields = {
        "dead_letter": FORMAT,
        "topic": place.topic,
        "partition": f"{place.broker_id}-{place.partition}",
        "offset": origin.offset,
        "id": origin.id,
        "attribute": origin.attribute,
        "group": origin.group,
        "error": origin.error,
        "text": origin.text,
        "attempts": origin.attempts,
        "at_ms": origin.at_ms,
        "traceback": origin.traceback,
    }
    return json.dumps(fields)


def read_origin(message: Message) -> Origin | None:
    """Return where a dead letter comes from; None for any other message."""
    try:
        fields = json.loads(message.attribute or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("dead_letter") != FORMAT:
        return None
    try:
        place = parse_partition(_text(fields, "topic"), _text(fields, "partition"))
        return Origin(
            partition=place,
            offset=Offset(_number(fields, "offset")),
            id=MessageId(_number(fields, "id")),
            attribute=_own_attribute(fields),
            group=_text(fields, "group"),
            error=_text(fields, "error"),
            text=_text(fields, "text"),
            attempts=_number(fields, "attempts"),
            at_ms=Millis(_number(fields, "at_ms")),
            traceback=_text({"traceback": "", **fields}, "traceback"),
        )
    except (LocalProtocolError, TypeError):
        return None


def _own_attribute(fields: dict[str, Any]) -> str | None:
    return None if fields.get("attribute") is None else _text(fields, "attribute")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected text, got {value!r}")
    return value


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return value

"""Dead letters of consumers: their origin, and the choice of their partition. Pure.

`metaq/record/dead_letters.py` has their headers.
"""

import traceback
from collections.abc import Sequence

from metaq.client.partitioner import KeyHash, OutgoingMessage, parse_partition
from metaq.errors import ConfigError
from metaq.model import Message, MessageId, Millis, Offset, TopicPartition
from metaq.record.dead_letters import (
    ERROR_CHARS_MAX,
    PREFIX,
    TEXT_CHARS_MAX,
    TRACEBACK_CHARS_MAX,
    Origin,
)


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

    Chooses by the key; without a key, by the partition of the failed message.
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

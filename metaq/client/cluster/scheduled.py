"""Requests to brokers about delayed messages."""

import datetime as dt
import json
from collections.abc import Mapping
from typing import Final, NamedTuple

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import insist
from metaq.client.validation import moment_of
from metaq.errors import BadReplyError
from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Cancel, ListScheduled

ALL_TOPICS: Final = "*"
LIST_COUNT_MAX: Final = 1000
"""Maximum number of batches in one answer."""
TIME_END_MS: Final = 10**14
"""End of valid times, in the year 5138."""
_CANCELLED: Final = "cancelled"
_UNKNOWN: Final = "unknown"
_LATE: Final = "delivered"


class ScheduledBatch(NamedTuple):
    """Delayed messages of one topic with one due time."""

    partition: TopicPartition
    """Their partition; number -1: the broker chooses one at delivery."""
    due_ms: Millis
    """Due time, ms since 1970 (UTC)."""
    message_count: int
    """Number of messages, without cancelled ones."""
    tier: int
    """Number of the broker's log that has them."""
    offset: Offset
    """Their offset in that log."""
    first_id: MessageId
    """Id of the first message."""

    @property
    def due(self) -> dt.datetime:
        """Due time, in UTC."""
        return moment_of(self.due_ms)


class WaitingOnBroker(NamedTuple):
    """Delayed messages on one broker."""

    message_count: int
    size_bytes: int
    hours: Mapping[int, int]
    """Start of an hour, ms since 1970 → number of messages due in it."""
    soonest: tuple[ScheduledBatch, ...]
    problems: tuple[str, ...] = ()
    """One sentence for each unreadable part of its logs, which is not counted."""


async def cancel_scheduled(
    context: ClientContext,
    partition: TopicPartition,
    receipt: tuple[int, int, int, int],
    *,
    deadline_s: float,
) -> bool | None:
    """Cancel a delayed message.

    Args:
        context: the client's parts.
        partition: partition of the message, whose broker is asked.
        receipt: tier, offset, due time and id.
        deadline_s: deadline of all attempts, monotonic.

    Returns:
        True if it is cancelled, False if it was delivered; None: there is no such
        message.

    Raises:
        MetaqError: the broker refuses, or cannot be asked in time.
    """

    async def ask(*, deadline_s: float) -> str:
        connection = await context.connect_leader(partition.broker_id, deadline_s)
        payload = b"%d %d %d %d" % receipt
        command = Cancel(partition.topic, payload, connection.next_opaque())
        return require_ok(await connection.call(command, deadline_s=deadline_s)).text

    word = await insist(context, ask, deadline_s)
    if word not in {_CANCELLED, _UNKNOWN, _LATE}:
        raise BadReplyError(f"cancel: expected '{_CANCELLED}', got {word[:80]!r}")
    return None if word == _UNKNOWN else word == _CANCELLED


async def scheduled_on(
    context: ClientContext,
    broker_id: BrokerId,
    *,
    topic: str | None,
    count: int,
    between_ms: tuple[int, int],
    deadline_s: float,
) -> WaitingOnBroker:
    """Return the delayed messages of one broker; none if it does not support them.

    Args:
        context: the client's parts.
        broker_id: id of the broker.
        topic: topic of the messages; None: any.
        count: maximum number of batches, soonest first; up to LIST_COUNT_MAX.
        between_ms: first due time, and the end of due times (exclusive); 0 or more.
        deadline_s: deadline of the answer, monotonic.

    Raises:
        MetaqError: the broker refuses, or cannot be asked.
    """
    connection = await context.connect_leader(broker_id, deadline_s)
    if not connection.capabilities.delay_ms_max:
        return WaitingOnBroker(0, 0, {}, ())
    command = ListScheduled(
        ALL_TOPICS if topic is None else topic,
        count,
        connection.next_opaque(),
        *between_ms,
    )
    reply = await connection.call(command, deadline_s=deadline_s)
    return parse_listing(require_ok(reply).text, broker_id)


def parse_listing(text: str, broker_id: BrokerId) -> WaitingOnBroker:
    """Parse the answer of a broker to `scheduled`.

    Raises:
        BadReplyError: it is invalid.
    """
    try:
        found = json.loads(text)
        soonest = tuple(
            ScheduledBatch(
                TopicPartition(str(each["topic"]), broker_id, int(each["partition"])),
                _time(each["due"]),
                int(each["count"]),
                int(each["tier"]),
                Offset(int(each["offset"])),
                MessageId(int(each["id"])),
            )
            for each in found["first"]
        )
        hours = {int(_time(hour)): int(count) for hour, count in found["hours"]}
        problems = tuple(str(each) for each in found.get("problems", ()))
        return WaitingOnBroker(
            int(found["count"]), int(found["bytes"]), hours, soonest, problems
        )
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise BadReplyError(f"scheduled: no listing is {text[:80]!r}") from error


def _time(value: object) -> Millis:
    """Return a time; raise ValueError if it is invalid."""
    if not isinstance(value, int) or not 0 <= value < TIME_END_MS:
        raise ValueError(value)
    return Millis(value)

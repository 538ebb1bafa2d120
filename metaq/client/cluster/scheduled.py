"""Questions to brokers about messages that wait for their time."""

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
"""Batches that one answer names."""
TIME_END_MS: Final = 10**14
"""Later times are none: the year 5138."""
_CANCELLED: Final = "cancelled"
_UNKNOWN: Final = "unknown"
_LATE: Final = "delivered"


class ScheduledBatch(NamedTuple):
    """Messages of one topic that wait for one time."""

    partition: TopicPartition
    """Their partition; -1: one that their broker chooses then."""
    due_ms: Millis
    """Their time, ms since 1970 (UTC)."""
    message_count: int
    """Number of messages, without those that were taken back."""
    tier: int
    """Part of the broker's log in which they wait,"""
    offset: Offset
    """at this offset."""
    first_id: MessageId
    """Id of the first one."""

    @property
    def due(self) -> dt.datetime:
        """Their time, with the time zone UTC."""
        return moment_of(self.due_ms)


class WaitingOnBroker(NamedTuple):
    """Answer of one broker."""

    message_count: int
    size_bytes: int
    hours: Mapping[int, int]
    """Start of an hour, ms since 1970 → messages that are due in it."""
    soonest: tuple[ScheduledBatch, ...]
    problems: tuple[str, ...] = ()
    """One sentence for each part of its log that cannot be read, and does not count."""


async def cancel_scheduled(
    context: ClientContext,
    partition: TopicPartition,
    receipt: tuple[int, int, int, int],
    *,
    deadline_s: float,
) -> bool | None:
    """Take a message back before its time.

    Args:
        context: the client's parts.
        partition: of the message; its broker is asked.
        receipt: tier, offset, due time and id.
        deadline_s: of all attempts.

    Returns:
        Whether it is taken back; None: no such message waits.

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
    """Return what waits on one broker; nothing, where it delivers no message later.

    Args:
        context: the client's parts.
        broker_id: who is asked.
        topic: of the messages; None: any.
        count: batches that are named, the soonest ones; up to LIST_COUNT_MAX.
        between_ms: least due time, and the one that due times are below; 0 or more.
        deadline_s: of the answer.

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
    """Read the answer of a broker to `scheduled`.

    Raises:
        BadReplyError: it makes no sense.
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
    """Return a time; raise ValueError where it is none."""
    if not isinstance(value, int) or not 0 <= value < TIME_END_MS:
        raise ValueError(value)
    return Millis(value)

"""The offset of the first message at or after a point in time.

MetaQ's wire has no question for that. The ids that brokers of this package stamp carry
wall time and grow along the log, so two questions it does have will do: `offset` names
the start of the segment around any offset, and a get there shows the first id of that
segment. Bisection finds the segment; inside it the records are walked.

Java brokers stamp a monotonic clock (negative ids): such a log has no time in it.
"""

from typing import Final

from metaq.client.browser import TopicBrowser
from metaq.client.cursor import PartitionCursor
from metaq.client.errors import NoProgressError, NoWallTimeError
from metaq.client.replies import Fetched
from metaq.client.wire import WireConnection
from metaq.model import (
    MessageId,
    Millis,
    Offset,
    SizeBytes,
    TopicPartition,
    id_time,
)
from metaq.record.layout import HEADER, HEADER_BYTES

PROBES_MAX: Final = 200
"""Offsets have 63 bits; bisection of segment starts needs no more than about 64."""


def offset_at(
    browser: TopicBrowser,
    partition: TopicPartition,
    moment: Millis,
    *,
    timeout_s: float,
) -> Offset:
    """Return where to start reading to see what was put at `moment` or later.

    Args:
        browser: gives the connections.
        partition: what is searched.
        moment: wall clock, milliseconds since 1970.
        timeout_s: bound on each question.

    Returns:
        The offset of the first message of that time or later; the log end when there
        is none; 0 for a partition without a log.

    Raises:
        NoWallTimeError: the messages were stamped by a Java broker.
    """
    ends = browser.range_of(partition)
    if ends is None:
        return Offset(0)
    log_start, log_end = ends
    connection = browser.connection(partition.broker_id)
    segment = _find_segment(
        connection, partition, moment, log_start, log_end, timeout_s
    )
    cursor = PartitionCursor(partition, segment, end=log_end)
    while not cursor.is_done:
        outcome = connection.get(
            partition.topic,
            partition.partition,
            cursor.fetch_offset,
            max_bytes=cursor.size_bytes,
            timeout_s=timeout_s,
        )
        messages = cursor.on_reply(outcome)
        # Ids grow, so the last one tells whether to look at the others.
        if messages and _time_of(messages[-1].id, partition) >= moment:
            return next(
                m.offset for m in messages if _time_of(m.id, partition) >= moment
            )
    return log_end


def _time_of(message_id: MessageId, partition: TopicPartition) -> Millis:
    moment = id_time(message_id)
    if moment is None:
        raise NoWallTimeError(
            f"{partition}: cannot search by time: message id {message_id} was stamped"
            " by a Java broker and carries no wall time"
        )
    return moment


def _find_segment(
    connection: WireConnection,
    partition: TopicPartition,
    moment: Millis,
    log_start: Offset,
    log_end: Offset,
    timeout_s: float,
) -> Offset:
    """Return the start of the last segment whose first message is before `moment`."""
    found = log_start
    low, high = int(log_start), int(log_end)
    for _probe in range(PROBES_MAX):
        if low >= high:
            return found
        middle = (low + high) // 2
        start = connection.offset(
            partition.topic, partition.partition, middle, timeout_s=timeout_s
        )
        if start is None or start > middle:
            # Retention moved the log start past the middle meanwhile.
            low = middle + 1
        elif start <= found or _is_before(
            connection, partition, start, moment, timeout_s
        ):
            found, low = max(found, start), middle + 1
        else:
            high = int(start)
    raise NoProgressError(f"{partition}: segments change faster than they are searched")


def _is_before(
    connection: WireConnection,
    partition: TopicPartition,
    offset: Offset,
    moment: Millis,
    timeout_s: float,
) -> bool:
    outcome = connection.get(
        partition.topic,
        partition.partition,
        offset,
        max_bytes=SizeBytes(HEADER_BYTES),
        timeout_s=timeout_s,
    )
    if not isinstance(outcome, Fetched) or len(outcome.data) < HEADER_BYTES:
        return False
    _length, _checksum, message_id, _flag = HEADER.unpack_from(outcome.data)
    return _time_of(MessageId(message_id), partition) < moment

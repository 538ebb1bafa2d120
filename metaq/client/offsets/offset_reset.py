"""Start of reading in a partition: the committed offset, or the offset reset.

A committed offset outside the log is always reported: below the log start, messages
were deleted before they were read; above the log end, the log was replaced. Both are
logged as errors and counted. Reading then continues at the log start, or at the log end
for a consumer that starts at the latest offset. If a MetaQ 1.4 broker has no log of the
partition, the committed offset is kept, because such a broker does not know a partition
between its own start and the next put to it.
"""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Final, Literal, TypeAlias

from metaq.client.cluster.boundaries import require_boundary
from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.options import Start, check_start
from metaq.client.validation import check_offset, wrong_type
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import GroupOffset, MessageId, Millis, Offset, TopicPartition

_log = logging.getLogger(__name__)

NO_MESSAGE: Final = MessageId(-1)
"""Id that MetaQ's clients write if no message was read yet."""

Goal: TypeAlias = Literal["earliest", "latest"] | datetime | int
"""Target of a seek: the log start, the log end, the first message of a time or later,
or an offset."""

NOTHING_HANDLED: Final = Offset(-1)
"""Below every offset."""
CUT: Final = "the log was replaced, or cut by a broker that lost data"


async def first_offset(
    context: ClientContext,
    partition: TopicPartition,
    committed: GroupOffset | None,
    start: Start,
    *,
    handled: Offset = NOTHING_HANDLED,
    deadline_s: float,
) -> tuple[GroupOffset, bool]:
    """Return where to begin, and whether a committed or handled offset was abandoned.

    Args:
        context: the client's parts.
        partition: the partition to read.
        committed: the committed offset of the group; None: none, or to be ignored.
        start: offset reset of the group.
        handled: offset up to which the caller has handled messages, and drops repeats.
            If the log ends before it, the log was replaced and has other messages.
        deadline_s: monotonic time.

    Raises:
        CannotAnswerError: a time at a MetaQ 1.4 broker, which has no times.
        NoBrokerError: an offset is committed, and the broker does not serve the
            partition.
        MetaqError: the broker cannot be asked.
    """
    log = LogQueries(context, partition, deadline_s)
    ends = await log.ends()
    reached = [] if committed is None else [committed.offset]
    reached += [] if handled == NOTHING_HANDLED else [handled]
    if reached and (ends is None or min(reached) < ends[0] or max(reached) > ends[1]):
        ends = await log.confirmed_ends()
    is_cut = ends is not None and handled > ends[1]
    if is_cut:
        _log.error(
            "handled offset is outside the log: partition=%s handled=%d log_start=%d"
            " log_end=%d: %s",
            partition,
            handled,
            *(ends or ()),
            CUT,
        )
    if committed is not None:
        if ends is None:
            await _require_served(log, committed.offset)
            if committed.offset and await log.may_be_unopened():
                _log.warning(
                    "the broker of MetaQ 1.4 knows no log of a partition, and may open"
                    " it at the next put: partition=%s committed=%d",
                    partition,
                    committed.offset,
                )
                return committed, False
            # Without a log the next message is at offset 0.
            ends = (Offset(0), Offset(0))
        if ends[0] <= committed.offset <= ends[1]:
            return committed, is_cut
        if committed.offset < ends[0] <= handled <= ends[1]:
            # The deleted messages had been handled; their commit was lost.
            return GroupOffset(ends[0], NO_MESSAGE), False
        follower = ends[1] if start == "latest" else ends[0]
        if committed.offset < ends[0]:
            missing = ends[0] - committed.offset
            what = f"{missing} bytes were deleted before they were read"
        else:
            what = CUT
        _log.error(
            "committed offset is outside the log: partition=%s committed=%d"
            " log_start=%d log_end=%d next=%d: %s",
            partition,
            committed.offset,
            *ends,
            follower,
            what,
        )
        return GroupOffset(follower, NO_MESSAGE), True
    if ends is None:
        # There was no put yet: every message will be new.
        return GroupOffset(Offset(0), NO_MESSAGE), False
    return GroupOffset(await _choose(log, start, ends), NO_MESSAGE), is_cut


async def _choose(log: LogQueries, start: Start, ends: tuple[Offset, Offset]) -> Offset:
    partition, (log_start, log_end) = log.partition, ends
    if start == "earliest":
        return log_start
    if start == "latest":
        return log_end
    if isinstance(start, datetime):
        # A naive time is in the machine's time zone, as everywhere in Python.
        moment = Millis(int(start.timestamp() * 1000))
        found = await log.offset_at(moment)
        return log_end if found is None else max(found, log_start)
    wanted = start.get(partition, log_start) if isinstance(start, Mapping) else start
    return Offset(min(max(wanted, log_start), log_end))


async def _require_served(log: LogQueries, committed: Offset) -> None:
    """Check that the broker serves a partition of which it has no log.

    If it does, the partition was created again, and its old offset is void.

    Raises:
        NoBrokerError: it does not, so it may be the wrong broker.
    """
    partition, topics = log.partition, [log.partition.topic]
    snapshot = await read_cluster(log.context, topics, deadline_s=log.deadline_s)
    if committed and not snapshot.is_served(partition):
        raise NoBrokerError(
            f"{partition}: offset {committed} is committed, but broker"
            f" {partition.broker_id} has no such partition: the topic was deleted, or"
            " the broker replaced by another one"
        )


def check_goal(name: str, goal: object) -> None:
    """Check the target of a seek.

    Args:
        name: name of the argument, for the error.
        goal: the given value.

    Raises:
        ConfigError: the text, number or time is invalid.
        TypeError: it is of another type.
    """
    if isinstance(goal, int):
        check_offset("offset", goal)
    elif isinstance(goal, datetime):
        check_start(goal)
    elif not isinstance(goal, str):
        wanted = "an offset, a datetime, 'earliest' or 'latest'"
        raise wrong_type(name, wanted, goal)
    elif goal not in {"earliest", "latest"}:
        raise ConfigError(f"{name}: expected 'earliest' or 'latest', got {goal!r:.80}")


async def find_goal(
    context: ClientContext, partition: TopicPartition, goal: Goal, *, deadline_s: float
) -> Offset:
    """Return the offset of the target of a seek in one partition.

    Args:
        context: the client's parts.
        partition: the partition of the seek.
        goal: the target; an offset must be a message boundary.
        deadline_s: monotonic time.

    Raises:
        ClientError: the offset is outside the log, or inside a message.
        CannotAnswerError: a time at a MetaQ 1.4 broker, which has no times.
        CorruptRecordError: the offset is in damaged bytes.
        NoBrokerError: the broker of the partition is away.
        WireError: the broker refuses the request.
    """
    if isinstance(goal, str | datetime):
        begin, _ = await first_offset(
            context, partition, None, goal, deadline_s=deadline_s
        )
        return begin.offset
    offset = Offset(goal)
    await require_boundary(context, partition, offset, deadline_s=deadline_s)
    return offset

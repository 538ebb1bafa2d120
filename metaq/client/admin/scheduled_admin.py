"""Administration calls that list and cancel delayed messages."""

import datetime as dt
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from metaq.client.admin.queue_admin import AsyncQueueAdmin, problems_of
from metaq.client.cluster.catalog import find_topics, read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import (
    missing_topics,
    require_all_there,
    unknown_topic,
)
from metaq.client.cluster.scheduled import (
    LIST_COUNT_MAX,
    ScheduledBatch,
    cancel_scheduled,
    scheduled_on,
)
from metaq.client.fan_out import answers, for_each, raise_first
from metaq.client.names import check_topic
from metaq.client.validation import check_whole, moment_ms, moment_of
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.model import BrokerId
from metaq.protocol.decimals import I64_MAX
from metaq.record.ids import id_after

BATCH_COUNT_MAX: Final = 1 << 20
"""Upper bound on the number of messages in a batch."""


@dataclass(frozen=True, slots=True)
class ScheduledDescription:
    """Delayed messages that are not delivered yet."""

    message_count: int
    size_bytes: int
    """Size of the messages on disk, in bytes."""
    hours: Mapping[dt.datetime, int]
    """Start of an hour → number of messages due in it; the first 1,000 hours with
    any."""
    soonest: tuple[ScheduledBatch, ...]
    """The first batches, soonest first."""
    problems: tuple[str, ...]
    """One sentence for each broker that cannot be asked, for each part of its delayed
    messages that a broker cannot read, and for each broker that is away (for one topic:
    each of its partitions that is away)."""


class AsyncScheduledAdmin(AsyncQueueAdmin):
    """The part of `AsyncAdmin` about delayed messages."""

    async def scheduled(
        self,
        topic: str | None = None,
        *,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        count_max: int = 100,
        timeout: float | None = None,
    ) -> ScheduledDescription:
        """Return the delayed messages that are not delivered yet.

        Args:
            topic: topic of the messages; None: all topics.
            since: only those due at this time or later, with time zone; None: all.
            until: only those due before this time, with time zone; None: all.
            count_max: maximum number of batches in `soonest`, 0 to 1,000.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: a time has no time zone, or a name or number is invalid.
            NoBrokerError: no broker can be found.
            NoTopicError: the topic is not known and has no delayed messages.
            TypeError: an argument has a wrong type; the text names it.
        """
        if topic is not None:
            check_topic(topic)
        context, between_ms = self._context, _between_ms(since, until)
        check_whole("count_max", count_max, 0, LIST_COUNT_MAX)
        deadline_s = await context.reach(timeout)
        look = partial(
            scheduled_on,
            context,
            topic=topic,
            count=count_max,
            between_ms=between_ms,
            deadline_s=deadline_s,
        )
        names = [] if topic is None else [topic]
        snapshot = await read_cluster(context, names, deadline_s=deadline_s)
        found = await for_each(look, sorted(snapshot.brokers))
        named = answers(found)
        good = named.values()
        unread = [
            f"broker {number}: {problem}"
            for number in sorted(named)
            for problem in named[number].problems
        ]
        if topic is None:
            left_s = deadline_s - context.clock.monotonic_s()
            for broker in await self.brokers(max(0.1, left_s)):
                if not broker.is_present:
                    known = broker.broker_id is not None
                    name = broker.broker_id if known else broker.address
                    unread.append(f"broker {name} is away, with its scheduled messages")
        message_count = sum(each.message_count for each in good)
        if topic is not None and not (message_count or unread):
            await _require_known(context, snapshot, topic)
        hours: Counter[int] = Counter()
        for each in good:
            hours.update(each.hours)
        soonest = [batch for each in good for batch in each.soonest]
        soonest.sort(key=lambda batch: batch.due_ms)
        return ScheduledDescription(
            message_count,
            sum(each.size_bytes for each in good),
            {moment_of(hour): hours[hour] for hour in sorted(hours)},
            tuple(soonest[:count_max]),
            (*problems_of(snapshot, names, found), *unread),
        )

    async def cancel_scheduled(
        self,
        topic: str,
        *,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        timeout: float | None = None,
    ) -> int:
        """Cancel delayed messages of a topic; return the number of messages.

        Args:
            topic: topic of the messages.
            since: only those due at this time or later, with time zone; None: all.
            until: only those due before this time, with time zone; None: all.
            timeout: seconds for each batch; None takes `request_timeout_s`.

        Raises:
            PartitionsAwayError: some partitions are away; messages elsewhere are
                cancelled.
            MetaqError: a broker refuses, or cannot be asked; some may be cancelled.
            ConfigError: a time has no time zone, or the name is invalid.
            NoTopicError: as `scheduled`.
            TypeError: an argument has a wrong type; the text names it.

        Cancellation: some may be cancelled.
        """
        check_topic(topic)
        context, between_ms = self._context, _between_ms(since, until)
        deadline_s = await context.reach(timeout)
        snapshot = await read_cluster(context, [topic], deadline_s=deadline_s)

        async def clear(broker_id: BrokerId) -> int:
            done, seen = 0, set[tuple[int, int]]()
            while True:
                found = await scheduled_on(
                    context,
                    broker_id,
                    topic=topic,
                    count=LIST_COUNT_MAX,
                    between_ms=between_ms,
                    deadline_s=context.deadline_s(timeout),
                )
                fresh = [b for b in found.soonest if (b.tier, b.offset) not in seen]
                if not fresh:
                    return done
                for batch in fresh:
                    seen.add((batch.tier, batch.offset))
                    deadline_s = context.deadline_s(timeout)
                    done += await _cancel(context, batch, deadline_s)

        cleared = await for_each(clear, sorted(snapshot.brokers))
        count = sum(raise_first(cleared))
        if not count:
            await _require_known(context, snapshot, topic)
        require_all_there(snapshot, [topic])
        return count


async def _require_known(
    context: ClientContext, snapshot: ClusterSnapshot, topic: str
) -> None:
    """Raise NoTopicError if there is no such topic."""
    if missing_topics(snapshot, [topic]) and not snapshot.silent:
        known = await find_topics(context, ".*", deadline_s=context.deadline_s(None))
        if topic not in known:
            raise unknown_topic(topic, known)


async def _cancel(
    context: ClientContext, batch: ScheduledBatch, deadline_s: float
) -> int:
    """Cancel a batch, message by message; return the number of messages."""
    number = 0
    for number in range(BATCH_COUNT_MAX):
        receipt = (
            batch.tier, batch.offset, batch.due_ms, id_after(batch.first_id, number)
        )  # fmt: skip
        outcome = await cancel_scheduled(
            context, batch.partition, receipt, deadline_s=deadline_s
        )
        if not outcome:  # no more messages, or they are delivered
            break
    # Messages cancelled earlier are counted too, so take the smaller number.
    return min(batch.message_count, number)


def _between_ms(
    since: dt.datetime | None, until: dt.datetime | None
) -> tuple[int, int]:
    return (
        0 if since is None else moment_ms("since", since),
        I64_MAX if until is None else moment_ms("until", until),
    )

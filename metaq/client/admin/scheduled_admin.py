"""Calls about messages that wait for their time: how many there are, and an end."""

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
"""More messages than a batch has."""


@dataclass(frozen=True, slots=True)
class ScheduledDescription:
    """Messages that wait for their time."""

    message_count: int
    size_bytes: int
    """Bytes that they take on disk."""
    hours: Mapping[dt.datetime, int]
    """Start of each hour in which any is due → how many; the first 1,000 hours."""
    soonest: tuple[ScheduledBatch, ...]
    """The first ones, soonest first."""
    problems: tuple[str, ...]
    """One sentence for each broker that cannot be asked, for each part of what waits
    that its broker cannot read, and for each broker that is away: of one topic, for
    each of its partitions there."""


class AsyncScheduledAdmin(AsyncQueueAdmin):
    """The part of `AsyncAdmin` about messages that wait for their time."""

    async def scheduled(
        self,
        topic: str | None = None,
        *,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        count_max: int = 100,
        timeout: float | None = None,
    ) -> ScheduledDescription:
        """Return what waits for its time.

        Args:
            topic: of the messages; None: all topics.
            since: they are due then or later, with a time zone; None: at any time.
            until: they are due before; likewise.
            count_max: batches that are named one by one, 0 to 1,000.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: a time without its zone, or a name or number that cannot be.
            NoBrokerError: no broker can be found.
            NoTopicError: nothing is known of the topic, and nothing waits for it.
            TypeError: an argument of another type; the text names it.
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
                    unread.append(f"broker {name} is away, with what waits there")
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
        """Take back what waits for a topic; return how many messages that were.

        Args:
            topic: of the messages.
            since: they are due then or later, with a time zone; None: at any time.
            until: they are due before; likewise.
            timeout: seconds for each batch; None takes `request_timeout_s`.

        Raises:
            PartitionsAwayError: some are away; what waits elsewhere is taken back.
            MetaqError: a broker refuses, or cannot be asked; others may be taken back.
            ConfigError: a time without its zone, or a name that cannot be.
            NoTopicError: as `scheduled`.
            TypeError: an argument of another type; the text names it.

        Cancellation: some may be taken back.
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
    """Raise NoTopicError where there is no such topic."""
    if missing_topics(snapshot, [topic]) and not snapshot.silent:
        known = await find_topics(context, ".*", deadline_s=context.deadline_s(None))
        if topic not in known:
            raise unknown_topic(topic, known)


async def _cancel(
    context: ClientContext, batch: ScheduledBatch, deadline_s: float
) -> int:
    """Take a batch back, message by message; return how many that were."""
    number = 0
    for number in range(BATCH_COUNT_MAX):
        receipt = (
            batch.tier, batch.offset, batch.due_ms, id_after(batch.first_id, number)
        )  # fmt: skip
        outcome = await cancel_scheduled(
            context, batch.partition, receipt, deadline_s=deadline_s
        )
        if not outcome:  # there are no more, or they are delivered
            break
    # One that was taken back before answers as others do.
    return min(batch.message_count, number)


def _between_ms(
    since: dt.datetime | None, until: dt.datetime | None
) -> tuple[int, int]:
    return (
        0 if since is None else moment_ms("since", since),
        I64_MAX if until is None else moment_ms("until", until),
    )

"""What planning wants to know of logs, asked of their brokers.

Logs never change below their end, so a count that was told once stays true: a query
that waits for more messages, or is held by a limit, asks for each range once.

MetaQ 1.4 brokers keep no counts and no boundaries. There a record counts as
`RECORD_BYTES`, so limits in messages are limits in bytes, and logs are cut between
segments only; a start by time cannot be found there at all.
"""

from collections.abc import Sequence
from typing import Final

from metaq.client.context import ClientContext
from metaq.client.errors import CannotAnswerError
from metaq.client.questions import (
    boundaries_between,
    count_between,
    nearest_offset,
    offset_at,
)
from metaq.model import Millis, Offset, TopicPartition
from metaq.spark.cluster import Cluster

RECORD_BYTES: Final = 512
"""What a record is taken for where nobody counts them."""
COUNTS_MAX: Final = 10_000
"""Counts remembered; all are forgotten when there are more."""
PROBES_MAX: Final = 15
"""Places at which a log of a MetaQ 1.4 broker is asked for its segments."""


class BrokerFacts:
    """`SpanFacts` of a cluster. One thread; raises what `Cluster` raises."""

    def __init__(self, cluster: Cluster) -> None:
        """Know nothing yet."""
        self._cluster = cluster
        self._counts: dict[tuple[TopicPartition, Offset, Offset], int] = {}

    def count(self, partition: TopicPartition, start: Offset, end: Offset) -> int:
        """Return how many records begin in start..end; an estimate for MetaQ 1.4."""
        key = (partition, start, end)
        known = self._counts.get(key)
        if known is not None:
            return known

        async def ask(context: ClientContext, deadline_s: float) -> int:
            return await count_between(
                context, partition, start, end, deadline_s=deadline_s
            )

        try:
            count = self._cluster.run(ask)
        except CannotAnswerError:
            count = -((start - end) // RECORD_BYTES)
        if len(self._counts) >= COUNTS_MAX:
            self._counts.clear()
        self._counts[key] = count
        return count

    def boundaries(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        """Return places strictly between `start` and `end` where records begin."""

        async def ask(context: ClientContext, deadline_s: float) -> tuple[Offset, ...]:
            return await boundaries_between(
                context, partition, start, end, count, deadline_s=deadline_s
            )

        try:
            return self._cluster.run(ask)
        except CannotAnswerError:
            return self._segment_starts(partition, start, end, min(count, PROBES_MAX))

    def offset_for_time(
        self, partition: TopicPartition, moment: Millis
    ) -> Offset | None:
        """Return where to begin to see what was put at `moment` or later.

        Returns:
            A record boundary, the log end where nothing is that young; None without
            a log.

        Raises:
            CannotAnswerError: a MetaQ 1.4 broker.
        """

        async def ask(context: ClientContext, deadline_s: float) -> Offset | None:
            return await offset_at(context, partition, moment, deadline_s=deadline_s)

        return self._cluster.run(ask)

    def _segment_starts(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        size = end - start

        async def ask(context: ClientContext, deadline_s: float) -> set[Offset]:
            found = set()
            for number in range(1, count + 1):
                probe = Offset(start + size * number // (count + 1))
                at = await nearest_offset(
                    context, partition, probe, deadline_s=deadline_s
                )
                if at is not None and start < at < end:
                    found.add(at)
            return found

        return sorted(self._cluster.run(ask))

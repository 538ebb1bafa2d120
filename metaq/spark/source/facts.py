"""Log facts for planning, asked of brokers.

Logs never change below their end, so a count stays true: a query that waits for more
messages, or is held by a limit, asks for each range once.

MetaQ 1.4 brokers keep no counts and no boundaries. There a record counts as so many
bytes as those that were seen last, so limits in messages are limits in bytes; the end
of a micro-batch is found by reading up to it. Logs are cut into tasks between segments
only, and a start by time cannot be found at all.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.errors import CannotAnswerError
from metaq.client.fan_out import all_of
from metaq.client.options import MIB
from metaq.errors import CorruptRecordError
from metaq.model import MessageId, Millis, Offset, Position, SizeBytes, TopicPartition
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.scan import START, Corrupt, Incomplete, find_next_record, read_record
from metaq.spark.cluster import Cluster
from metaq.spark.columns import VALUE_BYTES_MAX
from metaq.spark.offsets import Offsets
from metaq.spark.rows import find_run

RECORD_BYTES: Final = 512
"""Assumed size of a record, bytes, where no count is known and none was seen."""
COUNTS_MAX: Final = 10_000
"""Counts remembered; all are forgotten when there are more."""
SEGMENT_PROBES_MAX: Final = 15
"""Places at which a log of a MetaQ 1.4 broker is asked for its segments."""
WALK_BYTES_MAX: Final = 16 * MIB
"""Most bytes read of one log to find the end of a micro-batch."""
WALK_GET_BYTES: Final = MIB
"""Size of one get of such a walk."""

T = TypeVar("T")


class PlanningFacts:
    """`SpanFacts` of a cluster. One thread; raises the errors of `Cluster`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        get_bytes: int = WALK_GET_BYTES,
        walk_bytes_max: int = WALK_BYTES_MAX,
    ) -> None:
        """Begin without facts; bound what is read in search of boundaries, bytes."""
        self._cluster = cluster
        self._get_bytes = get_bytes
        self._walk_bytes_max = walk_bytes_max
        self._counts: dict[tuple[TopicPartition, Offset, Offset], int] = {}
        self._record_bytes: dict[TopicPartition, int] = {}

    def count(self, partition: TopicPartition, start: Offset, end: Offset) -> int:
        """Return how many records begin in start..end; an estimate for MetaQ 1.4."""
        key = (partition, start, end)
        known = self._counts.get(key)
        if known is not None:
            return known
        try:
            count = self._ask(partition, lambda log: log.count(start, end))
        except CannotAnswerError:
            each = self._record_bytes.setdefault(partition, RECORD_BYTES)
            return -((start - end) // each)
        except CorruptRecordError:
            # The task that reads it will report the damage.
            return -((start - end) // RECORD_BYTES)
        if len(self._counts) >= COUNTS_MAX:
            self._counts.clear()
        self._counts[key] = count
        return count

    def boundaries(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        """Return offsets strictly between `start` and `end` where records begin."""
        try:
            return self._ask(partition, lambda log: log.cut(start, end, count))
        except CannotAnswerError:
            self._record_bytes.setdefault(partition, RECORD_BYTES)
        except CorruptRecordError:
            pass  # as above
        # Segments begin where records do.
        parts = min(count, SEGMENT_PROBES_MAX) + 1
        probes = [Offset(start + (end - start) * n // parts) for n in range(1, parts)]
        found = self._cluster.run(
            lambda context, deadline_s: all_of(
                LogQueries(context, partition, deadline_s).nearest(at) for at in probes
            )
        )
        return sorted({at for at in found if at is not None and start < at < end})

    def boundaries_after(
        self, partition: TopicPartition, start: Offset, end: Offset, origin: Offset
    ) -> Sequence[Offset]:
        """Return the record boundaries in the result of a get from `start` on.

        Nothing where the broker names boundaries, and `walk_bytes_max` after `origin`.
        """
        is_far = start - origin >= self._walk_bytes_max
        if is_far or partition not in self._record_bytes:
            return ()
        data = self._get(partition, start, end)
        inner = [at for at in _starts_in(data, start) if at < end]
        if inner:
            self._record_bytes[partition] = (inner[-1] - start) // len(inner)
        return inner

    def record_from(
        self, partition: TopicPartition, offset: Offset, end: Offset
    ) -> Offset | None:
        """Return the first offset in [offset, end) at which a record begins.

        It is `offset` also for a record that is longer than one get; None if none is in
        sight.
        """
        data = self._get(partition, offset, end)
        found = read_record(data, START, payload_bytes_max=VALUE_BYTES_MAX)
        is_cut = isinstance(found, Incomplete) and offset + found.needed_bytes > end
        if not is_cut and not isinstance(found, Corrupt):
            return offset
        after = find_next_record(data, Position(1), payload_bytes_max=VALUE_BYTES_MAX)
        return None if after is None else Offset(offset + after)

    def message_ids(self, offsets: Offsets) -> dict[TopicPartition, MessageId]:
        """Return the id of the message at each offset, if a record begins there.

        Offsets that are damaged, or that retention removes, are missing.
        """
        size_bytes = SizeBytes(HEADER_BYTES)

        async def read(context: ClientContext, deadline_s: float) -> list[bytes]:
            async def read_one(partition: TopicPartition, offset: Offset) -> bytes:
                log = LogQueries(context, partition, deadline_s)
                try:
                    return await log.slice(offset, size_bytes)
                except CorruptRecordError:
                    return b""

            return await all_of(read_one(*each) for each in offsets.items())

        return {
            partition: MessageId(HEADER.unpack_from(header)[2])
            for partition, header in zip(offsets, self._cluster.run(read), strict=True)
            if len(header) >= HEADER_BYTES
        }

    def offset_for_time(
        self, partition: TopicPartition, moment: Millis
    ) -> Offset | None:
        """Return the first offset from which on all messages are at least that young.

        It is a record boundary, or the log end; None without a log. CannotAnswerError
        for a MetaQ 1.4 broker.
        """
        return self._ask(partition, lambda log: log.offset_at(moment))

    def _get(self, partition: TopicPartition, start: Offset, end: Offset) -> bytes:
        size_bytes = SizeBytes(min(end - start, self._get_bytes))
        return self._ask(partition, lambda log: log.slice(start, size_bytes))

    def _ask(
        self,
        partition: TopicPartition,
        question: Callable[[LogQueries], Coroutine[Any, Any, T]],
    ) -> T:
        return self._cluster.run(
            lambda context, deadline_s: question(
                LogQueries(context, partition, deadline_s)
            )
        )


def _starts_in(data: bytes, start: Offset) -> Sequence[Offset]:
    """Return where records begin in bytes of a log that follow a boundary.

    The boundary itself is left out. The end of a record that is longer than the bytes
    is one of them.
    """
    size = len(data)
    if size < HEADER_BYTES:
        return []
    edges = find_run(
        memoryview(data),
        0,
        records_max=size,
        bytes_max=size,
        payload_max=VALUE_BYTES_MAX,
    )
    found = [Offset(start + edge) for edge in edges[2::2]]
    if not found:
        length = HEADER.unpack_from(data)[0]
        if 0 < length <= VALUE_BYTES_MAX and HEADER_BYTES + length > size:
            found = [Offset(start + HEADER_BYTES + length)]
    return found

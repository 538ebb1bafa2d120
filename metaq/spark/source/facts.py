"""Facts about logs for planning, requested from brokers.

Logs never change below their end, so counts are cached: a query that waits for more
messages, or is bounded by a limit, requests each range once.

MetaQ 1.4 brokers have no counts and no boundaries. There the count of a range is
estimated from the size of the last records seen, so limits in messages are in effect
limits in bytes; the end of a micro-batch is found by reading the log up to it. Logs are
cut into tasks only between segments, and a start by time is not possible.
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
"""Assumed size of a record, in bytes, if no count is known and no record was seen."""
COUNTS_MAX: Final = 10_000
"""Size of the cache of counts; a full cache is emptied."""
SEGMENT_PROBES_MAX: Final = 15
"""Maximum number of offsets at which a MetaQ 1.4 broker is asked for a segment."""
WALK_BYTES_MAX: Final = 16 * MIB
"""Maximum bytes read of one log to find the end of a micro-batch."""
WALK_GET_BYTES: Final = MIB
"""Bytes of one get of such a walk."""

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
        """Start without facts.

        Args:
            cluster: answers the requests.
            get_bytes: bytes of one get in search of boundaries.
            walk_bytes_max: maximum bytes of such a search.
        """
        self._cluster = cluster
        self._get_bytes = get_bytes
        self._walk_bytes_max = walk_bytes_max
        self._counts: dict[tuple[TopicPartition, Offset, Offset], int] = {}
        self._record_bytes: dict[TopicPartition, int] = {}

    def count(self, partition: TopicPartition, start: Offset, end: Offset) -> int:
        """Return the number of records in [start, end); an estimate for MetaQ 1.4."""
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
            # The damage will be reported by the task that reads it.
            return -((start - end) // RECORD_BYTES)
        if len(self._counts) >= COUNTS_MAX:
            self._counts.clear()
        self._counts[key] = count
        return count

    def boundaries(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        """Return record boundaries strictly between `start` and `end`, ascending."""
        try:
            return self._ask(partition, lambda log: log.cut(start, end, count))
        except CannotAnswerError:
            self._record_bytes.setdefault(partition, RECORD_BYTES)
        except CorruptRecordError:
            pass  # as above
        # The starts of segments are record boundaries.
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
        """Return the record boundaries found by a get at `start`.

        Empty if the broker knows boundaries, or `start` is `walk_bytes_max` or more
        after `origin`.
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
        """Return the first record boundary in [offset, end) within one get; else None.

        A record at `offset` that is longer than one get counts, too.
        """
        data = self._get(partition, offset, end)
        found = read_record(data, START, payload_bytes_max=VALUE_BYTES_MAX)
        is_cut = isinstance(found, Incomplete) and offset + found.needed_bytes > end
        if not is_cut and not isinstance(found, Corrupt):
            return offset
        after = find_next_record(data, Position(1), payload_bytes_max=VALUE_BYTES_MAX)
        return None if after is None else Offset(offset + after)

    def message_ids(self, offsets: Offsets) -> dict[TopicPartition, MessageId]:
        """Return the ids of the messages at offsets that are record boundaries.

        Lacks offsets that are damaged, or removed by retention.
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
        """Return the first offset from which on all messages are of `moment` or later.

        A record boundary or the log end; None without a log.

        Raises:
            CannotAnswerError: the broker is of MetaQ 1.4.
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
    """Return the record boundaries in bytes of a log that begin at a boundary.

    Without `start` itself. If the first record is longer than the bytes, its end.
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

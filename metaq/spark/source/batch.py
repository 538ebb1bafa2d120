"""`spark.read.format("metaq")`: the ranges of a batch query, planned once.

The driver reads the log starts and log ends, so a batch ends at the log ends of the
time when it was planned. Streams resolve starts, settle spans and cut tasks with the
same code.
"""

import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, assert_never

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from metaq.client.cluster.catalog import require_partitions
from metaq.client.offsets.query_progress import read_progress
from metaq.client.options import MIB
from metaq.errors import MetaqError
from metaq.model import Millis, Offset, TopicPartition
from metaq.spark.clusters import shared_cluster
from metaq.spark.errors import SparkError, one_sentence
from metaq.spark.offsets import Offsets
from metaq.spark.options import AtTime, Bound, Edge, SourceOptions
from metaq.spark.plan import Logs, LogSpan, SpanFacts, Spans, plan_reads, settle
from metaq.spark.record_bounds import Bounds, PushedFilters, TakesFilters
from metaq.spark.rows import OnCorrupt
from metaq.spark.schema import value_type, with_table_options
from metaq.spark.source.facts import PlanningFacts
from metaq.spark.source.read_task import ReadTask, TaskReader
from metaq.spark.versions import report_missing_filters, tasks_of

_log = logging.getLogger(__name__)

NARROWING_MAX: Final = 1000
"""Number of boundaries requested to exclude rows by a filter on offsets."""
RANGES_MAX: Final = 64
"""Maximum number of ranges of one task."""
SHARED_BYTES: Final = 4 * MIB
"""Maximum bytes of ranges that share a task: they are read faster than another task
starts."""
TASKS_MIN: Final = 16
"""Ranges share tasks only as long as at least this many tasks are left, to keep cores
busy."""
NOTHING: Final = LogSpan(Offset(0), Offset(0))
"""Span of a log that its broker does not have yet: its first record will be at 0."""


class ReadPlanner:
    """Plans the ranges of one read, on the driver. One thread."""

    def __init__(self, options: SourceOptions) -> None:
        """Start without facts; connects later."""
        self._options = options
        self._cluster = shared_cluster(options.wire)
        self._facts = PlanningFacts(self._cluster)

    def plan_batch(self, pushed: PushedFilters) -> list[tuple[ReadTask, ...]]:
        """Return the ranges of each task of a batch.

        Args:
            pushed: filters; parts that cannot match are omitted.

        Raises:
            DataLossError: requested bytes are gone, with `failOnDataLoss`.
            BackwardRangeError: a partition would end before it starts.
            SparkError: as `resolve_starts`.
            NoBrokerError, MetaqError: as `require_named`.
        """
        self.require_named()
        chosen = list(filter(pushed.allows, self._cluster.partitions(self._options)))
        logs = self._cluster.spans(chosen)
        starts = self.resolve_starts(logs)
        ends = self._resolve(self._options.ending, logs, {}, fails_late=False)
        wanted = {p: LogSpan(starts[p], ends[p]) for p in chosen}
        spans = {
            partition: self._narrowed(partition, span, pushed.bounds)
            for partition, span in self.settle_all(wanted, logs).items()
        }
        tasks = self.plan_tasks(spans, pushed.bounds)
        return share_tasks(self._facts, self._options, tasks)

    def require_named(self) -> None:
        """Wait until the partitions chosen by the options are served.

        Raises:
            NoBrokerError: no broker has a topic or partition named in the options, or
                a broker stays away, with `failOnDataLoss`.
            MetaqError: the cluster is not available.
        """
        self._cluster.require_whole(self._options)
        self._cluster.ask(require_partitions, self._options.named)

    def resolve_starts(self, spans: Logs) -> dict[TopicPartition, Offset]:
        """Return the start offset of each partition.

        Args:
            spans: current spans of the logs.

        Raises:
            SparkError: there is no message of the given time or later; or a named
                offset is inside a record.
            CannotAnswerError: a start by time in a partition of a MetaQ 1.4 broker.
        """
        options, committed = self._options, dict[TopicPartition, Offset]()
        if options.starting.edge is Edge.GROUP and options.start_group is not None:
            committed = self._cluster.ask(read_progress, options.start_group, spans)
        late = options.is_late_start_error
        return self._resolve(options.starting, spans, committed, fails_late=late)

    def _resolve(
        self, bound: Bound, spans: Logs, committed: Offsets, *, fails_late: bool
    ) -> dict[TopicPartition, Offset]:
        """Return the offset of a bound, start or end, in each partition."""
        offsets: dict[TopicPartition, Offset] = {}
        for partition, found in sorted(spans.items()):
            span, wanted = found or NOTHING, bound.of(partition)
            match wanted:
                case Edge.EARLIEST:
                    offsets[partition] = span.start
                case Edge.LATEST:
                    offsets[partition] = span.end
                case Edge.GROUP:
                    offsets[partition] = committed.get(partition, span.start)
                case AtTime(time_ms):
                    at = self._first_since(partition, span, time_ms)
                    if at is None and fails_late:
                        raise SparkError(
                            f"{partition}: no message was put at {time_ms} ms since"
                            " 1970 or later; startingOffsetsByTimestampStrategy=latest"
                            " starts at the log end there"
                        )
                    offsets[partition] = span.end if at is None else at
                case int():
                    self._require_record(partition, span, wanted)
                    offsets[partition] = wanted
                case _:
                    assert_never(wanted)
        return offsets

    def _require_record(
        self, partition: TopicPartition, span: LogSpan, named: Offset
    ) -> None:
        """Refuse a named offset inside the log that is not a record boundary.

        Without effect for `OnCorrupt.SKIP`.
        """
        is_within = span.start < named < span.end
        if not is_within or self._options.on_corrupt is OnCorrupt.SKIP:
            return
        begins = self._facts.record_from(partition, named, span.end)
        if begins != named:
            where = f"the next one is at {begins}"
            where = "none is in sight" if begins is None else where
            raise SparkError(
                f"{partition}: no record begins at offset {named}, which is inside a"
                f" record, or at damage; {where}. Offsets are byte positions: use"
                " those of the column offset"
            )

    def _first_since(
        self, partition: TopicPartition, span: LogSpan, time_ms: Millis
    ) -> Offset | None:
        """Return the offset of the first message of a time or later; None for none."""
        if not span.size_bytes:
            return None
        at = self._facts.offset_for_time(partition, time_ms)
        return None if at is None or at >= span.end else at

    def confirmed(self, wanted: Spans, logs: Logs) -> Logs:
        """Return logs, with the spans at leaders for those that lack wanted bytes.

        The replica asked before may not lead any more, and a MetaQ 1.4 broker may have
        forgotten a log: if no bytes of that are wanted, it ends at the wanted offset.

        Raises:
            BackwardRangeError: a span ends before it starts.
            SparkError: bytes are wanted from a log that a MetaQ 1.4 broker may have
                forgotten, with `failOnDataLoss`.
            MetaqError: the cluster is not available.
        """
        lacking = [
            partition
            for partition, span in wanted.items()
            if span.end
            and partition in logs
            and settle(partition, span, logs[partition], fail_on_data_loss=False).lost
        ]
        if not lacking:
            return logs
        found = self._cluster.spans(lacking, is_confirmed=True)
        if unknown := [partition for partition in lacking if found[partition] is None]:
            for partition in self._cluster.unopened(unknown):
                span = wanted[partition]
                if span.start == span.end:
                    found[partition] = LogSpan(span.end, span.end)
                elif self._options.fail_on_data_loss:
                    raise SparkError(
                        f"{partition}: broker {partition.broker_id} of MetaQ 1.4 knows"
                        f" no log of it, expected {span.start}..{span.end}: it forgets"
                        " partitions at its start, until the next put to them, so put"
                        " a message there; failOnDataLoss=false reads on without it"
                    )
        return {**logs, **found}

    def settle_all(self, wanted: Spans, logs: Logs) -> dict[TopicPartition, LogSpan]:
        """Return the readable part of each wanted span; log each loss as a warning.

        A missing log counts as empty if nothing of it is wanted.

        Raises:
            DataLossError: bytes are lost, with `failOnDataLoss`.
            BackwardRangeError: a span ends before it starts.
        """
        spans, fails = {}, self._options.fail_on_data_loss
        logs = self.confirmed(wanted, logs)
        for partition, span in sorted(wanted.items()):
            log = logs.get(partition)
            if log is None and not span.end:
                log = NOTHING
            settled = settle(partition, span, log, fail_on_data_loss=fails)
            for lost in settled.lost:
                _log.warning("data is lost: %s", lost)
            spans[partition] = settled.span
        return spans

    def plan_tasks(self, spans: Spans, bounds: Bounds) -> list[ReadTask]:
        """Cut settled spans into tasks, the largest first."""
        least, most = self._options.ranges_min, self._options.records_max
        ranges = plan_reads(spans, self._facts, ranges_min=least, records_max=most)
        at = self._cluster.addresses({found.partition for found in ranges})
        return [ReadTask(found, at.get(found.partition), bounds) for found in ranges]

    def _narrowed(
        self, partition: TopicPartition, span: LogSpan, bounds: Bounds
    ) -> LogSpan:
        """Return the part of a settled span that may match; it may be too wide."""
        start, end, facts = span.start, span.end, self._facts
        if not bounds.overlaps(start, end):
            return LogSpan(start, start)
        try:
            if bounds.start_ms is not None:
                at = facts.offset_for_time(partition, bounds.start_ms)
                start = min(end, max(start, at or start))
        except MetaqError as error:
            _log.warning("a filter on time is left to Spark: %s", error)
        if start < end and (start < bounds.start or bounds.end < end):
            inner = facts.boundaries(partition, start, end, NARROWING_MAX)
            start = max([start, *(at for at in inner if at <= bounds.start)])
            end = min([end, *(at for at in inner if at >= max(bounds.end, start))])
        return LogSpan(start, end)


def share_tasks(
    facts: SpanFacts, options: SourceOptions, tasks: Sequence[ReadTask]
) -> list[tuple[ReadTask, ...]]:
    """Combine small ranges: a Spark task costs more than reading such a range.

    Args:
        facts: used only if the options limit the records of a task.
        options: options of the read, with the limits.
        tasks: of one range each, the largest first.

    Returns:
        Every range once; those of one task sorted by partition and start.
    """
    ranges_max = min(RANGES_MAX, len(tasks) // max(TASKS_MIN, options.ranges_min or 0))
    shares: list[list[ReadTask]] = []
    left_count = left_bytes = left_records = 0
    for task in tasks:
        partition, start, end = task.range.partition, task.range.start, task.range.end
        size_bytes, count = end - start, 0
        is_small = ranges_max > 1 and size_bytes <= SHARED_BYTES
        if options.records_max is not None and is_small:
            count = facts.count(partition, start, end)
        if not left_count or size_bytes > left_bytes or count > left_records:
            shares.append([])
            left_count, left_bytes = max(1, ranges_max), SHARED_BYTES
            left_records = options.records_max or 0
        shares[-1].append(task)
        left_count -= 1
        left_bytes -= size_bytes
        left_records -= count
    order = attrgetter("range.partition", "range.start")
    return [tuple(sorted(share, key=order)) for share in shares]


class BatchReader(TaskReader, DataSourceReader):
    """Plans on the driver; pickled for the tasks as a `TaskReader`."""

    def __init__(self, options: SourceOptions, value_type: pa.DataType) -> None:
        """Store the options; `partitions` connects."""
        super().__init__(options, value_type)
        self._pushed = PushedFilters()

    @one_sentence
    def partitions(self) -> list[InputPartition]:
        """Return the tasks, each with a tuple of `ReadTask`; raises as `plan_batch`."""
        return tasks_of(ReadPlanner(self._options).plan_batch(self._pushed))


class PushingBatchReader(TakesFilters, BatchReader):
    """A reader that skips records which cannot match the query's filters."""


def batch_reader(given: Mapping[str, str], schema: StructType) -> BatchReader:
    """Return the reader of a batch.

    Args:
        given: options of the read, as passed by Spark.
        schema: as passed by Spark to a reader.

    Raises:
        OptionError: an option is wrong, or the user's schema has other columns.
    """
    options = SourceOptions.from_map(with_table_options(schema, given), is_stream=False)
    report_missing_filters(options.is_filter_pushdown)
    # Spark refuses a reader with `pushFilters` while its own setting is off.
    kind = PushingBatchReader if options.is_filter_pushdown else BatchReader
    return kind(options, value_type(schema, options.values))

"""`spark.readStream.format("metaq")`: ranges of each micro-batch of a query.

Spark keeps the offsets; a reader keeps nothing that a query needs after a restart. Two
things Spark does not do for a source are done here. The start of a new query is not
durable before its first batch is logged, so it is kept in ZooKeeper under a name, if
the user gives one. And a range that ends before it starts is an error here, which Spark
treats as an empty one.

Spark asks for the end of the logs as often as it can. When nothing is new the answer
waits until something is, for at most `IDLE_WAIT_S`.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from metaq.client.cluster.catalog import require_partitions
from metaq.client.names import name_some
from metaq.client.offsets.query_progress import (
    commit_progress,
    forget_start,
    keep_start,
    read_start,
)
from metaq.clock import SystemClock
from metaq.errors import MetaqError
from metaq.model import MessageId, Offset, TopicPartition
from metaq.spark.errors import BackwardRangeError, OptionError, one_sentence
from metaq.spark.offsets import (
    LAG_KEY,
    Offsets,
    format_offsets,
    offsets_from_json,
    offsets_to_json,
    parse_offsets,
)
from metaq.spark.options import SourceOptions
from metaq.spark.plan import BatchLimits, Logs, LogSpan, plan_batch_end, settle
from metaq.spark.record_bounds import EVERYTHING
from metaq.spark.schema import value_type, with_table_options
from metaq.spark.source.batch import NOTHING, ReadPlanner, share_tasks
from metaq.spark.source.read_task import ReadTask, TaskReader
from metaq.spark.versions import HAS_LIMITS, report_missing_limits

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # before 4.2

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # where it is missing
        """Replaces the mix-in that Spark lacks before 4.2."""


_CLOCK: Final = SystemClock()
_log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.2
"""Longest delay of the answer that nothing is new."""


class Backlog(NamedTuple):
    """Unread part of a topic."""

    size_bytes: int
    record_count: int | None
    """Messages; an estimate for MetaQ 1.4, None where a broker does not say."""


class StreamProgress(ReadPlanner):
    """The offsets of one query, on the driver. One thread."""

    def __init__(
        self, options: SourceOptions, *, idle_wait_s: float = IDLE_WAIT_S
    ) -> None:
        """Begin without facts; nothing is asked."""
        super().__init__(options)
        self._idle_wait_s = idle_wait_s
        self._limits = options.limits
        self._target: dict[TopicPartition, Offset] | None = None
        self._has_kept_start = options.pin_name is not None
        self._start: Offsets | None = None
        self._waiting_since_s: float | None = None
        self._away: frozenset[TopicPartition] = frozenset()
        self._left: frozenset[TopicPartition] = frozenset()
        self._gone: frozenset[TopicPartition] = frozenset()
        self._committed: dict[TopicPartition, Offset] = {}
        self._reached: Offsets = {}
        self._is_checked = False
        self.ends: dict[TopicPartition, Offset] = {}
        """Log ends as they were seen last."""
        self._planned: dict[TopicPartition, Offset] = {}

    def start(self) -> dict[TopicPartition, Offset]:
        """Return where a new query starts, the same until its first commit.

        That it is the same after a restart takes the option `pinStart`.

        Raises:
            NoBrokerError: a topic or partition that the options name is on no broker,
                or a broker is away, and that is to fail the query.
            OptionError: what is kept under the name is the start of another query.
            MetaqError: the cluster cannot be asked.
        """
        options, cluster = self._options, self._cluster
        if (kept := self._kept_start()) is not None:
            self._start = kept
            return kept
        self.require_named()
        self._is_checked = True
        logs = cluster.spans(cluster.partitions(options))
        starts = self.resolve_starts(logs)
        if options.pin_name is not None:
            cluster.ask(keep_start, options.pin_name, format_offsets(starts))
        self._start = starts
        return starts

    def _kept_start(self) -> dict[TopicPartition, Offset] | None:
        """Return the kept start or None; OptionError if other topics have it."""
        options = self._options
        if options.pin_name is None:
            return None
        text = self._cluster.ask(read_start, options.pin_name)
        if text is None:
            return None
        kept = parse_offsets(text)
        if kept and not any(map(options.chooses, kept)):
            raise OptionError(
                f"under the name {options.pin_name!r} the start of another query is"
                f" kept, which reads {name_some(kept.keys())}: give each source that is"
                " read a pinStart, or a progressGroup, of its own"
            )
        return kept

    def changed(
        self, lasts: Mapping[TopicPartition, tuple[Offset, MessageId]]
    ) -> list[TopicPartition]:
        """Return the partitions that have another message at an offset than was read.

        `lasts` has the offset and the id of the message that was read. Partitions that
        are away or no longer chosen are left out, and offsets that are expired, damaged
        or after the log end.
        """
        logs = self._cluster.watched_spans(filter(self._options.chooses, lasts))
        offsets = {
            partition: lasts[partition][0]
            for partition, log in logs.items()
            if log is not None and log.start <= lasts[partition][0] < log.end
        }
        found = self._facts.message_ids(offsets)
        return sorted(each for each in found if found[each] != lasts[each][1])

    def freeze(self) -> None:
        """Read up to the log ends of this moment, and never more."""
        cluster, options = self._cluster, self._options
        logs = cluster.spans(cluster.partitions(options))
        self._target = {p: (log or NOTHING).end for p, log in logs.items()}
        limits = options.limits
        # No more messages will come: a wait for them would never end.
        self._limits = BatchLimits(
            messages_max=limits.messages_max, bytes_max=limits.bytes_max
        )

    def advance(
        self, offsets: Offsets, *, has_limits: bool = True
    ) -> dict[TopicPartition, Offset]:
        """Return where the next micro-batch ends; `offsets` if there is none.

        Args:
            offsets: the next byte to read, of the partitions that are known.
            has_limits: heed the limits of the options.

        Raises:
            DataLossError: bytes are gone, and that is to fail the query.
            MetaqError: the cluster cannot be asked.
        """
        unread = self._unread(offsets)
        if self._target is None and not any(s.size_bytes for s in unread.values()):
            self._waiting_since_s = None
            self._cluster.wait_for_growth(self._idle_wait_s)
            unread = self._unread(offsets)
        limits = self._limits if has_limits else BatchLimits()
        waited_s = 0.0
        if limits.messages_min is not None:
            now_s = _CLOCK.monotonic_s()
            if any(span.size_bytes for span in unread.values()):
                since_s = self._waiting_since_s
                self._waiting_since_s = now_s if since_s is None else since_s
                waited_s = now_s - self._waiting_since_s
        ends = plan_batch_end(unread, limits, self._facts, waited_s=waited_s)
        is_held = all(ends[p] == span.start for p, span in unread.items())
        if not is_held:
            self._waiting_since_s = None
        elif limits.messages_min is not None and unread:
            self._cluster.wait_for_growth(self._idle_wait_s)
        self._planned = {**offsets, **ends}
        return self._planned

    def spans(self, start: Offsets, end: Offsets) -> dict[TopicPartition, LogSpan]:
        """Return the readable part of a micro-batch.

        A partition that `start` does not know is read from its log start.

        Raises:
            BackwardRangeError: a partition ends before it starts.
            DataLossError: bytes are gone, and that is to fail the query.
            MetaqError: the cluster cannot be asked.
        """
        changed = {p: at for p, at in end.items() if start.get(p) != at}
        # Of all: a partition that is left out would no longer be watched.
        logs = self._cluster.watched_spans(end.keys())
        wanted = {}
        for partition, last in changed.items():
            first = start.get(partition)
            if first is None:
                first = min((logs.get(partition) or NOTHING).start, last)
            if first <= last:
                wanted[partition] = LogSpan(first, last)
                continue
            text = f"{partition}: a micro-batch from {first} to {last}"
            if self._options.fail_on_data_loss:
                raise BackwardRangeError(
                    f"{text}: the log went back, or the start of the query was lost;"
                    " failOnDataLoss=false goes on from there"
                )
            _log.warning("%s reads nothing: the log went back", text)
        # A log that cannot be asked now is left to the task, which waits for its
        # broker.
        there = {p: span for p, span in wanted.items() if p in logs}
        return {**wanted, **self.settle_all(there, logs)}

    def tasks(self, start: Offsets, end: Offsets) -> list[ReadTask]:
        """Return the range of each task of a micro-batch; raises as `spans`."""
        return self.plan_tasks(self.spans(start, end), EVERYTHING)

    def shares(self, start: Offsets, end: Offsets) -> list[tuple[ReadTask, ...]]:
        """Return `tasks`, small ones put together; raises as `spans`."""
        return share_tasks(self._facts, self._options, self.tasks(start, end))

    def backlog(self) -> dict[str, Backlog]:
        """Return what the next micro-batch leaves for later ones, of each topic.

        Brokers are asked where something is left; one without an answer is a warning.
        """
        found: dict[str, Backlog] = {}
        for partition, end in sorted(self.ends.items()):
            start = min(end, self._planned.get(partition, end))
            before = found.get(partition.topic, Backlog(0, 0))
            count = self._count(partition, start, end)
            if count is not None and before.record_count is not None:
                count += before.record_count
            else:
                count = None
            size_bytes = before.size_bytes + end - start
            found[partition.topic] = Backlog(size_bytes, count)
        return found

    def _count(
        self, partition: TopicPartition, start: Offset, end: Offset
    ) -> int | None:
        """Return how many records begin in start..end; None if that is unknown."""
        if start == end:
            return 0
        try:
            return self._facts.count(partition, start, end)
        except MetaqError as error:
            _log.warning("the number of unread records is not known: %s", error)
            return None

    def reach(self, offsets: Offsets) -> None:
        """Commit the offsets from which Spark asks for more; a failure is a warning.

        Spark asks for more when a micro-batch is in its checkpoint, and commits it to
        the source one micro-batch later: the last one of a run that ends, never.
        """
        if offsets == self._reached:
            return
        self._reached = offsets  # once, even if it fails: the query waits for this
        self._commit(offsets, is_in_checkpoint=offsets != self._start)

    def commit(self, end: Offsets) -> None:
        """Commit the end of a micro-batch; a failure is a warning."""
        self._commit(end, is_in_checkpoint=True)

    def _commit(self, offsets: Offsets, *, is_in_checkpoint: bool) -> None:
        """Commit progress; forget the kept start when the query has offsets."""
        options = self._options
        known = self._committed
        moved = {p: at for p, at in offsets.items() if known.get(p) != at}
        try:
            if options.progress_group is not None and moved:
                self._cluster.ask(commit_progress, options.progress_group, moved)
                self._committed = dict(offsets)
            if is_in_checkpoint and self._has_kept_start and options.pin_name:
                self._cluster.ask(forget_start, options.pin_name)
                self._has_kept_start = False
        except MetaqError as error:
            _log.warning("progress is not committed: %s", error)

    def _unread(self, offsets: Offsets) -> dict[TopicPartition, LogSpan]:
        """Return the unread spans of each partition.

        Partitions that are away are missing, and those that the user no longer chooses:
        the query keeps its offsets in them.
        """
        cluster, options = self._cluster, self._options
        if not self._is_checked:
            # From then on partitions away are waited for, and the rest is read.
            cluster.require_whole(options, offsets)
            cluster.ask(require_partitions, options.assigned - offsets.keys())
            self._is_checked = True
        known = frozenset(filter(options.chooses, offsets))
        text = "partitions no longer chosen are not read: %s"
        self._left = _report(text, frozenset(offsets.keys() - known), self._left)
        logs: Logs = cluster.watched_spans(known.union(cluster.partitions(options)))
        text = "brokers are away; nothing new is read of: %s"
        self._away = _report(text, known - logs.keys(), self._away)
        reached = {p: LogSpan(offsets[p], offsets[p]) for p in known}
        logs = self.confirmed(reached, logs)
        self._report_gone(offsets, logs)
        unread = {}
        for partition, log in logs.items():
            here = offsets.get(partition, (log or NOTHING).start)
            end = here if log is None else log.end
            self.ends[partition] = end
            if self._target is not None:
                end = min(end, max(here, self._target.get(partition, here)))
            # A log that went back is named when the batch is planned.
            unread[partition] = LogSpan(min(here, end), end)
        return unread

    def _report_gone(self, offsets: Offsets, logs: Logs) -> None:
        """Name partitions that have no log any more, each once."""
        gone = {
            p: at for p, at in offsets.items() if at and logs.get(p, NOTHING) is None
        }
        fails = self._options.fail_on_data_loss
        for partition, at in sorted(gone.items()):
            found = settle(partition, LogSpan(at, at), None, fail_on_data_loss=fails)
            for lost in found.lost if partition not in self._gone else ():
                _log.warning("data is lost: %s", lost)
        self._gone = frozenset(gone)


def _report(
    text: str, now: frozenset[TopicPartition], before: frozenset[TopicPartition]
) -> frozenset[TopicPartition]:
    """Return `now`, after a warning about it if it has some that `before` lacks."""
    if now - before:
        _log.warning(text, ", ".join(map(str, sorted(now))))
    return now


class StreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader for Spark 4.2 and later; tasks have its `TaskReader`."""

    @cached_property
    def progress(self) -> StreamProgress:
        """The offsets of the query, on the driver."""
        return StreamProgress(self._options)

    @one_sentence
    def initialOffset(self) -> dict[str, object]:  # noqa: N802  # Spark's name
        """Return where a new query starts; Spark may ask several times."""
        return offsets_to_json(self.progress.start())

    @one_sentence
    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, object]:  # noqa: N802  # Spark's name
        """Return where the next micro-batch ends; `start` for none.

        Raises:
            DataLossError: bytes are gone, and that is to fail the query.
            MetaqError: the cluster cannot be asked.
        """
        del limit  # Spark's own; the options say more
        offsets = offsets_from_json(start)
        self.progress.reach(offsets)
        return offsets_to_json(self.progress.advance(offsets))

    @one_sentence
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Read the messages now there, and no later ones."""
        self.progress.freeze()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802  # Spark's name
        """Return the last known log ends, and what the query has not read.

        It is the `latestOffset` of the query's progress; nothing is planned by it.
        """
        progress = self.progress
        if not progress.ends:
            return None
        lag = {
            topic: {"bytes": one.size_bytes, "records": one.record_count}
            for topic, one in progress.backlog().items()
        }
        return {**offsets_to_json(progress.ends), LAG_KEY: lag}

    @one_sentence
    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> list[InputPartition]:
        """Return the ranges of each task of a micro-batch: some `ReadTask`."""
        shares = self.progress.shares(offsets_from_json(start), offsets_from_json(end))
        return [InputPartition(share) for share in shares]

    @one_sentence
    def commit(self, end: dict[str, Any]) -> None:
        """Note that everything before `end` is processed."""
        self.progress.commit(offsets_from_json(end))


class OldStreamReader(StreamReader):
    """The reader for Spark 4.0 and 4.1, which do not pass the offsets of the query.

    They are known once Spark has asked for the start or planned a micro-batch; the
    limits hold from then on. The first micro-batch after a restart reads all there is.
    """

    def __init__(self, options: SourceOptions, value_type: pa.DataType) -> None:
        """Take the options; nothing is asked yet."""
        super().__init__(options, value_type)
        self._offsets: dict[TopicPartition, Offset] | None = None
        self._left_out: dict[TopicPartition, Offset] = {}

    @one_sentence
    def initialOffset(self) -> dict[str, object]:  # noqa: N802  # Spark's name
        """Return where a new query starts; Spark may ask several times."""
        found = super().initialOffset()
        self._offsets = offsets_from_json(found)
        return found

    @one_sentence
    def latestOffset(self) -> dict[str, object]:  # type: ignore[override]  # noqa: N802  # Spark's name
        """Return where the next micro-batch ends."""
        offsets = self._offsets
        ends = self.progress.advance(offsets or {}, has_limits=offsets is not None)
        self._offsets = ends
        return offsets_to_json(ends)

    @one_sentence
    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> list[InputPartition]:
        """Return the ranges of each task of a micro-batch: some `ReadTask`.

        Partitions that were away while the query's offsets were unknown are missing
        from `end`; the next micro-batch has them again, with their old offsets.
        """
        first = {**self._left_out, **offsets_from_json(start)}
        last = offsets_from_json(end)
        self._left_out = {p: at for p, at in first.items() if p not in last}
        self._offsets = {**self._left_out, **last}
        return super().partitions(offsets_to_json(first), end)


def stream_reader(given: Mapping[str, str], schema: StructType) -> StreamReader:
    """Return the reader for the Spark that runs; arguments as for `batch_reader`.

    Raises:
        OptionError: an option is wrong, or the user asked for other columns.
    """
    options = SourceOptions.from_map(with_table_options(schema, given), is_stream=True)
    report_missing_limits(options.limits.is_any)
    kind = StreamReader if HAS_LIMITS else OldStreamReader
    return kind(options, value_type(schema, options.values))

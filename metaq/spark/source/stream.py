"""`spark.readStream.format("metaq")`: the ranges of each micro-batch of a query.

Spark stores the offsets; a reader has no state that a query needs after a restart. This
module does two things that Spark does not do for a source. Spark stores the start of a
new query only with its first batch, so the start is also stored in ZooKeeper, if the
user gives a name for it. And a range that ends before it starts is an error, while
Spark would treat it as empty.

Spark asks for the log ends continuously. If there is nothing new, the answer waits for
it, for at most `IDLE_WAIT_S`.
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
"""Maximum delay of an answer without new messages, in seconds."""


class Backlog(NamedTuple):
    """Unread part of a topic."""

    size_bytes: int
    record_count: int | None
    """Number of messages; an estimate for MetaQ 1.4, None if not known."""


class StreamProgress(ReadPlanner):
    """The offsets of one query, on the driver. One thread."""

    def __init__(
        self, options: SourceOptions, *, idle_wait_s: float = IDLE_WAIT_S
    ) -> None:
        """Start without facts; connects later."""
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
        """Partition → log end, as last read."""
        self._planned: dict[TopicPartition, Offset] = {}

    def start(self) -> dict[TopicPartition, Offset]:
        """Return the start offsets of a new query.

        With the option `pinStart` they are stored, and the same after a restart before
        the first commit.

        Raises:
            NoBrokerError: no broker has a topic or partition named in the options, or
                a broker stays away, with `failOnDataLoss`.
            OptionError: the start of another query is stored under the name.
            MetaqError: the cluster is not available.
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
        """Return the stored start or None; OptionError if it has other topics only."""
        options = self._options
        if options.pin_name is None:
            return None
        text = self._cluster.ask(read_start, options.pin_name)
        if text is None:
            return None
        kept = parse_offsets(text)
        if kept and not any(map(options.chooses, kept)):
            raise OptionError(
                f"the name {options.pin_name!r} stores the start of another query,"
                f" which reads {name_some(kept.keys())}: give each source its own"
                " pinStart or progressGroup"
            )
        return kept

    def changed(
        self, lasts: Mapping[TopicPartition, tuple[Offset, MessageId]]
    ) -> list[TopicPartition]:
        """Return the partitions whose message at an offset differs from the one read.

        Ignores partitions that are away or no longer chosen, and offsets that are
        expired, damaged or after the log end.

        Args:
            lasts: partition → offset and id of a message that was read.
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
        """Read up to the current log ends, and no further."""
        cluster, options = self._cluster, self._options
        logs = cluster.spans(cluster.partitions(options))
        self._target = {p: (log or NOTHING).end for p, log in logs.items()}
        limits = options.limits
        # Without `messages_min`: a wait for more messages would never end.
        self._limits = BatchLimits(
            messages_max=limits.messages_max, bytes_max=limits.bytes_max
        )

    def advance(
        self, offsets: Offsets, *, has_limits: bool = True
    ) -> dict[TopicPartition, Offset]:
        """Return the end offsets of the next micro-batch; `offsets` if there is none.

        Args:
            offsets: next byte to read of each known partition.
            has_limits: whether to apply the limits of the options.

        Raises:
            DataLossError: bytes are gone, with `failOnDataLoss`.
            MetaqError: the cluster is not available.
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

        A partition missing in `start` is read from its log start.

        Raises:
            BackwardRangeError: a partition ends before it starts, with
                `failOnDataLoss`.
            DataLossError: bytes are gone, with `failOnDataLoss`.
            MetaqError: the cluster is not available.
        """
        changed = {p: at for p, at in end.items() if start.get(p) != at}
        # For all partitions, because others would no longer be watched.
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
        # A log whose broker is away is left to the task, which waits for the broker.
        there = {p: span for p, span in wanted.items() if p in logs}
        return {**wanted, **self.settle_all(there, logs)}

    def tasks(self, start: Offsets, end: Offsets) -> list[ReadTask]:
        """Return the ranges of a micro-batch, each as a task; raises as `spans`."""
        return self.plan_tasks(self.spans(start, end), EVERYTHING)

    def shares(self, start: Offsets, end: Offsets) -> list[tuple[ReadTask, ...]]:
        """Return `tasks` with small ranges combined; raises as `spans`."""
        return share_tasks(self._facts, self._options, self.tasks(start, end))

    def backlog(self) -> dict[str, Backlog]:
        """Return the backlog of each topic after the next micro-batch.

        Asks brokers for counts of partitions with a backlog; logs a warning if one does
        not answer.
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
        """Return the number of records in [start, end); None if not known."""
        if start == end:
            return 0
        try:
            return self._facts.count(partition, start, end)
        except MetaqError as error:
            _log.warning("the number of unread records is unknown: %s", error)
            return None

    def reach(self, offsets: Offsets) -> None:
        """Commit the offsets from which Spark asks for more; log failures as warnings.

        Spark asks for more once a micro-batch is in its checkpoint, but commits it to
        the source only with the next one: the last one of a run, never.
        """
        if offsets == self._reached:
            return
        self._reached = offsets  # only once, even if it fails: the query waits for this
        self._commit(offsets, is_in_checkpoint=offsets != self._start)

    def commit(self, end: Offsets) -> None:
        """Commit the end of a micro-batch; log failures as warnings."""
        self._commit(end, is_in_checkpoint=True)

    def _commit(self, offsets: Offsets, *, is_in_checkpoint: bool) -> None:
        """Commit progress; delete the stored start once Spark has stored offsets."""
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
        """Return the unread span of each partition.

        Lacks partitions that are away or no longer chosen; the query keeps their
        offsets.
        """
        cluster, options = self._cluster, self._options
        if not self._is_checked:
            # Only the first time: later, reading goes on without partitions away.
            cluster.require_whole(options, offsets)
            cluster.ask(require_partitions, options.assigned - offsets.keys())
            self._is_checked = True
        known = frozenset(filter(options.chooses, offsets))
        text = "partitions no longer chosen are not read: %s"
        self._left = _report(text, frozenset(offsets.keys() - known), self._left)
        logs: Logs = cluster.watched_spans(known.union(cluster.partitions(options)))
        text = "brokers are away, no new messages are read of: %s"
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
            # A log that went back is reported when the batch is planned.
            unread[partition] = LogSpan(min(here, end), end)
        return unread

    def _report_gone(self, offsets: Offsets, logs: Logs) -> None:
        """Report partitions whose log is gone, each once."""
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
    """Return `now`; log it as a warning if it has elements that `before` lacks."""
    if now - before:
        _log.warning(text, ", ".join(map(str, sorted(now))))
    return now


class StreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader for Spark 4.2 and later; pickled for the tasks as a `TaskReader`."""

    @cached_property
    def progress(self) -> StreamProgress:
        """The offsets of the query, on the driver."""
        return StreamProgress(self._options)

    @one_sentence
    def initialOffset(self) -> dict[str, object]:  # noqa: N802  # Spark's name
        """Return the start offsets of a new query; Spark may ask several times."""
        return offsets_to_json(self.progress.start())

    @one_sentence
    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, object]:  # noqa: N802  # Spark's name
        """Return the end offsets of the next micro-batch; `start` for none.

        Raises:
            DataLossError: bytes are gone, with `failOnDataLoss`.
            MetaqError: the cluster is not available.
        """
        del limit  # replaced by our own options
        offsets = offsets_from_json(start)
        self.progress.reach(offsets)
        return offsets_to_json(self.progress.advance(offsets))

    @one_sentence
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Read the messages that exist now, and no later ones."""
        self.progress.freeze()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802  # Spark's name
        """Return the last known log ends, and the backlog of the query.

        Spark shows it as `latestOffset` in the query's progress.
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
        """Return the tasks of a micro-batch, each with a tuple of `ReadTask`."""
        shares = self.progress.shares(offsets_from_json(start), offsets_from_json(end))
        return [InputPartition(share) for share in shares]

    @one_sentence
    def commit(self, end: dict[str, Any]) -> None:
        """Commit `end`: everything before it is processed."""
        self.progress.commit(offsets_from_json(end))


class OldStreamReader(StreamReader):
    """The reader for Spark 4.0 and 4.1, which do not pass the offsets of the query.

    The offsets are known once Spark has asked for the start or planned a micro-batch;
    limits apply from then on. The first micro-batch after a restart has no limits.
    """

    def __init__(self, options: SourceOptions, value_type: pa.DataType) -> None:
        """Store the options; connects later."""
        super().__init__(options, value_type)
        self._offsets: dict[TopicPartition, Offset] | None = None
        self._left_out: dict[TopicPartition, Offset] = {}

    @one_sentence
    def initialOffset(self) -> dict[str, object]:  # noqa: N802  # Spark's name
        """Return the start offsets of a new query; Spark may ask several times."""
        found = super().initialOffset()
        self._offsets = offsets_from_json(found)
        return found

    @one_sentence
    def latestOffset(self) -> dict[str, object]:  # type: ignore[override]  # noqa: N802  # Spark's name
        """Return the end offsets of the next micro-batch."""
        offsets = self._offsets
        ends = self.progress.advance(offsets or {}, has_limits=offsets is not None)
        self._offsets = ends
        return offsets_to_json(ends)

    @one_sentence
    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> list[InputPartition]:
        """Return the tasks of a micro-batch, each with a tuple of `ReadTask`.

        `end` lacks partitions that were away while the query's offsets were unknown;
        the next micro-batch has them again, with their old offsets.
        """
        first = {**self._left_out, **offsets_from_json(start)}
        last = offsets_from_json(end)
        self._left_out = {p: at for p, at in first.items() if p not in last}
        self._offsets = {**self._left_out, **last}
        return super().partitions(offsets_to_json(first), end)


def stream_reader(given: Mapping[str, str], schema: StructType) -> StreamReader:
    """Return the reader for the running Spark; arguments as for `batch_reader`.

    Raises:
        OptionError: an option is wrong, or the user's schema has other columns.
    """
    options = SourceOptions.from_map(with_table_options(schema, given), is_stream=True)
    report_missing_limits(options.limits.is_any)
    kind = StreamReader if HAS_LIMITS else OldStreamReader
    return kind(options, value_type(schema, options.values))

"""Archive topics to a Delta table, partitioned by topic and day, each message once.

    archive(spark, "/archive", {"zookeeper": "zk:2181", "subscribe": "orders"})

It works in batches. The driver reads the log ends, one Spark job reads up to there and
writes data files, and one commit of the table adds them, with the next byte to read of
each partition. So all progress is in the table: a batch that was not committed is
planned again, from the same offsets.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from pyspark.sql import SparkSession

from metaq.client.names import name_some
from metaq.model import MessageId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError, JobError
from metaq.pipeline.jobs.archive_store import ArchiveStore, may_lose
from metaq.pipeline.jobs.compact import FILE_BYTES, compact_store
from metaq.pipeline.jobs.day_files import Read
from metaq.pipeline.jobs.session import SPARK_ERRORS, job_errors, run_apart
from metaq.spark.offsets import Offsets
from metaq.spark.options import SourceOptions
from metaq.spark.topics import ReadTask, plan_stream, read_rows

SMALL_FILES_MAX: Final = 32
"""Number of small files of a topic and day at which they are compacted."""
STOP_LOOK_S: Final = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """Progress of a run after a batch: messages and bytes of files since its start."""

    batch: int
    message_count: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """Result of one run; `total_` fields are of the whole archive at its end."""

    message_count: int
    written_bytes: int
    batch_count: int
    """Number of batches with messages."""
    compacted_count: int
    """Number of small files replaced by compaction."""
    total_message_count: int
    total_file_count: int
    total_bytes: int


class ArchiveSource(Protocol):
    """The source of an archive; for topics, the result of `plan_stream`."""

    def start(self) -> dict[TopicPartition, Offset]:
        """Return the start offsets of a new archive."""

    def changed(
        self, lasts: Mapping[TopicPartition, tuple[Offset, MessageId]]
    ) -> Sequence[TopicPartition]:
        """Return the partitions with another message at the offset of `lasts`."""

    def freeze(self) -> None:
        """Read up to the current log ends, and no further."""

    def advance(self, offsets: Offsets) -> dict[TopicPartition, Offset]:
        """Return the end of the next batch; `offsets` if there is nothing to read."""

    def tasks(self, start: Offsets, end: Offsets) -> Sequence[ReadTask]:
        """Return the tasks that read a batch, each a range of one partition."""

    def commit(self, end: Offsets) -> None:
        """Commit `end`: everything before it is archived."""


def archive(
    spark: SparkSession,
    path: str,
    options: Mapping[str, str],
    *,
    interval_s: float | None = None,
    file_bytes: int = FILE_BYTES,
    on_progress: Callable[[ArchiveProgress], None] = lambda _progress: None,
    stop: threading.Event | None = None,
) -> ArchiveSummary:
    """Archive the messages of topics since the last run.

    Args:
        spark: the session.
        path: path or URL of the archive, which one job at a time may write.
        options: of a streaming read with `format("metaq")`. A new archive starts at
            the earliest offsets unless `startingOffsets` is given.
        interval_s: minimum seconds between batches; runs until Ctrl-C or `stop`. None
            ends once all messages that existed at the start are archived.
        file_bytes: approximate size up to which small files are compacted, 2 or more.
        on_progress: called on the driver after each batch.
        stop: set by another thread, or by Ctrl-C, to end the run at once; the batch in
            progress is left to the next run.

    Returns:
        Counts of this run, and of the whole archive.

    Raises:
        ArchiveError: the archive is damaged, or another job writes it.
        JobError: a task failed; the message names partition and offsets.
        KeyboardInterrupt: Ctrl-C, without `interval_s`; not everything is archived.
        MetaqError: the cluster is not available, or messages are lost.
        OptionError: an option is wrong.
    """
    asked = {"startingOffsets": "earliest"}
    # Given twice in different case, the option would have an arbitrary value.
    asked = {k: v for k, v in asked.items() if k.lower() not in map(str.lower, options)}
    wanted = SourceOptions.from_map(asked | dict(options), is_stream=True)
    wanted.require_raw_values()
    run = ArchiveRun(
        spark,
        ArchiveStore(path, may_be_new=True),
        plan_stream(wanted),
        partial(read_rows, options=wanted),
        interval_s,
        file_bytes,
        on_progress,
        stop or threading.Event(),
    )
    return run.to_the_end()


@dataclass(slots=True)
class ArchiveRun:
    """One run of `archive`: writes batches, in one thread."""

    spark: SparkSession
    store: ArchiveStore
    source: ArchiveSource
    read: Read
    interval_s: float | None = None
    file_bytes: int = FILE_BYTES
    on_progress: Callable[[ArchiveProgress], None] = lambda _progress: None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the run, even during a batch."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _batch: int = 0
    _message_count: int = 0
    _written_bytes: int = 0
    _batch_count: int = 0
    _compacted_count: int = 0

    @property
    def _group(self) -> str:
        return f"metaq archive {self.store.root}"

    def to_the_end(self) -> ArchiveSummary:
        """Run until everything is archived, or the run is stopped."""
        interrupted = threading.Event()

        def interrupt() -> None:
            interrupted.set()
            self.stop.set()

        run_apart(self._go, on_interrupt=interrupt)
        if self.interval_s is None and interrupted.is_set():
            raise KeyboardInterrupt
        files = self.store.files()
        return ArchiveSummary(
            self._message_count,
            self._written_bytes,
            self._batch_count,
            self._compacted_count,
            sum(file.message_count for file in files),
            len(files),
            sum(file.size_bytes for file in files),
        )

    def _go(self) -> None:
        threading.Thread(target=self._cancel_when_stopped, daemon=True).start()
        try:
            self._archive()
        except JobError as error:
            if not self.stop.is_set():
                raise
            _log.info("stopped in the middle of a batch: %s", error)
        finally:
            self._ended.set()

    def _archive(self) -> None:
        source, store, interval_s = self.source, self.store, self.interval_s
        store.claim()
        offsets = store.positions()
        if changed := source.changed(store.last_messages()):
            raise ArchiveError(
                f"{store.root}: {name_some(changed)}: another message is at the offset"
                " of the last archived one now: the topic was created again, or is that"
                " of another cluster; archive it to a directory of its own"
            )
        # Read once: later the table may have a batch of another job.
        self._batch = store.batch + 1
        if interval_s is None:
            source.freeze()
        start = offsets or source.start()
        while not self.stop.is_set():
            end = source.advance(start)
            if end != offsets:
                self._write(start, end)
                offsets = start = end
            elif interval_s is None:
                return
            if interval_s is not None:
                self.stop.wait(interval_s)

    def _cancel_when_stopped(self) -> None:
        """Cancel the Spark job once `stop` is set.

        Repeatedly, because a job that is just starting is not cancelled.
        """
        while not self._ended.wait(STOP_LOOK_S):
            if self.stop.is_set():
                with suppress(*SPARK_ERRORS, OSError):
                    self.spark.sparkContext.cancelJobGroup(self._group)

    def _write(self, start: Offsets, end: Offsets) -> None:
        """Write one batch, and commit it."""
        store = self.store
        batch = self._batch
        tasks = self.source.tasks(start, end)
        with job_errors("archive"):
            context = self.spark.sparkContext
            context.setJobGroup(self._group, f"archive {store.root}", True)
            files = store.write(self.spark, tasks, self.read, batch)
        store.commit(batch, files, positions=end)
        self._batch += 1
        self.source.commit(end)
        if not files:
            return
        self._batch_count += 1
        self._message_count += sum(file.message_count for file in files)
        self._written_bytes += sum(file.size_bytes for file in files)
        self.on_progress(
            ArchiveProgress(batch, self._message_count, self._written_bytes)
        )
        with may_lose(store.root):
            done = compact_store(
                store, file_bytes=self.file_bytes, count_min=SMALL_FILES_MAX
            )
            self._compacted_count += done.replaced_count

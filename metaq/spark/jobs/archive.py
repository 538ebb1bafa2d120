"""Archive topics to a Delta table, partitioned by topic and day, each message once.

    archive(spark, "/archive", {"zookeeper": "zk:2181", "subscribe": "orders"})

A streaming query reads; each of its batches becomes data files and one commit of the
table, which has the number of the batch. A batch that is repeated after a kill is
either in the table, and then left out, or not, and then written again.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from metaq.spark.errors import JobError, OptionError
from metaq.spark.jobs.archive_store import ArchiveStore, open_archive
from metaq.spark.jobs.compact import FILE_BYTES, compact_store
from metaq.spark.jobs.failures import job_errors
from metaq.spark.jobs.waiting import run_apart
from metaq.spark.options import SourceOptions, ValueFormat

SMALL_FILES_MAX: Final = 32
"""When a topic and day has so many small files, they are put together."""
STOP_LOOK_S: Final = 1
"""Interval of looks whether a run is to stop, seconds."""
QUERY_ID: Final = "sql.streaming.queryId"
"""Local property that Spark sets while a batch is written."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """Progress of archiving."""

    batch: int
    """The batch that has just been written."""
    message_count: int
    """Messages archived so far by this run."""
    written_bytes: int
    """Bytes of the files that this run has written."""


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """Result of one run."""

    message_count: int
    """Messages archived by this run."""
    written_bytes: int
    """Bytes of the files that they went to."""
    batch_count: int
    """Batches that had messages."""
    compacted_count: int
    """Small files that were put together."""
    total_message_count: int
    """Messages in the archive now."""
    total_file_count: int
    """Files of the archive now."""
    total_bytes: int
    """Bytes of all its files."""


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
    """Archive the messages of the topics beyond the last run.

    Args:
        spark: The session.
        path: Path or URL of the archive, which one job at a time may write.
        options: Of a streaming read with `format("metaq")`. A new archive starts at
            the earliest offsets unless they say otherwise.
        interval_s: Go on for ever, a batch at least that long after the last, until
            Ctrl-C or until the query is stopped; None: end when everything is archived
            that was there at the start.
        file_bytes: Small files are put together up to about that size, 2 or more.
        on_progress: Called on the driver after each batch.
        stop: Set by another thread, it ends the run where it is: a batch that is being
            written is left to the next run.

    Raises:
        ArchiveError: The archive is damaged, or of an older version, or another job
            writes it.
        JobError: Reading or writing failed; the sentence names partition and offsets.
        KeyboardInterrupt: Ctrl-C, without `interval_s`; not everything is archived.
        OptionError: An option is wrong.
    """
    asked = {"startingOffsets": "earliest"}
    # Of two spellings of one name Spark would take either.
    asked = {k: v for k, v in asked.items() if k.lower() not in map(str.lower, options)}
    asked |= options
    # Refused before Spark does anything.
    values = SourceOptions.from_map(asked, is_stream=True).values
    if values.format is not ValueFormat.BINARY:
        raise OptionError(
            f"an archive has values as they are: expected valueFormat=binary, got"
            f" {values.format.value}"
        )
    with job_errors("archive"):
        rows = spark.readStream.format("metaq").options(**asked).load()
    return archive_stream(
        rows,
        path,
        interval_s=interval_s,
        file_bytes=file_bytes,
        on_progress=on_progress,
        stop=stop,
    )


def archive_stream(
    rows: DataFrame,
    path: str,
    *,
    interval_s: float | None = None,
    file_bytes: int = FILE_BYTES,
    on_progress: Callable[[ArchiveProgress], None] = lambda _progress: None,
    stop: threading.Event | None = None,
) -> ArchiveSummary:
    """Run `archive` on a given stream of rows.

    Args:
        rows: A streaming frame with the columns of the source; a batch that is
            repeated has the same rows.
        path: As for `archive`.
        interval_s: As for `archive`.
        file_bytes: As for `archive`.
        on_progress: As for `archive`.
        stop: As for `archive`.
    """
    store = open_archive(path, may_be_new=True)
    writer = _BatchWriter(store, file_bytes, on_progress)
    stream = rows.writeStream.foreachBatch(writer.write)
    stream = stream.option("checkpointLocation", store.checkpoint)
    if interval_s is None:
        stream = stream.trigger(availableNow=True)
    else:
        interval = f"{round(interval_s * 1000)} milliseconds"
        stream = stream.trigger(processingTime=interval)
    stop = stop or threading.Event()
    with job_errors("archive"):
        query = stream.start()
        _wait(query, writer, stop, ends=interval_s is None)
        writer.end(str(query.id))
    return writer.summary()


def _wait(
    query: StreamingQuery, writer: "_BatchWriter", stop: threading.Event, *, ends: bool
) -> None:
    """Wait until a query ends, or end it; the error of a batch is raised as it is.

    Ctrl-C is the end of a query that does not end by itself.
    """

    def wait() -> None:
        while not (stop.is_set() or query.awaitTermination(STOP_LOOK_S)):
            pass

    try:
        run_apart(wait)
    except KeyboardInterrupt:
        if ends:
            raise
    except Exception:
        if writer.failure is not None:
            raise writer.failure from None
        raise
    finally:
        query.stop()


class _BatchWriter:
    """Writes the batches of one query, one after the other."""

    def __init__(
        self,
        store: ArchiveStore,
        file_bytes: int,
        on_progress: Callable[[ArchiveProgress], None],
    ) -> None:
        self._store = store
        self._file_bytes = file_bytes
        self._on_progress = on_progress
        self._turn = threading.Lock()
        self._is_claimed = False
        self._is_ended = False
        self._message_count = 0
        self._written_bytes = 0
        self._batch_count = 0
        self._compacted_count = 0
        self.failure: Exception | None = None
        """Error raised by `write`; Spark hands on its text alone."""

    def write(self, batch: DataFrame, number: int) -> None:
        """Write one batch; one that is in the archive already is left out."""
        with self._turn:
            if self._is_ended:
                # Returning would tell Spark that the batch is archived.
                raise JobError(f"batch {number} comes after the end of its query")
            try:
                self._write(batch, number)
            except Exception as error:
                self.failure = error
                raise

    def end(self, query_id: str) -> None:
        """Let no batch be written any more; an archive without any is made as well.

        A query that is stopped does not wait for the thread that writes its batch.
        """
        with self._turn:
            self._is_ended = True
            self._claim(query_id)

    def _claim(self, query_id: str) -> None:
        if not self._is_claimed:
            self._store.claim(query_id)
            self._is_claimed = True

    def _write(self, batch: DataFrame, number: int) -> None:
        store = self._store
        query_id = batch.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
        self._claim(query_id or "")
        if store.has_batch(number):
            _log.info("batch %d is in %s already", number, store.root)
            return
        files = store.write(batch, number)
        store.commit(number, files)
        if not files:
            return
        self._batch_count += 1
        self._message_count += sum(file.message_count for file in files)
        self._written_bytes += sum(file.size_bytes for file in files)
        self._on_progress(
            ArchiveProgress(number, self._message_count, self._written_bytes)
        )
        done = compact_store(
            store, file_bytes=self._file_bytes, count_min=SMALL_FILES_MAX
        )
        self._compacted_count += done.replaced_count

    def summary(self) -> ArchiveSummary:
        """Return the result of the run."""
        files = self._store.files()
        return ArchiveSummary(
            self._message_count,
            self._written_bytes,
            self._batch_count,
            self._compacted_count,
            sum(file.message_count for file in files),
            len(files),
            sum(file.size_bytes for file in files),
        )

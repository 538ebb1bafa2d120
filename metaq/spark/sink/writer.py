"""`df.write.format("metaq")` and `df.writeStream.format("metaq")`: rows to brokers.

At least once, by default: messages written by a task stay, even if the task, the
micro-batch or the driver fails and is repeated. Brokers of this package recognise most
repetitions, as `outbox.py` describes.

With `delivery=exactly-once` tasks prepare transactions, which the driver commits:
`exact_sink.py`.

Spark passes Arrow batches; to the sink of a stream before 4.1, rows.
"""

import logging
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import ArrayType, StructType

from metaq.model import TopicPartition
from metaq.spark.clusters import shared_cluster
from metaq.spark.errors import OptionError, one_sentence
from metaq.spark.options import SinkOptions
from metaq.spark.routing import WriteRoutes, require_targets
from metaq.spark.schema import arrow_schema
from metaq.spark.sink.decisions import BATCH_WRITE
from metaq.spark.sink.exact_sink import ExactSink, TaskMessages, TaskPrepared
from metaq.spark.sink.outbox import (
    Outbox,
    RowTargets,
    Targets,
    WriteName,
    Written,
    write_name,
)
from metaq.spark.sink.sink_rows import check_columns, fill_tombstones
from metaq.spark.versions import HAS_ARROW_STREAM_WRITER

ROWS_MAX: Final = 10_000
"""Maximum rows of a batch made of rows from Spark."""

_NAME_BYTES: Final = 12
_NO_HOST: Final = re.compile(r"^([A-Za-z][\w+.-]*:)/(?!/)")
"""Matches a URL without the empty host: `file:/x`."""

_log = logging.getLogger(__name__)

_Base: Any = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


@dataclass
class TaskWritten(WriterCommitMessage):
    """Message of one task to the driver."""

    written: Written
    """Counters of the task's messages; durable."""
    query: str = ""


class Sink:
    """The at-least-once sink of a batch or stream; picklable, for executors.

    Spark creates several of these for one write, so they have no state of their own.
    """

    def __init__(
        self,
        options: SinkOptions,
        write: str,
        *,
        kept_as: str | None = None,
        is_repeatable: bool = False,
    ) -> None:
        """Find the partitions of the topic.

        Done once for all runs of all tasks, so that a repeated task sends each row to
        the same partition.

        Args:
            options: options of the write.
            write: name of the write; for a stream the same in each of its batches.
            kept_as: name under which the routes of the batches are stored in ZooKeeper;
                None if they are not stored.
            is_repeatable: whether another driver may repeat a batch.

        Raises:
            NoBrokerError: no broker takes puts to the topic.
        """
        self._options = options
        self._write = write
        self._kept_as = kept_as if options.wire.zookeeper else None
        self._is_repeatable = is_repeatable
        self._routes, self._addresses = WriteRoutes(), dict[TopicPartition, str]()
        self._targets: Targets = {}
        if options.topic is not None:
            self._begin([options.topic])

    def write_rows(self, batches: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of one task.

        *Durability.* On return they are on the disks of brokers.

        Raises:
            RowError: a row cannot be written.
            MetaqError: a broker cannot be reached or refuses.
        """
        options, name = self._options, write_name(self._write)
        if options.has_tombstones:
            batches = map(fill_tombstones, batches)

        def find(topics: Collection[str]) -> Targets:
            self._begin(topics)
            return self._targets_of(topics, name)

        known = [] if options.topic is None else [options.topic]
        with Outbox(
            name,
            RowTargets(options.topic, self._targets_of(known, name), find),
            batch_bytes=options.batch_bytes,
            wire=options.wire,
        ) as outbox:
            for batch in batches:
                outbox.put(batch)
            return TaskWritten(outbox.finish(), name.query)

    def commit(self, batch: int, messages: TaskMessages) -> None:
        """Record that all rows of a batch are written."""
        queries = [m.query for m in messages if isinstance(m, TaskWritten)]
        if not self._is_repeatable:
            self._forget()
        elif self._kept_as is not None and queries:
            cluster = shared_cluster(self._options.wire)
            cluster.end_batch(self._kept_as, batch, queries[0])

    def abort(self, batch: int, messages: TaskMessages) -> None:
        """Give up a batch; messages already written stay, and it may be repeated."""
        del batch, messages
        if not self._is_repeatable:
            self._forget()

    def _forget(self) -> None:
        """Delete the stored routes of a write that is not repeated."""
        if self._kept_as is not None:
            shared_cluster(self._options.wire).forget_routes(self._kept_as)

    def _begin(self, topics: Collection[str]) -> None:
        """Find the partitions of topics; runs in a task if rows name their topics."""
        options = self._options
        cluster = shared_cluster(options.wire)
        if self._kept_as is not None:
            self._routes, self._addresses = cluster.begin_batch(
                self._kept_as, topics, fail_on_lost_route=options.fail_on_lost_route
            )
        else:
            is_whole = self._is_repeatable and options.wire.zookeeper is None
            self._targets = cluster.targets(topics, is_whole=is_whole)

    def _targets_of(self, topics: Collection[str], name: WriteName) -> Targets:
        if self._kept_as is None:
            return self._targets
        route = self._routes.of(name.batch, name.query)
        return require_targets(route, topics, self._addresses)


class _Writer:
    """Methods called by Spark that both writers share."""

    _sink: Sink | ExactSink
    _schema: pa.Schema | None = None
    """Schema of the rows, if Spark passes rows; None if it passes batches."""

    @one_sentence
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Write the rows of one task; raises as the sink's `write_rows`."""
        batches = iterator
        if self._schema is not None:
            batches = batches_of(iterator, self._schema)
        return self._sink.write_rows(batches)

    @one_sentence
    def commit(self, messages: TaskMessages, batchId: int = 0) -> None:  # noqa: N803  # Spark's name
        """Commit the write or micro-batch, and log the counters; raises as the sink."""
        self._sink.commit(batchId, messages)
        log_written(messages)

    @one_sentence
    def abort(self, messages: TaskMessages, batchId: int = 0) -> None:  # noqa: N803  # Spark's name
        """Give up the write or micro-batch; log the counters of tasks that ended."""
        self._sink.abort(batchId, messages)
        log_written(messages)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes the rows of a batch query."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Prepare the write.

        Raises:
            SchemaError: the rows cannot be written.
            MetaqError: as `Sink` and `ExactSink`.
        """
        check_schema(options, schema)
        write = uuid.uuid4()
        name = f"{BATCH_WRITE}{write.hex}"
        if options.is_exactly_once:
            self._sink = ExactSink(
                options, name=name, place=name, write=str(write), is_planned=True
            )
            return
        # The topic of an option is looked up once, before the tasks start.
        kept_as = name if options.topic is None else None
        self._sink = Sink(options, write.hex, kept_as=kept_as)


def batch_writer(
    given: Mapping[str, str], schema: StructType, *, is_overwrite: bool
) -> BatchWriter:
    """Return the writer of a batch.

    Args:
        given: options of the write, as passed by Spark.
        schema: of the rows.
        is_overwrite: whether the save mode is "overwrite".

    Raises:
        OptionError: an option is wrong, or the save mode is "overwrite".
        SchemaError: the rows cannot be written.
        MetaqError: as `Sink` and `ExactSink`.
    """
    if not given:
        raise OptionError(
            "a table of this format is for reading: write with"
            ' df.write.format("metaq").options(zookeeper=..., topic=...)'
        )
    if is_overwrite:
        raise OptionError("a log supports only appends: use mode('append')")
    return BatchWriter(SinkOptions.from_map(given), schema)


class StreamWriter(_Writer, _Base):  # type: ignore[misc]  # which class it is depends on Spark
    """Writes the rows of the micro-batches of one query."""

    def __init__(
        self,
        options: SinkOptions,
        schema: StructType,
        checkpoint: str | None = None,
        *,
        is_planned: bool = True,
    ) -> None:
        """Prepare one micro-batch.

        Args:
            options: options of the write.
            schema: of the rows.
            checkpoint: the option `checkpointLocation`, the only identification of the
                query before its tasks run.
            is_planned: True to plan tasks, False to commit a micro-batch.

        Raises:
            SchemaError: the rows cannot be written.
            OptionError: `delivery=exactly-once` without a checkpoint.
            MetaqError: as `Sink` and `ExactSink`.
        """
        check_schema(options, schema)
        self._schema = None if HAS_ARROW_STREAM_WRITER else arrow_schema(schema)
        if options.is_exactly_once:
            if checkpoint is None:
                raise OptionError(
                    "delivery=exactly-once identifies a query by its checkpoint: it"
                    " needs the option checkpointLocation on the writer"
                )
            self._sink = ExactSink(
                options,
                name=routes_name(checkpoint),
                place=checkpoint,
                write=None,
                is_planned=is_planned,
            )
            return
        kept_as = None if checkpoint is None else routes_name(checkpoint)
        if kept_as is None and options.wire.zookeeper is not None:
            _log.warning(
                "a micro-batch that is run again may go to other partitions: without"
                " the option checkpointLocation its partitions are not stored"
            )
        self._sink = Sink(options, "", kept_as=kept_as, is_repeatable=True)


def stream_writer(
    given: Mapping[str, str], schema: StructType, *, is_planned: bool
) -> StreamWriter:
    """Return the writer of a micro-batch; raises as `StreamWriter`.

    Args:
        given: options of the write, as passed by Spark; a case-insensitive mapping.
        schema: of the rows.
        is_planned: as for `StreamWriter`.
    """
    checkpoint = given.get("checkpointLocation")
    options = SinkOptions.from_map(given)
    return StreamWriter(options, schema, checkpoint, is_planned=is_planned)


def routes_name(checkpoint: str) -> str:
    """Return the name under which the routes and decisions of a query are stored.

    Spark spells one directory in two ways: a flow of a declared pipeline begins with
    file:/x, and continues with file:///x once the directory exists.

    Args:
        checkpoint: the option `checkpointLocation`.
    """
    place = _NO_HOST.sub(r"\1///", checkpoint.rstrip("/")).encode()
    return f"sink-{blake2b(place, digest_size=_NAME_BYTES).hexdigest()}"


def batches_of(rows: Iterator[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches of up to `ROWS_MAX` rows."""
    while some := list(islice(rows, ROWS_MAX)):
        columns = zip(*some, strict=True)
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def check_schema(options: SinkOptions, schema: StructType) -> None:
    """Check the columns of rows, before any is written.

    Raises:
        SchemaError: a column is missing, unknown, or of a wrong type.
    """
    types = {
        field.name: (
            field.dataType.simpleString()
            if isinstance(field.dataType, ArrayType)
            else field.dataType.typeName()
        )
        for field in schema.fields
    }
    check_columns(types, has_topic=options.topic is not None)


def log_written(messages: TaskMessages) -> None:
    """Log the counters of the tasks of one write."""
    done = [m.written for m in messages if isinstance(m, TaskWritten | TaskPrepared)]
    _log.info(
        "written: messages=%d bytes=%d may_be_doubled=%d",
        sum(written.message_count for written in done),
        sum(written.size_bytes for written in done),
        sum(written.doubtful_count for written in done),
    )

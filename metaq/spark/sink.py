"""`df.write.format("metaq")` and `df.writeStream.format("metaq")`: rows to brokers.

At least once: what a task has written stays, also when the task, the micro-batch or the
driver fails, and is then written again. Brokers of this package recognise the
repetition as far as `outbox.py` says.

The place of transactions is kept free: a task would prepare what it wrote under an id
made of query, micro-batch and task, `WriterCommitMessage` would carry that id to the
driver, and `commit` there would commit them all. `delivery=exactly-once` is refused
until brokers offer it (`options.py`).
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from metaq.spark.cluster import shared_cluster
from metaq.spark.options import SinkOptions
from metaq.spark.outbox import Outbox, Outlets, Written
from metaq.spark.sink_rows import check_columns
from metaq.spark.task import write_name

_log = logging.getLogger(__name__)


@dataclass
class TaskWritten(WriterCommitMessage):
    """What one task tells the driver."""

    written: Written
    """What it has written; durable."""


class Sink:
    """What the batch and the stream writer share; goes to executors in pickled form.

    Spark makes several of these for one write, and keeps none: there is no state.
    """

    def __init__(self, options: SinkOptions, schema: StructType, write: str) -> None:
        """Check the columns, and find the partitions of the topic.

        They are found once for all runs of all tasks, so that a row whose task is run
        again goes to where it went before.

        Args:
            options: what the user wants.
            schema: of the rows.
            write: names this write: for a stream the same in each of its batches.

        Raises:
            SchemaError: the rows cannot be written.
            NoBrokerError: nobody takes puts to the topic.
        """
        types = {field.name: field.dataType.typeName() for field in schema.fields}
        check_columns(types, has_topic=options.topic is not None)
        self._options = options
        self._write = write
        self._outlets: Outlets = {}
        if options.topic is not None:
            self._outlets = shared_cluster(options.wire).outlets([options.topic])

    def write_rows(self, batches: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of one task.

        Durability: on return they are on the disks of brokers.

        Raises:
            RowError: a row cannot be written.
            MetaqError: a broker cannot be reached or refuses.
        """
        options = self._options
        with Outbox(
            write_name(self._write),
            topic=options.topic,
            outlets=self._outlets,
            find_outlets=lambda topics: shared_cluster(options.wire).outlets(topics),
            batch_bytes=options.batch_bytes,
            timeout_s=options.wire.request_timeout_s,
        ) as outbox:
            for batch in batches:
                outbox.put(batch)
            return TaskWritten(outbox.finish())


class BatchWriter(DataSourceArrowWriter):
    """Writes the rows of a batch query."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Prepare the write; raises as `Sink`."""
        self._sink = Sink(options, schema, uuid.uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task; raises as `Sink.write_rows`."""
        return self._sink.write_rows(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what was written: it is there already."""
        log_written(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what was written all the same: it cannot be taken back."""
        log_written(messages)


def log_written(messages: Sequence[WriterCommitMessage | None]) -> None:
    """Report what the tasks of one write have written."""
    done = [m.written for m in messages if isinstance(m, TaskWritten)]
    _log.info(
        "written: messages=%d bytes=%d may_be_doubled=%d",
        sum(written.message_count for written in done),
        sum(written.size_bytes for written in done),
        sum(written.doubtful_count for written in done),
    )

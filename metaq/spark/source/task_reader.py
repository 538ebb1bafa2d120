"""The half of a reader that travels to the tasks: a range in, rows out.

A reader plans on the driver, with a client of its own; a task only reads what it is
told. So a reader is pickled as this class alone, and executors import neither the
client nor ZooKeeper; what sends dead letters they import with the first bad value.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from metaq.spark.errors import one_sentence
from metaq.spark.options import BadRows, SourceOptions
from metaq.spark.source.read_task import ReadTask, read_rows
from metaq.spark.values import Converted, ValueConverter

if TYPE_CHECKING:
    from metaq.spark.sink.outbox import Outbox


class TaskReader:
    """Reads the range of a task. Base of the readers that plan them."""

    def __init__(self, options: SourceOptions, value_type: pa.DataType) -> None:
        """Take the options of the read and the Arrow type of the column `value`."""
        self._options = options
        self._value_type = value_type

    def __reduce__(
        self,
    ) -> tuple[type["TaskReader"], tuple[SourceOptions, pa.DataType]]:
        return TaskReader, (self._options, self._value_type)

    @one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task, with values as the user wants them.

        Raises:
            BadRowError: a value is not of the format, and that is to fail the query.
            MetaqError: as `read_rows`.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        with _Converting(task, self._options, self._value_type) as converting:
            for batch in read_rows(task, self._options):
                rows = converting.convert(batch)
                if rows.num_rows:
                    yield rows


class _Converting:
    """Converts the values of one task. A context manager; one thread.

    Leaving it without an error waits until every dead letter is stored.
    """

    def __init__(
        self, task: ReadTask, options: SourceOptions, value_type: pa.DataType
    ) -> None:
        """Prepare for one task; nothing is connected before there is a bad value."""
        values = options.values
        self._task = task
        self._options = options
        self._converter = ValueConverter(values.format, values.bad_rows, value_type)
        self._outbox: Outbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._outbox is None:
            return
        with self._outbox as outbox:
            if kind is None:
                outbox.finish()

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with a good value, in order.

        Raises:
            BadRowError: a value is bad, and that is to fail the query.
            MetaqError: dead letters cannot be sent.
        """
        converted = self._converter.convert(batch)
        if converted.rejected is not None:
            assert self._options.values.bad_rows is BadRows.TOPIC
            self._put(converted)
        return converted.rows

    def _put(self, converted: Converted) -> None:
        import metaq.spark.source.dead_letters as post  # noqa: PLC0415  # see the top

        if self._outbox is None:
            self._outbox = post.letter_outbox(self._task, self._options)
        self._outbox.put(post.letters(converted))

"""The stream writer, as Arrow batches where Spark has them (4.1), as rows before."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from metaq.spark.options import SinkOptions
from metaq.spark.schema import arrow_schema
from metaq.spark.sink import Sink, log_written
from metaq.spark.versions import HAS_ARROW_STREAM_WRITER

ROWS_MAX: Final = 10_000
"""Rows put together to a batch where Spark hands over rows."""

_Base: Any = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


class StreamWriter(_Base):  # type: ignore[misc]  # which class it is depends on Spark
    """Writes the rows of the micro-batches of one query."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Prepare one micro-batch; raises as `Sink`."""
        self._sink = Sink(options, schema, "")
        self._schema = None if HAS_ARROW_STREAM_WRITER else arrow_schema(schema)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Write the rows of one task; raises as `Sink.write_rows`."""
        batches = iterator
        if self._schema is not None:
            batches = batches_of(iterator, self._schema)
        return self._sink.write_rows(batches)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Say what was written: it is there already."""
        del batchId
        log_written(messages)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Say what was written all the same: it cannot be taken back."""
        del batchId
        log_written(messages)


def batches_of(rows: Iterator[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Put rows together to batches of up to `ROWS_MAX`."""
    while some := list(islice(rows, ROWS_MAX)):
        columns = zip(*some, strict=True)
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

"""The stream writer, as Arrow batches where Spark has them (4.1), as rows before."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from metaq.spark.errors import OptionError, one_sentence
from metaq.spark.options import SinkOptions
from metaq.spark.schema import arrow_schema
from metaq.spark.sink.exact_sink import ExactSink
from metaq.spark.sink.writer import Sink, check_schema, log_written
from metaq.spark.versions import HAS_ARROW_STREAM_WRITER

ROWS_MAX: Final = 10_000
"""Rows put together to a batch where Spark hands over rows."""

_NAME_BYTES: Final = 12
_NO_HOST: Final = re.compile(r"^([A-Za-z][\w+.-]*:)/(?!/)")
"""A URL whose host is left out with its slashes."""

_log = logging.getLogger(__name__)

_Base: Any = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


class StreamWriter(_Base):  # type: ignore[misc]  # which class it is depends on Spark
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
            checkpoint: the option `checkpointLocation`. Of all that tells one query
                from another it alone is known before its tasks run.
            is_planned: tasks come; False where a micro-batch is to be committed.

        Raises:
            SchemaError: the rows cannot be written.
            OptionError: `delivery=exactly-once` without a checkpoint.
            MetaqError: as `Sink` and `ExactSink`.
        """
        check_schema(options, schema)
        self._schema = None if HAS_ARROW_STREAM_WRITER else arrow_schema(schema)
        self._sink: Sink | ExactSink
        if options.is_exactly_once:
            if checkpoint is None:
                raise OptionError(
                    "delivery=exactly-once knows a query by its checkpoint: it needs"
                    " the option checkpointLocation on the writer"
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
                "a micro-batch that is run again may go elsewhere: without the option"
                " checkpointLocation it is not kept where it goes"
            )
        self._sink = Sink(options, "", kept_as=kept_as, is_repeatable=True)

    @one_sentence
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Write the rows of one task; raises as the sink's `write_rows`."""
        batches = iterator
        if self._schema is not None:
            batches = batches_of(iterator, self._schema)
        return self._sink.write_rows(batches)

    @one_sentence
    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """End the micro-batch, and log its counters; raises as the sink's `commit`."""
        self._sink.commit(batchId, messages)
        log_written(messages)

    @one_sentence
    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Give the micro-batch up, and log the counters of tasks that have ended."""
        self._sink.abort(batchId, messages)
        log_written(messages)


def stream_writer(
    given: Mapping[str, str], schema: StructType, *, is_planned: bool
) -> StreamWriter:
    """Return the writer of a micro-batch; raises as `StreamWriter`.

    Args:
        given: options of the write, as Spark hands them over: case does not matter.
        schema: of the rows.
        is_planned: as for `StreamWriter`.
    """
    checkpoint = given.get("checkpointLocation")
    options = SinkOptions.from_map(given)
    return StreamWriter(options, schema, checkpoint, is_planned=is_planned)


def routes_name(checkpoint: str) -> str:
    """Return the name under which a query keeps where its batches go.

    Spark spells one directory in two ways: a flow of a declared pipeline begins with
    file:/x, and goes on with file:///x when the directory is there.

    Args:
        checkpoint: the option `checkpointLocation`.
    """
    place = _NO_HOST.sub(r"\1///", checkpoint.rstrip("/")).encode()
    return f"sink-{blake2b(place, digest_size=_NAME_BYTES).hexdigest()}"


def batches_of(rows: Iterator[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Put rows together to batches of up to `ROWS_MAX`."""
    while some := list(islice(rows, ROWS_MAX)):
        columns = zip(*some, strict=True)
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

"""`format("metaq")`: topics as a source and a sink of Spark.

    spark.read.format("metaq").options(zookeeper="zk:2181", subscribe="logs").load()
    df.write.format("metaq").options(zookeeper="zk:2181", topic="logs").save()

Spark makes one `MetaqDataSource` for each thing that it wants to know, also several for
one query, in processes of their own: nothing is kept here.
"""

from collections.abc import Mapping
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from metaq.spark.errors import OptionError, one_sentence
from metaq.spark.option_table import OPTIONS, Use
from metaq.spark.options import SinkOptions, SourceOptions, read_value_options
from metaq.spark.schema import (
    options_of_new_table,
    row_ddl,
    table_ddl,
    value_type,
    with_table_options,
)
from metaq.spark.sink.stream_writer import StreamWriter
from metaq.spark.sink.writer import BatchWriter
from metaq.spark.source.batch import BatchReader, PushingBatchReader
from metaq.spark.source.stream import stream_reader
from metaq.spark.versions import report_missing_filters, report_missing_limits

_STREAM_ONLY = frozenset(
    spec.name.lower()
    for spec in OPTIONS
    if Use.STREAM in spec.uses and Use.BATCH not in spec.uses
)


class MetaqDataSource(DataSource):
    """The format, on the driver.

    Spark makes one for a plan, and keeps one in pickled form for what follows it: the
    commit of a micro-batch is the latter's.
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Take the options of the user, as Spark hands them over."""
        super().__init__(options)
        self._is_planning = True

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: an instance that plans no more."""
        return {**self.__dict__, "_is_planning": False}

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "metaq"

    @one_sentence
    def schema(self) -> str:
        """Return the columns of every row.

        Raises:
            OptionError: an option is wrong.
        """
        table = options_of_new_table(self.options)
        if table is not None:
            # The last moment for errors to reach the table's creator.
            read = SourceOptions.from_map(table, is_stream=_is_of_stream(table))
            return table_ddl(row_ddl(read.values), table)
        use = Use.STREAM if _is_of_stream(self.options) else Use.BATCH
        return row_ddl(read_value_options(self.options, use))

    @one_sentence
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that plans and reads a batch.

        Raises:
            OptionError: an option is wrong, or the user asked for other columns.
        """
        given = with_table_options(schema, self.options)
        options = SourceOptions.from_map(given, is_stream=False)
        report_missing_filters(options.is_filter_pushdown)
        # Spark refuses a reader that takes filters while its own setting is off.
        kind = PushingBatchReader if options.is_filter_pushdown else BatchReader
        return kind(options, value_type(schema, options.values))

    @one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Return the reader that plans and reads the micro-batches of a query.

        Raises:
            OptionError: an option is wrong, or the user asked for other columns.
        """
        given = with_table_options(schema, self.options)
        options = SourceOptions.from_map(given, is_stream=True)
        report_missing_limits(options.limits.is_any)
        return stream_reader(options, value_type(schema, options.values))

    @one_sentence
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch.

        Raises:
            OptionError: an option is wrong, or rows are to be overwritten.
            SchemaError: the rows cannot be written.
        """
        if not self.options:
            raise OptionError(
                "a table of this format is for reading: write with"
                ' df.write.format("metaq").options(zookeeper=..., topic=...)'
            )
        if overwrite:
            raise OptionError("a log is only ever appended to: use mode('append')")
        return BatchWriter(SinkOptions.from_map(self.options), schema)

    @one_sentence
    def streamWriter(  # noqa: N802  # Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return the writer of micro-batches; raises as `writer`.

        In the output mode "complete" every result is appended anew.
        """
        del overwrite
        checkpoint = self.options.get("checkpointLocation")
        return StreamWriter(
            SinkOptions.from_map(self.options),
            schema,
            checkpoint,
            is_planned=self._is_planning,
        )


def _is_of_stream(options: Mapping[str, str]) -> bool:
    """Whether options can only be those of a stream; Spark does not tell."""
    return any(name.lower() in _STREAM_ONLY for name in options)

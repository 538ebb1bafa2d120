"""The Spark formats: topics as a source and a sink, and segment files as a source.

    spark.read.format("metaq").options(zookeeper="zk:2181", subscribe="logs").load()
    df.write.format("metaq").options(zookeeper="zk:2181", topic="logs").save()
    spark.read.format("metaq-segments").load("/data/metaq")

Both formats have the same rows. Spark creates a data source for each request, several
per query, in separate processes: so no state is kept here, and each process imports
only the part that it needs.

PySpark finds the formats itself: it looks for top-level modules named `pyspark_…` with
a class `DefaultSource`, and there is one for each format. It looks in the Python of its
workers: `PYSPARK_PYTHON`, else `python3` on `PATH`. A notebook, or a script run by the
interpreter of its own environment, may have another one; there users register the
formats with `metaq.spark.register(spark)`. So do users who have switched the look-up
off, or ship the code with `addPyFiles`.
"""

import os
import re
import sys
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType
from pyspark.sql.utils import is_remote

from metaq.spark.errors import SparkError, one_sentence

_NO_MODULE: Final = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_ALREADY_THERE: Final = "DATA_SOURCE_ALREADY_EXISTS"


class MetaqDataSource(DataSource):
    """The format `metaq`, on the driver.

    Spark creates an instance to plan, and uses a pickled copy afterwards: the copy
    commits micro-batches.
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Store the user's options, as passed by Spark."""
        super().__init__(options)
        self._is_planning = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: that of an instance which does not plan."""
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
        from metaq.spark.schema import declared_columns  # noqa: PLC0415  # see the top

        return declared_columns(self.options)

    @one_sentence
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that plans and reads a batch.

        Raises:
            OptionError: an option is wrong, or the user's schema has other columns.
        """
        from metaq.spark.source.batch import batch_reader  # noqa: PLC0415  # see the top

        return batch_reader(self.options, schema)

    @one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Return the reader that plans and reads the micro-batches of a query.

        Raises:
            OptionError: an option is wrong, or the user's schema has other columns.
        """
        from metaq.spark.source.stream import stream_reader  # noqa: PLC0415  # see the top

        return stream_reader(self.options, schema)

    @one_sentence
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch.

        Raises:
            OptionError: an option is wrong, or the save mode is "overwrite".
            SchemaError: the rows cannot be written.
        """
        from metaq.spark.sink.writer import batch_writer  # noqa: PLC0415  # see the top

        return batch_writer(self.options, schema, is_overwrite=overwrite)

    @one_sentence
    def streamWriter(  # noqa: N802  # Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return the writer of micro-batches; raises as `writer`.

        In the output mode "complete" each trigger appends the whole result again.
        """
        from metaq.spark.sink.writer import stream_writer  # noqa: PLC0415  # see the top

        del overwrite
        return stream_writer(self.options, schema, is_planned=self._is_planning)


class SegmentsDataSource(DataSource):
    """The format `metaq-segments`, on the driver."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "metaq-segments"

    @one_sentence
    def schema(self) -> str:
        """Return the columns of every row.

        Raises:
            OptionError: An option is wrong.
        """
        from metaq.spark.segments.segment_reader import declared_columns  # noqa: PLC0415  # see the top

        return declared_columns(self.options)

    @one_sentence
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that plans and reads.

        Raises:
            OptionError: an option is wrong, or the user's schema has other columns.
        """
        from metaq.spark.segments.segment_reader import segments_reader  # noqa: PLC0415  # see the top

        return segments_reader(self.options, schema)


FORMATS: Final[tuple[type[DataSource], ...]] = (MetaqDataSource, SegmentsDataSource)


def register(spark: SparkSession) -> None:
    """Register every format with a session; idempotent.

    On a local master, the Python workers of the session use this interpreter from now
    on, unless `PYSPARK_PYTHON` names another one. The executors of a cluster need this
    package too, installed or shipped with the query.

    Raises:
        SparkError: the Spark Connect server runs a Python without this package.
    """
    # With Spark Connect the driver is another process, with its own workers.
    if not is_remote() and "PYSPARK_PYTHON" not in os.environ:
        context = spark.sparkContext
        if (context.master or "").startswith("local"):
            context.pythonExec = sys.executable
    for source in FORMATS:
        try:
            spark.dataSource.register(source)
        except PySparkException as error:
            # Spark 4.0 refuses to register a format that it has found itself.
            if error.getCondition() != _ALREADY_THERE:
                raise
    if is_remote():
        _require_package(spark)


def _require_package(spark: SparkSession) -> None:
    """Check the server's Python by requesting the schema, which contacts no broker."""
    rows = spark.read.format(MetaqDataSource.name())
    try:
        _ = rows.options(brokers="none:1", subscribe="none").load().schema
    except PySparkException as error:
        if (missing := _NO_MODULE.search(str(error))) is None:
            raise
        raise SparkError(
            f"the Python of the server of Spark Connect has no module {missing[1]}:"
            " start it (or this program, for remote('local')) with PYSPARK_PYTHON set"
            " to an interpreter that has metaq[spark]"
        ) from None

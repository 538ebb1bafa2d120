"""The reader of `format("metaq-segments")`: lists files, cuts them, reads in tasks.

The driver lists the files and cuts them into splits; each task reads its splits with
no broker in between. A query reads the bytes that were there when it was planned: an
active segment ends with its last whole record of that moment.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from metaq.fs import SystemFileSystem
from metaq.spark.errors import one_sentence
from metaq.spark.pushed_filters import PushedFilters, read_filters
from metaq.spark.rows import OnCorrupt
from metaq.spark.schema import row_ddl, value_type
from metaq.spark.segments.segment_options import (
    SegmentOptions,
    parse_segment_options,
)
from metaq.spark.segments.segment_plan import (
    plan_query,
    refuse_unreadable,
)
from metaq.spark.segments.segment_read import read_splits
from metaq.spark.values import ValueConverter
from metaq.spark.versions import report_missing_filters, tasks_of

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_log = logging.getLogger(__name__)


def declared_columns(given: Mapping[str, str]) -> str:
    """Return the columns of every row, as DDL.

    Args:
        given: options of the read, as Spark hands them over.

    Raises:
        OptionError: An option is wrong.
    """
    return row_ddl(parse_segment_options(given).values)


def segments_reader(given: Mapping[str, str], schema: StructType) -> "SegmentsReader":
    """Return the reader of a query.

    Args:
        given: options of the read, as Spark hands them over.
        schema: as Spark hands it to a reader.

    Raises:
        OptionError: An option is wrong, or the user asked for other columns.
    """
    options = parse_segment_options(given)
    report_missing_filters(options.can_push_filters)
    # Spark refuses a reader that takes filters while its own setting is off.
    kind = PushingReader if options.can_push_filters else SegmentsReader
    return kind(options, value_type(schema, options.values))


class SegmentsReader(DataSourceReader):
    """Plans on the driver, reads in the tasks; travels to them in pickled form."""

    def __init__(self, options: SegmentOptions, value_type: pa.DataType) -> None:
        self._options = options
        self._value_type = value_type
        self._pushed = PushedFilters()

    @one_sentence
    def partitions(self) -> list[InputPartition]:
        """Return the splits of each task, as a tuple.

        Raises:
            CorruptRecordError: An archive is none, and damage is to fail the query.
            OptionError: A path does not exist, or names no partition.
            StorageError: The disk refused.
        """
        plan = plan_query(SystemFileSystem(), self._options, self._pushed)
        if self._options.on_corrupt is OnCorrupt.FAIL:
            refuse_unreadable(plan)
        for damage in plan.unreadable:
            _log.warning("a file is left out: %s", damage)
        return tasks_of(plan.tasks)

    @one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task.

        Raises:
            BadRowError: A value is not of the format, and that is to fail the query.
            CorruptRecordError: Bytes are damaged, and damage is to fail the query.
            StorageError: The disk refused.
        """
        splits = partition.value or ()
        asked = self._options
        converter = ValueConverter(
            asked.values.format, asked.values.bad_rows, self._value_type
        )
        fs = SystemFileSystem()
        for batch in read_splits(fs, splits, on_corrupt=asked.on_corrupt):
            yield converter.convert(batch).rows


class PushingReader(SegmentsReader):
    """Leaves out files that cannot match the filters of the query."""

    def pushFilters(self, filters: "list[Filter]") -> "Iterable[Filter]":  # noqa: N802  # Spark's name
        """Take note of filters; all are returned, so that Spark evaluates them too."""
        self._pushed = read_filters(filters)
        return filters

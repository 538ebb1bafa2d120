"""Capabilities of the running PySpark, and a warning for each missing one.

Each is detected by itself, not by version number, because vendors backport features.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Final, TypeVar

import pyspark
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

T = TypeVar("T")

HAS_FILTERS: Final = hasattr(datasource, "Filter")
"""Whether Spark passes the filters of a query to its source (since 4.1)."""
HAS_ARROW_STREAM_WRITER: Final = hasattr(datasource, "DataSourceStreamArrowWriter")
"""Whether Spark passes Arrow batches, not rows, to the sink of a stream (since 4.1)."""
HAS_LIMITS: Final = (
    "limit" in inspect.signature(DataSourceStreamReader.latestOffset).parameters
)
"""Whether Spark passes the current offsets to `latestOffset`, and supports the reader's
handling of `Trigger.AvailableNow` (since 4.2)."""

_log = logging.getLogger(__name__)


def report_missing_filters(is_wanted: bool) -> None:
    """Warn if filter pushdown is wanted but not supported."""
    if is_wanted and not HAS_FILTERS:
        _log.warning(
            "filterPushdown saves nothing: PySpark %s hands no filters to a source,"
            " PySpark 4.1 does",
            pyspark.__version__,
        )


def report_missing_limits(is_wanted: bool) -> None:
    """Warn if limits of a stream are given but may not hold."""
    if is_wanted and not HAS_LIMITS:
        _log.warning(
            "limits of a micro-batch may not hold for the first one of a run, and"
            " Trigger.AvailableNow ends after one: PySpark %s does not pass a source"
            " the offsets of its query, PySpark 4.2 does",
            pyspark.__version__,
        )


def tasks_of(values: Sequence[T]) -> list[InputPartition]:
    """Return one task for each value; without values, one empty task.

    Spark adds an empty task itself, but before 4.2 one that readers cannot handle.
    """
    return [InputPartition(value) for value in values] or [InputPartition(None)]

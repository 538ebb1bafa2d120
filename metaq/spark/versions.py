"""Capabilities of the PySpark that runs, and a sentence for each missing one.

Each capability is looked for by its own mark, not by a number: vendors put new features
into older versions.
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
"""From 4.1 on Spark hands the filters of a query to its source."""
HAS_ARROW_STREAM_WRITER: Final = hasattr(datasource, "DataSourceStreamArrowWriter")
"""From 4.1 on Spark hands Arrow batches to the sink of a stream, not rows."""
HAS_LIMITS: Final = (
    "limit" in inspect.signature(DataSourceStreamReader.latestOffset).parameters
)
"""From 4.2 on Spark passes a reader its offsets when it asks for more, and heeds the
reader's reaction to `Trigger.AvailableNow`."""

_log = logging.getLogger(__name__)


def report_missing_filters(is_wanted: bool) -> None:
    """Warn where filters cannot be pushed down although that is wanted."""
    if is_wanted and not HAS_FILTERS:
        _log.warning(
            "filterPushdown saves nothing: PySpark %s hands no filters to a source,"
            " PySpark 4.1 does",
            pyspark.__version__,
        )


def report_missing_limits(is_wanted: bool) -> None:
    """Warn where the limits of a stream are not always heeded."""
    if is_wanted and not HAS_LIMITS:
        _log.warning(
            "limits of a micro-batch may not hold for the first one of a run, and"
            " Trigger.AvailableNow ends after one: PySpark %s does not pass a source"
            " the offsets of its query, PySpark 4.2 does",
            pyspark.__version__,
        )


def tasks_of(values: Sequence[T]) -> list[InputPartition]:
    """Return one task for each value; where there is none, one that has nothing to do.

    Spark makes up such a task by itself, but before 4.2 one that no reader can take.
    """
    return [InputPartition(value) for value in values] or [InputPartition(None)]

"""Write the rows of any Spark source to a topic."""

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.pipeline.jobs.replay import WriteSummary, write_messages
from metaq.pipeline.jobs.session import job_errors
from metaq.spark.options import SinkOptions

WHOLE_ROW: Final = "to_json(struct(*))"
"""SQL expression for the value of rows without a column `value`."""


def ingest(
    spark: SparkSession,
    options: Mapping[str, str],
    *,
    source_format: str,
    paths: Sequence[str] = (),
    source_options: Mapping[str, str] | None = None,
    value: str | None = None,
    attribute: str | None = None,
    key: str | None = None,
) -> WriteSummary:
    """Write the rows of a batch source to a topic.

    Delivery is that of the sink, at least once by default. Rows with the same key go to
    the same partition; there is no order between rows of different tasks.

    Args:
        spark: the session.
        options: of a write with `format("metaq")`, including `topic`.
        source_format: argument of `spark.read.format`: text, csv, json, parquet, …
        paths: arguments of `load`; none for sources without a path.
        source_options: options of that source.
        value: SQL expression for the message, binary or text; None for the column
            `value` or, without that, the whole row as JSON.
        attribute: SQL expression for the attribute, text; None for no attribute.
        key: SQL expression for the key, binary or text; None for no key: partitions
            are used in turn.

    Raises:
        JobError: reading or writing failed.
        OptionError: an option of the write is wrong.
    """
    SinkOptions.from_map(options)
    with job_errors("ingest"):
        reader = spark.read.format(source_format).options(**(source_options or {}))
        rows = reader.load(list(paths)) if paths else reader.load()
        return write_messages(to_messages(rows, value, attribute, key), options)


def to_messages(
    rows: DataFrame, value: str | None, attribute: str | None, key: str | None
) -> DataFrame:
    """Return the columns of the sink; arguments as for `ingest`."""
    if value is None:
        value = "value" if "value" in rows.columns else WHOLE_ROW
    columns = {"value": value, "attribute": attribute, "key": key}
    return rows.select(
        *(
            sf.expr(expression).alias(name)
            for name, expression in columns.items()
            if expression is not None
        )
    )

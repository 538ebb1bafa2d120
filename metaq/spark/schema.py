"""The row as Spark declares it: DDL for the source, and Arrow types from Spark's own.

Spark parses the DDL, so that no type of a JSON value is understood in two ways.
"""

import inspect
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from metaq.spark.options import BadRows, ValueFormat, ValueOptions
from metaq.spark.values import BAD_REASON, BAD_VALUE

_BEFORE_VALUE: Final = (
    "topic STRING, broker_id INT, partition INT, offset BIGINT, message_id BIGINT,"
    " timestamp TIMESTAMP, attribute STRING, flag INT"
)

ROW_DDL: Final = f"{_BEFORE_VALUE}, value BINARY"
"""The row with its value as bytes."""

_TAKES_ZONE: Final = "timezone" in inspect.signature(to_arrow_schema).parameters
"""Before 4.2 the zone of timestamps was always UTC, and there was nothing to say."""


def row_ddl(options: ValueOptions) -> str:
    """Return the columns that a source declares.

    Args:
        options: what the column `value` holds, and whether bad values have columns.
    """
    match options.format:
        case ValueFormat.BINARY:
            value = "BINARY"
        case ValueFormat.STRING:
            value = "STRING"
        case ValueFormat.JSON:
            value = f"STRUCT<{options.ddl}>"
    ddl = f"{_BEFORE_VALUE}, value {value}"
    if options.bad_rows is BadRows.COLUMN:
        ddl += f", {BAD_VALUE} BINARY, {BAD_REASON} STRING"
    return ddl


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark compares batches with, to the letter.

    Args:
        schema: as Spark hands it to a reader.
    """
    zone: dict[str, Any] = {"timezone": "UTC"} if _TAKES_ZONE else {}
    return to_arrow_schema(schema, **zone)

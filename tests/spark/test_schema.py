"""The declared row and the batches agree to the letter."""

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.options import BadRows, Use, ValueFormat, read_value_options
from metaq.spark.schema import ROW_DDL, arrow_schema, row_ddl
from metaq.spark.values import ValueConverter

pytestmark = pytest.mark.spark

TYPES = {
    "STRING": StringType(),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "TIMESTAMP": TimestampType(),
    "BINARY": BinaryType(),
}


def declared(ddl: str) -> StructType:
    """Read the flat part of DDL; Spark's own parser needs a running JVM."""
    pairs = [column.split(" ") for column in ddl.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in pairs])


def test_the_row_is_what_spark_makes_of_its_ddl() -> None:
    """Names, order, units, zone and nullability."""
    assert arrow_schema(declared(ROW_DDL)) == ROW_SCHEMA


@pytest.mark.parametrize("bad_rows", ["fail", "column"])
def test_text_rows_are_declared_as_they_are_made(bad_rows: str) -> None:
    """With the columns for bad values where they are asked for."""
    options = read_value_options(
        {"valueFormat": "string", "badRows": bad_rows}, Use.SEGMENTS
    )
    made = ValueConverter(ValueFormat.STRING, BadRows(bad_rows), pa.string()).schema
    assert arrow_schema(declared(row_ddl(options))) == made


def test_json_rows_are_declared_with_the_users_fields() -> None:
    """Spark parses them; nobody else does."""
    options = read_value_options(
        {"valueFormat": "json", "valueSchema": "a INT, b ARRAY<STRING>"}, Use.BATCH
    )
    assert row_ddl(options).endswith(", value STRUCT<a INT, b ARRAY<STRING>>")

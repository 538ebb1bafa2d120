"""The declared row and the batches agree to the letter."""

import re

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import OptionError
from metaq.spark.options import BadRows, Use, ValueFormat, read_value_options
from metaq.spark.schema import ROW_DDL, arrow_schema, row_ddl, value_type
from metaq.spark.values import ValueConverter

pytestmark = pytest.mark.spark

TYPES = {
    "STRING": StringType(),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "TIMESTAMP": TimestampType(),
    "BINARY": BinaryType(),
    "ARRAY<STRUCT<key: STRING, value: BINARY>>": ArrayType(
        StructType(
            [StructField("key", StringType()), StructField("value", BinaryType())]
        )
    ),
}


def declared(ddl: str) -> StructType:
    """Read the flat part of DDL; Spark's own parser needs a running JVM."""
    columns = re.split(", (?![^<]*>)", ddl)
    pairs = [column.split(" ", 1) for column in columns]
    return StructType([StructField(name, TYPES[kind]) for name, kind in pairs])


def test_the_row_is_what_spark_makes_of_its_ddl() -> None:
    """Names, order, units, zone and nullability."""
    assert arrow_schema(declared(ROW_DDL)) == ROW_SCHEMA


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            CharType(3),
            r"struct<a:char\(3\)>: .*CharType\(3\) is not supported",
        ),
        (VariantType(), "column a: nothing is read into variant"),
        (
            ArrayType(StructType([StructField("b", VariantType())])),
            "column a: nothing is read into array<struct<b:variant>>",
        ),
    ],
)
def test_types_that_arrow_has_not_are_refused(kind: DataType, sentence: str) -> None:
    """A VARIANT would be read as an object with its own two fields."""
    with pytest.raises(OptionError, match=sentence):
        arrow_schema(StructType([StructField("a", kind)]))


@pytest.mark.parametrize("bad_rows", ["fail", "column"])
def test_text_rows_are_declared_as_they_are_made(bad_rows: str) -> None:
    """With the columns for bad values where they are asked for."""
    options = read_value_options(
        {"valueFormat": "string", "badRows": bad_rows}, Use.SEGMENTS
    )
    made = ValueConverter(ValueFormat.STRING, BadRows(bad_rows), pa.string()).schema
    assert arrow_schema(declared(row_ddl(options))) == made


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ("value STRING", {}, "expected the columns topic, .*, got value: leave schema"),
        (f"{ROW_DDL}, more INT", {}, "got topic, .*, value, more"),
        (ROW_DDL, {"valueFormat": "string"}, "valueFormat=string gives, got binary"),
        (
            ROW_DDL,
            {"valueFormat": "json", "valueSchema": "a INT"},
            "valueFormat=json gives, got binary",
        ),
    ],
)
def test_other_columns_are_refused_before_anything_is_read(
    schema: str, options: dict[str, str], said: str
) -> None:
    """A user's own schema, or a `valueSchema` that closes what it is put into."""
    with pytest.raises(OptionError, match=said):
        value_type(declared(schema), read_value_options(options, Use.BATCH))


def test_the_value_is_what_was_declared() -> None:
    """Also where a user writes the columns down once more."""
    options = read_value_options({"valueFormat": "string"}, Use.BATCH)
    assert value_type(declared(row_ddl(options)), options) == pa.string()


def test_json_rows_are_declared_with_the_users_fields() -> None:
    """Only Spark parses them."""
    options = read_value_options(
        {"valueFormat": "json", "valueSchema": "a INT, b ARRAY<STRING>"}, Use.BATCH
    )
    assert row_ddl(options).endswith(", value STRUCT<a INT, b ARRAY<STRING>>")

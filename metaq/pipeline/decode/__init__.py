"""Decoding of values in Spark columns: JSON, CSV, Avro, log lines.

    from metaq.pipeline import decode

    line = decode.json("level STRING NOT NULL, code INT")
    decoded = messages.withColumn("decoded", line("value"))
    rows = decoded.where("decoded.error IS NULL").select("timestamp", "decoded.row.*")
    letters = decode.dead_letters(decoded)        # for a sink with the option topic

Each function returns a function from a column, binary or string, to a column
`STRUCT<row: STRUCT<...>, error: STRING>`. For a value that does not decode, `row` is
null and `error` has the reason; for all others `error` is null. A field never silently
becomes null: a field of another type, or a missing NOT NULL field, is an error of the
whole value. A null value has neither row nor error.

The columns work in batches, streams and declared pipelines, and on Spark Connect; they
need PySpark 4.1. They are evaluated in the Python workers, column by column, with the
code of `valueFormat=json` (docs/decisions/0027-decoding-in-arrow.md).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

import pyarrow as pa
import pyspark
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType

from metaq.pipeline.decode.decoding import Decoder, decode_values, nullable
from metaq.pipeline.decode.text_values import CsvValues, PatternValues, group_names
from metaq.spark.columns import HEADERS
from metaq.spark.errors import OptionError, SparkError
from metaq.spark.letters import headers_of
from metaq.spark.schema import arrow_schema
from metaq.spark.values import JsonValues

__all__ = ["avro", "csv", "dead_letters", "json", "pattern"]

Schema: TypeAlias = str | StructType
"""Fields as DDL, such as `level STRING NOT NULL, code INT`, or as a Spark type. DDL
needs an active session to parse it."""
Decoding: TypeAlias = Callable[[Column | str], Column]
"""Function from a column to a column with `row` and `error`."""

HAS_ARROW_UDF: Final = hasattr(sf, "arrow_udf")
"""Whether PySpark has functions over whole Arrow columns (since 4.1)."""


def json(schema: Schema) -> Decoding:
    """Decode JSON objects.

    Fields that are not in the schema are ignored. Types are not converted: `"1"` is not
    an INT, and `1` not a STRING. A TIMESTAMP without a zone is UTC.

    Args:
        schema: fields of an object; NOT NULL makes a field required.

    Returns:
        A function from a column to a column with `row` and `error`.

    Raises:
        OptionError: a type is not supported for JSON.
    """
    fields = _fields(schema)
    return _decoding(JsonValues(nullable(fields), "schema"), fields)


def csv(schema: Schema, *, delimiter: str = ",") -> Decoding:
    """Decode values of one CSV record each.

    A value has as many fields as the schema, in the same order. Quotes are `"`, doubled
    inside a quoted field. An empty field is null; nothing is trimmed.

    Args:
        schema: names and types of the fields; no structs or arrays.
        delimiter: one character.

    Returns:
        A function from a column to a column with `row` and `error`.

    Raises:
        OptionError: a type is not supported for text, or the delimiter is not one
            character.
    """
    fields = _fields(schema)
    return _decoding(CsvValues(nullable(fields), delimiter), fields)


def pattern(regex: str, schema: Schema | None = None) -> Decoding:
    """Decode lines by a regular expression that matches the whole value.

    The syntax is RE2's, which guarantees linear time. Named groups,
    `(?P<level>[A-Z]+)`, become fields; write other groups as `(?:...)`. A group that is
    empty, or does not take part in the match, is null.

    Args:
        regex: the expression.
        schema: types of all groups, in any order; None for STRING.

    Returns:
        A function from a column to a column with `row` and `error`.

    Raises:
        OptionError: the expression is invalid, or the schema has other names or a type
            not supported for text.
    """
    names = group_names(regex)
    texts = StructType([StructField(name, StringType()) for name in names])
    fields = _fields(texts if schema is None else schema)
    return _decoding(PatternValues(nullable(fields), regex), fields)


def avro(
    schema: str, *, older: Sequence[str] = (), has_fingerprint: bool = True
) -> Decoding:
    """Decode Avro records; needs `metaq[avro]`.

    Values have Avro's single-object encoding, which names the schema by its
    fingerprint.

    Args:
        schema: the record's schema, as JSON.
        older: schemas of other writers, whose records are resolved to `schema`.
        has_fingerprint: False for bare records, without the ten bytes before them.

    Returns:
        A function from a column to a column with `row` and `error`.

    Raises:
        OptionError: a schema is invalid, or has a type that Spark lacks.
    """
    try:
        from metaq.pipeline.decode.avro_values import AvroValues  # noqa: PLC0415  # optional
    except ImportError as error:
        raise OptionError(
            f"Avro requires fastavro: pip install 'metaq[avro]': {error}"
        ) from error
    decoder = AvroValues(schema, older=older, has_fingerprint=has_fingerprint)
    return _decoding(decoder, decoder.kind)


def dead_letters(frame: DataFrame, decoded: str = "decoded") -> DataFrame:
    """Return the rows that did not decode, with the columns of the sink.

    They are the unchanged messages, with headers for their origin and the error, as the
    dead letters of consumers.

    Args:
        frame: rows of `format("metaq")` with a decoded column added.
        decoded: name of that column.
    """
    place = ("topic", "broker_id", "partition", "offset", "message_id", "headers")
    row = sf.struct(*place, sf.col(f"{decoded}.error").alias("reason"))
    headers = _udf(_letter_headers, from_arrow_type(HEADERS))(row)
    return frame.where(sf.col(f"{decoded}.error").isNotNull()).select(
        "value", "attribute", "key", headers.alias("headers")
    )


def _letter_headers(rows: pa.Array) -> pa.Array:
    letters = [headers_of(row, row["reason"]) for row in rows.to_pylist()]
    return pa.array(letters, HEADERS)


def _fields(schema: Schema) -> pa.DataType:
    """Return the struct of the fields; required ones are not nullable."""
    found = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(found, StructType):
        raise OptionError(f"schema: expected fields such as 'a INT', got {schema!r}")
    return pa.struct(list(arrow_schema(found)))


def _decoding(decoder: Decoder, required: pa.DataType) -> Decoding:
    def decoded(values: pa.Array) -> pa.Array:
        return decode_values(decoder, required, values)

    row = from_arrow_schema(pa.schema(list(decoder.kind)))
    kind = StructType([StructField("row", row), StructField("error", StringType())])
    # Otherwise Spark would decode twice, for the filter on `error` and for the fields.
    return cast("Decoding", _udf(decoded, kind).asNondeterministic())


def _udf(function: Callable[[pa.Array], pa.Array], kind: DataType) -> Any:
    if not HAS_ARROW_UDF:
        raise SparkError(
            "decoding columns require PySpark 4.1 or newer, got"
            f" {pyspark.__version__}; valueFormat=json reads JSON with any version"
        )
    # Spark recognises a function over whole columns by its type hints.
    return sf.arrow_udf(function, kind)  # type: ignore[attr-defined]  # not in its stubs

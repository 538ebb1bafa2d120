"""The row as Spark declares it: DDL for the source, and Arrow types from Spark's own.

Spark parses the DDL, so that no type of a JSON value is understood in two ways.

The options of `CREATE TABLE ... USING metaq` travel with the columns. Spark hands them
to a Python source while it creates the table, and to none of the queries that read it;
it keeps, and hands on each time, the schema. So they are the comment of the
first column, which `DESCRIBE` shows.
"""

import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import OptionError
from metaq.spark.option_table import OPTIONS, Use
from metaq.spark.options import (
    BadRows,
    SourceOptions,
    ValueFormat,
    ValueOptions,
    read_value_options,
)
from metaq.spark.values import BAD_REASON, BAD_VALUE, ValueConverter

HEADERS_DDL: Final = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
_BEFORE_VALUE: Final = (
    "topic STRING, broker_id INT, partition INT, offset BIGINT, message_id BIGINT,"
    " timestamp TIMESTAMP, attribute STRING, flag INT, key BINARY,"
    f" headers {HEADERS_DDL}"
)

ROW_DDL: Final = f"{_BEFORE_VALUE}, value BINARY"

_STREAM_ONLY: Final = frozenset(
    spec.name.lower()
    for spec in OPTIONS
    if Use.STREAM in spec.uses and Use.BATCH not in spec.uses
)
_TABLE: Final = "metaq table "
"""Start of a comment that is followed by the options of a table, as JSON."""
_OF_TABLE: Final = "option."
"""Prefix that Spark gives to each option of a table that is created."""

_STAND_INS: Final = frozenset({b"variant", b"geometry", b"geography"})
"""Marks of fields by which Spark knows types that Arrow has not."""

_TAKES_ZONE: Final = "timezone" in inspect.signature(to_arrow_schema).parameters
"""Before 4.2 the zone of timestamps was always UTC, and there was nothing to say."""


def row_ddl(options: ValueOptions) -> str:
    """Return the columns that a source declares.

    Args:
        options: format of the column `value`, and whether bad values have columns.
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


def declared_columns(options: Mapping[str, str]) -> str:
    """Return the columns that a source of these options declares, as DDL.

    Args:
        options: as Spark hands them over, of a read or of a table that is created.

    Raises:
        OptionError: an option is wrong.
    """
    table = _options_of_new_table(options)
    if table is not None:
        # The last moment for errors to reach the table's creator.
        read = SourceOptions.from_map(table, is_stream=_is_of_stream(table))
        return _table_ddl(row_ddl(read.values), table)
    use = Use.STREAM if _is_of_stream(options) else Use.BATCH
    return row_ddl(read_value_options(options, use))


def _is_of_stream(options: Mapping[str, str]) -> bool:
    """Whether options can only be those of a stream; Spark does not say."""
    return any(name.lower() in _STREAM_ONLY for name in options)


def _options_of_new_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """Return the OPTIONS among all properties of a table that is created.

    Args:
        options: as Spark hands them over; None is returned for those of a read.
    """
    if "provider" not in options:
        return None
    names = (name for name in options if name.lower().startswith(_OF_TABLE))
    return {name[len(_OF_TABLE) :]: options[name] for name in names}


def _table_ddl(ddl: str, options: Mapping[str, str]) -> str:
    """Return the columns of a table that is read with some options."""
    text = _TABLE + json.dumps(dict(options), sort_keys=True)
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    first, rest = ddl.split(",", 1)
    return f"{first} COMMENT '{text}',{rest}"


def with_table_options(
    schema: StructType, options: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the options of a read: its own over those of its table.

    Args:
        schema: as Spark hands it to a reader.
        options: the read's own; where they name a cluster, they are all.
    """
    comment = schema.fields[0].metadata.get("comment", "") if schema.fields else ""
    own = {name.lower(): text for name, text in options.items()}
    if not comment.startswith(_TABLE) or own.keys() & {"zookeeper", "brokers"}:
        return options
    kept = json.loads(comment.removeprefix(_TABLE))
    return {**{name.lower(): text for name, text in kept.items()}, **own}


def value_type(schema: StructType, options: ValueOptions) -> pa.DataType:
    """Return the Arrow type of the column `value`.

    Args:
        schema: as Spark hands it to a reader: ours, or the user's own.
        options: format of the column.

    Raises:
        OptionError: The columns are others, or JSON is not read into the type.
    """
    found = arrow_schema(schema)
    names = list(ROW_SCHEMA.names)
    if options.bad_rows is BadRows.COLUMN:
        names += [BAD_VALUE, BAD_REASON]
    if found.names != names:
        raise OptionError(
            f"expected the columns {', '.join(names)}, got {', '.join(found.names)}:"
            " leave schema(...) out, and select what you need"
        )
    kind = found.field("value").type
    if not _FITS[options.format](kind):
        raise OptionError(
            f"column value: expected what valueFormat={options.format.value} gives,"
            f" got {kind}"
        )
    # It refuses types that it cannot make, here and not in every task.
    ValueConverter(options.format, options.bad_rows, kind)
    return kind


_FITS: Final = {
    ValueFormat.BINARY: pa.types.is_binary,
    ValueFormat.STRING: pa.types.is_string,
    ValueFormat.JSON: pa.types.is_struct,
}


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark compares batches with, to the letter.

    Args:
        schema: as Spark hands it to a reader.

    Raises:
        OptionError: a column has a type that Arrow has not.
    """
    zone: dict[str, Any] = {"timezone": "UTC"} if _TAKES_ZONE else {}
    try:
        found = to_arrow_schema(schema, **zone)
    except PySparkException as error:
        raise OptionError(f"schema {schema.simpleString()}: {error}") from error
    for field in found:
        if _is_disguised(field.type):
            kind = schema[field.name].dataType.simpleString()
            raise OptionError(f"column {field.name}: nothing is read into {kind}")
    return found


def _is_disguised(kind: pa.DataType) -> bool:
    """Whether there is a struct in a type that represents a VARIANT, or a shape."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return any(
        _STAND_INS & (each.metadata or {}).keys() or _is_disguised(each.type)
        for each in fields
    )

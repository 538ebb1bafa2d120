"""Schemas of the rows: DDL for Spark, and Arrow types from Spark's types.

Only Spark parses the DDL, so that types of JSON values have one interpretation.

The options of `CREATE TABLE ... USING metaq` are stored in the schema. Spark passes
them to a Python source when it creates the table, but not for queries that read it; it
stores the schema, and passes that each time. So the options are in the comment of the
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
"""Prefix of a comment with the options of a table, as JSON."""
_OF_TABLE: Final = "option."
"""Prefix that Spark adds to each option of a new table."""

_STAND_INS: Final = frozenset({b"variant", b"geometry", b"geography"})
"""Metadata keys of fields by which Spark marks types that Arrow lacks."""

_TAKES_ZONE: Final = "timezone" in inspect.signature(to_arrow_schema).parameters
"""Whether the time zone of timestamps is an argument; before 4.2 it was always UTC."""


def row_ddl(options: ValueOptions) -> str:
    """Return the columns of a source, as DDL.

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
    """Return the columns of a source with these options, as DDL.

    Args:
        options: of a read or of a new table, as passed by Spark.

    Raises:
        OptionError: an option is wrong.
    """
    table = _options_of_new_table(options)
    if table is not None:
        # Errors found later would not reach the table's creator.
        read = SourceOptions.from_map(table, is_stream=_is_of_stream(table))
        return _table_ddl(row_ddl(read.values), table)
    use = Use.STREAM if _is_of_stream(options) else Use.BATCH
    return row_ddl(read_value_options(options, use))


def _is_of_stream(options: Mapping[str, str]) -> bool:
    """Return whether any option is for streams only: Spark does not pass on the use."""
    return any(name.lower() in _STREAM_ONLY for name in options)


def _options_of_new_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """Return the OPTIONS among all properties of a new table; None for a read.

    Args:
        options: as passed by Spark.
    """
    if "provider" not in options:
        return None
    names = (name for name in options if name.lower().startswith(_OF_TABLE))
    return {name[len(_OF_TABLE) :]: options[name] for name in names}


def _table_ddl(ddl: str, options: Mapping[str, str]) -> str:
    """Return DDL with a table's options in the comment of the first column."""
    text = _TABLE + json.dumps(dict(options), sort_keys=True)
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    first, rest = ddl.split(",", 1)
    return f"{first} COMMENT '{text}',{rest}"


def with_table_options(
    schema: StructType, options: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the options of a read, which override those of its table.

    Args:
        schema: as passed by Spark to a reader.
        options: of the read itself; if they name a cluster, the table's are ignored.
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
        schema: as passed by Spark to a reader: ours, or the user's own.
        options: format of the column.

    Raises:
        OptionError: the schema has other columns, or a type not supported for JSON.
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
    # Raises for unsupported types, here rather than in every task.
    ValueConverter(options.format, options.bad_rows, kind)
    return kind


_FITS: Final = {
    ValueFormat.BINARY: pa.types.is_binary,
    ValueFormat.STRING: pa.types.is_string,
    ValueFormat.JSON: pa.types.is_struct,
}


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark requires of batches, exactly.

    Args:
        schema: as passed by Spark to a reader.

    Raises:
        OptionError: a column has a type that Arrow lacks.
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
    """Return whether a type contains a struct for VARIANT, GEOMETRY or GEOGRAPHY."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return any(
        _STAND_INS & (each.metadata or {}).keys() or _is_disguised(each.type)
        for each in fields
    )

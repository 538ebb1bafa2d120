"""Decoder for Avro's single-object encoding, or for bare Avro records.

    0      2                10
    | C3 01 | fingerprint: 8 | record ... |

The fingerprint is the CRC-64-AVRO of the writer's schema in canonical form, in
little-endian order.
"""

import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from fastavro import parse_schema, schemaless_reader
from fastavro.schema import (
    SchemaParseException,
    UnknownType,
    fingerprint,
    to_parsing_canonical_form,
)

from metaq.pipeline.decode.decoding import (
    AVRO_HEADER_BYTES,
    AVRO_MARK,
    fingerprint_text,
)
from metaq.spark.errors import OptionError
from metaq.spark.values import read_by_halves

_FAULTS: Final = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError,
    StopIteration, TypeError, ValueError, struct.error,
)  # fmt: skip
"""Errors that fastavro raises for bytes that are not a record."""

_PLAIN: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_LOGICAL: Final[Mapping[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("us", tz="UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", tz="UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
"""Type and logical type → Arrow type; Avro ignores a logical type of another type."""
_DECIMALS: Final = frozenset({"bytes", "fixed"})


class AvroValues:
    """Decodes Avro records as structs. Stateless."""

    def __init__(
        self, schema: str, *, older: Sequence[str] = (), has_fingerprint: bool = True
    ) -> None:
        """Prepare for one schema.

        Args:
            schema: schema of the records, as JSON; determines the resulting types.
            older: schemas of other writers, only with `has_fingerprint`. They may have
                unions and logical types that Spark lacks.
            has_fingerprint: False for records without the ten bytes before them.

        Raises:
            OptionError: a schema is invalid, or has a type that Spark lacks.
        """
        if older and not has_fingerprint:
            raise OptionError("older has no effect without fingerprints")
        self._reader = _parse(schema)
        writers = [_parse(each) for each in older]
        for number, each in enumerate(writers, 1):
            _kind_of(each, f"older schema {number}", {}, is_older=True)
        self._writers = {_fingerprint(each): each for each in (self._reader, *writers)}
        self._has_fingerprint = has_fingerprint
        kind = _kind_of(self._reader, "schema", {})
        if not pa.types.is_struct(kind):
            raise OptionError(f"schema: expected a record, got {kind}")
        self.kind: Final = kind

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value; see `Decoder`."""
        records: list[object] = []
        for row, value in enumerate(values.to_pylist()):
            try:
                records.append(self._read(value))
            except _FAULTS as error:
                reasons[row] = f"no Avro: {str(error) or 'it ends early'}"
                records.append(None)

        def on_bad(row: int, error: pa.ArrowInvalid) -> None:
            reasons[row] = f"no Avro of the schema: {error}"

        parts = read_by_halves(
            len(records),
            lambda a, b: pa.array(records[a:b], self.kind),
            on_bad,
            self.kind,
        )
        return pa.concat_arrays([pa.nulls(0, self.kind), *parts])

    def _read(self, value: bytes) -> object:
        """Return the record of one value.

        Raises:
            ValueError: the value has another format, or an unknown schema. Other
                members of `_FAULTS` are raised for invalid records.
        """
        writer, start = self._reader, 0
        if self._has_fingerprint:
            mark, start = value[:AVRO_HEADER_BYTES], AVRO_HEADER_BYTES
            if len(mark) < AVRO_HEADER_BYTES or not mark.startswith(AVRO_MARK):
                raise ValueError(
                    f"expected {AVRO_MARK.hex()} first, got {mark[:2].hex()}"
                )
            found = self._writers.get(mark[len(AVRO_MARK) :])
            if found is None:
                raise ValueError(f"no schema has fingerprint {fingerprint_text(mark)}")
            writer = found
        source = io.BytesIO(value)
        source.seek(start)
        record = schemaless_reader(source, writer, self._reader)
        if source.tell() != len(value):
            raise ValueError(f"record ends at byte {source.tell()} of {len(value)}")
        return record


def _parse(schema: str) -> Any:
    try:
        return parse_schema(json.loads(schema))
    except (SchemaParseException, UnknownType, ValueError, LookupError) as error:
        raise OptionError(f"schema: no Avro schema: {error}") from error


def _fingerprint(parsed: Any) -> bytes:
    text = fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO")
    return bytes.fromhex(text)


def _kind_of(
    schema: Any, path: str, named: dict[str, pa.DataType], *, is_older: bool = False
) -> pa.DataType:
    """Return the Arrow type of a parsed schema.

    Args:
        schema: as fastavro has parsed it.
        path: name of the field, for errors.
        named: name → type that may be referred to by the name; extended.
        is_older: whether it is a writer's schema, resolved to another one. It is only
            checked that few bytes cannot claim many values or deep recursion.

    Raises:
        OptionError: it has no Arrow type: a union of several types, or a record that
            contains itself.
    """
    if isinstance(schema, list):
        some = [each for each in schema if each != "null"]
        if len(some) != 1 and not is_older:
            raise OptionError(f"{path}: a union of {len(some)} types is no Spark type")
        kinds = [_kind_of(each, path, named, is_older=is_older) for each in some]
        return kinds[0] if len(kinds) == 1 else pa.null()
    if isinstance(schema, str):
        found = _PLAIN.get(schema) or named.get(schema)
        if found is None:
            raise OptionError(f"{path}: {schema} is no Spark type, or contains itself")
        return found
    found = _kind_of_object(schema, path, named, is_older=is_older)
    if "name" in schema:
        named[schema["name"]] = found
    return found


def _kind_of_object(
    schema: dict[str, Any], path: str, named: dict[str, pa.DataType], *, is_older: bool
) -> pa.DataType:
    def inner(schema: Any, path: str) -> pa.DataType:
        return _kind_of(schema, path, named, is_older=is_older)

    if schema["type"] == "fixed" and not schema["size"]:
        raise OptionError(f"{path}: a fixed of no bytes is no Spark type")
    logical, on = schema.get("logicalType"), str(schema["type"])
    if logical == "decimal" and on in _DECIMALS and not is_older:
        return _decimal(schema, path)
    if (found := _LOGICAL.get((on, str(logical)))) is not None:
        return found
    if logical is not None and not is_older:
        raise OptionError(
            f"{path}: {on} with the logical type {logical} is no Spark type"
        )
    match schema["type"]:
        case "record":
            fields = (
                (each["name"], inner(each["type"], f"{path}.{each['name']}"))
                for each in schema["fields"]
            )
            kind = pa.struct(list(fields))
            if not kind.num_fields:
                # An array of these may claim any length without taking any bytes.
                raise OptionError(f"{path}: a record without fields is no Spark type")
            return kind
        case "array":
            return pa.list_(inner(schema["items"], path))
        case "map":
            return pa.map_(pa.string(), inner(schema["values"], path))
        case name:
            return inner(name, path)


def _decimal(schema: Mapping[str, Any], path: str) -> pa.DataType:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    try:
        return pa.decimal128(precision, scale)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{path}: a decimal of precision {precision} and scale {scale} is no Spark"
            f" type: {error}"
        ) from error

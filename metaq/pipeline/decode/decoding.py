"""Decoding of a column of values, for any format."""

from collections.abc import Iterator
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from metaq.spark.values import REASON_CHARS_MAX

DECODED_NAMES: Final = ("row", "error")
"""Fields of the struct for each value."""

AVRO_MARK: Final = b"\xc3\x01"
"""First bytes of a value in Avro's single-object encoding."""
AVRO_HEADER_BYTES: Final = len(AVRO_MARK) + 8
"""Bytes before the record: the mark, and the fingerprint of the writer's schema."""


class Decoder(Protocol):
    """Decodes values of one format. Stateless; picklable, for executors."""

    @property
    def kind(self) -> pa.DataType:
        """Struct of the fields, all of them nullable."""

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value; any fields for a bad one.

        Args:
            values: binary, without nulls.
            reasons: index of a bad value → what is wrong with it; extended.
        """


def decode_values(
    decoder: Decoder, required: pa.DataType, values: pa.Array
) -> pa.Array:
    """Return structs of `row` and `error`, one for each value.

    Args:
        decoder: decodes the values.
        required: struct of the fields, in which required ones are not nullable.
        values: binary or string; a null gets neither row nor error.
    """
    octets = values.cast(pa.binary())
    reasons: dict[int, str] = {}
    read = decoder.decode(octets.drop_null(), reasons)
    numbers = pa.array(range(len(read)), pa.int64())
    for row, field in _missing(read, required, numbers, ""):
        reasons.setdefault(row, f"field {field} is missing or null")
    rows: list[int | None] = []
    errors: list[str | None] = []
    row = 0
    for is_there in octets.is_valid().to_pylist():
        reason = reasons.get(row) if is_there else None
        rows.append(row if is_there and reason is None else None)
        errors.append(None if reason is None else reason[:REASON_CHARS_MAX])
        row += is_there
    if reasons or len(read) < len(octets):
        read = read.take(pa.array(rows, pa.int64()))
    return pa.StructArray.from_arrays(
        [read, pa.array(errors, pa.string())], names=DECODED_NAMES
    )


def _missing(
    values: pa.Array, kind: pa.DataType, rows: pa.Array, path: str
) -> Iterator[tuple[int, str]]:
    """Yield row and field of each null that `kind` does not allow.

    Args:
        values: of the type `kind`, except for nulls.
        kind: the required type.
        rows: index of the row of each value.
        path: path of the field, with a dot at its end; "" at the top.
    """
    if pa.types.is_struct(kind):
        is_there = values.is_valid()
        for number, field in enumerate(kind):
            inner = pc.struct_field(values, [number])
            name = path + field.name
            if not field.nullable:
                is_missing = pc.and_(is_there, inner.is_null())
                for row in rows.filter(is_missing).to_pylist():
                    yield row, name
            yield from _missing(inner, field.type, rows, f"{name}.")
    elif pa.types.is_list(kind):
        elements = values.flatten()
        rows = rows.take(pc.list_parent_indices(values))
        if not kind.value_field.nullable:
            for row in rows.filter(elements.is_null()).to_pylist():
                yield row, f"{path}element"
        yield from _missing(elements, kind.value_type, rows, f"{path}element.")


def nullable(kind: pa.DataType) -> pa.DataType:
    """Return the same type with nulls allowed everywhere."""

    def free(field: pa.Field) -> Any:
        return pa.field(field.name, nullable(field.type))

    if pa.types.is_struct(kind):
        return pa.struct([free(field) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(free(kind.value_field))
    return kind


def fingerprint_text(value: bytes) -> str:
    """Return the fingerprint of an Avro value as hex, in big-endian order."""
    return value[len(AVRO_MARK) : AVRO_HEADER_BYTES][::-1].hex()

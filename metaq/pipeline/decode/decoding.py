"""One column of values decoded, of any format."""

from collections.abc import Iterator
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from metaq.spark.values import REASON_CHARS_MAX

DECODED_NAMES: Final = ("row", "error")
"""Fields of what a value becomes."""

AVRO_MARK: Final = b"\xc3\x01"
"""Start of a value of Avro's single-object encoding."""
AVRO_HEADER_BYTES: Final = len(AVRO_MARK) + 8
"""Bytes before its record: the mark, and the fingerprint of the writer's schema."""


class Decoder(Protocol):
    """Reads values of one format. Stateless; goes to executors in pickled form."""

    @property
    def kind(self) -> pa.DataType:
        """Struct of the fields, all of them nullable."""

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value; say in `reasons` what is wrong with others.

        Args:
            values: binary, none of them null.
            reasons: number of a value → its fault, added to. What is returned for such
                a value does not matter.
        """


def decode_values(
    decoder: Decoder, required: pa.DataType, values: pa.Array
) -> pa.Array:
    """Return structs of `row` and `error`, one for each value.

    Args:
        decoder: reads the values.
        required: struct that says which fields may not be null.
        values: binary or string; a null has neither row nor error.
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
    """Yield row and field of each null where `kind` has none.

    Args:
        values: of that type, but for the nulls.
        kind: what they should be.
        rows: number of the row that each one belongs to.
        path: name of the field, followed by a dot.
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
    """Return the fingerprint in the header of an Avro value, greatest byte first."""
    return value[len(AVRO_MARK) : AVRO_HEADER_BYTES][::-1].hex()

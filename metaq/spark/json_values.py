"""JSON objects of a schema, read by Arrow, many in one go.

One object lies behind the other, a line each. Every one is sure to begin with `{` and
to end with `}`, and `}` newline `{` occurs in no JSON value, so objects cannot flow
into one another; when as many come out as values went in, each value is exactly one
object. Where that fails, halving finds the bad ones.
"""

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from metaq.spark.errors import OptionError
from metaq.spark.halving import read_by_halves

REASON_CHARS_MAX: Final = 200
"""A reason is cut there: it may quote the value."""

_BLANKS: Final = b" \t\r\n"
_NO_ZONE: Final = pa.timestamp("us")


class JsonValues:
    """Reads JSON objects as structs of one type. Stateless."""

    def __init__(self, kind: pa.DataType, named: str) -> None:
        """Prepare for one type.

        Args:
            kind: struct of the fields that are read; others are ignored.
            named: name of the struct, for errors.

        Raises:
            OptionError: the struct has a type that JSON is not read into.
        """
        self.kind: Final = kind
        self._read_kind = _kind_to_read(kind, named)

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value, null for a bad one; say why in `reasons`.

        Args:
            values: binary, none of them null.
            reasons: number of a value → its fault, added to.
        """
        texts = read_texts(values, reasons)
        lines: list[bytes] = []
        rows: list[int] = []
        for row, value in enumerate(values.to_pylist()):
            line = value.strip(_BLANKS)
            if row in reasons:
                continue
            if line[:1] == b"{" and line[-1:] == b"}":
                lines.append(line)
                rows.append(row)
            else:
                reasons[row] = "no JSON object"

        def on_bad(place: int, error: pa.ArrowInvalid) -> None:
            reason = f"no JSON of the schema: {error}"
            reasons[rows[place]] = reason[:REASON_CHARS_MAX]

        parts = list(
            read_by_halves(
                len(lines), lambda a, b: self._read_block(lines[a:b]), on_bad, self.kind
            )
        )
        if not parts:
            return pa.nulls(len(texts), self.kind)
        read = pa.concat_arrays(parts)
        if len(rows) == len(texts):
            return read
        places: list[int | None] = [None] * len(texts)
        for place, row in enumerate(rows):
            places[row] = place
        return read.take(pa.array(places, pa.int64()))

    def _read_block(self, lines: list[bytes]) -> pa.Array:
        """Return the fields of these lines; raise ArrowInvalid where one is bad."""
        data = b"\n".join(lines)
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(list(self._read_kind)),
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != len(lines):
            raise pa.ArrowInvalid("more than one object in a value")
        read = pa.concat_arrays(table.to_struct_array().chunks).cast(self.kind)
        # Arrow takes numbers with more digits than a decimal has.
        read.validate(full=True)
        require_finite(read, may_be_nan=False)
        return read


def read_texts(values: pa.Array, reasons: dict[int, str]) -> pa.Array:
    """Return binary values as text, null for invalid UTF-8.

    Args:
        values: binary, none of them null.
        reasons: number of a value → its fault, added to.
    """
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(list(_texts(values.to_pylist(), reasons)), pa.string())


def _texts(values: list[bytes], reasons: dict[int, str]) -> Iterator[str | None]:
    for row, value in enumerate(values):
        try:
            yield value.decode()
        except UnicodeDecodeError as error:
            reasons[row] = f"no UTF-8: byte {error.start} of {len(value)}"
            yield None


def _kind_to_read(wanted: pa.DataType, path: str) -> pa.DataType:
    """Return the type that Arrow reads from JSON before it is cast to `wanted`.

    Raises:
        OptionError: there is none; the message names the field.
    """
    if pa.types.is_struct(wanted) and wanted.num_fields:
        names = [f.name for f in wanted]
        if doubles := sorted({n for n in names if names.count(n) > 1}):
            raise OptionError(f"{path}: two fields {doubles[0]!r}")
        return pa.struct(
            [
                pa.field(f.name, _kind_to_read(f.type, f"{path}.{f.name}"))
                for f in wanted
            ]
        )
    if pa.types.is_list(wanted):
        element = wanted.value_field
        return pa.list_(
            pa.field(element.name, _kind_to_read(element.type, f"{path}.element"))
        )
    if pa.types.is_date32(wanted) or wanted == _NO_ZONE:
        # Arrow reads a date from a number only; people write 2024-05-01. And where
        # there is no zone, it moves a time that has one to UTC and says nothing.
        return pa.string()
    if any(is_kind(wanted) for is_kind in _READABLE):
        return wanted
    raise OptionError(f"{path}: JSON is not read into {wanted}")


_READABLE: Final = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_timestamp,
)


def require_finite(values: pa.Array, *, may_be_nan: bool) -> None:
    """Refuse infinity, which Arrow makes of numbers that a DOUBLE cannot hold.

    Args:
        values: of any type; structs and lists are looked into.
        may_be_nan: the format has NaN; JSON has not, and Arrow reads it there as well.

    Raises:
        ArrowInvalid: a number in them is infinite, or none.
    """
    kind = values.type
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            field = pc.struct_field(values, [number])
            require_finite(field, may_be_nan=may_be_nan)
    elif pa.types.is_list(kind):
        require_finite(values.flatten(), may_be_nan=may_be_nan)
    elif pa.types.is_floating(kind):
        if pc.any(pc.is_inf(values)).as_py():
            raise pa.ArrowInvalid("a number is too large")
        if not may_be_nan and pc.any(pc.is_nan(values)).as_py():
            raise pa.ArrowInvalid("NaN is no number of JSON")

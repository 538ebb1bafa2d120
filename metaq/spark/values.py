"""Conversion of values to text or fields of JSON, in blocks; bad ones are separated.

Arrow parses a block of values, and refuses the whole block if one is bad; bisection
finds that one (`read_by_halves`).

JSON objects are parsed as one text, one object per line. Each is known to begin with
`{` and to end with `}`, and no JSON value contains `}` newline `{`, so objects cannot
merge: if the number of objects equals that of values, each value is one object.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from metaq.model import Offset
from metaq.spark.columns import ROW_SCHEMA, partition_of
from metaq.spark.errors import BadRowError, OptionError
from metaq.spark.options import BadRows, ValueFormat

BAD_VALUE: Final = "bad_value"
"""Column with the bytes of a bad value; null for good values."""
BAD_REASON: Final = "bad_reason"
"""Column with what is wrong with a bad value; null for good values."""
REASON_CHARS_MAX: Final = 200
"""Maximum characters of a reason, which may quote the value."""

_VALUE_AT: Final = ROW_SCHEMA.get_field_index("value")
_BLANKS: Final = b" \t\r\n"
_NO_ZONE: Final = pa.timestamp("us")


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of converting one batch."""

    rows: pa.RecordBatch
    """Rows of the requested schema, in order, without rejected ones."""
    rejected: pa.RecordBatch | None = None
    """Rows of `ROW_SCHEMA` for the dead-letter topic; None if there are none."""
    reasons: tuple[str, ...] = ()
    """Reason for each rejected row, in the same order."""


class ValueConverter:
    """Converts the values of batches from binary to one format. Stateless."""

    def __init__(
        self, value_format: ValueFormat, bad_rows: BadRows, value_type: pa.DataType
    ) -> None:
        """Prepare for one format.

        Args:
            value_format: format of the column `value`.
            bad_rows: handling of values that do not have the format.
            value_type: Arrow type of the column: binary, string, or a struct.

        Raises:
            OptionError: the struct has a type not supported for JSON.
        """
        self._format = value_format
        self._bad_rows = bad_rows
        self._json = None
        if value_format is ValueFormat.JSON:
            self._json = JsonValues(value_type, "valueSchema: value")
        fields = list(ROW_SCHEMA)
        fields[_VALUE_AT] = pa.field("value", value_type)
        if bad_rows is BadRows.COLUMN:
            fields += [
                pa.field(BAD_VALUE, pa.binary()),
                pa.field(BAD_REASON, pa.string()),
            ]
        self.schema = pa.schema(fields)

    def convert(self, batch: pa.RecordBatch) -> Converted:
        """Convert the values of one batch.

        Args:
            batch: rows of `ROW_SCHEMA`; not modified.

        Raises:
            BadRowError: a value does not have the format, with `BadRows.FAIL`.
        """
        values = batch.column(_VALUE_AT)
        reasons: dict[int, str] = {}
        if self._format is ValueFormat.BINARY:
            return Converted(batch)
        if self._json is None:
            converted = read_texts(values, reasons)
        else:
            converted = self._json.decode(values, reasons)
        if reasons and self._bad_rows is BadRows.FAIL:
            raise _first_bad(batch, reasons)
        is_bad = pa.array((row in reasons for row in range(len(values))), pa.bool_())
        columns = [*batch.columns[:_VALUE_AT], converted]
        if self._bad_rows is BadRows.COLUMN:
            nothing = pa.scalar(None, pa.binary())
            texts = (reasons.get(row) for row in range(len(values)))
            columns += [
                pc.if_else(is_bad, values, nothing),
                pa.array(texts, pa.string()),
            ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if not reasons or self._bad_rows is BadRows.COLUMN:
            return Converted(rows)
        said = tuple(reasons[row] for row in sorted(reasons))
        return Converted(rows.filter(pc.invert(is_bad)), batch.filter(is_bad), said)


def _first_bad(batch: pa.RecordBatch, reasons: dict[int, str]) -> BadRowError:
    row = min(reasons)
    place: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
    return BadRowError(partition_of(place), Offset(place["offset"]), reasons[row])


class JsonValues:
    """Parses JSON objects as structs of one type. Stateless."""

    def __init__(self, kind: pa.DataType, named: str) -> None:
        """Prepare for one type.

        Args:
            kind: struct of the fields to parse; other fields are ignored.
            named: name of the struct, for errors.

        Raises:
            OptionError: the struct has a type not supported for JSON.
        """
        self.kind: Final = kind
        self._read_kind = _kind_to_read(kind, named)

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value, null for a bad one.

        Args:
            values: binary, without nulls.
            reasons: index of a bad value → what is wrong with it; extended.
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
        """Return the fields of lines; raise ArrowInvalid if one is bad."""
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
        # Arrow itself accepts numbers with more digits than the decimal type.
        read.validate(full=True)
        require_finite(read, may_be_nan=False)
        return read


def read_texts(values: pa.Array, reasons: dict[int, str]) -> pa.Array:
    """Return binary values as text, null for invalid UTF-8.

    Args:
        values: binary, without nulls.
        reasons: index of a bad value → what is wrong with it; extended.
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
    """Return the type that Arrow parses from JSON, before a cast to `wanted`.

    Raises:
        OptionError: `wanted` is not supported; the message names the field.
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
        # Arrow parses dates only from numbers, not from 2024-05-01. And for a type
        # without a zone it silently converts times with a zone to UTC.
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
    """Refuse infinity, which Arrow makes from numbers too large for a DOUBLE.

    Args:
        values: of any type; structs and lists are searched.
        may_be_nan: whether NaN is allowed; JSON lacks it, though Arrow accepts it.

    Raises:
        ArrowInvalid: a number is infinite, or NaN and that is not allowed.
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


def read_by_halves(
    count: int,
    read: Callable[[int, int], pa.Array],
    on_bad: Callable[[int, pa.ArrowInvalid], None],
    kind: pa.DataType,
) -> Iterator[pa.Array]:
    """Yield values parsed in blocks, in order; bad ones are null.

    Args:
        count: number of values.
        read: parses the values [start, end); raises ArrowInvalid if one is bad.
        on_bad: called with the index of each bad value, and its error.
        kind: type of the parsed values.

    Yields:
        Arrays of one or more elements; none for a count of 0.
    """
    # A stack of ranges instead of recursion, whose depth is limited.
    waiting = [(0, count)] if count else []
    while waiting:
        start, end = waiting.pop()
        try:
            yield read(start, end)
        except pa.ArrowInvalid as error:
            if end - start > 1:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]
                continue
            on_bad(start, error)
            yield pa.nulls(1, kind)

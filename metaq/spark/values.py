"""Values as text or as fields of JSON, with others kept apart.

JSON is read by Arrow, many rows in one go: one object behind the other, a line each.
Every row is sure to begin with `{` and to end with `}`, and `}` newline `{` occurs in
no JSON value, so rows cannot flow into one another; when as many objects come out as
rows went in, each row is exactly one object. Where that fails, halving finds the bad
rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import BadRowError, OptionError
from metaq.spark.options import BadRows, ValueFormat

BAD_VALUE: Final = "bad_value"
"""Column for the bytes of a bad value; null where the value is good."""
BAD_REASON: Final = "bad_reason"
"""Column with the fault of a value; null where it is good."""

REASON_CHARS_MAX: Final = 200
"""A reason is cut there: it may quote the value."""

_VALUE_AT: Final = ROW_SCHEMA.get_field_index("value")
_BLANKS: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of converting one batch."""

    rows: pa.RecordBatch
    """Rows of the asked schema, in order; without the rejected ones."""
    rejected: pa.RecordBatch | None = None
    """Rows of `ROW_SCHEMA` for the dead-letter topic; None where there are none."""
    reasons: tuple[str, ...] = ()
    """Fault of each rejected row, in the same order."""


class ValueConverter:
    """Turns batches with binary values into the asked ones. Stateless, one schema."""

    def __init__(
        self, value_format: ValueFormat, bad_rows: BadRows, value_type: pa.DataType
    ) -> None:
        """Prepare for one format.

        Args:
            value_format: format of the column `value`.
            bad_rows: fate of values that are not of the format.
            value_type: Arrow type of the column: binary, string, or a struct.

        Raises:
            OptionError: the struct has a type that JSON is not read into.
        """
        self._format = value_format
        self._bad_rows = bad_rows
        self._type = value_type
        self._read_type = value_type
        if value_format is ValueFormat.JSON:
            self._read_type = _type_to_read(value_type, "value")
        fields = list(ROW_SCHEMA)
        fields[_VALUE_AT] = pa.field("value", value_type)
        if bad_rows is BadRows.COLUMN:
            fields += [
                pa.field(BAD_VALUE, pa.binary()),
                pa.field(BAD_REASON, pa.string()),
            ]
        self.schema = pa.schema(fields)
        """Schema of the converted batches."""

    def convert(self, batch: pa.RecordBatch) -> Converted:
        """Convert the values of one batch.

        Args:
            batch: rows of `ROW_SCHEMA`; kept as it is.

        Raises:
            BadRowError: a value is not of the format, and bad rows are to fail.
        """
        values = batch.column(_VALUE_AT)
        reasons: dict[int, str] = {}
        if self._format is ValueFormat.BINARY:
            return Converted(batch)
        if self._format is ValueFormat.STRING:
            converted = _as_text(values, reasons)
        else:
            converted = self._as_json(values, reasons)
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

    def _as_json(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value, null for a bad one; say why in `reasons`."""
        texts = _as_text(values, reasons)
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
        parts = list(self._read_lines(lines, rows, reasons))
        if not parts:
            return pa.nulls(len(texts), self._type)
        read = pa.concat_arrays(parts)
        if len(rows) == len(texts):
            return read
        places: list[int | None] = [None] * len(texts)
        for place, row in enumerate(rows):
            places[row] = place
        return read.take(pa.array(places, pa.int64()))

    def _read_lines(
        self, lines: list[bytes], rows: list[int], reasons: dict[int, str]
    ) -> Iterator[pa.Array]:
        """Yield the fields of all lines in order; bad ones are null, with a reason."""
        # Halves wait on a list, in order, so that no depth of calls is a limit.
        waiting = [(0, len(lines))] if lines else []
        while waiting:
            start, end = waiting.pop()
            try:
                yield self._read_block(lines[start:end])
            except pa.ArrowInvalid as error:
                if end - start > 1:
                    middle = (start + end) // 2
                    waiting += [(middle, end), (start, middle)]
                    continue
                reasons[rows[start]] = f"no JSON of the schema: {error}"[
                    :REASON_CHARS_MAX
                ]
                yield pa.nulls(1, self._type)

    def _read_block(self, lines: list[bytes]) -> pa.Array:
        """Return the fields of these lines; raise ArrowInvalid where one is bad."""
        data = b"\n".join(lines)
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(list(self._read_type)),
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != len(lines):
            raise pa.ArrowInvalid("more than one object in a value")
        read = pa.concat_arrays(table.to_struct_array().chunks).cast(self._type)
        # Arrow takes numbers with more digits than a decimal has.
        read.validate(full=True)
        return read


def _as_text(values: pa.Array, reasons: dict[int, str]) -> pa.Array:
    """Return values as text, null for invalid UTF-8; put the faults in `reasons`."""
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


def _type_to_read(wanted: pa.DataType, path: str) -> pa.DataType:
    """Return the type that Arrow reads from JSON before it is cast to `wanted`.

    Raises:
        OptionError: there is none; the message names the field.
    """
    if pa.types.is_struct(wanted) and wanted.num_fields:
        names = [f.name for f in wanted]
        if doubles := sorted({n for n in names if names.count(n) > 1}):
            raise OptionError(f"valueSchema: {path}: two fields {doubles[0]!r}")
        return pa.struct(
            [
                pa.field(f.name, _type_to_read(f.type, f"{path}.{f.name}"))
                for f in wanted
            ]
        )
    if pa.types.is_list(wanted):
        element = wanted.value_field
        return pa.list_(
            pa.field(element.name, _type_to_read(element.type, f"{path}.element"))
        )
    if pa.types.is_date32(wanted):
        # Arrow reads a date from a number only; people write 2024-05-01.
        return pa.string()
    if any(is_kind(wanted) for is_kind in _READABLE):
        return wanted
    raise OptionError(f"valueSchema: {path}: JSON is not read into {wanted}")


_READABLE: Final = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_timestamp,
)


def _first_bad(batch: pa.RecordBatch, reasons: dict[int, str]) -> BadRowError:
    row = min(reasons)
    place: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
    partition = TopicPartition(
        place["topic"], BrokerId(place["broker_id"]), place["partition"]
    )
    return BadRowError(partition, Offset(place["offset"]), reasons[row])

"""Values as text or as fields of JSON, with others kept apart."""

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from metaq.model import Offset
from metaq.spark.columns import ROW_SCHEMA, partition_of
from metaq.spark.errors import BadRowError
from metaq.spark.json_values import JsonValues, read_texts
from metaq.spark.options import BadRows, ValueFormat

BAD_VALUE: Final = "bad_value"
"""Column for the bytes of a bad value; null where the value is good."""
BAD_REASON: Final = "bad_reason"
"""Column with the fault of a value; null where it is good."""

_VALUE_AT: Final = ROW_SCHEMA.get_field_index("value")


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

"""Decoders of values with text fields: CSV records, and lines that match a pattern."""

import csv
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_type

from metaq.spark.errors import OptionError
from metaq.spark.values import read_by_halves, read_texts, require_finite

QUOTED_CHARS_MAX: Final = 80
"""Maximum characters of a text quoted in an error."""


class CsvValues:
    """Decodes values of one CSV record each. Stateless."""

    def __init__(self, kind: pa.DataType, delimiter: str) -> None:
        """Prepare for one type.

        Args:
            kind: struct of the fields, in the order of the record.
            delimiter: one character.

        Raises:
            OptionError: a type is not supported for text, or the delimiter is not one
                character.
        """
        _check_kinds(kind)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise OptionError(f"delimiter: expected one character, got {delimiter!r}")
        self.kind: Final = kind
        self._delimiter = delimiter

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the fields of each value; see `Decoder`."""
        count = self.kind.num_fields
        rows: list[Sequence[str | None]] = []
        for row, text in enumerate(read_texts(values, reasons).to_pylist()):
            fields: Sequence[str | None] = (None,) * count
            try:
                if text is not None:
                    fields = split_record(text, self._delimiter)
            except csv.Error as error:
                reasons[row] = f"no CSV: {str(error).partition(' - ')[0]}"
            if len(fields) != count:
                reasons[row] = f"expected {count} fields, got {len(fields)}"
                fields = (None,) * count
            rows.append(fields)
        columns = zip(*rows, strict=True) if rows else ((),) * count
        texts = [pa.array(column, pa.string()) for column in columns]
        return _typed(texts, self.kind, reasons)


def split_record(text: str, delimiter: str) -> list[str]:
    """Return the fields of one CSV record.

    Raises:
        csv.Error: a quote is not closed, there is a line end outside of quotes, or a
            field is longer than 131,072 characters.
    """
    records = list(csv.reader([text], delimiter=delimiter, strict=True))
    return records[0] if records and records[0] else [""]


class PatternValues:
    """Decodes lines that match a regular expression. Stateless."""

    def __init__(self, kind: pa.DataType, regex: str) -> None:
        """Prepare for one expression.

        Args:
            kind: struct with a field for each named group, in any order.
            regex: RE2 expression that must match the whole value.

        Raises:
            OptionError: the expression is invalid or has other groups, or a type is not
                supported for text.
        """
        groups = group_names(regex)
        names = [field.name for field in kind]
        if sorted(groups) != sorted(names):
            raise OptionError(
                f"schema: expected the groups {', '.join(groups)}, got"
                f" {', '.join(names)}"
            )
        _check_kinds(kind)
        self.kind: Final = kind
        self._regex = regex

    def decode(self, values: pa.Array, reasons: dict[int, str]) -> pa.Array:
        """Return the groups of each value; see `Decoder`."""
        texts = read_texts(values, reasons)
        found = pc.extract_regex(texts, _whole(self._regex))
        for row in pc.indices_nonzero(found.is_null()).to_pylist():
            reasons.setdefault(row, "the pattern does not match")
        columns = [pc.struct_field(found, [field.name]) for field in self.kind]
        return _typed(columns, self.kind, reasons)


def group_names(regex: str) -> list[str]:
    """Return the named groups of an expression, in order.

    Raises:
        OptionError: it is not a valid RE2 expression, or does not have named groups of
            different names.
    """
    try:
        kind = pc.extract_regex(pa.array([], pa.string()), _whole(regex)).type
    except pa.ArrowInvalid as error:
        raise OptionError(f"pattern {regex!r}: {error}") from error
    names = [field.name for field in kind]
    if not names or len(set(names)) < len(names):
        raise OptionError(
            f"pattern {regex!r}: expected groups (?P<name>...) of different names, got"
            f" {', '.join(names) or 'none'}"
        )
    return names


def _whole(regex: str) -> str:
    return rf"\A(?:{regex})\z"


def _typed(
    columns: Sequence[pa.Array], kind: pa.DataType, reasons: dict[int, str]
) -> pa.Array:
    """Return columns of texts as structs of their types; an empty text is null."""
    typed = []
    for field, texts in zip(kind, columns, strict=True):
        is_empty = pc.equal(texts, "")
        given = pc.if_else(is_empty, pa.scalar(None, pa.string()), texts)
        typed.append(_cast(given, field, reasons))
    return pa.StructArray.from_arrays(typed, fields=list(kind))


def _cast(texts: pa.Array, field: pa.Field, reasons: dict[int, str]) -> pa.Array:
    given = texts
    if pa.types.is_timestamp(field.type):
        given = _as_times(texts, has_zone=field.type.tz is not None)

    def on_bad(row: int, _error: pa.ArrowInvalid) -> None:
        wanted = from_arrow_type(field.type).simpleString().upper()
        text = texts[row].as_py()[:QUOTED_CHARS_MAX]
        reasons.setdefault(row, f"field {field.name}: expected {wanted}, got {text!r}")

    def read(start: int, end: int) -> pa.Array:
        block = given[start:end].cast(field.type)
        require_finite(block, may_be_nan=True)
        return block

    parts = read_by_halves(len(texts), read, on_bad, field.type)
    return pa.concat_arrays([pa.nulls(0, field.type), *parts])


def _as_times(texts: pa.Array, *, has_zone: bool) -> pa.Array:
    """Return times with a point before the fraction, and UTC if they have no zone."""
    texts = pc.replace_substring(texts, ",", ".", max_replacements=1)
    if not has_zone:
        return texts
    # A zone only after a time, because the end of 2024-05-01 looks like one.
    has_one = pc.match_substring_regex(texts, r":\d\d(\.\d+)?(Z|[+-]\d\d(:?\d\d)?)$")
    in_utc = pc.binary_join_element_wise(texts, pa.scalar("Z"), "")
    return pc.if_else(has_one, texts, in_utc)


def _check_kinds(kind: pa.DataType) -> None:
    for field in kind:
        if pa.types.is_nested(field.type):
            wanted = from_arrow_type(field.type).simpleString().upper()
            raise OptionError(
                f"schema: field {field.name}: text is not read into {wanted}"
            )

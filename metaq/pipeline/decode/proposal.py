"""Proposal of a schema for sample messages: format, fields, types. Pure.

The proposed format is that of most messages. Types are merged over all of them: a field
gets the most frequent type, widened to all numbers or texts that occur, and is nullable
if any message lacks it. The decoder itself then decides which messages fit, so that the
proposal promises only what a pipeline can decode.
"""

import csv
import enum
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from metaq.pipeline.decode.decoding import (
    AVRO_HEADER_BYTES,
    AVRO_MARK,
    Decoder,
    decode_values,
    fingerprint_text,
    nullable,
)
from metaq.pipeline.decode.text_values import (
    CsvValues,
    PatternValues,
    group_names,
    split_record,
)
from metaq.spark.schema import arrow_schema
from metaq.spark.values import JsonValues

SHARE_MIN: Final = 0.5
"""Minimum share of the messages that must fit a format to propose it."""
FIELDS_MAX: Final = 1000
"""Maximum number of fields of a proposal; objects with data as keys have more."""
ERRORS_MAX: Final = 5
"""Number of different errors reported, the most frequent ones."""

_TIME: Final = (
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\d\d/\d\d/\d\d \d\d:\d\d:\d\d|\d{6} \d{6})"
)
_LEVEL: Final = (
    r"\[?(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|SEVERE|CRITICAL|FATAL)\]?"
)
_SYSLOG: Final = (
    r"(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) (?P<host>\S+)"
    r" (?P<process>[^\s\[:]+)(?:\[(?P<pid>\d+)\])?: (?P<message>.*)"
)
_ACCESS: Final = (
    r"(?P<host>\S+) (?P<ident>\S+) (?P<user>\S+) \[(?P<time>[^\]]+)\]"
    r' "(?P<request>[^"]*)" (?P<status>\d{3}) (?:(?P<bytes>\d+)|-)'
)
PATTERNS: Final = (
    _ACCESS,
    rf'{_ACCESS} "(?P<referer>[^"]*)" "(?P<agent>[^"]*)"',
    _SYSLOG,
    rf"<(?P<priority>\d{{1,3}})>{_SYSLOG}",
    r"\[(?P<time>[^\]]+)\] \[(?P<level>[^\]]+)\] (?P<message>.*)",
    rf"{_TIME} \[(?P<thread>[^\]]*)\]\s+{_LEVEL}\s+(?P<message>.*)",
    rf"{_TIME} (?P<id>\d+) {_LEVEL}\s+(?P<message>.*)",
    rf"{_TIME}(?: -)?\s+{_LEVEL}:?\s+(?P<message>.*)",
)
"""Patterns of log lines; the one that fits most lines is proposed."""


class ValueForm(enum.Enum):
    """Format of values; the value is its name in output."""

    JSON = "json"
    CSV = "csv"
    AVRO = "avro"
    PATTERN = "pattern"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFacts:
    """One field of a proposal."""

    name: str
    """Path of the field, with dots; `element` for the elements of an array."""
    type: str
    is_required: bool
    """Whether every value has it."""
    count: int
    """Number of values, or elements, that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Format and schema that fit most sample messages."""

    form: ValueForm
    schema: StructType | None
    """Fields; None for Avro, whose values do not contain them."""
    fields: tuple[FieldFacts, ...] = ()
    """Fields with counts; nested fields follow their parents."""
    detail: str | None = None
    """Regular expression, delimiter, or fingerprints of the format."""
    fit_count: int
    """Number of messages that fit."""
    errors: tuple[tuple[str, int], ...] = ()
    """Errors of the others with their counts, most frequent first."""


def propose(values: Sequence[bytes]) -> Proposal | None:
    """Return a proposal for messages; None if no format fits half of them.

    Args:
        values: values of the messages.
    """
    for look in (_propose_avro, _propose_json, _propose_pattern, _propose_csv):
        found = max(look(values), key=lambda each: each.fit_count, default=None)
        if found is not None and found.fit_count >= SHARE_MIN * len(values) > 0:
            return found
    return None


def expression(proposal: Proposal) -> str:
    """Return a Python expression that decodes values as proposed."""
    if proposal.schema is None:
        return "decode.avro(...)"
    ddl = ddl_of(proposal.schema)
    match proposal.form:
        case ValueForm.PATTERN:
            return f"decode.pattern({proposal.detail!r}, {ddl!r})"
        case ValueForm.CSV:
            return f"decode.csv({ddl!r}, delimiter={proposal.detail!r})"
        case _:
            return f"decode.{proposal.form.value}({ddl!r})"


def to_json(proposal: Proposal) -> dict[str, object]:
    """Return a proposal as a JSON object."""
    schema = proposal.schema
    return {
        "format": proposal.form.value,
        "detail": proposal.detail,
        "fit": proposal.fit_count,
        "schema": None if schema is None else ddl_of(schema),
        "fields": [asdict(each) for each in proposal.fields],
        "errors": [{"error": text, "count": n} for text, n in proposal.errors],
        "decode": expression(proposal),
    }


def ddl_of(schema: StructType) -> str:
    """Return a schema as DDL, with NOT NULL for required fields."""
    return _fields_ddl(schema, " ")


def _fields_ddl(schema: StructType, mark: str) -> str:
    """Return the fields of a struct as DDL, with `mark` after each name."""
    return ", ".join(
        f"{_name(f.name)}{mark}{type_ddl(f.dataType)}" + " NOT NULL" * (not f.nullable)
        for f in schema.fields
    )


def type_ddl(kind: DataType) -> str:
    """Return a type as DDL."""
    if isinstance(kind, StructType):
        return f"STRUCT<{_fields_ddl(kind, ': ')}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{type_ddl(kind.elementType)}>"
    return kind.simpleString().upper()


def _name(name: str) -> str:
    # Keywords of SQL are quoted too; an unneeded quote is harmless.
    if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) and name not in _WORDS:
        return name
    return f"`{name.replace('`', '``')}`"


_WORDS: Final = frozenset({"not", "null", "array", "struct", "map", "interval"})


# -- types of sample values ----------------------------------------------------------


class ShownKind(enum.Enum):
    """Apparent type of one value."""

    NULL = enum.auto()
    BOOLEAN = enum.auto()
    INTEGER = enum.auto()
    LARGE = enum.auto()
    """An integer beyond 64 bits, of at most 38 digits."""
    FLOAT = enum.auto()
    DATE = enum.auto()
    TIMESTAMP = enum.auto()
    TEXT = enum.auto()
    OBJECT = enum.auto()
    ARRAY = enum.auto()


_FAMILIES: Final = (
    frozenset({ShownKind.OBJECT}),
    frozenset({ShownKind.ARRAY}),
    frozenset({ShownKind.DATE, ShownKind.TIMESTAMP, ShownKind.TEXT}),
    frozenset({ShownKind.INTEGER, ShownKind.LARGE, ShownKind.FLOAT}),
    frozenset({ShownKind.BOOLEAN}),
)
"""Kinds that one type can represent; the first of equally frequent families is used."""

_DATE: Final = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", re.ASCII)
_CLOCK: Final = re.compile(
    r"[T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?(Z|[+-]\d\d(:?\d\d)?)?",
    re.ASCII,
)
_INTEGER: Final = re.compile(r"-?(0|[1-9]\d*)", re.ASCII)
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+([eE][+-]?\d{1,2})?)?", re.ASCII)
_FLOAT_DIGITS_MAX: Final = sys.float_info.max_10_exp
_LONG_MAX: Final = 2**63 - 1
_DECIMAL_DIGITS_MAX: Final = 38
_INTEGER_CHARS_MAX: Final = _DECIMAL_DIGITS_MAX + len("-")


@dataclass(slots=True)
class Shape:
    """Kinds of all values at one path; fields in order of first occurrence."""

    counts: Counter[ShownKind] = field(default_factory=Counter)
    fields: "dict[str, Shape]" = field(default_factory=dict)
    elements: "Shape | None" = None

    @property
    def there_count(self) -> int:
        """Number of values that are not null."""
        return self.counts.total() - self.counts[ShownKind.NULL]

    def add(self, value: object) -> None:
        """Count one JSON value."""
        if isinstance(value, dict):
            self.counts[ShownKind.OBJECT] += 1
            for name, inner in value.items():
                self.fields.setdefault(name, Shape()).add(inner)
        elif isinstance(value, list):
            self.counts[ShownKind.ARRAY] += 1
            self.elements = self.elements or Shape()
            for inner in value:
                self.elements.add(inner)
        else:
            self.counts[_kind_of(value)] += 1

    def add_text(self, text: str | None) -> None:
        """Count one text of CSV or a log line; an empty one is null."""
        kind = ShownKind.NULL
        if text:
            # The logs of Java and Python have a comma before the fraction.
            kind = _kind_of(text.replace(",", ".", 1))
            if _INTEGER.fullmatch(text) and len(text) <= _INTEGER_CHARS_MAX:
                kind = _kind_of(int(text))
            elif _NUMBER.fullmatch(text) and len(text) <= _FLOAT_DIGITS_MAX:
                kind = ShownKind.FLOAT
            elif text in {"true", "false"}:
                kind = ShownKind.BOOLEAN
        self.counts[kind] += 1


def _kind_of(value: object) -> ShownKind:
    match value:
        case None:
            return ShownKind.NULL
        case bool():
            return ShownKind.BOOLEAN
        case int():
            if -_LONG_MAX - 1 <= value <= _LONG_MAX:
                return ShownKind.INTEGER
            is_decimal = abs(value) < 10**_DECIMAL_DIGITS_MAX
            return ShownKind.LARGE if is_decimal else ShownKind.FLOAT
        case float():
            return ShownKind.FLOAT
        case str() if found := _DATE.match(value):
            if found.end() == len(value):
                return ShownKind.DATE
            is_time = _CLOCK.fullmatch(value, found.end())
            return ShownKind.TIMESTAMP if is_time else ShownKind.TEXT
        case _:
            return ShownKind.TEXT


def type_of(shape: Shape, *, is_text: bool = False) -> DataType:
    """Return the type that represents most values of a shape.

    Args:
        shape: shape of the values.
        is_text: whether the values are texts, so that STRING represents mixed kinds.
    """
    kinds = {kind for kind, count in shape.counts.items() if count} - {ShownKind.NULL}
    families = [family for family in _FAMILIES if family & kinds]
    if not families or (is_text and len(families) > 1):
        return StringType()
    family = max(families, key=lambda each: sum(shape.counts[kind] for kind in each))
    match sorted(kind.name for kind in family & kinds):
        case ["OBJECT"]:
            # Omits objects without fields, for which Spark has no type.
            kept = (each for each in shape.fields.items() if not _is_empty(each[1]))
            there = shape.counts[ShownKind.OBJECT]
            return StructType(
                [
                    StructField(
                        name, type_of(inner, is_text=is_text), inner.there_count < there
                    )
                    for name, inner in kept
                ]
            )
        case ["ARRAY"]:
            return ArrayType(type_of(shape.elements or Shape()))
        case ["BOOLEAN"]:
            return BooleanType()
        case ["INTEGER"]:
            return LongType()
        case ["LARGE"] | ["INTEGER", "LARGE"]:
            return DecimalType(_DECIMAL_DIGITS_MAX, 0)
        case ["DATE"]:
            return DateType()
        case ["TIMESTAMP"]:
            return TimestampType()
        case _ if ShownKind.FLOAT in family:
            return DoubleType()
        case _:
            return StringType()


def _is_empty(shape: Shape) -> bool:
    """Return whether the Spark type would contain a struct without fields."""
    kind = type_of(shape)
    while isinstance(kind, ArrayType):
        kind = kind.elementType
    return isinstance(kind, StructType) and not kind.fields


def _facts(shape: Shape, schema: StructType, path: str = "") -> Iterator[FieldFacts]:
    for each in schema.fields:
        inner, kind, name = shape.fields[each.name], each.dataType, path + each.name
        yield FieldFacts(
            name=name,
            type=type_ddl(kind),
            is_required=not each.nullable,
            count=inner.there_count,
        )
        while isinstance(kind, ArrayType) and inner.elements is not None:
            inner, kind, name = inner.elements, kind.elementType, f"{name}.element"
        if isinstance(kind, StructType):
            yield from _facts(inner, kind, f"{name}.")


# -- formats -------------------------------------------------------------------------


def _propose_avro(values: Sequence[bytes]) -> Iterator[Proposal]:
    marked = [
        fingerprint_text(value)
        for value in values
        if value.startswith(AVRO_MARK) and len(value) >= AVRO_HEADER_BYTES
    ]
    if marked:
        names = ", ".join(sorted(set(marked))[:ERRORS_MAX])
        yield Proposal(
            form=ValueForm.AVRO, schema=None, detail=names, fit_count=len(marked)
        )


def _propose_json(values: Sequence[bytes]) -> Iterator[Proposal]:
    shape = Shape()
    for value in values:
        found = _object_of(value)
        if found is not None:
            shape.add(found)
    schema = type_of(shape)
    if not isinstance(schema, StructType) or not schema.fields:
        return
    if sum(1 for _ in _facts(shape, schema)) <= FIELDS_MAX:
        decoder = JsonValues(nullable(_required(schema)), "schema")
        yield _judged(values, ValueForm.JSON, shape, schema, decoder)


def _object_of(value: bytes) -> dict[str, Any] | None:
    """Return a message as a JSON object; None if it is not one."""
    try:
        found = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _propose_pattern(values: Sequence[bytes]) -> Iterator[Proposal]:
    for regex in PATTERNS:
        names = group_names(regex)
        texts = StructType([StructField(name, StringType()) for name in names])
        decoder = PatternValues(_required(texts), regex)
        found = decode_values(decoder, decoder.kind, pa.array(values, pa.binary()))
        rows = [list(row.values()) for row in found.field("row").to_pylist() if row]
        if rows:
            shape, schema = _read_texts(rows, names)
            typed = PatternValues(nullable(_required(schema)), regex)
            yield _judged(values, ValueForm.PATTERN, shape, schema, typed, regex)


def _propose_csv(values: Sequence[bytes]) -> Iterator[Proposal]:
    # JSON objects are not CSV, although they contain commas.
    others = [each for each in values if _object_of(each) is None]
    for delimiter in ",;\t|":
        records = list(_records(others, delimiter))
        counts = Counter(map(len, records))
        width = max(counts, key=counts.__getitem__, default=1)
        if 1 < width <= FIELDS_MAX:
            rows = [record for record in records if len(record) == width]
            names = [f"c{number}" for number in range(1, width + 1)]
            shape, schema = _read_texts(rows, names)
            decoder = CsvValues(nullable(_required(schema)), delimiter)
            yield _judged(values, ValueForm.CSV, shape, schema, decoder, delimiter)


def _records(values: Iterable[bytes], delimiter: str) -> Iterator[list[str]]:
    for value in values:
        try:
            yield split_record(value.decode(), delimiter)
        except (UnicodeDecodeError, csv.Error):
            continue


def _read_texts(
    rows: Sequence[Sequence[str | None]], names: Sequence[str]
) -> tuple[Shape, StructType]:
    """Return the shape and the schema of rows of texts, at least one."""
    shape = Shape()
    for row in rows:
        shape.counts[ShownKind.OBJECT] += 1
        for name, text in zip(names, row, strict=True):
            shape.fields.setdefault(name, Shape()).add_text(text)
    schema = type_of(shape, is_text=True)
    assert isinstance(schema, StructType), schema
    return shape, schema


def _required(schema: StructType) -> pa.DataType:
    return pa.struct(list(arrow_schema(schema)))


def _judged(
    values: Sequence[bytes],
    form: ValueForm,
    shape: Shape,
    schema: StructType,
    decoder: Decoder,
    detail: str | None = None,
) -> Proposal:
    """Return the proposal, with counts from decoding the values."""
    octets = pa.array(values, pa.binary())
    found = decode_values(decoder, _required(schema), octets)
    errors = Counter(found.field("error").drop_null().to_pylist())
    return Proposal(
        form=form,
        schema=schema,
        fields=tuple(_facts(shape, schema)),
        detail=detail,
        fit_count=len(values) - errors.total(),
        errors=tuple(errors.most_common(ERRORS_MAX)),
    )

"""Values of each format become rows or errors, and each value decides alone."""

import csv
import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.pipeline.decode.avro_values import AvroValues
from metaq.pipeline.decode.decoding import Decoder, decode_values, nullable
from metaq.pipeline.decode.text_values import CsvValues, PatternValues, group_names
from metaq.spark.errors import OptionError
from metaq.spark.values import JsonValues

TIME = pa.timestamp("us", tz="UTC")
FIELDS = pa.struct([("a", pa.int32()), ("t", TIME), ("b", pa.string())])
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
LINE = r"(?P<t>\S+ \S+) (?P<b>[A-Z]+)(?: (?P<a>\d+))?"
OLD = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}]}
NEW = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "a", "type": "int"},
        {"name": "b", "type": ["null", "string"], "default": None},
    ],
}


def decoded(
    decoder: Decoder, values: list[Any], required: pa.DataType | None = None
) -> list[Any]:
    """Return per value: its fields, its error as text, or None."""
    kind = decoder.kind if required is None else required
    found = decode_values(decoder, kind, pa.array(values, pa.binary()))
    found.validate(full=True)
    rows = found.to_pylist()
    assert not [row for row in rows if row["row"] is not None and row["error"]]
    return [row["error"] or row["row"] for row in rows]


def avro_record(schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def avro_value(schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    """Return the single-object encoding."""
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    mark = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
    return b"\xc3\x01" + bytes.fromhex(mark) + avro_record(schema, record)


def csv_values(kind: pa.DataType = FIELDS) -> CsvValues:
    return CsvValues(kind, ",")


def row(a: int | None, t: dt.datetime | None, b: str | None) -> dict[str, Any]:
    return {"a": a, "t": t, "b": b}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1,2024-05-01 12:00:00,x", row(1, NOON, "x")),
        (b'1,2024-05-01T14:00:00+02:00,"x,""y"""', row(1, NOON, 'x,"y"')),
        (b"1,2024-05-01T12:00Z,x\r\n", row(1, NOON, "x")),
        (b'-1,"2024-05-01 12:00:00,000","a\nb"', row(-1, NOON, "a\nb")),
        (b",,", row(None, None, None)),
        (b'"","",""', row(None, None, None)),
        (b"", "expected 3 fields, got 1"),
        (b"1,2", "expected 3 fields, got 2"),
        (b"1,,x,", "expected 3 fields, got 4"),
        (b"x,,", "field a: expected INT, got 'x'"),
        (b"3000000000,,", "field a: expected INT, got '3000000000'"),
        (b" 1,,", "field a: expected INT, got ' 1'"),
        (b"1,yesterday,", "field t: expected TIMESTAMP, got 'yesterday'"),
        (b'1,,"x', "no CSV: unexpected end of data"),
        (b'1,,"x"y', "no CSV: ',' expected after '\"'"),
        (b"1,,x\n2,,y", "no CSV: new-line character seen in unquoted field"),
        (b"1,,\xff", "no UTF-8: byte 3 of 4"),
        (None, None),
    ],
)
def test_csv(text: bytes | None, expected: object) -> None:
    """Among good neighbours, which stay."""
    good = b"7,,z"
    assert decoded(csv_values(), [good, text, good]) == [
        row(7, None, "z"),
        expected,
        row(7, None, "z"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"2024-05-01 12:00:00,000 INFO 5", row(5, NOON, "INFO")),
        (b"2024-05-01 12:00:00Z INFO", row(None, NOON, "INFO")),
        (b"2024-05-01 12:00:00 INFO 5 more", "the pattern does not match"),
        (b"at 2024-05-01 12:00:00 INFO", "the pattern does not match"),
        (b"", "the pattern does not match"),
        (b"a b INFO", "field t: expected TIMESTAMP, got 'a b'"),
        (
            b"2024-05-01 12:00:00 INFO 99999999999",
            "field a: expected INT, got '99999999999'",
        ),
        (b"\xff", "no UTF-8: byte 0 of 1"),
        (None, None),
    ],
)
def test_lines_that_match_a_pattern(text: bytes | None, expected: object) -> None:
    """Groups by their names, in the order of the schema; whole lines."""
    good = b"2024-05-01 12:00:00 WARN 1"
    assert decoded(PatternValues(FIELDS, LINE), [good, text, good]) == [
        row(1, NOON, "WARN"),
        expected,
        row(1, NOON, "WARN"),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (avro_value(NEW, {"a": 1, "b": "x"}), {"a": 1, "b": "x"}),
        (avro_value(OLD, {"a": 2}), {"a": 2, "b": None}),
        (avro_value(OLD, {"a": 2}) + b"x", "no Avro: record ends at byte 11 of 12"),
        (avro_value(OLD, {"a": 2})[:-1], "no Avro: it ends early"),
        (avro_record(OLD, {"a": 2}), "no Avro: expected c301 first, got 04"),
        (b"", "no Avro: expected c301 first, got "),
        (
            b"\xc3\x01\x01\x02\x03\x04\x05\x06\x07\x08",
            "no Avro: no schema has fingerprint 0807060504030201",
        ),
        (None, None),
    ],
)
def test_avro(value: bytes | None, expected: object) -> None:
    """By the schema that the value names; others are resolved to the newest."""
    decoder = AvroValues(json.dumps(NEW), older=[json.dumps(OLD)])
    good = avro_value(NEW, {"a": 7, "b": None})
    assert decoded(decoder, [good, value, good]) == [
        {"a": 7, "b": None},
        expected,
        {"a": 7, "b": None},
    ]


def test_avro_records_alone() -> None:
    """Their schema is agreed upon elsewhere."""
    decoder = AvroValues(json.dumps(NEW), has_fingerprint=False)
    record = {"a": 1, "b": "x"}
    values = [avro_record(NEW, record), avro_record(NEW, record) + b"."]
    assert decoded(decoder, values) == [record, "no Avro: record ends at byte 4 of 5"]


def test_the_types_of_avro_are_those_of_spark() -> None:
    """Logical ones too, and types that are used again by their names."""
    level = {"type": "enum", "name": "level", "symbols": ["A", "B"]}
    types: dict[str, Any] = {
        "e": level,
        "again": "level",
        "day": {"type": "int", "logicalType": "date"},
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "n": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "l": {"type": "array", "items": ["null", "double"]},
        "m": {"type": "map", "values": "boolean"},
    }
    fields = [{"name": name, "type": kind} for name, kind in types.items()]
    schema = {"type": "record", "name": "r", "fields": fields}
    record = {
        "e": "A",
        "again": "B",
        "day": dt.date(2024, 5, 1),
        "at": NOON,
        "n": Decimal("1.25"),
        "l": [1.5, None],
        "m": {"x": True},
    }
    decoder = AvroValues(json.dumps(schema))
    assert decoded(decoder, [avro_value(schema, record)]) == [
        {**record, "m": [("x", True)]}
    ]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (["int", "string"], "schema.x: a union of 2 types is no Spark type"),
        (
            {"type": "array", "items": "r"},
            "schema.x: r is no Spark type, or contains itself",
        ),
        ({"type": "string", "logicalType": "uuid"}, "logical type uuid is no Spark"),
        ({"type": "string", "logicalType": "date"}, "string with the logical type"),
        ({"type": "bytes", "logicalType": "decimal"}, "a decimal of precision None"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 39},
            "schema.x: a decimal of precision 39 and scale 0 is no Spark type",
        ),
        ({"type": "record", "name": "e", "fields": []}, "schema.x: a record without"),
        ({"type": "fixed", "name": "f", "size": 0}, "schema.x: a fixed of no bytes"),
        ("nothing", "no Avro schema"),
    ],
)
def test_avro_schemas_that_spark_has_no_type_for_are_refused(
    kind: object, sentence: str
) -> None:
    """With the path of the field."""
    schema = {"type": "record", "name": "r", "fields": [{"name": "x", "type": kind}]}
    with pytest.raises(OptionError, match=sentence):
        AvroValues(json.dumps(schema))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        # A few bytes claim millions of them.
        ({"type": "array", "items": "null"}, "older schema 1.x: null is no Spark type"),
        ({"type": "record", "name": "e", "fields": []}, "1.x: a record without fields"),
        # As many calls in calls as it has bytes.
        (["null", "r"], "older schema 1.x: r is no Spark type, or contains itself"),
        (["null", "int", "r"], "older schema 1.x: r is no Spark type, or contains"),
    ],
)
def test_older_schemas_without_bounds_are_refused(kind: object, sentence: str) -> None:
    """Whatever is left of their records when they are resolved."""
    older = {"type": "record", "name": "r", "fields": [{"name": "x", "type": kind}]}
    with pytest.raises(OptionError, match=sentence):
        AvroValues(json.dumps(NEW), older=[json.dumps(older)])


def test_older_schemas_may_have_what_spark_has_not() -> None:
    """Unions of several types and any logical ones, where the newest has no such."""
    uuid = {"type": "string", "logicalType": "uuid"}
    kinds = {
        "a": "int",
        "u": ["null", "int", uuid],
        "l": {"type": "array", "items": uuid},
    }
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    older = {**OLD, "fields": fields}
    decoder = AvroValues(json.dumps(NEW), older=[json.dumps(older)])
    value = avro_value(older, {"a": 3, "u": 5, "l": []})
    assert decoded(decoder, [value]) == [{"a": 3, "b": None}]


@pytest.mark.parametrize("text", ["2024-05-01T12:00:00", "2024-05-01T12:00:00+02:00"])
def test_a_time_of_no_zone_takes_none(text: str) -> None:
    """To move it to UTC would be a guess."""
    kind = pa.struct([("t", pa.timestamp("us"))])
    found = [
        *decoded(JsonValues(kind, "schema"), [json.dumps({"t": text}).encode()]),
        *decoded(csv_values(kind), [text.encode()]),
    ]
    if "+" in text:
        assert "expected no zone offset" in found[0]
        assert "expected TIMESTAMP_NTZ" in found[1]
    else:
        assert found == [{"t": NOON.replace(tzinfo=None)}] * 2


def test_numbers_that_a_double_cannot_hold_are_errors() -> None:
    """Infinity is not what was sent."""
    kind = pa.struct([("x", pa.float64()), ("s", pa.struct([("y", pa.float32())]))])
    large = b"9" * 400
    values = [b'{"x": 1}', b'{"x": %b}' % large, b'{"s": {"y": %b}}' % large]
    nan = b'{"s": {"y": NaN}}'
    good, *bad, no_number = decoded(JsonValues(kind, "schema"), [*values, nan])
    assert good == {"x": 1.0, "s": None}
    assert all("too large" in error for error in bad)
    assert "NaN is no number of JSON" in no_number
    numbers = csv_values(pa.struct([("x", pa.float64())]))
    assert decoded(numbers, [b"1e3", b"1e999"]) == [
        {"x": 1000.0},
        "field x: expected DOUBLE, got '1e999'",
    ]


def test_required_fields_are_named_where_they_are_missing() -> None:
    """At any depth; a null parent that may be null requires nothing."""
    inner = pa.struct([pa.field("y", pa.int64(), nullable=False)])
    required = pa.struct(
        [
            pa.field("a", pa.int32(), nullable=False),
            pa.field("s", inner),
            pa.field("l", pa.list_(pa.field("element", inner, nullable=False))),
        ]
    )
    values = {
        '{"a": 1}': {"a": 1, "s": None, "l": None},
        '{"a": 1, "s": {"y": 2}, "l": []}': {"a": 1, "s": {"y": 2}, "l": []},
        "{}": "field a is missing or null",
        '{"a": null}': "field a is missing or null",
        '{"a": 1, "s": {}}': "field s.y is missing or null",
        '{"a": 1, "l": [{"y": 1}, {}]}': "field l.element.y is missing or null",
        '{"a": 1, "l": [{"y": 1}, null]}': "field l.element is missing or null",
        '{"a": "1"}': "no JSON of the schema: JSON parse error: Column(/a) changed"
        " from number to string in row 0",
    }
    decoder = JsonValues(nullable(required), "schema")
    for turn in (1, -1):
        texts = list(values)[::turn]
        found = decoded(decoder, [text.encode() for text in texts], required)
        assert found == [values[text] for text in texts]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_values_that_are_null_have_neither_row_nor_error(count: int) -> None:
    """Also where all of them are, or none is there."""
    for decoder in (csv_values(), PatternValues(FIELDS, LINE)):
        assert decoded(decoder, [None] * count) == [None] * count


@pytest.mark.parametrize(
    ("regex", "sentence"),
    [
        ("(?P<a>", "missing"),
        ("a", "expected groups .* got none"),
        ("(a)", "unnamed groups"),
        ("(?P<a>x)(?P<a>y)", "a"),
        ("(?P<a>x)(?=y)", "invalid"),
    ],
)
def test_expressions_that_make_no_fields_are_refused(regex: str, sentence: str) -> None:
    """Before the first row."""
    with pytest.raises(OptionError, match=sentence):
        group_names(regex)


def test_schemas_that_do_not_fit_the_format_are_refused() -> None:
    """A pattern has all groups; texts hold no structs; delimiters are characters."""
    nested = pa.struct([("l", pa.list_(pa.int32()))])
    with pytest.raises(OptionError, match="expected the groups t, b, a, got l"):
        PatternValues(nested, LINE)
    with pytest.raises(OptionError, match="field l: text is not read into ARRAY<INT>"):
        csv_values(nested)
    with pytest.raises(OptionError, match="one character, got ';;'"):
        CsvValues(FIELDS, ";;")


DECODERS: list[Decoder] = [
    csv_values(),
    PatternValues(FIELDS, LINE),
    JsonValues(FIELDS, "schema"),
    AvroValues(json.dumps(NEW)),
    AvroValues(json.dumps(NEW), has_fingerprint=False),
]
PIECES = [b"1", b",", b'"', b"\n", b"x", b"2024-05-01 12:00:00", b" ", b"INFO"]
VALUES = (
    st.none()
    | st.binary(max_size=30)
    | st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join)
    | st.just(avro_value(NEW, {"a": 1, "b": "x"}))
)


@pytest.mark.slow
@given(st.sampled_from(DECODERS), st.lists(VALUES, max_size=8))
def test_each_value_decides_alone(decoder: Decoder, values: list[Any]) -> None:
    """No bytes raise, none flow into others, and only a null has nothing."""
    together = decoded(decoder, values)
    assert [value is None for value in values] == [one is None for one in together]
    assert together == [decoded(decoder, [value])[0] for value in values]


@given(st.lists(st.text(max_size=5), min_size=3, max_size=3))
def test_csv_that_is_written_is_read(fields: list[str]) -> None:
    """Whatever is in the fields; an empty one is null."""
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerow(fields)
    kind = pa.struct([(name, pa.string()) for name in "xyz"])
    try:
        value = out.getvalue().encode()
    except UnicodeEncodeError:
        return
    assert decoded(csv_values(kind), [value]) == [
        dict(zip("xyz", (one or None for one in fields), strict=True))
    ]

"""Values of each format become rows or errors, and each value decides alone."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.pipeline.decode.avro_values import AvroValues
from metaq.pipeline.decode.decoding import Decoder, nullable
from metaq.pipeline.decode.text_values import PatternValues
from metaq.spark.values import JsonValues
from tests.pipeline.decode.values import (
    FIELDS,
    LINE,
    NEW,
    NOON,
    avro_value,
    csv_values,
    decoded,
)

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


@pytest.mark.slow
@given(st.sampled_from(DECODERS), st.lists(VALUES, max_size=8))
def test_each_value_decides_alone(decoder: Decoder, values: list[Any]) -> None:
    """No bytes raise, none flow into others, and only a null has nothing."""
    together = decoded(decoder, values)
    assert [value is None for value in values] == [one is None for one in together]
    assert together == [decoded(decoder, [value])[0] for value in values]

"""Avro records, and schemas that Spark has no type for."""

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest

from metaq.pipeline.decode.avro_values import AvroValues
from metaq.spark.errors import OptionError
from tests.pipeline.decode.values import (
    NEW,
    NOON,
    OLD,
    avro_record,
    avro_value,
    decoded,
)


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

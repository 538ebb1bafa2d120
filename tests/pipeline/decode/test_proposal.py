"""Schemas are proposed that fit; what fits is said by the decoder."""

import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from metaq.pipeline.decode.proposal import (
    FIELDS_MAX,
    PATTERNS,
    Proposal,
    Shape,
    ValueForm,
    ddl_of,
    expression,
    propose,
    to_json,
    type_ddl,
    type_of,
)
from metaq.pipeline.decode.text_values import group_names


def proposed(values: list[bytes]) -> Proposal:
    found = propose(values)
    assert found is not None
    return found


def ddl(values: list[bytes]) -> str:
    schema = proposed(values).schema
    assert schema is not None
    return ddl_of(schema)


def type_for(*values: Any) -> str:
    """Return the type of a field that has these values of JSON."""
    shape = Shape()
    for value in values:
        shape.add(json.loads(json.dumps(value)))
    return type_ddl(type_of(shape))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((True, None), "BOOLEAN"),
        ((1, -(2**63), 2**63 - 1), "BIGINT"),
        ((1, 2**63), "DECIMAL(38,0)"),
        ((1, 1.5), "DOUBLE"),
        ((2**63, 1.5), "DOUBLE"),
        ((10**38,), "DOUBLE"),
        (("x",), "STRING"),
        (("2024-05-01",), "DATE"),
        (("2024-13-01",), "STRING"),
        (("2024-05-01T12:00:00Z", "2024-05-01 12:00:00.5+02:00"), "TIMESTAMP"),
        (("2024-05-01", "2024-05-01T12:00:00Z"), "STRING"),
        (("2024-05-01", "May"), "STRING"),
        ((None,), "STRING"),
        (([],), "ARRAY<STRING>"),
        (([1, 2.5], [None]), "ARRAY<DOUBLE>"),
        (({"a": 1}, {"a": None}), "STRUCT<a: BIGINT>"),
        (({"a": 1}, {"a": 2, "b": []}), "STRUCT<a: BIGINT NOT NULL, b: ARRAY<STRING>>"),
        (([{"a": 1}, {}],), "ARRAY<STRUCT<a: BIGINT>>"),
        ((1, 2, "x"), "BIGINT"),
        ((1, "x", "y"), "STRING"),
        (({"a": {}, "b": [[{}]], "c": 1},), "STRUCT<c: BIGINT NOT NULL>"),
    ],
)
def test_types_are_merged(values: tuple[Any, ...], expected: str) -> None:
    """The most frequent one, as wide as it has to be."""
    assert type_for(*values) == expected


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (("1", "2"), "BIGINT NOT NULL"),
        (("1", ""), "BIGINT"),
        (("1", "x"), "STRING NOT NULL"),
        (("007",), "STRING NOT NULL"),
        (("9" * 38,), "DECIMAL(38,0) NOT NULL"),
        (("9" * 300,), "DOUBLE NOT NULL"),
        (("9" * 5000,), "STRING NOT NULL"),
        (("1.5", "2"), "DOUBLE NOT NULL"),
        (("true", "false"), "BOOLEAN NOT NULL"),
        (("True",), "STRING NOT NULL"),
        (('"2024-05-01 12:00:00,5"',), "TIMESTAMP NOT NULL"),
        (("2024-05-01",), "DATE NOT NULL"),
        (("\N{ARABIC-INDIC DIGIT ONE}",), "STRING NOT NULL"),
        (("",), "STRING"),
    ],
)
def test_types_of_texts(cells: tuple[str, ...], expected: str) -> None:
    """A text column takes all where kinds are mixed, so that no value is lost."""
    values = [f"key,{cell}".encode() for cell in cells]
    found = proposed(values)
    assert found.form is ValueForm.CSV
    assert found.schema is not None
    assert ddl_of(found.schema) == f"c1 STRING NOT NULL, c2 {expected}"
    assert found.fit_count == len(values)


LINES = {
    b"2015-10-18 18:01:47,978 INFO [main] org.apache.App: started": "time TIMESTAMP",
    b"2015-10-18 18:01:47 [main] INFO org.apache.App - started": "thread STRING",
    b"2015-07-29 17:41:44,747 - WARN  [Queue@774] - timed out": "time TIMESTAMP",
    b"17/06/09 20:10:40 INFO executor.Backend: registered": "time STRING",
    b"081109 203615 148 INFO dfs.DataNode: terminating": "id BIGINT",
    b"[Sun Dec 04 04:47:44 2005] [notice] init() ok": "level STRING",
    b"Dec 10 06:55:46 LabSZ sshd[24200]: invalid user": "pid BIGINT",
    b"<34>Oct 11 22:14:15 host su: failed": "priority BIGINT",
    b'10.0.0.1 - - [01/May/2024:12:00:00 +0000] "GET /" 200 -': "status BIGINT",
    b'10.0.0.1 - joe [01/May/2024:12:00:00 +0000] "GET /" 404 12 "-" "curl"': (
        "agent STRING"
    ),
}


@pytest.mark.parametrize(("line", "field"), LINES.items())
def test_log_lines_are_known(line: bytes, field: str) -> None:
    """Those of common programs, with types for times and numbers."""
    found = proposed([line] * 3)
    assert (found.form, found.fit_count) == (ValueForm.PATTERN, 3)
    assert found.schema is not None
    assert field in ddl_of(found.schema)
    assert found.detail in PATTERNS
    assert expression(found).startswith("decode.pattern(")


def test_patterns_have_names_that_are_no_words_of_sql() -> None:
    """So that the groups can be columns as they are."""
    for regex in PATTERNS:
        assert all(name.isidentifier() for name in group_names(regex))


def test_what_does_not_fit_is_counted_by_its_fault() -> None:
    """And does not change the proposal."""
    good = [b'{"a": %d, "b": "x"}' % number for number in range(8)]
    found = proposed([*good, b"no json", b'{"a": "1", "b": "x"}'])
    assert to_json(found) == {
        "format": "json",
        "detail": None,
        "fit": 8,
        "schema": "a BIGINT NOT NULL, b STRING NOT NULL",
        "fields": [
            {"name": "a", "type": "BIGINT", "is_required": True, "count": 9},
            {"name": "b", "type": "STRING", "is_required": True, "count": 9},
        ],
        "errors": [
            {"error": "no JSON object", "count": 1},
            {
                "error": "no JSON of the schema: JSON parse error: Column(/a) changed"
                " from number to string in row 0",
                "count": 1,
            },
        ],
        "decode": "decode.json('a BIGINT NOT NULL, b STRING NOT NULL')",
    }


def test_fields_inside_of_others_are_told() -> None:
    """By their path, with the number of values that have them."""
    values = [b'{"l": [{"x": 1}, {}], "s": {"y": null}}', b'{"l": []}']
    assert [(f.name, f.count, f.is_required) for f in proposed(values).fields] == [
        ("l", 2, True),
        ("l.element.x", 1, False),
        ("s", 1, False),
        ("s.y", 0, False),
    ]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b"hello"],
        [b"\xff\xfe"],
        [b"{}"],
        [b"[1]", b"2"],
        [b'{"a": 1}', b"x", b"y"],
        [b'{"a": NaN}'],
        [b'{"l": [{}, {}]}'],
        [b"[" * 100_000],
        [json.dumps(dict.fromkeys(map(str, range(FIELDS_MAX + 1)), 1)).encode()],
    ],
)
def test_where_nothing_fits_half_nothing_is_proposed(values: list[bytes]) -> None:
    """Rather than a schema of one text."""
    assert propose(values) is None


def test_avro_with_a_fingerprint_is_known() -> None:
    """Its schema is not in it."""
    found = proposed([b"\xc3\x01\x01\x02\x03\x04\x05\x06\x07\x08rest"])
    assert (found.form, found.schema) == (ValueForm.AVRO, None)
    assert found.detail == "0807060504030201"
    assert to_json(found)["decode"] == "decode.avro(...)"


def records(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects in which a field has one kind wherever it comes."""
    scalars: dict[str, st.SearchStrategy[Any]] = {
        "n": st.integers(-(2**63), 2**63 - 1),
        "big": st.integers(-(10**37), 10**37),
        "x": st.floats(-1e15, 1e15) | st.integers(-1000, 1000),
        "t": st.text(max_size=4),
        "ok": st.booleans(),
        "day": st.dates(dt.date(1900, 1, 1)).map(str),
        "at": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1)).map(
            lambda at: at.isoformat() + "Z"
        ),
    }
    if depth:
        inner = records(depth - 1)
        scalars |= {"s": inner, "l": st.lists(inner | st.none(), max_size=3)}
    optional = {name: kind | st.none() for name, kind in scalars.items()}
    return st.fixed_dictionaries({}, optional=optional)


@pytest.mark.slow
@given(st.lists(records(), min_size=1, max_size=8), st.randoms())
def test_what_is_of_one_kind_fits(rows: list[dict[str, Any]], random: Any) -> None:
    """All of it decodes by the proposal, and the order of messages is no matter."""
    values = [json.dumps(row).encode() for row in rows]
    found = propose(values)
    if found is None:
        assert not any(leaves(row) for row in rows)
        return
    assert (found.form, found.fit_count) == (ValueForm.JSON, len(rows)), found.errors
    random.shuffle(values)
    again = proposed(values)
    assert {f.name: f.count for f in again.fields} == {
        f.name: f.count for f in found.fields
    }
    assert again.fit_count == found.fit_count


def leaves(row: Any) -> list[Any]:
    """Return everything in an object that is sure to be a field of some type."""
    if isinstance(row, dict):
        return [leaf for inner in row.values() for leaf in leaves(inner)]
    if isinstance(row, list):
        return [leaf for inner in row for leaf in leaves(inner)]
    return [] if row is None else [row]


@pytest.mark.slow
@given(st.lists(st.binary(max_size=20), max_size=6))
def test_no_bytes_are_too_odd_to_look_at(values: list[bytes]) -> None:
    """A proposal fits half of them, or there is none."""
    found = propose(values)
    assert found is None or 2 * found.fit_count >= len(values)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_reads_the_ddl_as_it_is_meant(spark: SparkSession) -> None:
    """Whatever the names are."""
    names = [
        "a",
        "not",
        "null",
        "Level",
        "a b",
        "a`b",
        "é",
        "1",
        "select",
        "date",
        "_x",
    ]
    row = {name: {name: [1.5]} for name in names}
    schema = proposed([json.dumps(row).encode()]).schema
    assert schema is not None
    assert StructType.fromDDL(ddl_of(schema)) == schema
    for line in LINES:
        schema = proposed([line]).schema
        assert schema is not None
        assert StructType.fromDDL(ddl_of(schema)) == schema

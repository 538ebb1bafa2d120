"""Values become text or fields; each bad one is kept apart, and only the bad ones."""

import datetime as dt
import json
import pickle
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.record.layout import encode_record
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import BadRowError, OptionError
from metaq.spark.options import BadRows, ValueFormat
from metaq.spark.rows import RowDecoder, decode_pieces
from metaq.spark.values import ValueConverter

PARTITION = TopicPartition("logs", BrokerId(0), 1)
FIELDS = pa.struct([("a", pa.int32()), ("b", pa.string())])


def batch(values: list[bytes]) -> pa.RecordBatch:
    log = b"".join(
        encode_record(value, id=MessageId(n + 1)) for n, value in enumerate(values)
    )
    end = Offset(len(log))
    (rows,) = decode_pieces(RowDecoder(PARTITION, Offset(0), end), [log])
    return rows


def converter(
    value_type: pa.DataType = FIELDS, bad_rows: BadRows = BadRows.COLUMN
) -> ValueConverter:
    is_text = value_type == pa.string()
    kind = ValueFormat.STRING if is_text else ValueFormat.JSON
    return ValueConverter(kind, bad_rows, value_type)


def read(values: list[bytes], value_type: pa.DataType = FIELDS) -> list[object]:
    """Return per row: the value, or (bytes, reason) of a bad one."""
    one = converter(value_type)
    rows = one.convert(batch(values)).rows
    assert rows.schema == one.schema
    rows.validate(full=True)
    found: list[object] = []
    for row in rows.to_pylist():
        assert (row["value"] is None) == (row["bad_value"] is not None)
        assert (row["bad_reason"] is None) == (row["bad_value"] is None)
        bad = (row["bad_value"], row["bad_reason"])
        found.append(bad if row["value"] is None else row["value"])
    return found


def test_binary_values_stay_as_they_are() -> None:
    """The common case costs nothing."""
    one = ValueConverter(ValueFormat.BINARY, BadRows.FAIL, pa.binary())
    rows = batch([b"\xff"])
    assert one.convert(rows).rows is rows
    assert one.schema == ROW_SCHEMA


@given(
    st.lists(st.binary(max_size=6) | st.text(max_size=6).map(str.encode), min_size=1)
)
def test_text_is_utf8_or_a_bad_row(values: list[bytes]) -> None:
    """Each value alone decides, with any neighbours."""
    for value, found in zip(values, read(values, pa.string()), strict=True):
        try:
            assert found == value.decode()
        except UnicodeDecodeError:
            assert isinstance(found, tuple)
            assert found[0] == value
            assert found[1].startswith("no UTF-8: byte ")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FRAGMENTS = st.lists(
    st.sampled_from(
        [b"{", b"}", b'"a":', b"1", b"\n", b",", b'"', b"[", b"]", b'"b":']
    ),
    max_size=9,
).map(b"".join)


@pytest.mark.slow
@given(
    st.lists(
        JSON_VALUES.map(lambda value: json.dumps(value, indent=1).encode())
        | FRAGMENTS
        | st.integers(-(2**31), 2**31 - 1).map(lambda n: b'{"a": %d}' % n)
        | st.binary(max_size=5),
        min_size=1,
        max_size=12,
    )
)
def test_json_rows_never_flow_into_one_another(values: list[bytes]) -> None:
    """A row among others is read as it is alone; what is no JSON object is bad."""
    together = read(values)
    for value, found in zip(values, together, strict=True):
        (alone,) = read([value])
        if isinstance(found, tuple):
            assert isinstance(alone, tuple)
            assert found[0] == alone[0] == value
            continue
        assert found == alone
        parsed = json.loads(value)
        assert isinstance(parsed, dict)
        assert found == {"a": parsed.get("a"), "b": parsed.get("b")}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'"a"', "no JSON object"),
        (b"\xef\xbb\xbf{}", "no JSON object"),
        (b'{"a":1} {"a":2}', "more than one object in a value"),
        (b'{"a":1}\n{"a":2}', "more than one object in a value"),
        (b'{"a":1', "no JSON object"),
        (b'{"a":1}}', "no JSON of the schema"),
        (b'{"a":{"b":1}', "no JSON of the schema"),
        (b'{"a":1.5}', "no JSON of the schema"),
        (b'{"a":3000000000}', "no JSON of the schema"),
        (b'{"a":"1"}', "no JSON of the schema"),
        (b'{"a":1,"a":2}', "no JSON of the schema"),
        (b'{"b":"line\nbreak"}', "no JSON of the schema"),
        (b'{"b":"\xff"}', "no UTF-8: byte 6 of 9"),
    ],
)
def test_what_is_wrong_is_said(value: bytes, reason: str) -> None:
    """The good neighbours are read; nothing of a bad row is."""
    found = read([b'{"a":1}', value, b'{"b":"x"}'])
    assert found[::2] == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    assert isinstance(found[1], tuple)
    assert found[1][0] == value
    assert reason in found[1][1]
    assert len(found[1][1]) <= 200


def test_types_of_sql_are_read_from_json() -> None:
    """Times and dates as people write them; fields beside the schema are ignored."""
    element = pa.field("element", pa.date32())
    wanted = pa.struct(
        [
            ("t", pa.timestamp("us", tz="UTC")),
            ("d", pa.list_(element)),
            ("n", pa.decimal128(9, 2)),
            ("s", pa.struct([("x", pa.float64())])),
            ("y", pa.bool_()),
        ]
    )
    text = b"""{"t": "2024-05-01T12:00:00.5Z", "d": ["2024-05-01", null], "n": 1.5,
        "s": {"x": 3, "ignored": []}, "y": true, "unknown": {"x": [1]}}"""
    assert read([text, b'{"d": ["May"]}', b"{}"], wanted)[::2] == [
        {
            "t": dt.datetime(2024, 5, 1, 12, 0, 0, 500_000, dt.UTC),
            "d": [dt.date(2024, 5, 1), None],
            "n": Decimal("1.50"),
            "s": {"x": 3.0},
            "y": True,
        },
        {"t": None, "d": None, "n": None, "s": None, "y": None},
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_number_with_too_many_digits_is_bad(depth: int) -> None:
    """Spark would take it for another one, or fail without saying where."""
    wanted: pa.DataType = pa.struct([("n", pa.decimal128(9, 2))])
    good, bad = b'{"n": 1234567.25}', b'{"n": 12345678}'
    for _ in range(depth):
        wanted = pa.struct([("l", pa.list_(pa.field("element", wanted)))])
        good, bad = b'{"l": [%b]}' % good, b'{"l": [%b]}' % bad
    first, second, third = read([good, bad, b"{}"], wanted)
    assert isinstance(first, dict)
    assert isinstance(second, tuple)
    assert second[0] == bad
    assert "does not fit in precision" in second[1]
    assert third == {wanted[0].name: None}


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (pa.struct([("m", pa.map_(pa.string(), pa.int32()))]), "value.m: JSON is not"),
        (
            pa.struct([("l", pa.list_(pa.duration("us")))]),
            "value.l.element: JSON is not read into duration",
        ),
        (pa.struct([]), "value: JSON is not read into struct<>"),
        (
            pa.struct([("s", pa.struct([("a", pa.int32()), ("a", pa.int64())]))]),
            "value.s: two fields 'a'",
        ),
    ],
)
def test_types_that_json_is_not_read_into_are_refused(
    wanted: pa.DataType, named: str
) -> None:
    """Before the first row, with the path of the field."""
    with pytest.raises(OptionError, match=named):
        converter(wanted)


def test_bad_rows_fail_the_query_by_name() -> None:
    """The first one is named, and the error comes whole from an executor."""
    rows = batch([b"good", b"\xff", b"\xfe"])
    with pytest.raises(BadRowError) as caught:
        converter(pa.string(), BadRows.FAIL).convert(rows)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert (again.partition, again.offset) == (PARTITION, 24)
    assert str(again).startswith("logs/0-1: bad value at offset 24: no UTF-8: byte 0")
    converted = converter(pa.string(), BadRows.FAIL).convert(batch([b"good"]))
    assert converted.rows.column("value").to_pylist() == ["good"]


def test_bad_rows_leave_for_the_dead_letter_topic() -> None:
    """With their bytes, their place, and what is wrong with each."""
    values = [b'{"a":1}', b"bad", b'{"a":2}', b'{"a":1']
    converted = converter(FIELDS, BadRows.TOPIC).convert(batch(values))
    assert converted.rows.column("value").to_pylist() == [
        {"a": 1, "b": None},
        {"a": 2, "b": None},
    ]
    assert converted.rejected is not None
    assert converted.rejected.schema == ROW_SCHEMA
    assert converted.rejected.column("value").to_pylist() == [b"bad", b'{"a":1']
    assert converted.reasons == ("no JSON object", "no JSON object")
    whole = converter(FIELDS, BadRows.TOPIC).convert(batch(values[:1]))
    assert (whole.rejected, whole.reasons) == (None, ())


def test_a_batch_of_bad_rows_alone_is_read_to_its_end() -> None:
    """Every value is judged, also where none is good."""
    found = read([b"x"] * 50 + [b'{"a":"x"}'] * 50)
    assert all(isinstance(row, tuple) for row in found)

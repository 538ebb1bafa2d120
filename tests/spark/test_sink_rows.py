"""Columns that are written, and where each row goes."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from metaq.client.partitioner import KeyHash, OutgoingMessage
from metaq.model import TopicPartition
from metaq.record.flags import encode_payload
from metaq.spark.errors import RowError, SchemaError
from metaq.spark.sink.sink_rows import Router, check_columns
from metaq.spark.sink.stream_writer import ROWS_MAX, batches_of
from tests.spark.brokers import TOPIC, tp

PARTITIONS = tuple(tp(number, broker=broker) for broker in (0, 1) for number in (0, 1))


def router(first_turn: int = 0) -> Router:
    return Router({TOPIC: PARTITIONS}, first_turn=first_turn)


def batch(types: Mapping[str, pa.DataType], *rows: tuple[Any, ...]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [[]] * len(types)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, t) for c, t in zip(columns, types.values(), strict=True)],
        names=list(types),
    )


TEXT, BYTES, INT = pa.string(), pa.binary(), pa.int32()


@pytest.mark.parametrize(
    ("types", "text"),
    [
        ({}, "expected a column value, got none"),
        ({"value": "integer"}, "column value: expected binary or string, got integer"),
        ({"value": "binary", "key": "array"}, "column key: expected"),
        ({"value": "binary", "partition": "double"}, "column partition: expected"),
        ({"value": "binary", "attribute": "binary"}, "column attribute: expected"),
    ],
)
def test_columns_of_other_types_are_refused(types: dict[str, str], text: str) -> None:
    """The message names the column and both types."""
    with pytest.raises(SchemaError, match=text):
        check_columns(types, has_topic=True)


def test_a_topic_is_an_option_or_a_column() -> None:
    """One of them; other columns do not matter."""
    check_columns({"value": "string", "other": "array"}, has_topic=True)
    check_columns({"value": "string", "topic": "string"}, has_topic=False)
    with pytest.raises(SchemaError, match="option topic"):
        check_columns({"value": "string"}, has_topic=False)


def test_rows_without_key_take_partitions_in_turn() -> None:
    """A batch of rows each: large batches on the wire."""
    rows = batch({"value": BYTES}, (b"a",), (b"b",))
    found, route = router(), []
    for _ in range(8):
        ((partition, there),) = found.route(rows, TOPIC).items()
        assert (there.payloads, there.flags) == ([b"a", b"b"], [0, 0])
        route.append(partition)
    assert sorted(route[:4]) == sorted(PARTITIONS)
    assert route[:4] == route[4:]
    assert next(iter(router(1).route(rows, TOPIC))) == route[1]


def test_the_same_key_goes_where_the_client_sends_it() -> None:
    """As text and as bytes."""
    keys = [f"key {number}" for number in range(50)]
    rows = batch({"value": TEXT, "key": TEXT}, *((key, key) for key in keys))
    found = router().route(rows, TOPIC)
    choose = KeyHash()
    for partition, there in found.items():
        for payload in there.payloads:
            message = OutgoingMessage(data=b"", key=payload.decode())
            assert choose(TOPIC, PARTITIONS, message) == partition
    as_bytes = batch(
        {"value": TEXT, "key": BYTES}, *((key, key.encode()) for key in keys)
    )
    again = router().route(as_bytes, TOPIC)
    assert {p: t.payloads for p, t in again.items()} == {
        p: t.payloads for p, t in found.items()
    }


@pytest.mark.parametrize(
    ("types", "row", "expected"),
    [
        ({"partition": TEXT}, ("1-1",), tp(1, broker=1)),
        ({"partition": INT}, (1,), tp(1)),
        ({"partition": INT, "broker_id": INT}, (1, 1), tp(1, broker=1)),
        ({"partition": INT, "broker_id": INT}, (1, None), tp(1)),
    ],
)
def test_a_row_may_name_its_partition(
    types: dict[str, pa.DataType], row: tuple[Any, ...], expected: TopicPartition
) -> None:
    """By name, by number, or by number and broker as rows of the source have it."""
    rows = batch({"value": BYTES, **types}, (b"v", *row))
    assert list(router().route(rows, TOPIC)) == [expected]


@pytest.mark.parametrize("wanted", ["0-7", "9-0", "zero"])
def test_a_partition_that_is_none_is_an_error(wanted: str) -> None:
    """Nothing goes somewhere else in silence."""
    rows = batch({"value": BYTES, "partition": TEXT}, (b"v", wanted))
    with pytest.raises(RowError, match=wanted):
        router().route(rows, TOPIC)


def test_attributes_become_part_of_the_payload() -> None:
    """An empty one is not none."""
    rows = batch(
        {"value": BYTES, "attribute": TEXT}, (b"a", "x"), (b"b", None), (b"c", "")
    )
    (there,) = router().route(rows, TOPIC).values()
    expected = [encode_payload(b"a", "x"), (b"b", 0), encode_payload(b"c", "")]
    assert list(zip(there.payloads, there.flags, strict=True)) == expected


def test_rows_without_value_or_topic_are_errors() -> None:
    """A log has no empty places."""
    with pytest.raises(RowError, match="1 rows have no value"):
        router().route(batch({"value": BYTES}, (None,)), TOPIC)
    rows = batch({"value": BYTES, "topic": TEXT}, (b"v", None))
    with pytest.raises(RowError, match="names no topic"):
        router().missing(rows)


def test_topics_of_rows_are_asked_for_once() -> None:
    """Those that are known are not missing."""
    rows = batch({"value": BYTES, "topic": TEXT}, (b"v", TOPIC), (b"w", "new"))
    found = router()
    assert found.missing(rows) == {"new"}
    found.add_topic("new", [tp(0, topic="new")])
    assert found.missing(rows) == frozenset()
    assert {p.topic: t.payloads for p, t in found.route(rows, None).items()} == {
        TOPIC: [b"v"],
        "new": [b"w"],
    }


def test_rows_of_old_spark_are_put_together() -> None:
    """Before 4.1 a stream writer gets rows; nothing of them is lost on the way."""
    schema = pa.schema([("value", BYTES), ("attribute", TEXT)])
    rows = [(b"%d" % number, None) for number in range(ROWS_MAX + 1)]
    batches = list(batches_of(iter(rows), schema))
    assert [found.num_rows for found in batches] == [ROWS_MAX, 1]
    assert all(found.schema.equals(schema) for found in batches)
    assert batches[1].to_pylist() == [{"value": rows[-1][0], "attribute": None}]
    assert list(batches_of(iter([]), schema)) == []

"""Columns that are written, and where each row goes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.partitioner import KeyHash, OutgoingMessage
from metaq.model import TopicPartition
from metaq.record.flags import decode_payload, encode_payload
from metaq.spark.errors import RowError, SchemaError
from metaq.spark.sink.decisions import RowSum
from metaq.spark.sink.sink_rows import (
    Router,
    check_columns,
    fill_tombstones,
    sum_batch,
    sum_rows,
)
from metaq.spark.sink.writer import ROWS_MAX, batches_of
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
        (
            {"value": "binary", "headers": "map"},
            "column headers: expected array",
        ),
        (
            {"value": "binary", "header": "string"},
            "column header .* mean headers:",
        ),
        (
            {"value": "binary", "date": "date"},
            "column date cannot be",
        ),
    ],
)
def test_columns_of_other_types_are_refused(types: dict[str, str], text: str) -> None:
    """The message names the column and both types."""
    with pytest.raises(SchemaError, match=text):
        check_columns(types, has_topic=True)


def test_a_topic_is_an_option_or_a_column() -> None:
    """One of them; the other columns of the source do not matter."""
    check_columns({"value": "string", "offset": "long"}, has_topic=True)
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
        for payload, flag in zip(there.payloads, there.flags, strict=True):
            data, _attribute, key, _headers = decode_payload(payload, flag)
            assert data == key
            message = OutgoingMessage(data=b"", key=key)
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


def test_a_number_of_another_broker_is_named_with_it() -> None:
    """Partition 1 there is not partition 1 here."""
    types = {"value": BYTES, "partition": INT, "broker_id": INT}
    with pytest.raises(RowError, match="has no partition 9-1; it has 0-0, 0-1, 1-0"):
        router().route(batch(types, (b"v", 1, 9)), TOPIC)


def test_attributes_become_part_of_the_payload() -> None:
    """An empty one is not none."""
    rows = batch(
        {"value": BYTES, "attribute": TEXT}, (b"a", "x"), (b"b", None), (b"c", "")
    )
    (there,) = router().route(rows, TOPIC).values()
    expected = [encode_payload(b"a", "x"), (b"b", 0), encode_payload(b"c", "")]
    assert list(zip(there.payloads, there.flags, strict=True)) == expected


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=2))),
    st.sampled_from(["partition", None]),
)
def test_columns_and_single_rows_give_the_same(
    rows: list[tuple[bytes, bytes | None]], extra: str | None
) -> None:
    """A column of partitions that names none takes the way of single rows."""
    types = {"value": BYTES, "key": BYTES}
    if extra is not None:
        types[extra] = TEXT
    filler = () if extra is None else (None,)
    found = router().route(batch(types, *((*row, *filler) for row in rows)), TOPIC)
    expected: dict[TopicPartition, list[tuple[bytes, int]]] = {}
    choose = KeyHash()
    for value, key in rows:
        target = PARTITIONS[1]
        if key is not None:
            target = choose(TOPIC, PARTITIONS, OutgoingMessage(b"", key=key))
        expected.setdefault(target, []).append(encode_payload(value, key=key))
    assert {
        target: list(zip(there.payloads, there.flags, strict=True))
        for target, there in found.items()
    } == expected


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from([TOPIC, "other"]),
            st.sampled_from([None, "0-1", "1-0"]),
            st.none() | st.binary(max_size=2),
            st.binary(max_size=4),
        )
    )
)
def test_rows_of_every_kind_keep_their_order(
    rows: list[tuple[str, str | None, bytes | None, bytes]],
) -> None:
    """Named, with a key and in turn: in a partition they lie as they came."""
    types = {"topic": TEXT, "partition": TEXT, "key": BYTES, "value": BYTES}
    targets = {
        topic: [replace(p, topic=topic) for p in PARTITIONS]
        for topic in (TOPIC, "other")
    }
    found = Router(targets, first_turn=0).route(batch(types, *rows), None)
    expected: dict[TopicPartition, list[tuple[bytes, int]]] = {}
    for topic, wanted, key, value in rows:
        target = targets[topic][1]
        if wanted is not None:
            (target,) = (p for p in targets[topic] if str(p).endswith(f"/{wanted}"))
        elif key is not None:
            message = OutgoingMessage(b"", key=key)
            target = KeyHash()(topic, tuple(targets[topic]), message)
        expected.setdefault(target, []).append(encode_payload(value, key=key))
    assert {
        target: list(zip(there.payloads, there.flags, strict=True))
        for target, there in found.items()
    } == expected


HEADERS = pa.list_(pa.struct([("key", TEXT), ("value", BYTES)]))


def test_key_and_headers_become_part_of_the_payload() -> None:
    """As the client writes them; a row that has neither is as it was."""
    pairs = (("trace", b"1"), ("trace", b"2"))
    rows = batch(
        {"value": BYTES, "key": BYTES, "headers": HEADERS, "partition": INT},
        (b"a", b"k", None, 0),
        (b"b", None, pairs, 0),
        (b"c", None, (), 0),
        (b"d", b"", pairs, 0),
    )
    (there,) = router().route(rows, TOPIC).values()
    assert list(zip(there.payloads, there.flags, strict=True)) == [
        encode_payload(b"a", None, b"k"),
        encode_payload(b"b", None, None, pairs),
        (b"c", 0),
        encode_payload(b"d", None, b"", pairs),
    ]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([("a", None)], "value of header 'a' is null"),
        ([(None, b"x")], "name of header None is null"),
        ([("a", b"x"), None], "a header is null"),
        ([("", b"x")], "expected a name, got an empty one"),
    ],
)
def test_headers_without_name_or_value_are_errors(
    headers: list[tuple[str, bytes] | None], text: str
) -> None:
    """Kafka knows null; a message has no way to say it, and nothing is made of it."""
    rows = batch({"value": BYTES, "headers": HEADERS}, (b"v", headers))
    with pytest.raises(RowError, match=text):
        router().route(rows, TOPIC)


def test_a_partition_key_goes_before_the_key_and_is_not_stored() -> None:
    """The key decides if it is null."""
    types = {"value": BYTES, "key": BYTES, "partition_key": TEXT}
    numbers = [str(number) for number in range(20)]
    rows = batch(types, *((b"v", b"all", number) for number in numbers))
    found = router().route(rows, TOPIC)
    choose = KeyHash()
    expected = [
        choose(TOPIC, PARTITIONS, OutgoingMessage(b"", key=number))
        for number in numbers
    ]
    assert {p: len(there.payloads) for p, there in found.items()} == Counter(expected)
    stored = {decode_payload(p, 3).key for t in found.values() for p in t.payloads}
    assert stored == {b"all"}
    alone = router().route(batch(types, (b"v", b"all", None)), TOPIC)
    assert list(alone) == [choose(TOPIC, PARTITIONS, OutgoingMessage(b"", key="all"))]


def test_rows_without_value_or_topic_are_errors() -> None:
    """A log has no empty places."""
    with pytest.raises(RowError, match="1 rows have no value"):
        router().route(batch({"value": BYTES}, (None,)), TOPIC)
    rows = batch({"value": BYTES, "topic": TEXT}, (b"v", None))
    with pytest.raises(RowError, match="names no topic"):
        router().missing(rows)


@pytest.mark.parametrize("kind", [TEXT, BYTES])
def test_a_null_value_may_be_a_message_without_data(kind: pa.DataType) -> None:
    """A tombstone, which has a key: without one it would delete nothing."""
    types = {"value": kind, "key": TEXT}
    filled = fill_tombstones(batch(types, (None, "k"), ("v", None)))
    assert filled.column("value").cast(BYTES).to_pylist() == [b"", b"v"]
    assert fill_tombstones(batch(types)).num_rows == 0
    for bare in (batch(types, (None, None)), batch({"value": kind}, (None,))):
        with pytest.raises(RowError, match="1 rows have neither value nor key"):
            fill_tombstones(bare)


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


_SUMMED = {"value": BYTES, "key": TEXT, "attribute": TEXT, "topic": TEXT}
_ROWS = st.lists(
    st.tuples(
        st.binary(max_size=4),
        st.none() | st.text(max_size=2),
        st.none() | st.text(max_size=2),
        st.sampled_from([TOPIC, "other"]),
    ),
    max_size=12,
)


@given(_ROWS, st.randoms(use_true_random=False), st.integers(1, 12))
def test_a_sum_of_rows_knows_no_order_and_no_tasks(
    rows: list[tuple[Any, ...]], chance: Random, size: int
) -> None:
    """Neither shuffles nor another cut change it, nor whether rows are sent."""
    whole = sum_batch(batch(_SUMMED, *rows), None)
    chance.shuffle(rows)
    routed, cut = RowSum(), RowSum()
    places = [tp(0, topic=TOPIC), tp(0, topic="other")]
    route = Router({p.topic: [p] for p in places}, first_turn=0).route
    for first in range(0, len(rows), size):
        some = batch(_SUMMED, *rows[first : first + size])
        cut += sum_batch(some, None)
        for partition, payloads in route(some, None).items():
            routed += sum_rows(partition.topic, payloads)
    assert whole == cut == routed
    assert whole.count == len(rows)


def test_a_sum_of_rows_sees_each_change() -> None:
    """Also equal changes of two rows, which a sum of checksums may not see."""
    rows = [(b"%d" % n, "k", None, TOPIC) for n in range(50)]
    flipped = [(bytes([value[0] ^ 128]) + value[1:], *more) for value, *more in rows]
    changed = [
        rows[1:],
        [*rows[1:], rows[1]],
        [(b"x", "k", None, TOPIC), *rows[1:]],
        [(b"0", "l", None, TOPIC), *rows[1:]],
        [(b"0", None, None, TOPIC), *rows[1:]],
        [(b"0", "k", "", TOPIC), *rows[1:]],
        [(b"0", "k", None, "other"), *rows[1:]],
        *(
            [*flipped[:2], *rows[2:n], *flipped[n : n + 2], *rows[n + 2 :]]
            for n in range(2, 48)
        ),
    ]
    whole = sum_batch(batch(_SUMMED, *rows), None)
    assert whole not in [sum_batch(batch(_SUMMED, *some), None) for some in changed]


def test_a_row_without_a_topic_has_no_sum() -> None:
    with pytest.raises(RowError, match="names no topic"):
        sum_batch(batch(_SUMMED, (b"x", None, None, None)), None)

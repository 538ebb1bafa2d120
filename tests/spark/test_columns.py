"""Columns of a run of records: as they were put, up to the first bad attribute."""

import datetime as dt

from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, MessageId, Offset
from metaq.record.flags import HAS_ATTRIBUTE, encode_payload
from metaq.record.layout import encode_record
from metaq.spark.columns import ROW_SCHEMA, RowBuilder, partition_of
from metaq.spark.rows import find_run
from tests.spark.brokers import tp

NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
NOON_ID = (round(NOON.timestamp() * 1000) - ID_ZERO_MS) << ID_MS_SHIFT


def record(payload: bytes, number: int, flag: int = 0) -> bytes:
    return encode_record(payload, id=MessageId(number), flag=flag)


def test_a_row_has_its_partition_offset_time_and_parts() -> None:
    """The time is null where a Java broker stamped the id."""
    payload, flag = encode_payload(b"data", "text", b"key", (("h", b"v"),))
    first = record(payload, NOON_ID, flag)
    data = first + record(b"plain", -1)
    edges = find_run(memoryview(data), 0, records_max=9, bytes_max=999, payload_max=99)
    batch, bad = RowBuilder(tp(1), 9).build(memoryview(data), edges, Offset(500))
    assert (bad, batch.schema) == (None, ROW_SCHEMA)
    one, two = batch.to_pylist()
    assert partition_of(one) == partition_of(two) == tp(1)
    assert [one["offset"], two["offset"]] == [500, 500 + len(first)]
    assert (one["timestamp"], two["timestamp"]) == (NOON, None)
    assert (one["attribute"], one["key"], one["value"]) == ("text", b"key", b"data")
    assert one["headers"] == [{"key": "h", "value": b"v"}]
    assert (two["attribute"], two["key"], two["headers"]) == (None, None, None)


def test_rows_end_before_a_bad_attribute() -> None:
    data = record(b"good", 1) + record(b"\0\0\0\x99x", 2, HAS_ATTRIBUTE)
    edges = find_run(memoryview(data), 0, records_max=9, bytes_max=999, payload_max=99)
    batch, bad = RowBuilder(tp(0), 9).build(memoryview(data), edges, Offset(0))
    assert batch.num_rows == 1
    assert bad is not None
    assert (bad.row, bad.detail) == (
        1,
        "attribute block: length 153, but 1 bytes follow",
    )

"""Rows that match: those of plain bytes and those of runs are the same."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecordError
from metaq.filter.language import parse_filter
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.record.runs import RecordRun, encode_runs
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.rows import RowDecoder, decode_pieces
from metaq.spark.source.matches import matching_rows, rows_of_runs

PARTITION = TopicPartition("logs", BrokerId(0), 0)
BASE = Offset(5000)
WHERE = parse_filter("tag = 'a' AND key IS NULL OR attribute = 'x'")

RECORDS = st.lists(
    st.tuples(
        st.none() | st.just("x"), st.none() | st.just("k"), st.sampled_from(["", "a"])
    ),
    max_size=30,
)


def records_of(described: list[tuple[str | None, str | None, str]]) -> list[bytes]:
    records = []
    for number, (attribute, key, tag) in enumerate(described):
        headers = {"tag": tag.encode()} if tag else {}
        payload, flag = encode_payload(b"%d" % number * 3, attribute, key, headers)
        records.append(encode_record(payload, id=MessageId(number), flag=flag))
    return records


def runs_of(records: list[bytes], wanted: set[int]) -> bytes:
    """Return the wanted records as runs, neighbours in one."""
    runs, at = list[RecordRun](), BASE
    for number, record in enumerate(records):
        if number in wanted:
            if runs and runs[-1].offset + len(runs[-1].data) == at:
                runs[-1] = RecordRun(runs[-1].offset, runs[-1].data + record)
            else:
                runs.append(RecordRun(at, record))
        at = Offset(at + len(record))
    return encode_runs(runs)


@pytest.mark.slow
@given(RECORDS, st.data())
def test_runs_give_the_rows_of_the_bytes_that_they_are_of(
    described: list[Any], data: Any
) -> None:
    """Of all that match and some that do not; nothing behind the end."""
    records = records_of(described)
    log = b"".join(records)
    end = Offset(BASE + len(b"".join(records[: data.draw(st.integers(0, 30))])))
    batches = list(decode_pieces(RowDecoder(PARTITION, BASE, end), [log]))
    plain = pa.Table.from_batches(batches, ROW_SCHEMA).to_pylist()
    wanted = [row for row in plain if matches(row)]
    filtered = [row for b in batches for row in matching_rows(b, WHERE).to_pylist()]
    assert filtered == wanted
    numbers = {row["message_id"] for row in wanted}
    numbers |= data.draw(st.sets(st.integers(0, 30)))
    rows = rows_of_runs(PARTITION, runs_of(records, numbers), BASE, end)
    assert rows.schema.equals(ROW_SCHEMA)
    assert matching_rows(rows, WHERE).to_pylist() == wanted
    assert matching_rows(rows, None) is rows


def matches(row: dict[str, Any]) -> bool:
    tags = [each["value"] for each in row["headers"] or () if each["key"] == "tag"]
    return (tags == [b"a"] and row["key"] is None) or row["attribute"] == "x"


def test_runs_that_cannot_be_are_damage() -> None:
    """A checksum, a cut, an order, a place before the part that was asked for."""
    one, two = records_of([("x", None, "a"), (None, "k", "")])
    flipped = one[:-1] + bytes([one[-1] ^ 1])
    for runs in (
        [RecordRun(BASE, flipped)],
        [RecordRun(BASE, one[:-1])],
        [RecordRun(BASE, one[:9]), RecordRun(Offset(6000), one[9:])],
        [RecordRun(Offset(BASE + 100), one), RecordRun(BASE, two)],
        [RecordRun(Offset(BASE - 1), one)],
    ):
        with pytest.raises(CorruptRecordError):
            rows_of_runs(PARTITION, encode_runs(runs), BASE, Offset(9000))

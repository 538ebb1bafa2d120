"""Bytes of the log become rows: exactly those, or an error or report that says what."""

import datetime as dt
import pickle
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import (
    ID_MS_SHIFT,
    ID_ZERO_MS,
    BrokerId,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.record.flags import HAS_ATTRIBUTE, decode_payload, encode_payload
from metaq.record.layout import HEADER, encode_record
from metaq.spark import rows as spark_rows
from metaq.spark.columns import ROW_SCHEMA, VALUE_BYTES_MAX
from metaq.spark.errors import BackwardRangeError, DamagedRecordError
from metaq.spark.rows import OnCorrupt, RowDamage, RowDecoder, decode_pieces
from tests.rigs.strategies import PAYLOADS, cuts

PARTITION = TopicPartition("logs", BrokerId(3), 7)
BASE = Offset(1000)


def record(payload: bytes, number: int = 1, flag: int = 0) -> bytes:
    return encode_record(payload, id=MessageId(number), flag=flag)


def decoder(data: bytes, **options: object) -> RowDecoder:
    end = Offset(BASE + len(data))
    return RowDecoder(PARTITION, BASE, end, **options)  # type: ignore[arg-type]


def table(batches: object) -> list[dict[str, object]]:
    return pa.Table.from_batches(batches, ROW_SCHEMA).to_pylist()


def plain_records() -> st.SearchStrategy[bytes]:
    """Records with and without attributes, of equal sizes now and then."""
    payloads = PAYLOADS | st.sampled_from([b"a" * 9, b"b" * 9, b"c" * 9])
    texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    ids = st.integers(-(2**63), -1) | st.integers(1, 2**62)
    keys = st.none() | st.binary(max_size=4)
    headers = st.lists(
        st.tuples(st.sampled_from("ab"), st.binary(max_size=3)), max_size=2
    )

    def build(number: int, *parts: Any) -> bytes:
        payload, flag = encode_payload(*parts)
        return record(payload, number, flag)

    return st.builds(build, ids, payloads, texts, keys, headers)


def expected_rows(records: list[bytes]) -> list[dict[str, object]]:
    found, offset = [], int(BASE)
    for data in records:
        _length, _checksum, number, flag = HEADER.unpack_from(data)
        value, attribute, key, headers = decode_payload(data[HEADER.size :], flag)
        milliseconds = (number >> ID_MS_SHIFT) + ID_ZERO_MS
        moment = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        found.append(
            {
                "topic": "logs",
                "broker_id": 3,
                "partition": 7,
                "offset": offset,
                "message_id": number,
                "timestamp": None
                if number < 0
                else moment + dt.timedelta(milliseconds=milliseconds),
                "attribute": attribute,
                "flag": flag,
                "key": key,
                "headers": [{"key": name, "value": each} for name, each in headers]
                or None,
                "value": value,
            }
        )
        offset += len(data)
    return found


@pytest.mark.slow
@given(st.lists(plain_records(), max_size=12), st.data(), st.integers(1, 5))
def test_any_log_in_any_pieces_gives_its_rows(
    records: list[bytes], data: st.DataObject, records_max: int
) -> None:
    """Cuts and batch limits change nothing; bytes after the end are not looked at."""
    log = b"".join(records)
    pieces = data.draw(cuts(log))
    reader = decoder(log, batch_records_max=records_max, batch_bytes_max=64)
    batch_bytes = data.draw(st.sampled_from([0, 1, 100, 10_000]))
    pieces = [*pieces, b"after the end"]
    batches = list(decode_pieces(reader, pieces, batch_bytes=batch_bytes))
    assert table(batches) == expected_rows(records)
    assert all(0 < batch.num_rows <= records_max for batch in batches)
    sizes = iter(map(len, records))
    for batch in batches:
        *first, _last = [next(sizes) for _row in range(batch.num_rows)]
        assert sum(first) < 64
    assert reader.is_done
    assert reader.damage == []


@pytest.mark.slow
@given(st.lists(plain_records(), min_size=1, max_size=8), st.data())
def test_any_changed_byte_is_found_or_harmless(
    records: list[bytes], data: st.DataObject
) -> None:
    """A payload that changed is never handed out, and what was left out is named."""
    log = bytearray(b"".join(records))
    at = data.draw(st.integers(0, len(log) - 1))
    log[at] ^= data.draw(st.integers(1, 255))
    reader = decoder(bytes(log), on_corrupt=OnCorrupt.SKIP)
    found = table(decode_pieces(reader, [bytes(log)]))
    offsets = [row["offset"] for row in found]
    assert offsets == sorted(set(offsets))  # type: ignore[type-var]
    kept = {row["offset"]: row["value"] for row in found}
    start = int(BASE)
    for row, size in zip(expected_rows(records), map(len, records), strict=True):
        is_hit = start <= BASE + at < start + size
        is_out = any(d.start <= start < d.end for d in reader.damage)
        assert is_hit or is_out or kept[start] == row["value"]
        start += size
    assert all(a.end <= b.start for a, b in pairwise(reader.damage))
    assert reader.is_done


def test_short_pieces_are_decoded_together() -> None:
    """As many bytes as are wanted at a time, and what is left at the end."""
    records = [record(b"%015d" % n) for n in range(10)]
    log = b"".join(records)
    batches = decode_pieces(decoder(log), records, batch_bytes=3 * len(records[0]))
    assert [batch.num_rows for batch in batches] == [3, 3, 3, 1]


def test_a_damaged_record_fails_the_read_by_name() -> None:
    """The rows before it come; the error names the record and the next good one."""
    good, bad = record(b"good"), bytearray(record(b"damaged"))
    bad[-1] ^= 1
    log = good + bytes(bad) + good
    reader = decoder(log)
    batches = reader.decode(log)
    assert next(batches).num_rows == 1
    with pytest.raises(
        DamagedRecordError, match="logs/3-7: damaged record at"
    ) as caught:
        next(batches)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.partition, again.offset, str(again)) == (
        PARTITION,
        BASE + len(good),
        str(caught.value),
    )
    assert again.next_good_offset == BASE + len(good) + len(bad)
    assert "checksum: expected" in again.detail


@pytest.mark.parametrize("sizes", [[200] * 40, [200, 30] * 20])
@pytest.mark.parametrize("hit", [0, 17, 39])
def test_damage_is_left_out_and_reported(sizes: list[int], hit: int) -> None:
    """With SKIP all other rows come, records of equal size or not."""
    records = [record(b"x" * size, number + 1) for number, size in enumerate(sizes)]
    bad = bytearray(records[hit])
    bad[25] ^= 0x40
    log = b"".join([*records[:hit], bytes(bad), *records[hit + 1 :]])
    reader = decoder(log, on_corrupt=OnCorrupt.SKIP)
    ids = [row["message_id"] for row in table(decode_pieces(reader, [log]))]
    assert ids == [n + 1 for n in range(40) if n != hit]
    start = BASE + len(b"".join(records[:hit]))
    (damage,) = reader.damage
    assert (damage.start, damage.end) == (start, start + len(bad))
    assert str(damage).startswith(f"logs/3-7: [{start}, {damage.end}) left out: check")


def test_a_bad_attribute_block_is_damage() -> None:
    """The payload is whole, but it is unknown where its value begins."""
    good = record(b"good")
    for payload, detail in ((b"\0\0\0\x09short", "length 9"), (b"\0", "got 1")):
        bad = record(payload, flag=HAS_ATTRIBUTE)
        log = good + bad + good
        with pytest.raises(DamagedRecordError, match=detail):
            list(decode_pieces(decoder(log), [log]))
        reader = decoder(log, on_corrupt=OnCorrupt.SKIP)
        assert len(table(decode_pieces(reader, [log]))) == 2
        start = Offset(BASE + len(good))
        (damage,) = reader.damage
        assert (damage.start, damage.end) == (start, start + len(bad))


def test_attributes_that_are_no_utf8_are_read_with_replacement() -> None:
    """The same reading as everywhere else."""
    payload = b"\0\0\0\x03a\xffbvalue"
    log = record(payload, flag=HAS_ATTRIBUTE)
    (row,) = table(decoder(log).decode(log))
    assert (row["value"], row["attribute"]) == decode_payload(payload, HAS_ATTRIBUTE)[
        :2
    ]


def test_a_cut_record_is_left_for_the_next_time() -> None:
    """The decoder says where to read on, and how much it takes."""
    log = record(b"first") + record(b"x" * 100)
    reader = decoder(log)
    assert len(table(reader.decode(log[:30]))) == 1
    assert reader.next_offset == BASE + 25
    assert reader.needed_bytes == 20
    assert table(reader.decode(log[25:60])) == []
    assert reader.needed_bytes == 120
    assert not reader.is_done
    assert len(table(reader.decode(memoryview(log)[25:]))) == 1
    assert reader.is_done


def test_a_record_longer_than_the_range_is_damage() -> None:
    """The end is a record boundary, so the length field is wrong."""
    log = record(b"first") + record(b"x" * 100)
    with pytest.raises(DamagedRecordError, match="120 bytes, but 100 are left"):
        list(decode_pieces(decoder(log[:125]), [log[:125]]))


def test_a_wrong_length_before_good_records_is_damage() -> None:
    """Records follow, so it is no end of the log."""
    liar = bytearray(record(b"liar"))
    liar[1] = 0x10
    log = bytes(liar) + record(b"good")
    with pytest.raises(DamagedRecordError, match="damaged record at offset 1000"):
        list(decode_pieces(decoder(log), [log]))
    reader = decoder(log, on_corrupt=OnCorrupt.SKIP)
    assert len(table(decode_pieces(reader, [log[:30], log[30:]]))) == 1
    assert [(d.start, d.end) for d in reader.damage] == [(BASE, BASE + len(liar))]


def test_bytes_that_do_not_come_are_damage() -> None:
    """A source that ends early is never taken for a short log."""
    log = record(b"first")
    end = Offset(BASE + 2 * len(log))
    with pytest.raises(DamagedRecordError, match="the data ends 25 bytes early"):
        list(decode_pieces(RowDecoder(PARTITION, BASE, end), [log]))
    reader = RowDecoder(PARTITION, BASE, end, on_corrupt=OnCorrupt.SKIP)
    assert len(table(decode_pieces(reader, [log]))) == 1
    assert [(d.start, d.end) for d in reader.damage] == [(BASE + len(log), end)]


def test_a_good_record_far_behind_damage_is_found() -> None:
    """The search keeps enough of what it saw to put a cut record together."""
    log = b"\xff" * 3000 + record(b"x" * 150, 5) + b"\xff" * 2000
    for size in (1, 100, 700):
        pieces = [log[at : at + size] for at in range(0, len(log), size)]
        reader = decoder(log, on_corrupt=OnCorrupt.SKIP, resync_bytes=256)
        (row,) = table(decode_pieces(reader, pieces))
        assert row["offset"] == BASE + 3000
        assert reader.damage == [
            RowDamage(PARTITION, BASE, Offset(BASE + 3000), "length -1"),
            RowDamage(PARTITION, Offset(BASE + 3170), Offset(BASE + 5170), "length -1"),
        ]


def test_a_search_goes_on_with_the_record_it_stopped_at() -> None:
    """The rest may begin with a good record that was cut."""
    log = b"\xff" * 300 + record(b"good" * 20, 5)
    reader = decoder(log, on_corrupt=OnCorrupt.SKIP, resync_bytes=64)
    (row,) = table(decode_pieces(reader, [log[:364], log[364:]]))
    assert row["message_id"] == 5


def test_equal_sizes_are_told_by_every_length_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by checksums alone, which can be forged to match."""
    monkeypatch.setattr(spark_rows, "crc32", lambda _data: 0)
    sizes = [10, 40, 10]
    log = b"".join(HEADER.pack(size, 0, 1, 0) + bytes(size) for size in sizes)
    found = table(decoder(log).decode(log))
    assert [len(row["value"]) for row in found] == sizes  # type: ignore[arg-type]


def test_zeros_at_the_end_of_a_piece_are_no_good_record() -> None:
    """Eight zeros look like an empty record until what follows is seen."""
    start = b"\xff" * 300 + bytes(8) + b"x" * 12
    log = start + b"\xff" * 300 + record(b"good", 5)
    reader = decoder(log, on_corrupt=OnCorrupt.SKIP, resync_bytes=64)
    (row,) = table(decode_pieces(reader, [start, log[len(start) :]]))
    assert row["message_id"] == 5
    assert [(d.start, d.end) for d in reader.damage] == [(BASE, BASE + len(log) - 24)]
    empty = record(b"", 6)
    log = b"\xff" * 300 + empty + empty + record(b"good", 5) + empty
    for cut in (300, 320, 340, 364):
        reader = decoder(log, on_corrupt=OnCorrupt.SKIP, resync_bytes=64)
        found = table(decode_pieces(reader, [log[:cut], log[cut:]]))
        assert [row["message_id"] for row in found] == [6, 6, 5, 6]


def test_a_payload_over_the_limit_is_damage() -> None:
    """The limit is the caller's; there is no wait for a gigabyte that never comes."""
    log = record(b"x" * 100)
    with pytest.raises(DamagedRecordError, match="length 100, the limit is 99"):
        list(decoder(log, payload_bytes_max=99).decode(log[:30]))


def test_zeros_are_no_record() -> None:
    """Zeros left by file systems have a matching checksum, and are refused."""
    with pytest.raises(DamagedRecordError, match="20 zero bytes"):
        list(decoder(bytes(60)).decode(bytes(60)))


def test_batches_own_their_bytes() -> None:
    """The caller may reuse its buffer as soon as the iterator is exhausted."""
    log = bytearray(record(b"value", 5) + record(b"other", 6))
    batches = list(decoder(bytes(log)).decode(log))
    log[:] = bytes(len(log))
    assert [row["value"] for row in table(batches)] == [b"value", b"other"]


def test_a_read_that_ends_before_it_starts_is_refused() -> None:
    """Never taken for an empty one."""
    with pytest.raises(BackwardRangeError, match="logs/3-7: read from 7 ends at 6"):
        RowDecoder(PARTITION, Offset(7), Offset(6))


def test_a_run_at_both_limits_fits_the_columns() -> None:
    """Arrow's binary column addresses 2^31 - 1 bytes."""
    assert VALUE_BYTES_MAX + 20 + VALUE_BYTES_MAX < 2**31


@pytest.mark.parametrize(
    "sizes", [[50] * 3 + [51] + [50] * 3, [50] * 40 + [0, 20], [0, 0, 1], [500, 1, 1]]
)
def test_equal_and_unequal_sizes_make_one_batch(sizes: list[int]) -> None:
    """The way for equal sizes hands over where they end."""
    log = b"".join(record(bytes([n]) * size, n + 1) for n, size in enumerate(sizes))
    (batch,) = decoder(log).decode(log)
    assert [len(value) for value in batch.column("value").to_pylist()] == sizes
    assert [value[:1] for value in batch.column("value").to_pylist()] == [
        bytes([n]) if size else b"" for n, size in enumerate(sizes)
    ]

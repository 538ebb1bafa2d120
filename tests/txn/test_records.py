"""Records of a redo file: the bytes of the Java broker, and any bytes at all."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import LogId, MessageId, Offset
from metaq.record.ids import id_after
from metaq.record.layout import encode_record
from metaq.txn.records import (
    BatchLocation,
    OperationRecord,
    PutRecord,
    RecordError,
    RedoOperation,
    decode_locations,
    decode_put,
    decode_record,
    encode_batch,
    encode_locations,
    encode_operation,
    encode_put,
    ending_of,
    varint,
)
from tests.protocol.golden import bytes_of, vectors

ID = MessageId(-5468930230129250304)

PUT_1 = bytes.fromhex("00000033 0801 122f 08 80e080dee69d9d8db401 12 22") + (
    b"put test 1 5 0 -1 TX:s1:1 3\r\nhello"
)
COMMIT = (
    bytes.fromhex("00000013 0802 120f 0804 1000 1a07")
    + b"TX:s1:1"
    + bytes.fromhex("201a 0000000000000000 00000032 74453441 00000006")
    + b"test-1"
)
ROLLBACK = bytes.fromhex("00000011 0802 120d 0805 1000 1a07") + b"TX:s1:5"
PREPARE = (
    bytes.fromhex("00000020 0802 121a 0801 1000 1a14")
    + b"XID:100:0a0b:0c0d:uq"
    + bytes.fromhex("1801")
)
XA_COMMIT = (
    bytes.fromhex("00000020 0802 121c 0802 1001 1a14")
    + b"XID:100:0a0b:0c0d:uq"
    + bytes.fromhex("201a")
    + COMMIT[-26:]
)
XA_ROLLBACK = bytes.fromhex("0000001a 0802 1216 0803 1000 1a10") + b"XID:101:0a0b::uq"
"""Bytes that a Java broker wrote (docs/metaq-1.4/broker.md 5.6)."""

LOCATION = BatchLocation(LogId("test", 1), Offset(0), 50, 0x74453441)
XID = "XID:100:0a0b:0c0d:uq"

GOLDEN = [
    (PUT_1, encode_put(ID, PUT_1[-34:])),
    (
        COMMIT,
        encode_operation(RedoOperation.LOCAL_COMMIT, "TX:s1:1", locations=[LOCATION]),
    ),
    (ROLLBACK, encode_operation(RedoOperation.LOCAL_ROLLBACK, "TX:s1:5")),
    (PREPARE, encode_operation(RedoOperation.XA_PREPARE, XID)),
    (
        XA_COMMIT,
        encode_operation(
            RedoOperation.XA_COMMIT, XID, was_prepared=True, locations=[LOCATION]
        ),
    ),
    (XA_ROLLBACK, encode_operation(RedoOperation.XA_ROLLBACK, "XID:101:0a0b::uq")),
]


@pytest.mark.parametrize(
    ("key", "commit", "rollback"),
    [
        (XID, RedoOperation.XA_COMMIT, RedoOperation.XA_ROLLBACK),
        ("TX:s1:1", RedoOperation.LOCAL_COMMIT, RedoOperation.LOCAL_ROLLBACK),
    ],
)
def test_the_end_of_a_transaction_is_written_as_one_of_its_kind(
    key: str, commit: RedoOperation, rollback: RedoOperation
) -> None:
    """A Java broker that takes the directory over looks for it there."""
    assert ending_of(key, is_commit=True) is commit
    assert ending_of(key, is_commit=False) is rollback


@pytest.mark.parametrize(("theirs", "ours"), GOLDEN)
def test_records_are_those_of_the_java_broker(theirs: bytes, ours: bytes) -> None:
    """We write the bytes that MetaQ writes."""
    assert ours == theirs


def test_a_batch_is_a_record_for_each_message() -> None:
    """The bytes that docs/protocol.md draws, and the same for the second message."""
    first = MessageId(1661382015569637376)
    records = bytearray(
        encode_record(b"hello", id=first)
        + encode_record(b"ab\r\n", id=id_after(first, 1), flag=-7)
    )
    pieces = encode_batch(LogId("test", 0), b"TX:s1:1", 12, records, [0, 25])
    assert b"".join(pieces) == (
        bytes.fromhex("0000003a 0801 1236 08 80e080d2c0c49a8717 122a")
        + b"put test 0 5 0 907060870 TX:s1:1 12\r\nhello"
        + bytes.fromhex("0000003b 0801 1237 08 81e080d2c0c49a8717 122b")
        + b"put test 0 4 -7 1022805863 TX:s1:1 12\r\nab\r\n"
    )


def test_a_put_record_is_read() -> None:
    """Id, key, and the put with its partition, flag, checksum and body."""
    record, end = decode_record(PUT_1, 0, len(PUT_1))
    assert record == PutRecord("TX:s1:1", ID, PUT_1[-34:])
    assert end == len(PUT_1)
    put = decode_put(PUT_1[-34:])
    assert put == (LogId("test", 1), 0, -1, b"hello")
    sizes = rf"position 0: expected 1\.\.16 bytes, got {len(PUT_1) - 4}"
    with pytest.raises(RecordError, match=sizes):
        decode_record(PUT_1, 0, 20)


def test_a_commit_record_is_read_with_its_attachment() -> None:
    """The attachment comes after the length of the record, and is part of it."""
    record, end = decode_record(XA_COMMIT, 0, len(XA_COMMIT))
    assert record == OperationRecord(RedoOperation.XA_COMMIT, XID, True, (LOCATION,))
    assert end == len(XA_COMMIT)


OURS = (
    bytes.fromhex("0000001d 0802 1219 0804 1000 1a07")
    + b"TX:s1:1"
    + bytes.fromhex("201a 7a08 0000000000000000 0000000000000000")
    + COMMIT[-18:]
)
"""`COMMIT` with a field that MetaQ lacks: the first value of the offset."""


def test_a_commit_record_has_its_bounds_apart_from_its_offsets() -> None:
    """So they are there when an offset was overwritten, by half or fully."""
    kind = RedoOperation.LOCAL_COMMIT
    ours = encode_operation(kind, "TX:s1:1", locations=[LOCATION], has_bounds=True)
    assert ours == OURS
    moved = LOCATION._replace(offset=Offset(0x1234))
    rewritten = OURS[:-26] + encode_locations([moved])
    record, end = decode_record(rewritten, 0, len(rewritten))
    bounds = {LOCATION.log_id: Offset(0)}
    assert record == OperationRecord(kind, "TX:s1:1", False, (moved,), bounds)
    assert end == len(rewritten)


def test_bounds_are_those_of_their_partitions_in_any_order_of_the_attachment() -> None:
    """A Java broker that appends a batch again writes the attachment as a map."""
    ids = [LogId("b", 10), LogId("b", 9), LogId("a", 3)]
    places = [BatchLocation(each, Offset(n), 1, 1) for n, each in enumerate(ids)]
    wanted = dict(zip(ids, (0, 1, 2), strict=True))
    data = encode_operation(
        RedoOperation.LOCAL_COMMIT, "TX:s:1", locations=places, has_bounds=True
    )
    body = data[: -len(encode_locations(places))]
    for order in permutations(places):
        moved = [each._replace(offset=Offset(7)) for each in order]
        again = body + encode_locations(moved)
        record, _end = decode_record(again, 0, len(again))
        assert isinstance(record, OperationRecord)
        assert record.bounds == wanted


@pytest.mark.parametrize("size", range(len(OURS)))
def test_a_commit_record_with_bounds_that_is_cut_is_none(size: int) -> None:
    """No prefix of it is taken for a record."""
    with pytest.raises(RecordError):
        decode_record(OURS[:size], 0, size)


def test_bounds_of_other_locations_are_no_record() -> None:
    """There is one for each location."""
    data = OURS + OURS[-26:]
    longer = data.replace(bytes.fromhex("201a7a"), bytes.fromhex("20347a"))
    with pytest.raises(RecordError, match="8 bytes of bounds, 2 locations"):
        decode_record(longer, 0, len(longer))


@pytest.mark.parametrize(
    "moment", ["journal_after_local_commit", "journal_after_xa_prepare"]
)
def test_recorded_journals_are_read_to_their_end(moment: str) -> None:
    """Every record of a recorded journal is understood, and encoded to the same."""
    (redo,) = (f for f in vectors()["disk"][moment] if f["file"].endswith("redo.1"))
    data = bytes_of(redo["bytes"])
    assert data
    position, again = 0, b""
    while position < len(data):
        record, position = decode_record(data, position, len(data))
        if isinstance(record, PutRecord):
            again += encode_put(record.message_id, record.command)
        else:
            again += encode_operation(
                record.operation,
                record.key,
                was_prepared=record.was_prepared,
                locations=record.locations,
            )
    assert again == data


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    """Any foreign bytes raise the same error."""
    try:
        record, end = decode_record(data, 0, len(data))
    except RecordError:
        return
    assert record
    assert 4 < end <= len(data)


@given(st.sampled_from([each for each, _ours in GOLDEN]), st.data())
def test_a_cut_record_is_none(record: bytes, data: st.DataObject) -> None:
    """No prefix of a record is taken for one."""
    size = data.draw(st.integers(0, len(record) - 1))
    with pytest.raises(RecordError):
        decode_record(record[:size], 0, size)


NAMES = st.text("abc-", min_size=1, max_size=9)
PLACES = st.builds(
    BatchLocation,
    st.builds(LogId, NAMES, st.integers(0, 9999)),
    st.integers(0, 2**63 - 1).map(Offset),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)


@given(st.lists(PLACES, max_size=4))
def test_attachments_come_back(places: list[BatchLocation]) -> None:
    """All that is written is read, in the same order; topics may contain a hyphen."""
    assert list(decode_locations(encode_locations(places))) == places


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300))
def test_puts_come_back(number: int, body: bytes) -> None:
    """Any id and any body, with or without a line end in it."""
    command = b"put a-b 3 %d 1 -1 TX:s:1 7\r\n" % len(body) + body
    data = encode_put(MessageId(number), command)
    record, end = decode_record(b"x" * 5 + data, 5, 5 + len(data))
    assert record == PutRecord("TX:s:1", MessageId(number), command)
    assert end == 5 + len(data)
    assert decode_put(command).payload == body


def test_varints_have_protobufs_lengths() -> None:
    """Seven bits a byte; a negative number has ten bytes."""
    assert [len(varint(n)) for n in (0, 127, 128, 2**14, -1)] == [1, 1, 2, 3, 10]

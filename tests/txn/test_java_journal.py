"""The journal of a Java broker: which transactions are open in it."""

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.txn import java_journal
from metaq.txn.java_journal import (
    JournalKind,
    JournalRecord,
    OpenTransaction,
    decode_record,
    find_open,
    read_journal,
)
from tests.rigs.fs import FaultyFileSystem

DIRECTORY = Path("/transactions")

PUT_1 = bytes.fromhex("00000033 0801 122f 08 80e080dee69d9d8db401 12 22") + (
    b"put test 1 5 0 -1 TX:s1:1 3\r\nhello"
)
PUT_2 = bytes.fromhex("00000035 0801 1231 08 80e080c6869e9d8db401 12 24") + (
    b"put test 1 5 0 123 TX:s1:1 44\r\nhello"
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
"""Bytes that a Java broker wrote."""


def put_of(key: str, payload: bytes = b"x") -> bytes:
    put = f"put test 1 {len(payload)} 0 -1 {key} 3\r\n".encode() + payload
    content = b"\x08\x01\x12" + varint(len(put)) + put
    body = b"\x08\x01\x12" + varint(len(content)) + content
    return len(body).to_bytes(4, "big") + body


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


@pytest.fixture
def fs() -> FaultyFileSystem:
    disk = FaultyFileSystem()
    disk.make_directory(DIRECTORY)
    return disk


def write(fs: FaultyFileSystem, name: str, data: bytes) -> None:
    fs.write_atomically(DIRECTORY / name, data)


def keys(fs: FaultyFileSystem) -> list[str]:
    return [each.key for each in find_open(fs, DIRECTORY).open]


@pytest.mark.parametrize(
    ("data", "record"),
    [
        (PUT_1, JournalRecord(JournalKind.PUT, "TX:s1:1", 0)),
        (PUT_2, JournalRecord(JournalKind.PUT, "TX:s1:1", 0)),
        (COMMIT, JournalRecord(JournalKind.END, "TX:s1:1", 26)),
        (ROLLBACK, JournalRecord(JournalKind.END, "TX:s1:5", 0)),
        (PREPARE, JournalRecord(JournalKind.PREPARE, "XID:100:0a0b:0c0d:uq", 0)),
        (XA_COMMIT, JournalRecord(JournalKind.END, "XID:100:0a0b:0c0d:uq", 26)),
        (XA_ROLLBACK, JournalRecord(JournalKind.END, "XID:101:0a0b::uq", 0)),
    ],
)
def test_records_of_a_java_broker_are_read(data: bytes, record: JournalRecord) -> None:
    """JournalKind, key, and how many bytes follow that belong to it."""
    length = int.from_bytes(data[:4], "big")
    assert decode_record(data[4 : 4 + length]) == record
    assert len(data) == 4 + length + record.attachment_bytes


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    """Nothing else is raised, whatever the disk has."""
    decode_record(data)
    decode_record(PUT_1[4:20] + data)


def test_what_is_begun_or_prepared_and_not_ended_is_open(fs: FaultyFileSystem) -> None:
    """In the order of their first records, over all files."""
    write(fs, "redo.1", PUT_1 + PUT_2 + put_of("TX:s1:5") + PREPARE + XA_ROLLBACK)
    write(fs, "redo.2", ROLLBACK + put_of("TX:s2:1", b"x" * 100_000))
    write(fs, "redo.x", b"not ours")
    write(fs, "heuristic.log", b"")
    report = find_open(fs, DIRECTORY)
    assert report.is_whole
    assert report.open == (
        OpenTransaction("TX:s1:1", put_count=2),
        OpenTransaction("XID:100:0a0b:0c0d:uq", is_prepared=True),
        OpenTransaction("TX:s2:1", put_count=1),
    )
    assert read_journal(fs, DIRECTORY)[:2] == (
        "TX:s1:1 is begun and not ended, with 2 puts",
        "XID:100:0a0b:0c0d:uq is prepared and not ended, with 0 puts",
    )
    write(fs, "redo.3", COMMIT + XA_COMMIT)
    assert keys(fs) == ["TX:s2:1"]
    before = fs.calls
    find_open(fs, DIRECTORY)
    assert {call.name for call in fs.log[before:]} == {"stat", "list", "open", "read"}


@pytest.mark.parametrize(
    "tail", [b"\0", b"\0\0\0\x33\x08", b"\xff" * 20, b"\0" * 40, PUT_1[:-1]]
)
def test_what_is_cut_off_ends_its_file(fs: FaultyFileSystem, tail: bytes) -> None:
    """As for a Java broker; the next file is read nevertheless."""
    write(fs, "redo.1", PUT_1 + tail)
    write(fs, "redo.2", put_of("TX:s2:1"))
    assert keys(fs)[0] == "TX:s1:1"
    assert "TX:s2:1" in keys(fs)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"number": 1, "offset": 0}, ["TX:a:1", "TX:b:1", "TX:c:1"]),
        ({"number": 1, "offset": len(put_of("TX:a:1"))}, ["TX:b:1", "TX:c:1"]),
        ({"number": 2, "offset": 0}, ["TX:c:1"]),
        ({}, ["TX:a:1", "TX:b:1", "TX:c:1"]),
        (None, ["TX:a:1", "TX:b:1", "TX:c:1"]),
    ],
)
def test_reading_begins_at_the_newest_checkpoint(
    fs: FaultyFileSystem, checkpoint: object, expected: list[str]
) -> None:
    """An empty or strange one says nothing."""
    write(fs, "redo.1", put_of("TX:a:1") + put_of("TX:b:1"))
    write(fs, "redo.2", put_of("TX:c:1"))
    write(fs, "checkpoint.1", json.dumps({"number": 9, "offset": 9}).encode())
    data = b"" if checkpoint is None else json.dumps(checkpoint).encode()
    write(fs, "checkpoint.2", data)
    assert keys(fs) == expected


def test_reading_is_bounded(
    fs: FaultyFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not looked at is told."""
    monkeypatch.setattr(java_journal, "RECORDS_MAX", 3)
    write(fs, "redo.1", PUT_1 * 4)
    assert read_journal(fs, DIRECTORY) == (
        "TX:s1:1 is begun and not ended, with 3 puts",
        "behind 3 records the journal was not read",
    )


def test_without_a_journal_there_is_nothing_to_say(fs: FaultyFileSystem) -> None:
    """And one that cannot be read is told, not raised."""
    assert read_journal(fs, Path("/elsewhere")) == ()
    write(fs, "redo.1", PUT_1)
    fs.fail_at(fs.calls + 4, errno.EIO)
    (told,) = read_journal(fs, DIRECTORY)
    assert "cannot be read" in told
    assert fs.open_paths() == []

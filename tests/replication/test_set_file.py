"""The `set` file: its bytes, and what is not believed."""

import errno
import json
from pathlib import Path
from zlib import crc32

import pytest

from metaq.errors import StorageError
from metaq.replication.election import Flag
from metaq.replication.record import encode_record, make_record
from metaq.replication.replica import SetFile
from metaq.replication.set_file import (
    SET_BYTES_MAX,
    SET_FILE,
    decode_set_file,
    encode_set_file,
    read_set_file,
    write_set_file,
)
from tests.cases import for_each
from tests.rigs.fs import FaultyFileSystem

DATA = Path("/data")
RECORD = make_record("s", 1, frozenset({1, 2}), min_in_sync=1, nonce="init")
FILE = SetFile("s", 2, RECORD, epoch=7, completed=6, flag=Flag.CUT)
FIELDS = json.loads(encode_set_file(FILE).split(b"\n")[1])


def disk() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.make_directory(DATA)
    return fs


def file_of(fields: object) -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return b"metaq-set 1 %08x\n%s\n" % (crc32(body), body)


def test_the_bytes_of_a_file() -> None:
    """Pinned: a line with the checksum, and the record as ZooKeeper has it."""
    record = encode_record(RECORD).decode()
    body = (
        f'{{"set_id":"s","replica":2,"record":{record},"epoch":7,"completed":6,'
        '"flag":"cut","clean":0}'
    ).encode()
    assert encode_set_file(FILE) == file_of(body)


def test_a_file_is_read_as_it_was_written() -> None:
    """With every flag, and without a record; later properties are left out."""
    for flag in Flag:
        file = SetFile("s", 1, None, flag=flag)
        assert decode_set_file(encode_set_file(file)) == file
    assert decode_set_file(encode_set_file(FILE)) == FILE
    assert decode_set_file(file_of(FIELDS | {"later": 1})) == FILE
    before = {name: value for name, value in FIELDS.items() if name != "clean"}
    assert decode_set_file(file_of(before)) == FILE


@for_each(
    "data, text",
    {
        "empty": (b"", "expected a first line"),
        "no JSON": (file_of(b"{"), "expected the fields of version 1"),
        "no object": (file_of([]), "expected the fields of version 1"),
        "missing": (file_of({}), "expected the fields of version 1"),
        "a truth": (
            file_of(FIELDS | {"epoch": True}),
            "epoch: expected 0 to .*, got True",
        ),
        "a flag": (
            file_of(FIELDS | {"flag": "x"}),
            "flag: .*, got 'x'",
        ),
        "a record": (
            file_of(FIELDS | {"record": {}}),
            "set_id: expected a text, got None",
        ),
    }.values(),
)
def test_what_is_wrong_is_named(data: bytes, text: str) -> None:
    """Also where the checksum is right."""
    with pytest.raises(StorageError, match=text):
        decode_set_file(data)


def test_every_damaged_bit_is_seen() -> None:
    """A flag that is not believed would let a replica lead that lacks bytes."""
    data = encode_set_file(FILE)
    for bit in range(8 * len(data)):
        found = bytearray(data)
        found[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError):
            decode_set_file(bytes(found))


def test_no_file_is_no_member_and_a_damaged_one_is_an_error() -> None:
    """Nothing may start as a new replica because its file is damaged."""
    fs = disk()
    assert read_set_file(fs, DATA) is None
    write_set_file(fs, DATA, FILE)
    assert read_set_file(fs, DATA) == FILE
    fs.flip_bit(DATA / SET_FILE, 300)
    with pytest.raises(StorageError, match="/data/set is damaged: expected a first"):
        read_set_file(fs, DATA)
    fs.write_atomically(DATA / SET_FILE, bytes(SET_BYTES_MAX + 1))
    with pytest.raises(StorageError, match="too large"):
        read_set_file(fs, DATA)
    fs.fail_at(fs.calls + 1, errno.EIO)
    with pytest.raises(StorageError, match="EIO"):
        read_set_file(fs, DATA)


def test_a_crash_leaves_the_old_file_or_the_new_one() -> None:
    """And on return the new one, whatever is lost of what was not synced."""
    old = SetFile("s", 2, None)
    quiet = disk()
    write_set_file(quiet, DATA, old)
    before = quiet.calls
    write_set_file(quiet, DATA, FILE)
    for number in range(before + 1, quiet.calls + 1):
        fs = disk()
        write_set_file(fs, DATA, old)
        fs.fail_at(number, errno.EIO)
        with pytest.raises(StorageError):
            write_set_file(fs, DATA, FILE)
        for found in fs.crashes(torn=False):
            assert read_set_file(found, DATA) in (old, FILE)
    for found in quiet.crashes(torn=False):
        assert read_set_file(found, DATA) == FILE

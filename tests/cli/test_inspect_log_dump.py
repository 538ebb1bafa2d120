"""`metaq dump`: the records of a file, and where they end."""

import json
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaq.cli.render import preview
from metaq.fs import SystemFileSystem
from metaq.model import MessageId, Position
from metaq.record.flags import encode_payload
from metaq.record.layout import HEADER, Record, encode_record
from metaq.record.scan import WINDOW_BYTES, Corrupt, Incomplete, iter_records
from tests.cli.runner import id_at, run

BASE = 1000
NOON = 1_769_860_800_000  # 2026-01-31T12:00:00Z


def write(directory: Path, *records: bytes) -> Path:
    path = directory / f"{BASE:020d}.meta"
    path.write_bytes(b"".join(records))
    return path


def record(payload: bytes, message_id: int = 1, flag: int = 0) -> bytes:
    return encode_record(payload, id=MessageId(message_id), flag=flag)


@given(payloads=st.lists(st.binary(max_size=300), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_record_is_found_whatever_the_window(
    payloads: list[bytes], tmp_path: Path
) -> None:
    """Records that cross windows, or are larger than one, come whole."""
    path = write(tmp_path, *[record(p, i + 1) for i, p in enumerate(payloads)])
    file = SystemFileSystem().open_read(path)
    end = Position(file.size())
    found = list(iter_records(file.read_at, Position(0), end, window_bytes=64))
    file.close()
    assert [r.payload for _at, r in found] == payloads  # type: ignore[misc]  # records


def test_a_row_per_record(tmp_path: Path) -> None:
    """Offset, id, time, flag, attribute, size and a preview of the payload."""
    payload, flag = encode_payload(b"body\n", "k=v")
    path = write(tmp_path, record(b"plain", id_at(NOON)), record(payload, -5, flag))
    result = run("dump", str(path))
    assert result.exit_code == 0
    assert [line.split("\t") for line in result.stdout.splitlines()] == [
        ["offset", "id", "time", "flag", "attribute", "size", "payload"],
        ["1000", str(id_at(NOON)), "2026-01-31T12:00:00.000Z", "0", "-", "25", "plain"],
        ["1025", "-5", "-", "1", "k=v", "32", "body·"],
    ]


def test_json_has_the_whole_payload(tmp_path: Path) -> None:
    """Nothing is cut for machines."""
    path = write(tmp_path, record(b"x" * 500, id_at(NOON)))
    row = json.loads(run("dump", str(path), "--json").stdout)
    assert row["data"] == "x" * 500
    assert (row["offset"], row["size"], row["attribute"]) == (1000, 520, None)


def test_from_and_max_choose(tmp_path: Path) -> None:
    """A record boundary to begin at, and how many."""
    path = write(tmp_path, *[record(b"%d" % n) for n in range(5)])
    result = run("dump", str(path), "--from", "1042", "--max", "2")
    assert [line.split("\t")[-1] for line in result.stdout.splitlines()] == [
        "payload", "2", "3",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".arc", ".zip"])
def test_an_archived_segment_is_read_like_any_other(
    tmp_path: Path, suffix: str
) -> None:
    """Retention renamed or compressed it; offsets, `--from` and damage stay."""
    size = WINDOW_BYTES // 3
    bad = bytearray(record(b"bad"))
    bad[-1] ^= 1
    payloads = [(b"%d" % n).ljust(size) for n in range(8)]
    records = [record(payload) for payload in payloads]
    path = write(tmp_path, *records, bytes(bad), record(b"after"))
    archived = path.with_name(path.name + suffix)
    if suffix == ".arc":
        path.rename(archived)
    else:
        with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as file:
            file.write(path, path.name)
    result = run("dump", str(archived), "--from", str(BASE + 5 * (20 + size)))
    assert [line.split("\t")[-1] for line in result.stdout.splitlines()] == [
        "payload", *map(preview, payloads[5:]),
    ]  # fmt: skip
    assert result.exit_code == 1
    end = BASE + 8 * (20 + size)
    assert f"damaged record at offset {end}" in result.stderr
    assert f"next good record is at offset {end + 23}" in result.stderr


def test_an_archive_that_is_none_is_refused(tmp_path: Path) -> None:
    """The file is named."""
    path = write(tmp_path, b"no zip").rename(tmp_path / f"{BASE:020d}.meta.zip")
    result = run("dump", str(path))
    assert result.exit_code == 1
    assert f"archive is damaged: File is not a zip file: file={path}" in result.stderr


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_unpacks_to_gigabytes_at_once_is_refused(
    tmp_path: Path, method: int
) -> None:
    """A kilobyte of bzip2 took two gigabytes of memory."""
    path = tmp_path / f"{BASE:020d}.meta.zip"
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("segment", record(b"x") + bytes(1 << 20))
    result = run("dump", str(path))
    assert result.exit_code == 1
    assert f"expected an entry stored or deflated, got method {method}" in result.stderr


@pytest.mark.slow
def test_a_length_over_the_limit_takes_no_memory(tmp_path: Path) -> None:
    """In an archive that claims to hold all of it; nothing is unpacked for it."""
    path = tmp_path / f"{BASE:020d}.meta.zip"
    size = 100 << 20
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("segment", HEADER.pack(size, 1, 1, 1) + b"x" * size)
    tracemalloc.start()
    result = run("dump", str(path))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"length {size}, the limit is {64 << 20}" in result.stderr
    assert peak < 16 << 20


@pytest.mark.parametrize("suffix", ["", ".zip"])
@pytest.mark.parametrize("inside", [1, 7, 19, 20, 28])
def test_an_offset_inside_a_record_is_told_from_a_torn_tail(
    tmp_path: Path, suffix: str, inside: int
) -> None:
    """Whatever its bytes look like there: a long record, or damage."""
    path = write(tmp_path, record(b"first"), record(b"aaaaaaaaa"), record(b"last"))
    if suffix:
        segment, path = path, path.with_name(path.name + suffix)
        with zipfile.ZipFile(path, "w") as file:
            file.write(segment, segment.name)
    result = run("dump", str(path), "--from", str(BASE + 25 + inside))
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1)
    assert result.stderr == (
        f"metaq: no record begins at offset {BASE + 25 + inside}; the one that holds"
        f" it begins at offset {BASE + 25}\n"
    )


def test_zeros_inside_a_record_are_no_records(tmp_path: Path) -> None:
    """They look like empty ones; a real one that is empty is printed."""
    empty = record(b"")
    path = write(tmp_path, empty, record(bytes(40) + b"x" * 40), empty)
    result = run("dump", str(path), "--from", str(BASE + 20 + 20 + 30))
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1)
    assert f"begins at offset {BASE + 20}\n" in result.stderr
    for start in (0, 20 + 100):
        result = run("dump", str(path), "--from", str(BASE + start), "--max", "1")
        assert (result.exit_code, result.stdout.count("\n")) == (0, 2)


def test_a_torn_tail_may_be_where_the_dump_begins(tmp_path: Path) -> None:
    path = write(tmp_path, record(b"first"), record(b"torn")[:-1])
    result = run("dump", str(path), "--from", str(BASE + 25))
    assert result.exit_code == 0
    assert "incomplete record at offset 1025: 23 of 24 bytes" in result.stderr


def test_an_offset_outside_the_file_is_refused(tmp_path: Path) -> None:
    """Both ends are named."""
    path = write(tmp_path, record(b"x"))
    result = run("dump", str(path), "--from", "5")
    assert result.exit_code == 1
    assert "holds offsets 1000 to 1021, got --from 5" in result.stderr


def test_damage_is_named_and_is_exit_code_1(tmp_path: Path) -> None:
    """Good records before it are printed."""
    bad = bytearray(record(b"bad"))
    bad[-1] ^= 1
    path = write(tmp_path, record(b"good"), bytes(bad), record(b"after"))
    result = run("dump", str(path))
    assert result.exit_code == 1
    assert "good" in result.stdout
    assert "damaged record at offset 1024: checksum" in result.stderr
    assert "next good record is at offset 1047" in result.stderr


def test_a_torn_tail_is_told_and_is_no_damage(tmp_path: Path) -> None:
    """A record that is cut by the end of the file may be one that is being written."""
    path = write(tmp_path, record(b"good"), record(b"torn")[:-1])
    result = run("dump", str(path))
    assert result.exit_code == 0
    assert "incomplete record at offset 1024: 23 of 24 bytes" in result.stderr


def test_an_attribute_block_that_is_none_is_shown_as_payload(tmp_path: Path) -> None:
    """dump shows what is there, not what the flag promises."""
    path = write(tmp_path, record(b"\x00", flag=1))
    result = run("dump", str(path))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split("\t")[3:] == ["1", "-", "21", "·"]


def test_an_empty_segment_has_no_rows(tmp_path: Path) -> None:
    """A new segment is fine."""
    result = run("dump", str(write(tmp_path)))
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1


def test_a_file_that_is_no_segment_is_refused(tmp_path: Path) -> None:
    """The base offset is in the name."""
    path = tmp_path / "notes.txt"
    path.write_text("x")
    result = run("dump", str(path))
    assert result.exit_code == 1
    assert "a segment is named <offset>.meta" in result.stderr


def test_the_walk_says_why_it_ended(tmp_path: Path) -> None:
    """The last item is the flaw."""
    path = write(tmp_path, record(b"a"), b"\xff" * 30)
    file = SystemFileSystem().open_read(path)
    *_records, last = iter_records(file.read_at, Position(0), Position(file.size()))
    assert isinstance(last, Corrupt)
    *records, last = iter_records(file.read_at, Position(0), Position(25))
    assert isinstance(last, Incomplete)
    assert all(isinstance(r, Record) for _at, r in records)  # type: ignore[misc]  # pairs
    file.close()

"""`metaq verify`: what it prints, and its exit code."""

import json
from pathlib import Path

import pytest

from metaq.cli.inspect_log import is_in_use
from metaq.fs import SystemFileSystem
from metaq.model import MessageId
from metaq.record.layout import encode_record
from tests.cli.runner import run


@pytest.fixture
def segment(data_dir: Path) -> Path:
    """Return a sealed segment as a Java broker leaves it, without a side index."""
    directory = data_dir / "t-0"
    directory.mkdir()
    records = [encode_record(b"payload", id=MessageId(n)) for n in range(1, 5)]
    path = directory / f"{0:020d}.meta"
    path.write_bytes(b"".join(records[:3]))
    (directory / f"{81:020d}.meta").write_bytes(records[3])
    return path


def test_what_is_whole_is_counted(segment: Path, data_dir: Path) -> None:
    """Exit code 0 and a summary."""
    result = run("verify", str(data_dir))
    assert (result.exit_code, result.stdout) == (
        0,
        "1 partition, 2 segments, 4 records, 108 B checked: 0 problems\n",
    )


def test_damage_is_named_with_file_and_offsets(segment: Path, data_dir: Path) -> None:
    """Exit code 1; the file, the offset, and where the next good record is."""
    data = bytearray(segment.read_bytes())
    data[30] ^= 1
    segment.write_bytes(data)
    result = run("verify", str(data_dir))
    assert result.exit_code == 1
    assert f"file={segment} offset=27 next_good_offset=54" in result.stdout
    assert result.stdout.endswith("1 problem\n")
    result = run("verify", str(data_dir), "--json")
    finding, summary = map(json.loads, result.stdout.splitlines())
    assert finding.pop("detail").startswith("checksum")
    assert finding == {
        "kind": "damage",
        "topic": "t",
        "partition": 0,
        "file": str(segment),
        "offset": 27,
        "next_good_offset": 54,
    }
    assert summary["problems"] == 1


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_directory_whose_name_is_no_text_is_told(
    segment: Path, data_dir: Path, words: list[str]
) -> None:
    """Output is UTF-8, and JSON where that was asked for."""
    segment.write_bytes(b"damage")
    odd = data_dir.with_name("odd\udcff")
    data_dir.rename(odd)
    result = run("verify", str(odd), *words)
    assert result.exit_code == 1
    first = result.stdout_bytes.decode().splitlines()[0]
    if words:
        assert json.loads(first)["file"] == str(odd / "t-0" / segment.name)
    else:
        assert f"{odd.parent}/odd\\udcff/t-0/{segment.name}" in first


def test_a_torn_tail_is_a_problem_too(segment: Path, data_dir: Path) -> None:
    """A check at rest reports it, although the next start repairs it."""
    active = segment.with_name(f"{81:020d}.meta")
    active.write_bytes(active.read_bytes()[:-1])
    result = run("verify", str(data_dir))
    assert result.exit_code == 1
    assert result.stdout.startswith("torn tail: ")


@pytest.mark.parametrize(
    ("position", "text"),
    [(108, "offset=81 next_good_offset=108"), (27, "offset=27 next_good_offset=81")],
)
def test_a_hole_and_an_overlap_are_found_beside_a_broker(
    segment: Path, data_dir: Path, position: int, text: str
) -> None:
    """The broker stops at them; a check beside it says the same."""
    active = segment.with_name(f"{81:020d}.meta")
    other = segment.with_name(f"{position:020d}.meta")
    other.write_bytes(active.read_bytes())
    if position > 81:
        active.unlink()
    lock = SystemFileSystem().lock_directory(data_dir)
    try:
        result = run("verify", str(data_dir))
    finally:
        lock.release()
    assert result.exit_code == 1
    assert text in result.stdout


def test_nothing_is_written(segment: Path, data_dir: Path) -> None:
    """The directory and its files are as they were, no lock file among them."""
    before = {p: p.stat().st_mtime_ns for p in data_dir.rglob("*")}
    run("verify", str(data_dir))
    assert {p: p.stat().st_mtime_ns for p in data_dir.rglob("*")} == before


def test_the_directory_of_a_broker_without_messages_is_fine(data_dir: Path) -> None:
    """Zero partitions are counted; the lock file shows whose directory it is."""
    SystemFileSystem().lock_directory(data_dir).release()
    result = run("verify", str(data_dir))
    assert (result.exit_code, result.stdout[:12]) == (0, "0 partitions")


def test_a_directory_of_something_else_is_not_called_whole(tmp_path: Path) -> None:
    """Names that look like partitions do not make it a broker's."""
    (tmp_path / "python-3").mkdir()
    result = run("verify", str(tmp_path))
    assert result.exit_code == 1
    sentence = f"not a data directory of a broker: directory={tmp_path}"
    assert result.stderr == f"metaq: {sentence}\n"
    assert result.stdout == ""


def test_a_broker_at_work_is_noticed(segment: Path, data_dir: Path) -> None:
    """Its lock says so, for the data directory and for one partition of it."""
    fs = SystemFileSystem()
    assert not is_in_use(fs, data_dir)
    lock = fs.lock_directory(data_dir)
    assert is_in_use(fs, data_dir)
    assert is_in_use(fs, segment.parent)
    lock.release()
    assert not is_in_use(fs, data_dir)

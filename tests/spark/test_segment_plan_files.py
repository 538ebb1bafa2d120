"""Which files some paths mean: directories, files, wildcards, archives."""

import zipfile
from pathlib import Path

import pytest

from metaq.errors import StorageError
from metaq.model import LogId, SizeBytes
from metaq.spark.errors import OptionError
from metaq.spark.record_bounds import PushedFilters
from metaq.spark.segments.checks import plan_checks
from metaq.spark.segments.segment_options import parse_segment_options
from metaq.spark.segments.segment_plan import (
    FileKind,
    SegmentFile,
    find_segments,
    plan_query,
)
from tests.spark.segment_dirs import (
    ARCHIVE,
    FS,
    LOG,
    OTHER,
    ZIP,
    archive,
    payloads,
    segments_of,
    write_log,
)


def find(*patterns: Path | str) -> tuple[SegmentFile, ...]:
    return find_segments(FS, map(str, patterns))


@pytest.fixture
def data(data_dir: Path) -> Path:
    """Return a data directory with two partitions of several segments."""
    write_log(data_dir, payloads(60))
    write_log(data_dir, payloads(30), OTHER)
    (data_dir / "no-partition").mkdir()
    (data_dir / ".lock").write_text("1")
    return data_dir


def test_a_data_directory_means_all_its_partitions(data: Path) -> None:
    """Each segment comes once, with offsets that follow each other."""
    files = find(data)
    assert {f.log_id for f in files} == {LOG, OTHER}
    for log_id in (LOG, OTHER):
        own = [f for f in files if f.log_id == log_id]
        assert [f.path for f in own] == [
            s.path for s in segments_of(data / str(log_id))
        ]
        assert [f.end_offset for f in own[:-1]] == [f.base_offset for f in own[1:]]
        assert [f.is_active for f in own] == [False] * (len(own) - 1) + [True]


def test_the_logs_of_the_broker_itself_are_read_where_they_are_named(
    data: Path,
) -> None:
    """They would be rows among those of the topics, and delayed messages come twice."""
    waiting = write_log(data, payloads(10), LogId("__delays", 0))

    def topics(path: Path, **more: str) -> set[str]:
        options = parse_segment_options({"path": str(path), **more})
        tasks = plan_query(FS, options, PushedFilters()).tasks
        return {split.file.log_id.topic for task in tasks for split in task}

    assert topics(data) == {"test", "wild-x"}
    assert topics(data, subscribePattern=".*") == {"test", "wild-x"}
    assert topics(data, subscribe="__delays") == {"__delays"}
    assert topics(data, assign='{"__delays": ["7-0"]}') == {"__delays"}
    assert topics(waiting) == {"__delays"}
    checked = plan_checks([str(data)], SizeBytes(1 << 20)).tasks
    found = {split.file.log_id.topic for task in checked for split in task}
    assert found == {"test", "wild-x", "__delays"}


def test_directories_files_and_wildcards_mean_the_same(data: Path) -> None:
    """Files named twice come once; the newest file is active however it is named."""
    whole = find(data)
    assert find(data / "test-0", data / "wild-x-3", data) == whole
    assert find(f"{data}/*-[03]") == whole
    assert find(f"{data}/*/*.meta") == whole
    assert find(f"file://{data}") == whole
    assert find(whole[-1].path) == whole[-1:]


def test_a_directory_of_several_paths_comes_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By links, steps back and relative names; its rows would be there twice."""
    whole = find(data)
    (tmp_path / "links").mkdir()
    for name in ("a", "b"):
        (tmp_path / "links" / name).symlink_to(data)
    monkeypatch.chdir(data)
    assert find(data, data / "test-0" / "..", ".") == whole
    files = find(f"{tmp_path}/links/*")
    assert [file.base_offset for file in files] == [f.base_offset for f in whole]
    # The name of a link names the partition: this one is another one.
    (tmp_path / "links" / "test-9").symlink_to(data / "test-0")
    assert {f.log_id for f in find(tmp_path / "links")} == {LogId("test", 9)}


def test_an_archived_segment_is_found_by_its_kind(data: Path) -> None:
    """An archive has the size of its records, and is never active."""
    before = find(data / "test-0")
    archive(data / "test-0", ZIP, ARCHIVE)
    after = find(data / "test-0")
    assert [f.kind for f in after[:3]] == [
        FileKind.ZIPPED,
        FileKind.ARCHIVED,
        FileKind.PLAIN,
    ]
    assert [f.size_bytes for f in after] == [f.size_bytes for f in before]
    assert [f.base_offset for f in after] == [f.base_offset for f in before]


def test_a_segment_beside_its_archive_is_read_once(data: Path) -> None:
    """A crash between two steps of archiving leaves one segment."""
    before = find(data / "test-0")
    first = before[0].path
    kept = first.read_bytes()
    archive(data / "test-0", ZIP)
    first.write_bytes(kept)
    assert find(data / "test-0") == before


def test_other_files_are_nobodys_business(data: Path) -> None:
    """Torn tails, indexes and half archives are not read."""
    before = find(data)
    for name in ("5.meta.torn-7", "5.meta.zip.tmp", "notes.txt"):
        (data / "test-0" / name).write_bytes(b"x")
    assert find(data) == before


def test_a_data_directory_may_look_like_a_partition(tmp_path: Path) -> None:
    """A directory without segments is a data directory, with any name."""
    data = tmp_path / "data-1"
    data.mkdir()
    write_log(data, payloads(3))
    assert [f.log_id for f in find(data)] == [LogId("test", 0)]


def test_an_empty_directory_has_no_segments(data_dir: Path) -> None:
    """A broker that has just started has nothing to read."""
    assert find(data_dir) == ()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("missing", "expected a file or directory"),
        ("*.nothing", "expected a file or directory"),
        ("loose.meta", "expected a directory named <topic>-<partition>"),
        ("test-0/0.meta.gz", "expected a segment, named <offset>.meta, <offset>.meta."),
    ],
)
def test_a_path_that_means_nothing_is_an_error(
    tmp_path: Path, pattern: str, text: str
) -> None:
    """A mistyped path is never an empty result."""
    (tmp_path / "loose.meta").write_bytes(b"")
    (tmp_path / "test-0").mkdir()
    (tmp_path / "test-0" / "0.meta.gz").write_bytes(b"")
    with pytest.raises(OptionError, match=text):
        find(tmp_path / pattern)


def test_a_scheme_that_is_no_disk_is_refused() -> None:
    """Object stores have to be mounted."""
    with pytest.raises(OptionError, match="'hdfs'"):
        find("hdfs://name/data")


@pytest.mark.parametrize(
    ("name", "text"),
    [("0.meta", "two segments have one base offset"), ("x.meta", "not a number")],
)
def test_a_directory_that_makes_no_sense_is_refused(
    data: Path, name: str, text: str
) -> None:
    """Names are believed as little as a broker believes them."""
    (data / "test-0" / name).write_bytes(b"")
    with pytest.raises(StorageError, match=text):
        find(data)


@pytest.mark.parametrize("entries", [None, (), ("one", "two")])
def test_an_archive_that_is_none_is_named(
    data: Path, entries: tuple[str, ...] | None
) -> None:
    """The file is listed with its flaw: the caller decides what that means."""
    bad = data / "test-0" / "00000000000000009999.meta.zip"
    bad.write_bytes(b"no zip at all")
    if entries is not None:
        with zipfile.ZipFile(bad, "w") as archived:
            for entry in entries:
                archived.writestr(entry, b"x")
    (found,) = (f for f in find(data) if f.flaw)
    assert (found.path, found.size_bytes) == (bad, 0)
    assert "archive is damaged" in found.flaw

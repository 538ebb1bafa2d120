"""Data files and what failures say; without Spark."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive_store import STAGING, ArchiveStore, root_of
from metaq.pipeline.jobs.day_files import ArchivedLog, DataFile, stats_of
from metaq.pipeline.jobs.latest import LatestTable
from metaq.pipeline.jobs.session import sentence_of
from metaq.spark.columns import ROW_SCHEMA


@pytest.mark.parametrize(
    ("path", "topic", "read", "date"),
    [
        ("topic=t/date=2026-01-31/x", "t", "t", "2026-01-31"),
        ("topic=a%3Ab/date=2026-01-31/x", "a:b", "a:b", "2026-01-31"),
        ("topic=é/date=__HIVE_DEFAULT_PARTITION__/x", "é", "é", None),
        # As Delta's own writer names it.
        ("topic=%C3%A9/date=2026-01-31/x", "é", "Ã©", "2026-01-31"),
    ],
)
def test_directories_have_topic_and_day(
    path: str, topic: str, read: str, date: str | None
) -> None:
    """As Spark writes and reads them; a table may know better."""
    found = DataFile.from_path(path, 1, {}, 0)
    assert (found.topic, found.date) == (read, date)
    assert DataFile(path, 1, topic, date, {}, 0).directory_topic == read


def test_small_files_are_counted_by_topic_and_day(tmp_path: Path) -> None:
    """The largest number decides; a file of that size is not small."""
    store = ArchiveStore(str(tmp_path), may_be_new=True)
    store.claim()
    assert store.count_small(50) == 0
    ends = {"broker_id": 0, "partition": 0, "offset": 0}
    stats = {"numRecords": 1, "minValues": ends, "maxValues": ends}
    day, next_day = "topic=a/date=2026-01-31", "topic=a/date=2026-02-01"
    other, none = "topic=b/date=2026-01-31", "topic=a/date=__HIVE_DEFAULT_PARTITION__"
    sizes = [(day, 1), (day, 49), (day, 50), (next_day, 1), (other, 1), (none, 1)]
    files = [
        DataFile.from_path(f"{directory}/{number}.parquet", size_bytes, stats, 0)
        for number, (directory, size_bytes) in enumerate(sizes)
    ]
    store.commit(0, files, positions={})
    found = [(file.path, file.date, file.log) for file in store.files()]
    assert found == sorted(
        ((file.path, file.date, file.log) for file in files), key=lambda each: each[0]
    )
    assert [store.count_small(size) for size in (50, 51, 1)] == [2, 3, 0]


@pytest.mark.parametrize("lacking", ["min", "max", "offset", "partition", "broker_id"])
def test_a_file_without_statistics_is_refused(tmp_path: Path, lacking: str) -> None:
    """Another program has added it: what should be in it is not known."""
    ends = {"broker_id": 0, "partition": 0, "offset": 0}
    part = {name: value for name, value in ends.items() if name != lacking}
    stats = {
        "numRecords": 1,
        "minValues": {} if lacking == "min" else part,
        "maxValues": {} if lacking == "max" else part,
    }
    store = ArchiveStore(str(tmp_path), may_be_new=True)
    store.claim()
    path = "topic=a/date=2026-01-31/x.parquet"
    file = DataFile.from_path(path, 1, stats, 0)
    store._commit(0, [file], {})
    with pytest.raises(ArchiveError, match=rf"{path} was added without statistics"):
        store.files()


def test_what_others_have_in_staging_stays(tmp_path: Path) -> None:
    """Batches that are in the archive go; other names are none of ours."""
    store = ArchiveStore(str(tmp_path), may_be_new=True)
    store.claim()
    staging = tmp_path / STAGING
    for name in ("0000000000-app", "0000000001-app", "tmp", "7-x"):
        (staging / name).mkdir()
    (staging / "notes.txt").write_text("of another program")
    store.commit(0, (), positions={})
    left = {each.name for each in staging.iterdir()}
    assert left == {"0000000001-app", "tmp", "7-x", "notes.txt"}


@pytest.mark.parametrize("group_rows", [1, 3])
def test_times_that_python_has_not_are_no_bounds(group_rows: int) -> None:
    """Those of the other columns are all there, and so are those of other files."""
    days = pa.array([0, 2_932_897, 1], pa.date32())  # 10000-01-01 in the middle
    times = days.cast(ROW_SCHEMA.field("timestamp").type)
    table = pa.table({"offset": [3, 1, 2], "timestamp": times})
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=group_rows)
    stats = stats_of(pq.read_metadata(stream))
    assert stats["numRecords"] == 3
    assert (stats["minValues"], stats["maxValues"]) == ({"offset": 1}, {"offset": 3})
    pq.write_table(table.slice(2), stream := io.BytesIO())
    bounds = stats_of(pq.read_metadata(stream))["maxValues"]
    assert bounds == {"offset": 2, "timestamp": "1970-01-02T00:00:00.000000Z"}


def test_an_archive_is_no_table_of_latest_messages(tmp_path: Path) -> None:
    """A merge into it would replace and delete what is archived."""
    store = ArchiveStore(str(tmp_path), may_be_new=True)
    store.claim()
    context = SimpleNamespace(getLocalProperty=lambda _name: "other")
    batch = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))
    with pytest.raises(ArchiveError, match=r"table of latest messages.*got.* date"):
        LatestTable(str(tmp_path)).write(cast("DataFrame", batch), 0)


def test_a_file_of_several_partitions_may_hold_what_lies_between() -> None:
    """Of its own topic alone."""

    def place(broker_id: int, number: int, topic: str = "t") -> TopicPartition:
        return TopicPartition(topic, BrokerId(broker_id), number)

    one = ArchivedLog(place(1, 2), 1, Offset(0), Offset(0))
    some = ArchivedLog(place(1, 2), 1, Offset(0), Offset(0), place(3, 4))
    inside = [place(b, n) for b in (1, 2, 3) for n in (2, 3, 4)]
    outside = [place(0, 2), place(1, 1), place(4, 4), place(3, 5), place(1, 2, "u")]
    assert [one.may_hold(each) for each in (*inside, *outside)].count(True) == 1
    assert all(map(some.may_hold, inside))
    assert not any(map(some.may_hold, outside))


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/a/b/", "/a/b"),
        ("file:/a b", "/a b"),
        ("file:///a%20b", "/a%20b"),
        ("hdfs://host:1/a/", "hdfs://host:1/a"),
        ("s3a://bucket/a", "s3a://bucket/a"),
    ],
)
def test_a_directory_is_named_as_the_table_takes_it(path: str, root: str) -> None:
    """URLs of this machine become paths; nothing is decoded."""
    assert root_of(path) == root


@pytest.mark.parametrize("path", ["", "file:", "file://host/a", *"*?[]{}\\"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    """Spark would read the files of other directories, or none."""
    with pytest.raises(ArchiveError, match="expected"):
        root_of(path)


TRACE = """Traceback (most recent call last):
  File x
metaq.spark.errors.DataLossError: logs 0-0: lost [0, 9)

	at java"""
TWO = """[STREAM_FAILED] Job aborted: pyspark.errors.X: a
metaq.errors.A: first
metaq.errors.B: last
"""
NOT_OURS = "\n[PATH_NOT_FOUND] Path does not exist: x\nJVM stacktrace:"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TRACE, "logs 0-0: lost [0, 9)"),
        (TWO, "last"),
        (NOT_OURS, "[PATH_NOT_FOUND] Path does not exist: x"),
        ("", "ValueError"),
        ("x" * 5000, "x" * 2000),
    ],
)
def test_a_failure_is_told_in_one_sentence(text: str, sentence: str) -> None:
    """Our own sentence if there is one: it names partition and offsets."""
    assert sentence_of(ValueError(text)) == sentence

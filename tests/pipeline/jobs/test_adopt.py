"""Taking over an archive of the form that was before tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from metaq.model import BrokerId, TopicPartition
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.adopt import adopt
from metaq.pipeline.jobs.archive_store import ArchiveStore, open_archive, read_archive
from metaq.pipeline.jobs.compact import compact
from metaq.spark.offsets import Offsets, format_offsets
from tests.pipeline.jobs.archives import (
    Feed,
    Row,
    archive_feed,
    frame,
    log_rows,
    places,
    places_elsewhere,
    places_of,
    row,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

DAY = "date_from_unix_date(CAST(unix_micros(timestamp) DIV 86400000000 AS INT))"
"""As old versions made the UTC day."""


def old_archive(
    spark: SparkSession, path: Path, rows: Sequence[Row], batch: int
) -> list[str]:
    """Write an archive as old versions did; return its files."""
    dated = frame(spark, rows).selectExpr("*", f"{DAY} AS date").coalesce(1)
    dated.write.mode("append").partitionBy("topic", "date").parquet(str(path))
    (path / "_SUCCESS").unlink()
    names, logs = [], {}
    for found in sorted(path.glob("topic=*/**/*.parquet")):
        name = found.relative_to(path).as_posix()
        held: dict[tuple[Any, ...], list[int]] = {}
        for each in (
            spark.read.option("basePath", str(path)).parquet(str(found)).collect()
        ):
            key = (each["topic"], each["broker_id"], each["partition"])
            held.setdefault(key, []).append(each["offset"])
        logs[name] = [[*key, len(at), min(at), max(at)] for key, at in held.items()]
        count = sum(map(len, held.values()))
        names.append([name, found.stat().st_size, count])
    fields = {"version": 1, "number": 3, "query": "q", "batch": batch}
    manifests = path / "_metaq" / "manifest"
    manifests.mkdir(parents=True)
    (manifests / f"{2:020}.json").write_text("of an earlier moment")
    text = json.dumps({**fields, "files": names, "logs": logs})
    (manifests / f"{3:020}.json").write_text(text)
    return [name for name, _size, _count in names]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


ROWS = [
    *log_rows("orders", 0, 4),
    *log_rows("orders", 1, 2),
    row("a:b", 3, 70, headers=[("trace", b"1")], key=b"k", attribute="x", time=None),
]


def keep_offsets(path: Path, batch: int, offsets: Offsets) -> Path:
    """Write what the query of an old version knows of a batch; return the file."""
    kept = path / "_metaq" / "checkpoint" / "offsets" / f"{batch}"
    kept.parent.mkdir(parents=True)
    kept.write_text(f'v1\n{{"batchWatermarkMs":0}}\n{format_offsets(offsets)}')
    return kept


def test_an_archive_is_taken_over_where_it_lies(
    spark: SparkSession, tmp_path: Path, path: Path
) -> None:
    """Not a file moves; the job goes on; every reader has the same rows."""
    feed = Feed(tmp_path / "feed")
    feed.add(ROWS)
    names = old_archive(spark, path, ROWS, 0)
    keep_offsets(path, 0, feed.advance({}))
    before = {name: (path / name).stat() for name in names}

    command = f"metaq pipeline adopt {path}"
    for use in (open_archive, compact, lambda p: archive_feed(spark, feed, p)):
        with pytest.raises(ArchiveError, match=command):
            use(str(path))
    found = adopt(str(path))
    assert (found.message_count, found.file_count) == (len(ROWS), len(names))
    assert {name: (path / name).stat() for name in names} == before
    more = log_rows("orders", 1, 3, start=2)
    feed.add(more)
    assert archive_feed(spark, feed, str(path)).message_count == 3
    wanted = places_of([*ROWS, *more])
    for _ in range(2):
        assert {*map(tuple, places_elsewhere(str(path)).values())} == {tuple(wanted)}
        rows = read_archive(spark, str(path))
        assert places(rows.collect()) == wanted
        (back,) = rows.where("offset = 70").collect()
        assert (back.key, back.attribute, back.timestamp) == (b"k", "x", None)
        assert [(h.key, h.value) for h in back.headers] == [("trace", b"1")]
        stamped = pa.table(DeltaTable(path).scan(columns=["offset", "timestamp"]))
        times = {(each["offset"], each["timestamp"]) for each in stamped.to_pylist()}
        assert times == {(each[3], each[5]) for each in (*ROWS, *more)}
        compact(str(path))
    with pytest.raises(ArchiveError, match="no archive of an older version"):
        adopt(str(path))


def test_an_archive_without_its_progress_is_refused(
    spark: SparkSession, tmp_path: Path, path: Path
) -> None:
    """Starting from scratch would archive everything again."""
    feed = Feed(tmp_path / "feed")
    feed.add(ROWS)
    old_archive(spark, path, ROWS, 0)
    adopt(str(path))
    broken = ("", "v1\n{}", "v1\n{}\n{}", "v1\n{}\n-")
    with pytest.raises(ArchiveError, match=r"offsets/0 does not show how far"):
        archive_feed(spark, feed, str(path))
    kept = keep_offsets(path, 0, {})
    for text in broken:
        kept.write_text(text)
        with pytest.raises(ArchiveError, match=r"offsets/0 does not show how far"):
            archive_feed(spark, feed, str(path))
    assert places(read_archive(spark, str(path)).collect()) == places_of(ROWS)


def test_a_table_has_what_the_manifest_said(spark: SparkSession, path: Path) -> None:
    """Of a file that is gone as well: that is what an audit goes by."""
    names = old_archive(spark, path, ROWS, 5)
    commits = path / "_metaq" / "checkpoint" / "commits"
    commits.mkdir(parents=True)
    (commits / "7").write_text("{}")
    (commits / ".7.crc").write_text("")
    for name in names:
        (path / name).unlink()
    assert adopt(str(path)).message_count == len(ROWS)
    store = open_archive(str(path))
    assert store.count_rows(store.files()) == {}
    assert store.batch == 7
    ends = {0: 150, 1: 50}
    for number, end in ends.items():
        assert store.end(TopicPartition("orders", BrokerId(0), number)) == end
    assert store.end(TopicPartition("orders", BrokerId(0), 2)) is None
    both = [file.log for file in store.files("orders") if file.log.up_to]
    assert {log.up_to for log in both} == {TopicPartition("orders", BrokerId(0), 1)}


def test_the_oldest_manifests_leave_it_to_the_files(
    spark: SparkSession, path: Path
) -> None:
    """Their footers show it."""
    old_archive(spark, path, ROWS[:4], 0)
    manifest = path / "_metaq" / "manifest" / f"{3:020}.json"
    fields = json.loads(manifest.read_text())
    del fields["logs"]
    manifest.write_text(json.dumps(fields))
    adopt(str(path))
    store = open_archive(str(path))
    assert sum(file.message_count for file in store.files()) == 4
    assert store.end(TopicPartition("orders", BrokerId(0), 0)) == 150


def test_a_take_over_that_is_killed_is_run_again(
    spark: SparkSession, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the table, before its commit, and after it; no job takes it for one."""
    old_archive(spark, path, ROWS, 0)

    commit = ArchiveStore.commit

    def die(*_words: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    def die_late(*words: Any, **named: Any) -> None:
        commit(*words, **named)
        raise KeyboardInterrupt

    for name, dying in (("claim", die), ("commit", die), ("commit", die_late)):
        with monkeypatch.context() as patch:
            patch.setattr(ArchiveStore, name, dying)
            with pytest.raises(KeyboardInterrupt):
                adopt(str(path))
        with pytest.raises(ArchiveError, match="metaq pipeline adopt"):
            open_archive(str(path))
    adopt(str(path))
    assert places(read_archive(spark, str(path)).collect()) == places_of(ROWS)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is no manifest"),
        ("[]", "is no manifest"),
        ('{"version":1}', "is no manifest"),
        ('{"version":2}', "version 2, expected 1"),
        ('{"version":1,"query":"q","batch":0,"files":[["a"]]}', "is no manifest"),
        ('{"version":1,"query":"q","batch":0,"files":[["a",1,1]]}', "No such file"),
    ],
)
def test_what_is_no_manifest_is_refused(path: Path, text: str, what: str) -> None:
    """Never taken for an empty archive."""
    manifests = path / "_metaq" / "manifest"
    manifests.mkdir(parents=True)
    (manifests / f"{1:020}.json").write_text(text)
    with pytest.raises(ArchiveError, match=what):
        adopt(str(path))
    assert not ArchiveStore(str(path)).exists

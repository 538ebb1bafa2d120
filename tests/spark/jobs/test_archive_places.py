"""An archive wherever Spark can write: URLs, odd names, no local file system."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from metaq.spark.errors import ArchiveError, OptionError
from metaq.spark.jobs.archive import archive, archive_stream
from metaq.spark.jobs.archive_store import ArchiveStore, read_archive
from metaq.spark.jobs.compact import compact
from metaq.spark.jobs.files import ArchiveFiles
from tests.spark.jobs.archives import Feed, log_rows, places, places_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ODD = "with spaces, 100% #1 + é"


def viewed(spark: SparkSession, directory: Path) -> str:
    """Return the URL of a directory behind Hadoop's `viewfs`, mounted for this test.

    Its URLs are no local paths, and it renames nothing from one mount to another.
    """
    directory.mkdir()
    context = spark.sparkContext
    settings: Any = context._jsc.hadoopConfiguration()
    table = directory.parent.name.replace("_", "-").lower()
    key = f"fs.viewfs.mounttable.{table}.link./data"
    settings.set(key, directory.as_uri())
    return f"viewfs://{table}/data"


@pytest.fixture(params=["odd name", "odd URL", "viewfs"])
def place(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path
) -> tuple[str, Path]:
    """Return how an archive is named, and where its files are."""
    match request.param:
        case "odd name":
            return str(tmp_path / ODD), tmp_path / ODD
        case "odd URL":
            return f"file:{tmp_path}/{ODD}", tmp_path / ODD
        case _:
            root = tmp_path / "mounted"
            return f"{viewed(spark, root)}/archive", root / "archive"


@pytest.mark.sampled(1)
def test_an_archive_is_the_same_wherever_it_lies(
    spark: SparkSession, tmp_path: Path, place: tuple[str, Path]
) -> None:
    """Written twice, put together, cleared of what a killed job left, and read."""
    url, directory = place
    feed = Feed(spark, tmp_path / "feed")
    rows = [log_rows("orders", 0, 4, start=4 * n) for n in range(3)]
    feed.add(rows[0])
    feed.add(rows[1])
    archive_stream(feed.stream(), url, file_bytes=2)
    left = (
        directory
        / "topic=orders"
        / "date=2026-01-31"
        / f"batch-{7:010}-{1:010}-00000.parquet"
    )
    left.write_bytes(b"of a job that was killed")
    feed.add(rows[2])
    found = archive_stream(feed.stream(), url, file_bytes=2)
    assert (found.message_count, found.total_message_count) == (4, 12)
    assert not left.exists()
    everything = [row for batch in rows for row in batch]
    assert places(read_archive(spark, url).collect()) == places_of(everything)
    assert compact(spark, url).replaced_count > 0
    assert places(read_archive(spark, url).collect()) == places_of(everything)
    named = {directory / file.path for file in ArchiveStore(spark, url).manifest.files}
    assert set(directory.glob("topic=*/**/*.parquet")) == named
    assert not list((directory / "_metaq" / "staging").glob("*"))


def test_two_jobs_cannot_commit_the_same_number(
    spark: SparkSession, place: tuple[str, Path]
) -> None:
    """The second one fails, on any file system."""
    url, _directory = place
    one, two = ArchiveStore(spark, url), ArchiveStore(spark, url)
    one.claim("query")
    with pytest.raises(ArchiveError, match="another job writes this archive"):
        two.claim("query")
    names = [file.path for file in ArchiveFiles(spark, url).list_files("_metaq")]
    assert len([name for name in names if name.endswith(".json")]) == 1


@pytest.mark.sampled(1)
def test_of_those_who_create_a_file_at_once_one_succeeds(
    spark: SparkSession, place: tuple[str, Path]
) -> None:
    """Its contents are theirs; the others say one sentence, and leave nothing."""
    url, directory = place
    jobs = [ArchiveFiles(spark, url) for _ in range(4)]
    gate = threading.Barrier(len(jobs))

    def create(number: int, path: str) -> str | None:
        gate.wait(60)
        try:
            jobs[number].create(path, b"%d" % number * 1000)
        except ArchiveError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(jobs)) as pool:
        for turn in range(25):
            path = f"_metaq/manifest/{turn:05}.json"
            said = list(pool.map(create, range(len(jobs)), [path] * len(jobs)))
            assert said.count(None) == 1, (turn, said)
            assert jobs[0].read(path) == b"%d" % said.index(None) * 1000
            sentence = f"{jobs[0].root}: {path} exists: another job writes this archive"
            assert {*said} == {None, sentence}
    names = [f.name for f in (directory / "_metaq/manifest").glob("[!.]*")]
    assert sorted(names) == [f"{turn:05}.json" for turn in range(25)]
    # A link decides it; the look for the name that comes without one may be too early.
    old, new = jobs[0]._at(path), jobs[0]._at(f"{path}.new")
    assert [jobs[0]._link(old, new) for _ in range(2)] == [True, False]


def test_a_path_that_is_a_pattern_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark would read the files of other directories, or none."""
    for mark in "*?[]{}":
        with pytest.raises(ArchiveError, match="takes for patterns"):
            ArchiveFiles(spark, str(tmp_path / f"archive-{mark}"))


@pytest.mark.parametrize(
    "options",
    [
        {"valueFormat": "string", "badRows": "column"},
        {"valueFormat": "json", "valueSchema": "a INT"},
    ],
)
def test_an_archive_takes_values_as_they_are(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    """Others would not come back from it."""
    wire = {"brokers": "127.0.0.1:1", "subscribe": "orders"}
    with pytest.raises(OptionError, match="expected valueFormat=binary, got"):
        archive(spark, str(tmp_path), {**wire, **options})


@pytest.mark.parametrize("root", ["", ":x", "file://elsewhere/archive", "nobody://x"])
def test_a_path_that_is_none_is_one_sentence(spark: SparkSession, root: str) -> None:
    """Whichever kind of error Spark makes of it."""
    with pytest.raises(ArchiveError) as failed:
        ArchiveFiles(spark, root)
    assert "\n" not in str(failed.value)

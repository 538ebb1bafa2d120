"""Several jobs on one archive: each batch is in it once."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.model import BrokerId, TopicPartition
from metaq.spark.errors import ArchiveError
from metaq.spark.jobs.archive import archive_stream
from metaq.spark.jobs.archive_store import ArchiveStore, read_archive
from metaq.spark.jobs.compact import compact
from tests.spark.jobs.archives import Feed, frame, log_rows, places, places_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


def test_of_two_that_write_one_batch_the_second_fails(
    spark: SparkSession, path: str
) -> None:
    """Its files count nowhere, and it finds the batch in the archive then."""
    rows = log_rows("orders", 0, 4)
    slow = ArchiveStore(path)
    slow.claim("query")
    quick = ArchiveStore(path)
    assert not slow.has_batch(0)
    late = slow.write(frame(spark, rows), 0)
    assert not quick.has_batch(0)
    quick.commit(0, quick.write(frame(spark, rows), 0))
    with pytest.raises(ArchiveError, match="another job writes this archive"):
        slow.commit(0, late)
    assert slow.has_batch(0)
    assert places(read_archive(spark, path).collect()) == places_of(rows)


def test_a_job_that_slept_goes_on_where_the_archive_is(
    spark: SparkSession, path: str
) -> None:
    """It leaves out what another one has archived meanwhile."""
    one, two = log_rows("orders", 0, 4), log_rows("orders", 0, 4, start=4)
    slow = ArchiveStore(path)
    slow.claim("query")
    quick = ArchiveStore(path)
    for batch, rows in enumerate((one, two)):
        quick.commit(batch, quick.write(frame(spark, rows), batch))
    assert [slow.has_batch(batch) for batch in range(3)] == [True, True, False]
    slow.commit(2, ())
    assert quick.has_batch(2)
    assert places(read_archive(spark, path).collect()) == places_of(one + two)


def test_the_end_of_each_partition_is_kept(spark: SparkSession, path: str) -> None:
    """Also of those that one task has written to one file."""
    rows = frame(spark, log_rows("orders", 1, 2) + log_rows("orders", 0, 2))
    store = ArchiveStore(path)
    store.claim("query")
    store.commit(0, store.write(rows.coalesce(1), 0))
    store.commit(1, store.write(frame(spark, log_rows("orders", 0, 1, start=2)), 1))
    ends = [store.end(TopicPartition("orders", BrokerId(0), n)) for n in range(3)]
    assert ends == [100, 50, None]


def test_of_two_that_begin_an_archive_one_does(spark: SparkSession, path: str) -> None:
    """The other one says so."""
    one, two = ArchiveStore(path), ArchiveStore(path)
    one.claim("query")
    with pytest.raises(ArchiveError, match="exists"):
        two.claim("query")


def test_a_batch_goes_in_while_small_files_are_put_together(
    spark: SparkSession, tmp_path: Path, path: str
) -> None:
    """By whichever engine; neither takes anything from the other."""
    feed = Feed(spark, tmp_path / "feed")
    rows = [log_rows("orders", 0, 4, start=4 * n) for n in range(3)]
    for batch in rows[:2]:
        feed.add(batch)
    archive_stream(feed.stream(), path)
    store = ArchiveStore(path)
    late = store.write(frame(spark, rows[2]), 2)
    assert compact(path).replaced_count > 0
    store.commit(2, late)
    wanted = [row for batch in rows for row in batch]
    assert places(read_archive(spark, path).collect()) == places_of(wanted)

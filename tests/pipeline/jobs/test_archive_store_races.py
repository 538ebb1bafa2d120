"""Several jobs on one archive: each batch is in it once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive import SMALL_FILES_MAX
from metaq.pipeline.jobs.archive_store import STAGING, ArchiveStore, read_archive
from metaq.pipeline.jobs.compact import FILE_BYTES, compact
from metaq.pipeline.jobs.day_files import DataFile
from tests.pipeline.jobs.archives import (
    Feed,
    archive_feed,
    log_rows,
    overtaken_by,
    places,
    places_of,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ONE = TopicPartition("orders", BrokerId(0), 0)


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "feed")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


def staged(
    spark: SparkSession, feed: Feed, store: ArchiveStore, batch: int
) -> tuple[DataFile, ...]:
    """Write what a feed has after the archive's own offsets, as a batch."""
    now = store.positions()
    return store.write(spark, feed.tasks(now, feed.advance(now)), feed.read, batch)


def test_of_two_that_write_one_batch_the_second_fails(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Its files count nowhere; also where it has seen the other's batch by then."""
    rows = log_rows("orders", 0, 4)
    feed.add(rows)
    slow = ArchiveStore(path, may_be_new=True)
    slow.claim()
    quick = ArchiveStore(path, may_be_new=True)
    late = staged(spark, feed, slow, 0)
    quick.commit(0, staged(spark, feed, quick, 0), positions=feed.advance({}))
    for _ in range(2):
        with pytest.raises(ArchiveError, match="another job writes this archive"):
            slow.commit(0, late, positions=feed.advance({}))
        slow.compact(FILE_BYTES)
    assert places(read_archive(spark, path).collect()) == places_of(rows)
    assert ArchiveStore(path, may_be_new=True).positions() == feed.advance({})


def test_the_progress_of_each_partition_is_kept(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """The last message, and the next byte, also of what a batch does not have."""
    one, two, other = (TopicPartition("orders", BrokerId(0), n) for n in range(3))
    feed.add(log_rows("orders", 1, 2) + log_rows("orders", 0, 2))
    feed.add(log_rows("orders", 0, 1, start=2))
    archive_feed(spark, feed, path)
    store = ArchiveStore(path, may_be_new=True)
    assert [store.end(p) for p in (one, two, other)] == [100, 50, None]
    assert store.positions() == {one: 101, two: 51}
    assert store.last_messages() == {one: (100, 101), two: (50, 51)}
    store.commit(store.batch + 1, (), positions={other: Offset(7)})
    store = ArchiveStore(path, may_be_new=True)
    assert store.positions() == {one: 101, two: 51, other: 7}
    assert store.last_messages() == {one: (100, 101), two: (50, 51)}


def test_progress_that_another_program_took_away_is_missed(path: str) -> None:
    """Starting from scratch would archive everything again."""
    store = ArchiveStore(path, may_be_new=True)
    store.claim()
    assert store.positions() == {}
    store.commit(0, (), positions={})
    with pytest.raises(ArchiveError, match=r"metaq\.archive\.partitions of the table"):
        ArchiveStore(path, may_be_new=True).positions()


def test_of_jobs_that_create_one_archive_one_goes_on(path: str) -> None:
    """The others fail with one sentence, also in the same moment."""
    stores = [ArchiveStore(path, may_be_new=True) for _ in range(4)]
    stores[0].claim()
    sentence = (
        f"{path}: another job writes this archive: it has created the table since"
        " this job began"
    )
    with ThreadPoolExecutor() as pool:
        claims = [pool.submit(store.claim) for store in stores[1:]]
    assert [str(claim.exception()) for claim in claims] == [sentence] * 3


def test_a_batch_counts_though_what_it_has_staged_cannot_be_deleted(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An attempt that Spark has given up may still write; the next batch deletes it."""
    store = ArchiveStore(path, may_be_new=True)
    store.claim()
    left = Path(path, STAGING, "0000000000-app")
    # A file is in place of a directory that is filled while it is deleted.
    left.touch()
    for batch in (0, 1):
        store.commit(batch, (), positions={ONE: Offset(batch)})
        assert ArchiveStore(path, may_be_new=True).positions() == {ONE: batch}
        assert f"staged files not removed yet: {path}: " in caplog.text
    left.unlink()
    left.mkdir()
    store.commit(2, (), positions={})
    assert not left.exists()


def test_a_batch_counts_though_its_compaction_loses_a_race(
    spark: SparkSession,
    feed: Feed,
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next batch puts the files together."""
    numbers = range(SMALL_FILES_MAX)
    rows = [row for number in numbers for row in log_rows("orders", number, 1)]

    def alter() -> None:
        days = {"delta.logRetentionDuration": "interval 8 days"}
        DeltaTable(path).alter.set_table_properties(days)

    feed.add(rows)
    with overtaken_by(alter):
        found = archive_feed(spark, feed, path)
    assert (found.message_count, found.compacted_count) == (len(rows), 0)
    assert "small files stay until the next batch" in caplog.text
    last = log_rows("orders", 0, 1, start=1)
    feed.add(last)
    assert archive_feed(spark, feed, path).compacted_count >= SMALL_FILES_MAX
    assert places(read_archive(spark, path).collect()) == places_of(rows + last)


def test_a_batch_goes_in_while_small_files_are_put_together(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """By whichever engine; neither takes anything from the other."""
    rows = [log_rows("orders", 0, 4, start=4 * n) for n in range(3)]
    for batch in rows[:2]:
        feed.add(batch)
    archive_feed(spark, feed, path)
    feed.add(rows[2])
    store = ArchiveStore(path, may_be_new=True)
    late = staged(spark, feed, store, 2)
    assert compact(path).replaced_count > 0
    store.commit(2, late, positions={})
    wanted = [row for batch in rows for row in batch]
    assert places(read_archive(spark, path).collect()) == places_of(wanted)

"""Archiving: each message once, no matter what is killed when."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures
from pyspark.sql import SparkSession

from metaq.pipeline.errors import ArchiveError, JobError
from metaq.pipeline.jobs import archive
from metaq.pipeline.jobs.archive import ArchiveProgress
from metaq.pipeline.jobs.archive_store import ArchiveStore, read_archive
from metaq.pipeline.jobs.compact import compact
from metaq.pipeline.jobs.day_files import NO_VALUE
from metaq.spark.source.read_task import ReadTask
from tests.pipeline.jobs.archives import (
    Feed,
    Row,
    archive_feed,
    log_rows,
    places,
    places_elsewhere,
    places_of,
    row,
)
from tests.sampling import IS_WHOLE, sample

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
STEPS = ("claim", "write", "commit", "compact")
"""Steps of a run on an archive; it may end before and after each."""
LEFT = 8 * 24 * 3600
"""Age of a file that the table does not keep any more, seconds."""


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "feed")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


def batches(count: int = 3) -> list[list[Row]]:
    """Return rows of two topics and three partitions, batch by batch."""
    return [
        log_rows("orders", 0, 4, start=4 * n)
        + log_rows("orders", 1, 2, start=2 * n)
        + log_rows("logs", 0, 3, start=3 * n)
        for n in range(count)
    ]


def joined(rows: list[list[Row]]) -> list[Row]:
    return [row for batch in rows for row in batch]


def data_files(path: str) -> list[str]:
    """Return the files that count."""
    return [file.path for file in ArchiveStore(path).files()]


def check(spark: SparkSession, path: str, rows: list[Row]) -> None:
    """Expect each message once, by our reader, by Delta's own and by DuckDB."""
    wanted = places_of(rows)
    assert places(read_archive(spark, path).collect()) == wanted
    for reader, found in places_elsewhere(path).items():
        assert found == wanted, reader
    assert DeltaTable(path).count() == len(rows)


def test_only_the_files_of_wanted_topics_and_days_are_looked_at(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """The table names them; a store is not listed."""
    rows = [*joined(batches()), row("orders", 1, 900, time=None)]
    feed.add(rows)
    archive_feed(spark, feed, path)
    night, day = date(2026, 1, 31), date(2026, 2, 1)

    def directories(**asked: Any) -> set[str]:
        found = read_archive(spark, path, **asked)
        files = [Path(unquote(file)).parent for file in found.inputFiles()]
        names = {f"{file.parent.name} {file.name}" for file in files}
        assert {f"topic={r.topic} date={r.date}" for r in found.collect()} == {
            name.replace(NO_VALUE, "None") for name in names
        }
        return names

    assert directories(topics=["logs"]) == {
        f"topic=logs date={d}" for d in (night, day)
    }
    assert directories(topics=["orders"], last_date=night) == {
        f"topic=orders date={night}"
    }
    assert directories(first_date=day) == {
        f"topic={topic} date={day}" for topic in ("logs", "orders")
    }
    assert len(directories()) == 5
    with pytest.raises(ArchiveError, match="the archive has no topic 'order'"):
        read_archive(spark, path, topics=["order"])


def test_topics_are_archived_by_topic_and_day(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Every column comes back; the summary and progress add up."""
    rows = batches()
    bare = row("orders", 1, 900, b"\x00\xff", broker_id=3, time=None, attribute="k=v")
    rows[2].append(bare)
    for each in rows:
        feed.add(each)
    seen: list[ArchiveProgress] = []
    found = archive_feed(spark, feed, path, on_progress=seen.append)
    everything = joined(rows)
    assert (found.message_count, found.batch_count) == (28, 3)
    assert found.total_message_count == 28
    assert [p.batch for p in seen] == [0, 1, 2]
    assert seen[-1].message_count == 28
    assert seen[-1].written_bytes == found.written_bytes > 0
    check(spark, path, everything)
    assert not list(Path(path, "_metaq", "staging").iterdir())
    directories = {name.rpartition("/")[0] for name in data_files(path)}
    assert directories == {
        "topic=logs/date=2026-01-31",
        "topic=logs/date=2026-02-01",
        "topic=orders/date=2026-01-31",
        "topic=orders/date=2026-02-01",
        "topic=orders/date=__HIVE_DEFAULT_PARTITION__",
    }
    assert found.total_file_count == len(data_files(path))
    assert found.compacted_count == 0
    (back,) = read_archive(spark, path).where("offset = 900").collect()
    assert tuple(back)[:-1] == (*bare[:-1], bytearray(bare[-1]))
    assert back["date"] is None


def test_the_next_run_goes_on(spark: SparkSession, feed: Feed, path: str) -> None:
    """Nothing new is nothing new; what is new is added."""
    one, two, three = batches()
    feed.add(one)
    archive_feed(spark, feed, path)
    again = archive_feed(spark, feed, path)
    assert (again.message_count, again.batch_count) == (0, 0)
    assert again.total_message_count == len(one)
    feed.add(two)
    feed.add(three)
    assert archive_feed(spark, feed, path).message_count == len(two + three)
    check(spark, path, one + two + three)


def test_any_name_of_a_topic_comes_back(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Directories hold what their names cannot; a number stays a text."""
    topics = ("a:b", "50%", "007", "x y", "k=v", "größe→")
    rows = [row(topic, 0, 0) for topic in topics]
    feed.add(rows)
    archive_feed(spark, feed, path)
    assert places(read_archive(spark, path).collect()) == places_of(rows)
    assert [file.message_count for file in ArchiveStore(path).files()] == [1] * 6
    feed.add([row(topic, 0, 50) for topic in topics])
    archive_feed(spark, feed, path)
    # Delta's own writer names directories in a way that Spark reads otherwise.
    assert compact(path).written_count == 6
    check(spark, path, rows + [row(topic, 0, 50) for topic in topics])


def test_it_goes_on_until_it_is_stopped(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Later messages are archived as well; then the summary is returned."""
    one, two = batches(2)
    feed.add(one)
    stop = threading.Event()
    count = len(one + two)

    def take(progress: ArchiveProgress) -> None:
        if progress.message_count == count:
            stop.set()
        else:
            feed.add(two)

    found = archive_feed(spark, feed, path, interval_s=0.1, on_progress=take, stop=stop)
    assert (found.message_count, found.batch_count) == (count, 2)
    check(spark, path, one + two)


def test_ctrl_c_is_no_end_of_a_run_that_ends_by_itself(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Not everything is archived then; a run that goes on has no other end."""
    one, two = batches(2)
    waiting = threading.get_ident()

    def interrupt(_progress: ArchiveProgress) -> None:
        signal.pthread_kill(waiting, signal.SIGINT)

    feed.add(one)
    found = archive_feed(spark, feed, path, interval_s=0.1, on_progress=interrupt)
    assert found.message_count == len(one)
    feed.add(two)
    with pytest.raises(KeyboardInterrupt):
        archive_feed(spark, feed, path, on_progress=interrupt)


def test_an_empty_topic_gives_an_empty_archive(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """It exists, and has no rows; where there is none, that is an error."""
    with pytest.raises(ArchiveError, match="not an archive"):
        read_archive(spark, path)
    found = archive_feed(spark, feed, path)
    assert found.total_message_count == found.total_file_count == 0
    assert read_archive(spark, path).count() == 0


def no_space(_task: ReadTask) -> Iterator[pa.RecordBatch]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_batch_that_fails_says_why(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Spark alone would say that a function failed; with any reason."""
    feed.add(batches(1)[0])
    with pytest.raises(JobError, match=r"^archive: .*No space left") as failed:
        archive_feed(spark, feed, path, read=no_space)
    assert "\n" not in str(failed.value)

    def fail(_progress: ArchiveProgress) -> None:
        raise LookupError("of the caller")

    with pytest.raises(LookupError, match=r"^of the caller$"):
        archive_feed(spark, feed, path, on_progress=fail)
    check(spark, path, batches(1)[0])


class Killed(Exception):
    """Stands in for a kill: nothing of ours handles it."""


def kill_points(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    """Raise at the step number `at`, and at each one after it."""
    done = 0

    def reach(name: str) -> None:
        nonlocal done
        done += 1
        if done > at:
            raise Killed(f"at {name}")

    def dying(name: str) -> Any:
        real = getattr(ArchiveStore, name)

        def call(*words: Any, **named: Any) -> Any:
            reach(f"the begin of {name}")
            result = real(*words, **named)
            reach(f"the end of {name}")
            return result

        return call

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(ArchiveStore, name, dying(name))
        yield


@pytest.mark.timeout(900)
def test_a_job_that_ends_at_any_step_loses_and_doubles_nothing(
    spark: SparkSession,
    feed: Feed,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
) -> None:
    """Every change of a file is the last one once; the next run sets it right."""
    monkeypatch.setattr(archive, "SMALL_FILES_MAX", 2)
    rows: list[Row] = []

    def add() -> None:
        batch = log_rows("orders", 0, 2, start=len(rows))
        feed.add(batch)
        rows.extend(batch)

    add()
    archive_feed(spark, feed, path)
    last = 2 * len(STEPS)
    some = range(last) if IS_WHOLE else sorted(sample(range(last), 3, rng))
    for step in chain(some, count(last)):
        add()
        is_through = True
        for _ in kill_points(monkeypatch, step):
            try:
                archive_feed(spark, feed, path)
            except (Killed, JobError):
                is_through = False
        found = [tuple(p) for p in places(read_archive(spark, path).collect())]
        assert len(set(found)) == len(found), step
        assert set(found) <= set(places_of(rows)), step
        if is_through:
            break
        archive_feed(spark, feed, path)
        check(spark, path, rows)
    assert step == last
    check(spark, path, rows)
    assert not list(Path(path, "_metaq", "staging").iterdir())


def test_a_table_that_was_set_back_goes_on_from_there(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Its progress was set back with it, so nothing is missing."""
    for batch in batches(2):
        feed.add(batch)
    archive_feed(spark, feed, path)
    max(Path(path, "_delta_log").glob("*.json")).unlink()
    check(spark, path, batches(1)[0])
    assert archive_feed(spark, feed, path).message_count == len(batches(2)[1])
    check(spark, path, joined(batches(2)))


def test_a_table_that_was_restored_goes_on_from_there(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Which sets its files back, and not its progress."""
    first, second = batches(2)
    for batch in (first, second):
        feed.add(batch)
    archive_feed(spark, feed, path)
    table = DeltaTable(path)
    begun = table.version() - 1
    table.restore(begun)
    check(spark, path, first)
    assert archive_feed(spark, feed, path).message_count == len(second)
    check(spark, path, first + second)
    assert archive_feed(spark, feed, path).message_count == 0
    # To a version after which it was set back before, and to its beginning.
    for version, left in ((begun + 1, first + second), (begun, first), (0, [])):
        DeltaTable(path).restore(version)
        check(spark, path, left)
    assert archive_feed(spark, feed, path).batch_count == 2
    check(spark, path, first + second)
    table = DeltaTable(path)
    moment_ms = table.history()[table.version() // 2]["timestamp"]
    table.restore(datetime.fromtimestamp(moment_ms / 1000, UTC))
    with pytest.raises(ArchiveError, match="was restored to a time"):
        archive_feed(spark, feed, path)


def test_a_table_with_features_is_refused(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """Spark's Parquet reader would show rows that are deleted."""
    archive_feed(spark, feed, path)
    alter = DeltaTable(path).alter
    feature = TableFeatures.DeletionVectors
    alter.add_feature(feature, allow_protocol_versions_increase=True)
    for use in (lambda: read_archive(spark, path), lambda: compact(path)):
        with pytest.raises(ArchiveError, match="readers of version 1, got 3"):
            use()


def test_files_of_others_stay_where_they_are(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """An archive may come to lie where something else is already."""
    other = Path(path, "topic=orders", "others.parquet")
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of somebody else")
    for batch in batches(2):
        feed.add(batch)
        archive_feed(spark, feed, path)
        assert other.read_bytes() == b"of somebody else"
    assert places(read_archive(spark, path).collect()) == places_of(joined(batches(2)))


def test_a_lost_log_is_refused(
    spark: SparkSession, feed: Feed, path: str, tmp_path: Path
) -> None:
    """Without it every file would pass for what a killed job left."""
    for batch in batches(2):
        feed.add(batch)
        archive_feed(spark, feed, path)
    Path(path, "_delta_log").rename(tmp_path / "elsewhere")
    for use in (lambda: archive_feed(spark, feed, path), lambda: compact(path)):
        with pytest.raises(ArchiveError, match="but no _delta_log that says which"):
            use()
    assert not Path(path, "_delta_log").exists()


def test_what_a_killed_job_left_is_not_read(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """A file counts when the table names it; it is deleted when it is old."""
    one, two = batches(2)
    feed.add(one)
    archive_feed(spark, feed, path)
    real = Path(path, data_files(path)[0])
    old, young = real.with_name("old.parquet"), real.with_name("young.parquet")
    for left in (old, young):
        left.write_bytes(real.read_bytes())
    os.utime(old, (time.time() - LEFT, time.time() - LEFT))
    assert places(read_archive(spark, path).collect()) == places_of(one)
    feed.add(two)
    archive_feed(spark, feed, path)
    compact(path)
    assert (old.exists(), young.exists()) == (False, True)
    check(spark, path, one + two)


def test_small_files_are_put_together(
    spark: SparkSession, feed: Feed, path: str
) -> None:
    """A reader that has begun before reads on; large files stay."""
    rows = [log_rows("orders", n % 2, 3, start=3 * n) for n in range(6)]
    for each in rows:
        feed.add(each)
    archive_feed(spark, feed, path)
    assert len(data_files(path)) == 7
    before = read_archive(spark, path)
    found = compact(path)
    # The older day has one file, which stays as it is.
    assert (found.replaced_count, found.written_count) == (6, 1)
    assert len(data_files(path)) == 2
    assert places(before.collect()) == places_of(joined(rows))
    check(spark, path, joined(rows))
    assert (compact(path).replaced_count, len(data_files(path))) == (0, 2)


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pyspark.sql import SparkSession
from metaq.pipeline.jobs.archive_store import ArchiveStore
from tests.pipeline.jobs.archives import Feed, archive_feed
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = spark.config("spark.sql.session.timeZone", "Asia/Tokyo")
spark = spark.config("spark.sql.shuffle.partitions", "1").getOrCreate()
commit = ArchiveStore.commit
def dying(store, batch, files, **named):
    if batch == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(store, batch, files, **named)
ArchiveStore.commit = dying
archive_feed(spark, Feed(Path({feed!r})), {path!r})
"""


@pytest.mark.crash
def test_a_killed_driver_loses_and_doubles_nothing(
    spark: SparkSession, feed: Feed, path: str, tmp_path: Path
) -> None:
    """The process is killed with files written and no commit that names them."""
    rows = batches()
    for each in rows:
        feed.add(each)
    script = KILLED.format(
        root=str(ROOT), feed=str(tmp_path / "feed"), path=path, victim=1
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert places(read_archive(spark, path).collect()) == places_of(rows[0])
    assert len(list(Path(path).glob("topic=*/**/*.parquet"))) > len(data_files(path))
    archive_feed(spark, feed, path)
    check(spark, path, joined(rows))

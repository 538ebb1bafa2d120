"""An archive wherever it may lie, and what it refuses to be."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive import archive
from metaq.pipeline.jobs.archive_store import ArchiveStore, read_archive
from metaq.pipeline.jobs.audit import audit_archive
from metaq.pipeline.jobs.compact import compact
from metaq.spark.errors import OptionError
from tests.pipeline.jobs.archives import Feed, archive_feed, log_rows, places, places_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ODD = "with spaces, 100% #1 + é"


@pytest.mark.parametrize("url", ["{}", "file:{}", "file://{}"])
@pytest.mark.sampled(1)
def test_an_archive_is_the_same_wherever_it_lies(
    spark: SparkSession, tmp_path: Path, url: str
) -> None:
    """Written twice, put together, and read."""
    place = url.format(tmp_path / ODD)
    feed = Feed(tmp_path / "feed")
    rows = [log_rows("orders", 0, 4, start=4 * n) for n in range(3)]
    for batch in rows[:2]:
        feed.add(batch)
    archive_feed(spark, feed, place)
    feed.add(rows[2])
    found = archive_feed(spark, feed, place)
    assert (found.message_count, found.total_message_count) == (4, 12)
    everything = [row for batch in rows for row in batch]
    assert places(read_archive(spark, place).collect()) == places_of(everything)
    assert compact(place).replaced_count > 0
    assert places(read_archive(spark, place).collect()) == places_of(everything)
    files = {tmp_path / ODD / file.path for file in ArchiveStore(place).files()}
    assert all(file.is_file() for file in files)


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
    """Others would not come back from it, and are never what it holds."""
    wire = {"brokers": "127.0.0.1:1", "subscribe": "orders"}
    with pytest.raises(OptionError, match="expected valueFormat=binary, got"):
        archive(spark, str(tmp_path), {**wire, **options})
    with pytest.raises(OptionError, match="expected valueFormat=binary, got"):
        audit_archive(spark, str(tmp_path), {**wire, **options}, ["orders"])


def test_a_store_that_nobody_knows_is_one_sentence(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Before a job starts."""
    feed = Feed(tmp_path / "feed")
    for use in (ArchiveStore, lambda path: archive_feed(spark, feed, path)):
        with pytest.raises(ArchiveError, match="nobody://x") as failed:
            use("nobody://x")
        assert "\n" not in str(failed.value)

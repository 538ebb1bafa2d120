"""Several jobs on one archive: one goes on, and nothing that it has is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from metaq.spark.errors import ArchiveError
from metaq.spark.jobs.archive_store import (
    DATE_OF_TIMESTAMP,
    MANIFESTS_KEPT,
    ArchiveStore,
    read_archive,
)
from metaq.spark.jobs.files import ArchiveFiles
from metaq.spark.jobs.manifest import manifest_name
from tests.spark.jobs.archives import Row, frame, log_rows, places, places_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
DAY = "topic=orders/date=2026-01-31"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


def add(spark: SparkSession, store: ArchiveStore, rows: list[Row]) -> None:
    """Write rows as the next batch."""
    dated = frame(spark, rows).withColumn("date", sf.expr(DATE_OF_TIMESTAMP))
    batch = store.manifest.batch + 1
    written = store.write(dated, f"batch-{batch:010}")
    files = sorted([*store.manifest.files, *written], key=lambda file: file.path)
    store.commit(replace(store.manifest, batch=batch, files=tuple(files)))


def test_a_slow_start_takes_nothing_from_a_job_that_came_later(
    spark: SparkSession, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for what killed jobs left when the other has archived a batch."""
    rows = log_rows("orders", 0, 4)
    ArchiveStore(spark, path).claim("query")
    slow = ArchiveStore(spark, path)
    list_files = ArchiveFiles.list_files

    def sleep(files: ArchiveFiles, directory: str = "") -> Any:
        monkeypatch.setattr(ArchiveFiles, "list_files", list_files)
        quick = ArchiveStore(spark, path)
        quick.claim("query")
        add(spark, quick, rows)
        return list_files(files, directory)

    monkeypatch.setattr(ArchiveFiles, "list_files", sleep)
    slow.claim("query")
    assert places(read_archive(spark, path).collect()) == places_of(rows)
    with pytest.raises(ArchiveError, match="another job writes this archive"):
        slow.commit(slow.manifest)


def test_what_is_deleted_at_a_start_is_older_than_the_start(
    spark: SparkSession, path: str
) -> None:
    """Files staged and moved by later jobs have higher numbers."""
    ArchiveStore(spark, path).claim("query")
    files = ArchiveFiles(spark, path)
    names = [
        name
        for number in (2, 3)
        for name in (
            f"_metaq/staging/batch-0000000000-{number:010}/part.parquet",
            f"_metaq/staging/merged-00000-{number:010}/part.parquet",
            f"{DAY}/batch-0000000000-{number:010}-00000.parquet",
            f"{DAY}/merged-00000-{number:010}-00000.parquet",
        )
    ]
    for name in names:
        files.create(name, b"")
    ArchiveStore(spark, path).claim("query")
    manifests = {f"_metaq/manifest/{manifest_name(number)}" for number in (1, 2)}
    assert {file.path for file in files.list_files()} == {*manifests, *names[4:]}


def test_a_job_that_slept_for_many_batches_is_noticed(
    spark: SparkSession, path: str
) -> None:
    """The manifest with the number of its next batch was deleted as an old one."""
    slow, quick = ArchiveStore(spark, path), ArchiveStore(spark, path)
    slow.claim("query")
    quick.manifest = slow.manifest
    for _ in range(MANIFESTS_KEPT + 2):
        quick.commit(quick.manifest)
    with pytest.raises(ArchiveError, match="another job writes this archive"):
        slow.commit(slow.manifest)
    last = quick.manifest.number
    kept = range(last - MANIFESTS_KEPT + 1, last + 1)
    names = ArchiveFiles(spark, path).list_names("_metaq/manifest")
    assert names == [manifest_name(number) for number in kept]

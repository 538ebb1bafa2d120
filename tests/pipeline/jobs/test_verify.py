"""The parallel check: everything counted, every damage named, nothing changed."""

from pathlib import Path
from typing import cast

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from metaq.model import SizeBytes
from metaq.pipeline.jobs.archive_store import ArchiveStore, read_archive
from metaq.pipeline.jobs.verify import VerifyProgress, verify
from metaq.record.layout import HEADER_BYTES
from metaq.spark.errors import OptionError
from tests.pipeline.jobs.archives import row
from tests.pipeline.jobs.test_day_files import STAGING, write
from tests.spark.segment_dirs import (
    OTHER,
    flip,
    payloads,
    segments_of,
    write_java_log,
    write_log,
)

STRIDE = 60


def test_where_there_is_nothing_to_check_nothing_is_right(tmp_path: Path) -> None:
    """A mistyped path that exists; Spark has no part in it."""
    with pytest.raises(OptionError, match=rf"no segment is below {tmp_path}: nothing"):
        verify(cast("SparkSession", None), str(tmp_path))


@pytest.mark.spark
@pytest.mark.slow
def test_a_directory_is_verified_in_parallel(
    spark: SparkSession, data_dir: Path
) -> None:
    """The summary adds up, damage is named in order, progress reaches the end."""
    directory = write_log(data_dir, payloads(100))
    write_java_log(data_dir, [payloads(20)], OTHER)
    bad = segments_of(directory)[2]
    flip(bad.path, HEADER_BYTES)
    (data_dir / "test-0" / "00000000000000099999.meta.zip").write_bytes(b"none")
    seen: list[VerifyProgress] = []
    found = verify(
        spark,
        str(data_dir),
        bytes_per_task=SizeBytes(300),
        on_progress=seen.append,
    )
    # One record is damaged, and its span has five.
    assert (found.file_count, found.record_count) == (8, 115)
    assert found.checked_bytes == 120 * STRIDE
    assert found.torn_bytes == 0
    assert [d.offset for d in found.damage] == [bad.base_offset, 6000, 99999]
    assert len(seen) > 1
    assert seen[-1] == VerifyProgress(found.checked_bytes, found.checked_bytes, 3)


@pytest.mark.slow
def test_an_archive_is_read_as_a_whole_and_damage_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Beside a data directory, without a broker; Spark's readers refuse it too."""
    root, data_dir = tmp_path / "archive", tmp_path / "data"
    write_log(data_dir, payloads(100))
    store = ArchiveStore(str(root), may_be_new=True)
    store.claim()
    rows = [row("logs", 2, 50 * number) for number in range(100)]
    store.commit(0, write(root, rows), positions={})
    (file,) = store.files()
    (root / file.path).parent.mkdir(parents=True)
    (root / STAGING / file.path).rename(root / file.path)
    found = verify(spark, str(root), str(data_dir))
    assert (found.record_count, found.damage, found.unsummed_count) == (200, (), 0)
    flip(root / file.path, 60)
    (damage,) = verify(spark, f"file:{root}").damage
    assert (damage.path, damage.offset) == (root / file.path, 0)
    with pytest.raises(
        (PySparkException, Py4JJavaError), match=r"CRC checksum verification failed"
    ):
        read_archive(spark, str(root)).toArrow()

"""Two that put files of an archive together at once; without Spark."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError, CommitRaceError
from metaq.pipeline.jobs.archive_store import STAGING, ArchiveStore
from metaq.pipeline.jobs.compact import FILE_BYTES
from metaq.pipeline.jobs.day_files import DataFile, write_task
from metaq.spark.plan import ReadRange
from metaq.spark.source.read_task import ReadTask
from tests.pipeline.jobs.archives import arrow, log_rows, overtaken_by

pytestmark = pytest.mark.spark

PLACE = TopicPartition("orders", BrokerId(0), 0)
COUNT = 4


@pytest.fixture
def store(tmp_path: Path) -> ArchiveStore:
    """Return an archive of one message in each of COUNT files."""
    store = ArchiveStore(str(tmp_path / "archive"), may_be_new=True)
    store.claim()
    store.commit(
        0, [file for n in range(COUNT) for file in new_files(store, n)], positions={}
    )
    return store


def new_files(store: ArchiveStore, number: int) -> list[DataFile]:
    """Write a file of one message, which no commit names yet."""
    task = ReadTask(ReadRange(PLACE, Offset(0), Offset(1)), None)
    batch = arrow(log_rows("orders", 0, 1, start=number))
    files = write_task(
        task, read=lambda _task: iter([batch]), root=store.root, staging=STAGING
    )
    for file in files:
        place = Path(store.root, file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(store.root, STAGING, file.path), place)
    return files


def offsets(store: ArchiveStore) -> list[int]:
    """Return the offsets of all messages that count, in order."""
    found = []
    for file in ArchiveStore(store.root, may_be_new=True).files():
        with Path(store.root, file.path).open("rb") as stream:
            found += pq.read_table(stream)["offset"].to_pylist()
    return sorted(found)


WANTED = [50 * number for number in range(COUNT)]


def test_of_two_jobs_that_put_files_together_one_does(store: ArchiveStore) -> None:
    """Both would replace the same files, and every message be there twice."""
    other = ArchiveStore(store.root, may_be_new=True)
    with (
        overtaken_by(lambda: other.compact(FILE_BYTES)),
        pytest.raises(CommitRaceError, match="another job writes this archive"),
    ):
        store.compact(FILE_BYTES)
    assert offsets(store) == WANTED
    assert store.compact(FILE_BYTES) == (0, 0)


def test_what_another_engine_has_put_together_meanwhile_is_told(
    store: ArchiveStore,
) -> None:
    """It changes no property; the table as it was has every message once."""
    with (
        overtaken_by(lambda: DeltaTable(store.root).optimize.z_order(["offset"])),
        pytest.raises(ArchiveError, match="restore the table to version 2"),
    ):
        store.compact(FILE_BYTES)
    DeltaTable(store.root).restore(2)
    assert offsets(store) == WANTED


def test_a_batch_is_committed_behind_a_compaction(store: ArchiveStore) -> None:
    """Which changed a property of the table; two batches of one number are refused."""
    other = ArchiveStore(store.root, may_be_new=True)
    files = new_files(store, COUNT)
    assert other.compact(FILE_BYTES)[0] > 0
    store.commit(1, files, positions={PLACE: Offset(250)})
    assert offsets(store) == [*WANTED, 50 * COUNT]
    assert ArchiveStore(store.root, may_be_new=True).positions() == {PLACE: 250}
    with pytest.raises(ArchiveError, match="expected batch 2, got 1"):
        other.commit(1, (), positions={})

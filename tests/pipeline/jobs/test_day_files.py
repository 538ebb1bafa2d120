"""Files that a task writes; without Spark."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.day_files import OPEN_MAX, DataFile, directory_of, write_task
from metaq.spark.plan import ReadRange
from metaq.spark.source.read_task import ReadTask
from tests.pipeline.jobs.archives import DAY, SECOND, Row, arrow, log_rows, row

ONE_DAY = 24 * 3600 * SECOND
STAGING = "_metaq/staging/0"


def write(
    root: Path, rows: list[Row], *, piece_rows: int = 1, **more: Any
) -> list[DataFile]:
    """Write rows of one partition, so many at a time."""
    topic, broker_id, number = rows[0][:3]
    place = TopicPartition(topic, BrokerId(broker_id), number)
    task = ReadTask(ReadRange(place, Offset(0), Offset(1)), None)
    batch = arrow(rows)

    def read(_task: ReadTask) -> Iterator[pa.RecordBatch]:
        for first in range(0, batch.num_rows, piece_rows):
            yield batch.slice(first, piece_rows)

    return write_task(task, read=read, root=str(root), staging=STAGING, **more)


def rows_of(root: Path, file: DataFile) -> pa.Table:
    """Return the rows of a file alone."""
    with (root / STAGING / file.path).open("rb") as stream:
        return pq.read_table(stream)


@pytest.mark.parametrize("piece_rows", [1, 5, 1000])
def test_rows_go_to_the_files_of_their_days(tmp_path: Path, piece_rows: int) -> None:
    """In order, and each once; those without a time have files as well."""
    times = [DAY, DAY + SECOND, DAY + 2 * SECOND, None, DAY - 40 * 365 * ONE_DAY]
    times *= 3
    rows = [row("logs", 2, 50 * n, time=time) for n, time in enumerate(times)]
    files = write(tmp_path, rows, piece_rows=piece_rows)
    held: dict[str | None, list[int]] = {}
    for n, time in enumerate(times):
        held.setdefault(time and f"{time:%Y-%m-%d}", []).append(50 * n)
    assert len(files) == len(held) == 4
    for file in files:
        table = rows_of(tmp_path, file)
        assert table["offset"].to_pylist() == held[file.date]
        assert table["partition"].to_pylist() == [2] * len(table)
        assert file.path.startswith(f"{directory_of('logs', file.date)}/")
        assert file.size_bytes == (tmp_path / STAGING / file.path).stat().st_size
        log = file.log
        assert (log.message_count, log.first) == (len(table), held[file.date][0])
        assert (log.last, log.up_to) == (held[file.date][-1], None)


@pytest.mark.slow
def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    """With more days by turns, each turn has files of its own."""
    for days, count in ((OPEN_MAX, OPEN_MAX), (OPEN_MAX + 1, 3 * (OPEN_MAX + 1))):
        times = [DAY + (n % days) * ONE_DAY for n in range(3 * days)]
        rows = [row("logs", 0, n, time=time) for n, time in enumerate(times)]
        files = write(tmp_path, rows)
        assert len(files) == count
        found = [rows_of(tmp_path, file)["offset"].to_pylist() for file in files]
        assert sorted(chain.from_iterable(found)) == list(range(len(rows)))


def test_no_more_waits_than_a_row_group(tmp_path: Path) -> None:
    """However large the task is, and however its rows are shared out."""
    rows = [row("logs", 0, n, b"x" * 1000, time=DAY) for n in range(100)]
    each_bytes = arrow(rows[:1]).nbytes
    (file,) = write(tmp_path, rows, row_group_bytes=10 * each_bytes)
    footer = pq.read_metadata(tmp_path / STAGING / file.path)
    groups = [footer.row_group(n).num_rows for n in range(footer.num_row_groups)]
    assert groups == [10] * 10


def test_a_task_without_rows_writes_no_file(tmp_path: Path) -> None:
    """Filters and damage that is left out can leave nothing."""
    task = ReadTask(
        ReadRange(TopicPartition("t", BrokerId(0), 0), Offset(0), Offset(0)), None
    )
    assert (
        write_task(task, read=lambda _t: iter(()), root=str(tmp_path), staging="s")
        == []
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    """With the directory."""
    (tmp_path / "_metaq").write_text("no directory")
    with pytest.raises(ArchiveError, match=f"{tmp_path}/{STAGING}: "):
        write(tmp_path, log_rows("logs", 0, 1))


@pytest.mark.parametrize(
    "topic", ["a:b", "50%", "k=v", "größe→", "x y", "[*]?{}\\^\"'#"]
)
def test_directories_are_named_as_spark_names_them(topic: str) -> None:
    """Escaped characters come back; nothing else is escaped."""
    directory = directory_of(topic, "2026-01-31")
    found = DataFile.from_path(f"{directory}/x.parquet", 1, {}, 0)
    assert (found.topic, found.directory_topic, found.date) == (
        topic,
        topic,
        "2026-01-31",
    )
    assert "%" not in directory_of("größe→ -_.", None)

"""Rows of a task as Parquet files of an archive, one for each day.

    piece of the log  ->  Arrow batch  ->  waiting  ->  row group of the day's file

It runs in the task that reads, in its own process: no row crosses to the JVM. A task
has no more in memory than what waits, the row group that is encoded of it, and what
reads ahead. Executors import neither the table's library nor any client.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from metaq.fs import FileSystem as Disk
from metaq.fs import SystemFileSystem
from metaq.model import MessageId
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.data_files import MEASURED, DataFile, directory_of, stats_of
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import one_sentence
from metaq.spark.topics import ReadTask

FILE_SCHEMA: Final = ROW_SCHEMA.remove(ROW_SCHEMA.get_field_index("topic"))
"""Columns of a file; topic and day are in the names of its directories."""
ROW_GROUP_BYTES: Final = 32 << 20
"""Rows of so many bytes wait in a task, in Arrow's form, until they are written."""
OPEN_MAX: Final = 8
"""Files that a task has open; a day that comes again after so many has a new one."""
NS_PER_MS: Final = 1_000_000
DISK: Final = SystemFileSystem()
DAY_TYPE: Final = pa.date32()
DELTAS: Final = ("offset", "message_id", "timestamp")
"""They grow slowly from row to row, and are written as differences."""
PARQUET: Final = {
    "compression": "zstd",
    # Messages are seldom equal to the byte, and then zstd sees it as well.
    "use_dictionary": ["broker_id", "partition", "flag", "attribute"],
    "column_encoding": dict.fromkeys(DELTAS, "DELTA_BINARY_PACKED"),
    "write_statistics": list(MEASURED),
    "store_schema": False,
    # Readers that look at them refuse a page that has changed on the disk.
    "write_page_checksum": True,
}

Read: TypeAlias = Callable[[ReadTask], Iterator[pa.RecordBatch]]
"""Yields the rows of a task, of one partition; goes to executors in pickled form."""


def file_system(root: str) -> FileSystem:
    """Return the files of an archive; of a store as the table's library reaches it."""
    if root.startswith("/"):
        return SubTreeFileSystem(root, LocalFileSystem())
    from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415  # see the top

    return PyFileSystem(DeltaStorageHandler(root))


def sync_file(root: str, path: str, disk: Disk) -> None:
    """Wait until a closed file is on the disk; a store has it when it is closed.

    Raises:
        DiskError: The disk refused; what it has of the file is unknown.
    """
    if root.startswith("/"):
        with closing(disk.open_append(Path(root, path), create=False)) as file:
            file.sync()


@one_sentence
def write_task(
    task: ReadTask,
    *,
    read: Read,
    root: str,
    staging: str,
    row_group_bytes: int = ROW_GROUP_BYTES,
    disk: Disk = DISK,
) -> list[DataFile]:
    """Write the rows of a task as new files.

    Args:
        task: Range to read.
        read: Reads it.
        root: Directory of the archive, as `ArchiveStore` has it.
        staging: Directory below, of which the files have their paths.
        row_group_bytes: Rows of that size, of all open files, wait in memory.
        disk: Syncs local files.

    Raises:
        ArchiveError: The file system refused.
        DiskError: The disk did, at a sync.
        MetaqError: As `read`.

    Durability: a local disk has the files on return.
    """
    try:
        topic = task.range.partition.topic
        days = _Days(file_system(root), staging, topic, row_group_bytes)
        for batch in read(task):
            days.add(batch)
        files = days.close()
    except (OSError, pa.ArrowException) as error:
        raise ArchiveError(f"{root}/{staging}: {error}") from error
    for file in files:
        sync_file(root, f"{staging}/{file.path}", disk)
    return files


def put_together(
    root: str, files: Sequence[DataFile], *, disk: Disk = DISK
) -> DataFile:
    """Write the rows of files of one topic and day as one new file.

    Each page that has a checksum is compared with it, so that no damage gets a new one.

    Raises:
        ArchiveError: One is damaged or gone, or the file system refused.
        DiskError: The disk did, at the sync.

    Durability: a local disk has the file on return, without its name.
    """
    there, text = file_system(root), files[0].date
    day = None if text is None else date.fromisoformat(text)
    new = DayFile(there, "", files[0].topic, day)
    for file in files:
        try:
            with there.open_input_file(file.path) as stream:
                found = pq.ParquetFile(stream, page_checksum_verification=True)
                for batch in found.iter_batches():
                    new.add(batch.select(FILE_SCHEMA.names).cast(FILE_SCHEMA))
                    if new.waiting_bytes >= ROW_GROUP_BYTES:
                        new.flush()
        except (OSError, pa.ArrowException, KeyError) as error:
            raise ArchiveError(f"{root}/{file.path}: {error}") from error
    done = new.close()
    sync_file(root, done.path, disk)
    return done


class _Days:
    """Open files of one task. One thread."""

    def __init__(
        self, there: FileSystem, staging: str, topic: str, row_group_bytes: int
    ) -> None:
        """Write nothing yet."""
        self._row_group_bytes = row_group_bytes
        self._begin = partial(DayFile, there, f"{staging}/", topic)
        self._open: dict[date | None, DayFile] = {}
        self._done: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows; they are written when enough of them wait, or at the end."""
        for day, rows in _by_day(batch):
            file = self._open.pop(day, None) or self._begin(day)
            file.add(rows)
            self._open[day] = file  # the last one is the one used last
            if len(self._open) > OPEN_MAX:
                self._done.append(self._open.pop(next(iter(self._open))).close())
        waiting_bytes = sum(file.waiting_bytes for file in self._open.values())
        if waiting_bytes >= self._row_group_bytes:
            for file in self._open.values():
                file.flush()

    def close(self) -> list[DataFile]:
        """Write what waits; return all files."""
        return self._done + [file.close() for file in self._open.values()]


class DayFile:
    """One file while it is written."""

    def __init__(
        self, there: FileSystem, above: str, topic: str, day: date | None
    ) -> None:
        """Begin the file.

        Args:
            there: Files of the archive.
            above: Prefix of its path; "" for none.
            topic: Of its messages.
            day: Of their timestamps; None: they have none.
        """
        self.waiting_bytes = 0
        """Bytes of the rows that wait, in Arrow's form."""
        self._last_id: MessageId | None = None
        self._there, self._above = there, above
        directory = directory_of(topic, None if day is None else day.isoformat())
        there.create_dir(f"{above}{directory}", recursive=True)
        self._path = f"{directory}/part-{uuid4()}.parquet"
        self._waiting: list[pa.RecordBatch] = []
        self._footers: list[pq.FileMetaData] = []
        self._stream = there.open_output_stream(f"{above}{self._path}")
        settings: dict[str, Any] = {**PARQUET, "metadata_collector": self._footers}
        self._writer = pq.ParquetWriter(self._stream, FILE_SCHEMA, **settings)

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows, one or more; they are written by `flush` and `close`."""
        self._waiting.append(rows.select(FILE_SCHEMA.names))
        self.waiting_bytes += rows.nbytes
        self._last_id = MessageId(rows.column("message_id")[-1].as_py())

    def flush(self) -> None:
        """Write what waits as one row group."""
        if self._waiting:
            rows = pa.Table.from_batches(self._waiting, FILE_SCHEMA)
            self._waiting, self.waiting_bytes = [], 0
            self._writer.write_table(rows, row_group_size=rows.num_rows)

    def close(self) -> DataFile:
        """Write what waits, and the footer; return what the table says of the file."""
        self.flush()
        self._writer.close()
        self._stream.close()
        info = self._there.get_file_info(f"{self._above}{self._path}")
        (footer,) = self._footers
        return DataFile.from_path(
            self._path,
            info.size,
            stats_of(footer),
            info.mtime_ns // NS_PER_MS,
            self._last_id,
        )


def _by_day(batch: pa.RecordBatch) -> Iterable[tuple[date | None, pa.RecordBatch]]:
    """Yield the rows of each UTC day; None for those without a timestamp."""
    days = batch.column("timestamp").cast(DAY_TYPE)
    bounds = pc.min_max(days)
    if not days.null_count and bounds["min"] == bounds["max"]:
        yield bounds["min"].as_py(), batch
        return
    for day in days.unique():
        is_its = pc.equal(days, day) if day.is_valid else pc.is_null(days)
        yield day.as_py(), batch.filter(is_its)

"""Writes the rows of a task to Parquet files of an archive, one for each day.

    piece of the log  ->  Arrow batch  ->  waiting  ->  row group of the day's file
    topic=orders/date=2026-01-31/part-….parquet    rows of one task, so of one partition

It runs in the Python process of the reading task, so no row passes through the JVM. A
task has in memory only the waiting rows, the row group being encoded, and data read
ahead. For local archives, executors import neither the table's library nor any client.
Compacted files have rows of several partitions.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
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
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import one_sentence
from metaq.spark.topics import ReadTask

PLACED_BY: Final = ("broker_id", "partition", "offset")
"""Columns whose statistics are required, which show the messages of a file."""
MEASURED: Final = (*PLACED_BY, "message_id", "timestamp")
"""Columns for which the table has minimum and maximum of each file."""
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
"""Date in the name of the directory for messages without a timestamp."""

_ESCAPED: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""The characters that Spark escapes in names of directories."""


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """Messages of a file: their range of offsets, of one partition or of several."""

    partition: TopicPartition
    message_count: int
    first: Offset
    last: Offset
    up_to: TopicPartition | None = None
    """None for messages of one partition. For several, their broker ids and numbers are
    between those of `partition` and those of this one."""

    def may_hold(self, partition: TopicPartition) -> bool:
        """Return whether it may have messages of a partition."""
        low, high = self.partition, self.up_to or self.partition
        return (
            partition.topic == low.topic
            and low.broker_id <= partition.broker_id <= high.broker_id
            and low.partition <= partition.partition <= high.partition
        )


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of an archive."""

    path: str
    """Path below the archive's directory."""
    size_bytes: int
    topic: str
    date: str | None
    """UTC day of the timestamps, `YYYY-MM-DD`; None for messages without one."""
    stats: Mapping[str, Any]
    """Delta's statistics: `numRecords`, and `minValues` and `maxValues` by column."""
    modified_ms: int
    last_id: MessageId | None = None
    """Id of its last message; None if not known."""

    @classmethod
    def from_path(
        cls,
        path: str,
        size_bytes: int,
        stats: Mapping[str, Any],
        modified_ms: int,
        last_id: MessageId | None = None,
    ) -> "DataFile":
        """Return a file with topic and day taken from its directories."""
        names = (step.partition("=")[2] for step in path.split("/")[:2])
        topic, date = map(unescaped, names)
        day = None if date == NO_VALUE else date
        return cls(path, size_bytes, topic, day, stats, modified_ms, last_id)

    @property
    def message_count(self) -> int:
        """Number of rows."""
        count: int = self.stats["numRecords"]
        return count

    @property
    def log(self) -> ArchivedLog:
        """The range of its messages."""
        least, most = self.stats["minValues"], self.stats["maxValues"]
        low, high = (
            TopicPartition(self.topic, BrokerId(e["broker_id"]), e["partition"])
            for e in (least, most)
        )
        return ArchivedLog(
            low,
            self.message_count,
            Offset(least["offset"]),
            Offset(most["offset"]),
            None if low == high else high,
        )

    @property
    def directory_topic(self) -> str:
        """The topic as Spark reads it from the name of the directory.

        May differ from `topic`: Spark decodes each escape as a character, while other
        writers escape the bytes of UTF-8.
        """
        return unescaped(self.path.partition("/")[0].removeprefix("topic="))


def directory_of(topic: str, date: str | None) -> str:
    """Return the directory of a topic and day, relative to the archive."""
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", topic)
    return f"topic={name}/date={date or NO_VALUE}"


def unescaped(name: str) -> str:
    """Return the value that Spark reads from a directory's name, after the `=`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)


def stats_of(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Return Delta's statistics of a file, from its footer.

    Without bounds for the timestamps if one of them is after the year 9999.
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    unbounded: set[str] = set()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            found, name = column.statistics, column.path_in_schema
            if name in MEASURED and found is not None and found.has_min_max:
                try:
                    low, high = found.min, found.max
                except OverflowError:  # Python's times end there
                    unbounded.add(name)
                    continue
                least[name] = min(least.get(name, low), low)
                most[name] = max(most.get(name, high), high)
    for values in (least, most):
        for name in unbounded:
            values.pop(name, None)
        if "timestamp" in values:
            values["timestamp"] = f"{values['timestamp']:%Y-%m-%dT%H:%M:%S.%fZ}"
    return {
        "numRecords": metadata.num_rows,
        "minValues": least,
        "maxValues": most,
        "nullCount": {},
    }


FILE_SCHEMA: Final = ROW_SCHEMA.remove(ROW_SCHEMA.get_field_index("topic"))
"""Columns of a file; topic and day are in the names of its directories."""
ROW_GROUP_BYTES: Final = 32 << 20
"""Arrow bytes of waiting rows at which a task writes them."""
OPEN_MAX: Final = 8
"""Maximum number of open files of a task; after that, a day may get a second file."""
NS_PER_MS: Final = 1_000_000
DISK: Final = SystemFileSystem()
DAY_TYPE: Final = pa.date32()
DELTAS: Final = ("offset", "message_id", "timestamp")
"""Columns written as differences, because they grow slowly from row to row."""
PARQUET: Final = {
    "compression": "zstd",
    # Not for values: few are equal, and those zstd compresses well.
    "use_dictionary": ["broker_id", "partition", "flag", "attribute"],
    "column_encoding": dict.fromkeys(DELTAS, "DELTA_BINARY_PACKED"),
    "write_statistics": list(MEASURED),
    "store_schema": False,
    # So that readers that verify checksums detect a damaged page.
    "write_page_checksum": True,
}

Read: TypeAlias = Callable[[ReadTask], Iterator[pa.RecordBatch]]
"""Yields the rows of a task, of one partition; picklable, for executors."""


def file_system(root: str) -> FileSystem:
    """Return the file system of an archive: local, or that of the table's library."""
    if root.startswith("/"):
        return SubTreeFileSystem(root, LocalFileSystem())
    from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415  # see the top

    return PyFileSystem(DeltaStorageHandler(root))


def sync_file(root: str, path: str, disk: Disk) -> None:
    """Sync a closed local file; object stores have it once it is closed.

    Raises:
        DiskError: the sync failed; the file's state on the disk is unknown.
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
    """Write the rows of a task to new files.

    Args:
        task: range to read.
        read: reads it.
        root: directory of the archive, as in `ArchiveStore`.
        staging: directory below `root`, to which the paths of the files are relative.
        row_group_bytes: bytes of waiting rows, of all open files, at which they are
            written.
        disk: syncs local files.

    Raises:
        ArchiveError: an error of the file system.
        DiskError: a sync failed.
        MetaqError: as `read`.

    *Durability.* On return, local files are on the disk.
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
    """Write the rows of files of one topic and day to one new file.

    Existing page checksums are verified, so that damage does not get a valid checksum.

    Raises:
        ArchiveError: a file is damaged or missing, or an error of the file system.
        DiskError: the sync failed.

    *Durability.* On return, a local file is on the disk, but not yet its name.
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
        """Start without files."""
        self._row_group_bytes = row_group_bytes
        self._begin = partial(DayFile, there, f"{staging}/", topic)
        self._open: dict[date | None, DayFile] = {}
        self._done: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; they are written once enough of them wait, or by `close`."""
        for day, rows in _by_day(batch):
            file = self._open.pop(day, None) or self._begin(day)
            file.add(rows)
            self._open[day] = file  # moved to the end: least recently used come first
            if len(self._open) > OPEN_MAX:
                self._done.append(self._open.pop(next(iter(self._open))).close())
        waiting_bytes = sum(file.waiting_bytes for file in self._open.values())
        if waiting_bytes >= self._row_group_bytes:
            for file in self._open.values():
                file.flush()

    def close(self) -> list[DataFile]:
        """Write the waiting rows; return all files."""
        return self._done + [file.close() for file in self._open.values()]


class DayFile:
    """A file being written."""

    def __init__(
        self, there: FileSystem, above: str, topic: str, day: date | None
    ) -> None:
        """Create the file.

        Args:
            there: file system of the archive.
            above: prefix of its path; "" for none.
            topic: topic of its messages.
            day: UTC day of the timestamps; None for messages without one.
        """
        self.waiting_bytes = 0
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
        """Add one or more rows; `flush` and `close` write them."""
        self._waiting.append(rows.select(FILE_SCHEMA.names))
        self.waiting_bytes += rows.nbytes
        self._last_id = MessageId(rows.column("message_id")[-1].as_py())

    def flush(self) -> None:
        """Write the waiting rows as one row group."""
        if self._waiting:
            rows = pa.Table.from_batches(self._waiting, FILE_SCHEMA)
            self._waiting, self.waiting_bytes = [], 0
            self._writer.write_table(rows, row_group_size=rows.num_rows)

    def close(self) -> DataFile:
        """Write the waiting rows and the footer; return the file for the table."""
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

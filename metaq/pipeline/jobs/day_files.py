"""Rows of a task as Parquet files of an archive, one for each day.

    piece of the log  ->  Arrow batch  ->  waiting  ->  row group of the day's file
    topic=orders/date=2026-01-31/part-….parquet    rows of one task, so of one partition

It runs in the task that reads, in its own process: no row crosses to the JVM. A task
has no more in memory than what waits, the row group that is encoded of it, and what
reads ahead. Executors import neither the table's library nor any client. Files that
were put together have rows of several partitions.
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
"""Columns of MEASURED without which it is unknown what should be in a file."""
MEASURED: Final = (*PLACED_BY, "message_id", "timestamp")
"""Columns of which the table has the least and the greatest value of each file."""
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
"""Name of the directory for messages without a timestamp."""

_ESCAPED: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""Spark escapes them, and nothing else, in names of directories."""


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """Archived range of one partition, in a file or in all of them."""

    partition: TopicPartition
    message_count: int
    first: Offset
    last: Offset
    up_to: TopicPartition | None = None
    """None for messages of one partition; of several, no broker id and no number is
    greater than of this one, nor less than of `partition`."""

    def may_hold(self, partition: TopicPartition) -> bool:
        """Whether messages of a partition can be among them."""
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
    """Below the archive's directory."""
    size_bytes: int
    topic: str
    date: str | None
    """UTC day of their timestamps, `YYYY-MM-DD`; None where they have none."""
    stats: Mapping[str, Any]
    """Delta's statistics: `numRecords`, and `minValues` and `maxValues` by column."""
    modified_ms: int
    last_id: MessageId | None = None
    """Id of its last message; None where that is not known."""

    @classmethod
    def from_path(
        cls,
        path: str,
        size_bytes: int,
        stats: Mapping[str, Any],
        modified_ms: int,
        last_id: MessageId | None = None,
    ) -> "DataFile":
        """Return a file by its place: the directories have topic and day."""
        names = (step.partition("=")[2] for step in path.split("/")[:2])
        topic, date = map(unescaped, names)
        day = None if date == NO_VALUE else date
        return cls(path, size_bytes, topic, day, stats, modified_ms, last_id)

    @property
    def message_count(self) -> int:
        """Rows of the file."""
        count: int = self.stats["numRecords"]
        return count

    @property
    def log(self) -> ArchivedLog:
        """Its messages."""
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
        """The topic that Spark reads in the name of the directory.

        Spark takes each escaped byte for a character; other writers escape UTF-8.
        """
        return unescaped(self.path.partition("/")[0].removeprefix("topic="))


def directory_of(topic: str, date: str | None) -> str:
    """Return the directory of a topic and day, below that of the archive."""
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", topic)
    return f"topic={name}/date={date or NO_VALUE}"


def unescaped(name: str) -> str:
    """Return what Spark reads in a step of a path, after the `=`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)


def stats_of(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Return Delta's statistics of a file, from its footer.

    Times of a file that has one after the year 9999 have no bounds there.
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

"""An archive: a Delta table of messages, with the progress of the job that writes it.

    _delta_log/                                files of the table, and their statistics
    topic=orders/date=2026-01-31/….parquet     messages, in the columns of the source
    _metaq/staging/0000000007-…/               files of a batch before its commit

A batch is one commit of the table. The commit adds the files of the batch and stores
its number, and for each partition the last message and the next byte to read, as
versions of Delta's application transactions. So a batch is in the archive completely,
together with its progress, or not at all. Files in no commit were left by killed jobs.

    application             version
    metaq archive           number of the last batch
    orders/0-1              offset of the last message of partition 1 on broker 0
    orders/0-1 next         offset at which the next batch begins in it
    orders/0-1 id           id of the last message

The format has no list of applications, so a property of the table lists the partitions.
A partition is added to it before its first commit.
"""

import datetime as dt
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.client.names import name_few
from metaq.fs import SystemFileSystem
from metaq.model import MessageId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError, CommitRaceError
from metaq.pipeline.jobs.day_files import (
    MEASURED,
    PLACED_BY,
    DataFile,
    Read,
    file_system,
    put_together,
    write_task,
)
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.offsets import Offsets, format_offsets, parse_offsets
from metaq.spark.schema import ROW_DDL
from metaq.spark.topics import ReadTask

OWN: Final = "_metaq"
"""Directory of our own files; with an underscore, readers and VACUUM ignore it."""
LOG: Final = "_delta_log"
"""Directory that makes a directory a table, for the table's library."""
STAGING: Final = "_metaq/staging"
"""Directory for the files of a batch until they are complete."""
APPLICATION: Final = "metaq archive"
"""Application whose version is the number of the last batch."""
PARTITIONS: Final = "metaq.archive.partitions"
"""Property of the table: the archived partitions, in the text form of offsets."""
COMPACTION: Final = "metaq.archive.compaction"
"""Property of the table: its version when the last compaction began. In the commit of a
compaction: the number of replaced files."""
RACES_MAX: Final = 10
"""Maximum number of attempts to commit a batch when other programs commit first."""
TABLE_SCHEMA: Final = ROW_SCHEMA.append(pa.field("date", pa.date32()))
"""A row of an archive: that of the source, and the UTC day of its timestamp."""
PARTITIONED_BY: Final = ("topic", "date")
"""Columns stored in the table's log and in names of directories, not in files."""
PROPERTIES: Final = {
    "delta.dataSkippingStatsColumns": ",".join(MEASURED),
    # As long as removed files are kept; the default of 30 days would be many commits of
    # a continuous job.
    "delta.logRetentionDuration": "interval 7 days",
}
"""Properties of a new table; other programs may change them."""
READER_VERSION: Final = 1
"""Maximum reader version of Delta's protocol. Later versions may hide rows of a file,
and rename its columns."""
PATTERN_MARKS: Final = frozenset("*?[]{}\\")
"""Characters not allowed in paths: Spark takes paths for patterns, without escapes."""
CHECKS_PAGES: Final = "parquet.page.verify-checksum.enabled"
"""Setting of Spark's Parquet reader to verify checksums, off by default."""
FILES_AT_ONCE: Final = 8
COMMITS_AT_ONCE: Final = 16
"""Number of commits read first in search of a RESTORE."""

ARCHIVE_DDL: Final = f"{ROW_DDL}, date DATE"
COLUMNS: Final = (*ROW_SCHEMA.names, "date")
ORDER: Final = ("topic", "broker_id", "partition", "offset")

_log = logging.getLogger(__name__)

_STAGED: Final = re.compile(r"([0-9]{10,})-.+")
"""Name of a batch's directory in staging; other programs have other names."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Terminal colours in the library's messages."""
_URL: Final = re.compile(r"([A-Za-z][\w+.-]*):(?://([^/]*))?(/.*)?", re.DOTALL)


class ArchiveStore:
    """One archive, with at most one writing job. Used on the driver, by one thread."""

    def __init__(self, path: str, *, may_be_new: bool = False) -> None:
        """Open an archive.

        Args:
            path: path or URL of its directory.
            may_be_new: whether it may not exist yet.

        Raises:
            ArchiveError: it does not exist, or its log is gone, cannot be read, or
                requires features that Spark's own Parquet reader lacks.
        """
        self.root = root_of(path)
        self._table: DeltaTable | None = None
        with table_errors(self.root):
            self._files = file_system(self.root)
            if DeltaTable.is_deltatable(self.root):
                self._table = DeltaTable(self.root)
                require_plain(self._table, self.root)
        if self._table is None and self.names_in(OWN):
            raise ArchiveError(
                f"{self.root}: has the directory {OWN} of an archive, but no _delta_log"
                " that says which files count"
            )
        if self._table is None and not may_be_new:
            raise ArchiveError(f"{self.root}: not an archive: there is no _delta_log")

    @property
    def batch(self) -> int:
        """Number of the last batch in the archive; -1 for none."""
        with table_errors(self.root):
            number = self._open.transaction_version(APPLICATION)
        return -1 if number is None else number

    def end(self, partition: TopicPartition) -> Offset | None:
        """Return the offset of the last archived message of a partition, or None."""
        with table_errors(self.root):
            last = self._open.transaction_version(str(partition))
        return None if last is None else Offset(last)

    def positions(self) -> dict[TopicPartition, Offset]:
        """Return the next byte to read of each archived partition.

        Raises:
            ArchiveError: the table has lost the property that lists them, or was set
                back to an unknown version.
        """
        with table_errors(self.root):
            table = as_set_back(self._open, self.root)
            batch = table.transaction_version(APPLICATION)
            version, known = table.transaction_version, _known_in(table)
            nexts = {partition: version(_next_of(partition)) for partition in known}
        if batch is not None and not known:
            raise ArchiveError(
                f"{self.root}: the property {PARTITIONS} of the table is gone: without"
                " it messages would be archived twice"
            )
        return {p: Offset(at) for p, at in nexts.items() if at is not None}

    def last_messages(self) -> dict[TopicPartition, tuple[Offset, MessageId]]:
        """Return offset and id of the last archived message of partitions, if known.

        Raises:
            ArchiveError: the table was set back to an unknown version.
        """
        found = {}
        with table_errors(self.root):
            table = as_set_back(self._open, self.root)
            for partition in _known_in(table):
                last = table.transaction_version(str(partition))
                its_id = table.transaction_version(_id_of(partition))
                if last is not None and its_id is not None:
                    found[partition] = Offset(last), MessageId(its_id)
        return found

    def claim(self) -> None:
        """Create the table if it does not exist.

        Also deletes staged files of committed batches, left by killed jobs.

        Raises:
            CommitRaceError: another job has created it since it was opened.
        """
        if self._table is None:
            self._table = self._create()
        with table_errors(self.root):
            self._files.create_dir(STAGING, recursive=True)
        self._clear_staging()

    def _create(self) -> DeltaTable:
        try:
            with table_errors(self.root):
                return DeltaTable.create(
                    self.root,
                    TABLE_SCHEMA,
                    partition_by=list(PARTITIONED_BY),
                    configuration=dict(PROPERTIES),
                )
        except ArchiveError as error:
            with table_errors(self.root):
                if not DeltaTable.is_deltatable(self.root):
                    raise
            raise CommitRaceError(
                f"{self.root}: another job writes this archive: it has created the"
                " table since this job began"
            ) from error

    def write(
        self, spark: SparkSession, tasks: Sequence[ReadTask], read: Read, batch: int
    ) -> tuple[DataFile, ...]:
        """Write the rows of tasks to new data files, which `commit` adds to the table.

        One Spark job, in which each task writes its rows in their order.

        Args:
            spark: the session.
            tasks: each reads a range of one partition.
            read: reads the rows of a task, on an executor.
            batch: number of the batch.

        Raises:
            ArchiveError: an error of the file system.
            PySparkException: a task failed.
        """
        if not tasks:
            return ()
        staging = f"{STAGING}/{batch:010}-{spark.sparkContext.applicationId}"
        write = partial(write_task, read=read, root=self.root, staging=staging)
        parts = spark.sparkContext.parallelize(tasks, len(tasks))
        files = list(chain.from_iterable(parts.map(write).collect()))
        with table_errors(self.root), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            for _ in pool.map(lambda file: self._move_in(file, staging), files):
                pass
        self._sync_names(files)
        return tuple(files)

    def _sync_names(self, files: Iterable[DataFile]) -> None:
        """Sync the directories of new files, on a local disk."""
        if self.root.startswith("/"):
            fs, places = SystemFileSystem(), (Path(file.path).parents for file in files)
            for place in set(chain.from_iterable(places)):
                fs.sync_directory(self.root / place)

    def _move_in(self, file: DataFile, staging: str) -> None:
        """Move a staged file to its path in the table."""
        self._files.create_dir(file.path.rpartition("/")[0], recursive=True)
        self._files.move(f"{staging}/{file.path}", file.path)

    def commit(
        self, batch: int, files: Sequence[DataFile], *, positions: Offsets
    ) -> None:
        """Commit a batch: add its files and store its progress, atomically.

        Args:
            batch: number of the batch.
            files: files that `write` returned for it.
            positions: next byte to read of each partition.

        Raises:
            ArchiveError: another job has committed a batch since.
        """
        marks: dict[str, int] = {}
        for file in sorted(files, key=lambda file: file.log.last):
            marks[str(file.log.partition)] = file.log.last
            if file.last_id is not None:
                marks[_id_of(file.log.partition)] = file.last_id
        marks |= {_next_of(partition): at for partition, at in positions.items()}
        for races_left in reversed(range(RACES_MAX)):
            if batch <= self.batch:
                raise ArchiveError(
                    f"{self.root}: another job writes this archive: expected batch"
                    f" {self.batch + 1}, got {batch}"
                )
            try:
                self._make_known(positions)
                self._commit(batch, files, marks)
                break
            except CommitRaceError:
                if not races_left:
                    raise
                # Compactions and other programs may have changed properties.
                with table_errors(self.root):
                    self._open.update_incremental()
        self._clear_staging()

    def _commit(
        self, batch: int, files: Sequence[DataFile], marks: Mapping[str, int]
    ) -> None:
        progress = [Transaction(name, version) for name, version in marks.items()]
        with table_errors(self.root):
            self._transact(
                [_action_of(file) for file in files],
                CommitProperties(
                    app_transactions=[Transaction(APPLICATION, batch), *progress]
                ),
            )

    def _transact(
        self, actions: list[AddAction | RemoveAction], properties: CommitProperties
    ) -> None:
        columns, table = list(PARTITIONED_BY), self._open
        table.create_write_transaction(
            actions, "append", table.schema(), columns, commit_properties=properties
        )
        table.update_incremental()

    def _make_known(self, positions: Offsets) -> None:
        """Add partitions to the property of the table, in a commit of its own."""
        with table_errors(self.root):
            known = _known_in(self._open)
            if known.keys() >= positions.keys():
                return
            names = dict.fromkeys([*known, *positions], Offset(0))
            self._open.alter.set_table_properties(
                {PARTITIONS: format_offsets(names)}, raise_if_not_exists=False
            )

    def _clear_staging(self) -> None:
        """Delete staged files of committed batches.

        A task attempt that Spark has given up may still write there; its files are
        deleted after the next batch.
        """
        for name in self.names_in(STAGING):
            staged = _STAGED.fullmatch(name)
            if staged is None or int(staged[1]) > self.batch:
                continue
            try:
                with table_errors(self.root):
                    self._files.delete_dir(f"{STAGING}/{name}")
            except ArchiveError as error:
                _log.warning("staged files not removed yet: %s", error)

    def compact(self, file_bytes: int) -> tuple[int, int]:
        """Compact small files, and delete files removed from the table long ago.

        Args:
            file_bytes: approximate size up to which files are compacted.

        Returns:
            Number of replaced files, and of new ones.

        Raises:
            CommitRaceError: another job has begun a compaction.
            ArchiveError: another engine has compacted at the same time.
        """
        with table_errors(self.root):
            with alone(self._open, self.root):
                counts = self._replace_small(file_bytes)
            self._open.vacuum(dry_run=False, full=True)
            self._open.update_incremental()
        return counts

    def _replace_small(self, file_bytes: int) -> tuple[int, int]:
        """Replace groups of small files; keep groups with a damaged file.

        The library could do it, but writes no checksums.
        """
        old, new = list[DataFile](), list[DataFile]()
        for group in groups_of(self.files(), file_bytes):
            try:
                new.append(put_together(self.root, group))
            except ArchiveError as error:
                _log.warning("small files stay as they are: error=%s", error)
            else:
                old += group
        if new:
            self._sync_names(new)
            now_ms = max(file.modified_ms for file in new)
            removed = (_removal_of(file, now_ms) for file in old)
            added = (_action_of(file, is_change=False) for file in new)
            properties = CommitProperties({COMPACTION: str(len(old))})
            self._transact([*removed, *added], properties)
        return len(old), len(new)

    def topics(self) -> frozenset[str]:
        """Return the archived topics, including those without a message yet."""
        with table_errors(self.root):
            known = {partition.topic for partition in _known_in(self._open)}
            added = pa.table(self._open.get_add_actions(flatten=True))
        return frozenset(known.union(added["partition.topic"].unique().to_pylist()))

    def require_topics(self, topics: Iterable[str]) -> None:
        """Refuse topics that were never archived.

        Raises:
            ArchiveError: a topic was never archived; names the archived ones.
        """
        known = self.topics()
        for topic in topics:
            if topic not in known:
                raise ArchiveError(
                    f"{self.root}: the archive has no topic {topic!r}; its topics are:"
                    f" {name_few(sorted(known)) or 'none'}"
                )

    def files(self, *topics: str) -> tuple[DataFile, ...]:
        """Return the files of the table, by path.

        Args:
            topics: topics of the files; none for all.

        Raises:
            ArchiveError: another program has added a file without statistics.
        """
        with table_errors(self.root):
            added = pa.table(self._open.get_add_actions()).to_pylist()
        files = [_file_of(each, self.root) for each in added]
        chosen = (file for file in files if not topics or file.topic in topics)
        return tuple(sorted(chosen, key=lambda file: file.path))

    def count_small(self, size_bytes: int) -> int:
        """Return the largest number of files below a size in one topic and day."""
        with table_errors(self.root):
            added = pa.table(self._open.get_add_actions(flatten=True))
        small = added.filter(pc.less(added["size_bytes"], size_bytes))
        by_day = small.group_by([f"partition.{name}" for name in PARTITIONED_BY])
        counts = by_day.aggregate([([], "count_all")])["count_all"]
        return pc.max(counts).as_py() or 0

    def count_rows(self, files: Sequence[DataFile]) -> dict[str, int]:
        """Return path → number of rows, from the footers; lacks missing files.

        Raises:
            ArchiveError: a file is damaged.
        """

        def count(file: DataFile) -> int | None:
            try:
                with self._files.open_input_file(file.path) as stream:
                    rows: int = pq.read_metadata(stream).num_rows
            except FileNotFoundError:
                return None
            except (OSError, pa.ArrowException) as error:
                raise ArchiveError(f"{self.root}/{file.path}: {error}") from error
            return rows

        with table_errors(self.root), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            counts = pool.map(count, files)
            found = zip((file.path for file in files), counts, strict=True)
            return {path: rows for path, rows in found if rows is not None}

    def read(self, spark: SparkSession, files: Sequence[DataFile]) -> DataFrame:
        """Return the rows of data files."""
        if not files:
            return spark.createDataFrame([], ARCHIVE_DDL)
        reader = spark.read.schema(ARCHIVE_DDL).option("basePath", self._url_of(""))
        reader = reader.option(CHECKS_PAGES, "true")

        def rows_of(some: Sequence[DataFile]) -> DataFrame:
            return reader.parquet(*(self._url_of(file.path) for file in some))

        plain = [file for file in files if file.directory_topic == file.topic]
        odd = [file for file in files if file.directory_topic != file.topic]
        frames = [rows_of(plain)] if plain else []
        for topic in sorted({file.topic for file in odd}):
            some = rows_of([file for file in odd if file.topic == topic])
            frames.append(some.withColumn("topic", sf.lit(topic)))
        return reduce(DataFrame.unionByName, frames).select(*COLUMNS)

    def names_in(self, directory: str) -> list[str]:
        """Return the names in a directory of the archive, sorted."""
        with table_errors(self.root):
            top = FileSelector(directory, allow_not_found=True)
            found = self._files.get_file_info(top)
        return sorted(f.base_name for f in found if not f.base_name.startswith("."))

    @property
    def _open(self) -> DeltaTable:
        assert self._table is not None, f"{self.root}: no table yet"
        return self._table

    def _url_of(self, path: str) -> str:
        whole = f"{self.root}/{path}" if path else self.root
        return f"file:{whole}" if whole.startswith("/") else whole


def read_archive(
    spark: SparkSession,
    path: str,
    *,
    topics: Collection[str] = (),
    first_date: dt.date | None = None,
    last_date: dt.date | None = None,
) -> DataFrame:
    """Return the messages of an archive, each once, in no order.

    Reads only files of the requested topics and days: the table names them, so no
    directory is listed. Files added later are not seen. Files replaced by a compaction
    later stay readable as long as the table keeps removed files, a week by default.

    Args:
        spark: the session.
        path: path or URL of the archive.
        topics: topics to read; none for all.
        first_date: first UTC day to read; None for the earliest.
        last_date: last UTC day to read; None for the latest. With either, messages
            without a timestamp are omitted.

    Returns:
        The columns of the source, and `date`: the UTC day of `timestamp`, or null.

    Raises:
        ArchiveError: there is no archive, or a topic was never archived.
    """
    store = ArchiveStore(path)
    store.require_topics(topics)
    files = store.files(*topics)
    if first_date is not None or last_date is not None:
        first, last = first_date or dt.date.min, last_date or dt.date.max
        files = tuple(
            file
            for file in files
            if file.date is not None
            and first <= dt.date.fromisoformat(file.date) <= last
        )
    return store.read(spark, files)


def root_of(path: str) -> str:
    """Return the directory of an archive in the form for the table's library.

    Raises:
        ArchiveError: Spark or the library cannot read such a path.
    """
    if not path or PATTERN_MARKS & frozenset(path):
        marks = "".join(sorted(PATTERN_MARKS))
        raise ArchiveError(
            f"{path!r}: expected a path without any of {marks}, which Spark takes for"
            " patterns"
        )
    url = _URL.fullmatch(path)
    if url is None:
        return os.path.abspath(path)
    scheme, host, rest = url.groups()
    if scheme != "file":
        return path.rstrip("/")
    if host or not rest:
        raise ArchiveError(f"{path}: expected file:/path, without a host")
    return os.path.abspath(rest)


def require_plain(table: DeltaTable, root: str) -> None:
    """Refuse a table whose rows are not just those of its Parquet files.

    Raises:
        ArchiveError: another program has enabled features of later reader versions.
    """
    version = table.protocol().min_reader_version
    if version > READER_VERSION:
        raise ArchiveError(
            f"{root}: expected a table for readers of version {READER_VERSION}, got"
            f" {version}: another program has switched features on, such as deletion"
            " vectors or column mapping"
        )


def as_set_back(table: DeltaTable, root: str) -> DeltaTable:
    """Return a table at the version whose files it has now.

    `RESTORE` sets back the files, but not the versions of applications, which the next
    batch writes.

    Raises:
        ArchiveError: it was set back to a time instead of a version.
    """
    version = table.version()
    for commit in _newest_commits(table):
        if commit["version"] > version:
            continue
        if commit["operation"] == "WRITE" and COMPACTION not in commit:
            break
        if commit["operation"] == "RESTORE":
            target = commit["operationParameters"].get("version")
            if target is None:
                raise ArchiveError(
                    f"{root}: the table was restored to a time, which does not show"
                    " how far the archive had come: restore it to a version by its"
                    " number"
                )
            version = int(target)
    return table if version == table.version() else DeltaTable(root, version=version)


def _newest_commits(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Yield the commits of the log, newest first."""
    seen, limit = 0, COMMITS_AT_ONCE
    while True:
        commits = table.history(limit)
        yield from commits[seen:]
        if len(commits) < limit:
            return
        seen, limit = limit, limit * 2


def _known_in(table: DeltaTable) -> dict[TopicPartition, Offset]:
    text = table.metadata().configuration.get(PARTITIONS)
    return {} if text is None else parse_offsets(text)


def _next_of(partition: TopicPartition) -> str:
    """Return the application whose version is the next byte to read."""
    return f"{partition} next"


def _id_of(partition: TopicPartition) -> str:
    """Return the application whose version is the id of the last message."""
    return f"{partition} id"


def _removal_of(file: DataFile, now_ms: int) -> RemoveAction:
    values = {"topic": file.topic, "date": file.date}
    return RemoveAction(file.path, False, now_ms, file.size_bytes, values)


def _action_of(file: DataFile, *, is_change: bool = True) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values={"topic": file.topic, "date": file.date},
        modification_time=file.modified_ms,
        data_change=is_change,
        stats=json.dumps(file.stats),
    )


def _file_of(added: Mapping[str, Any], root: str) -> DataFile:
    """Return a file from its description in the table."""
    where = added["partition"]
    file = DataFile(
        unquote(added["path"]),
        added["size_bytes"],
        where["topic"],
        None if where["date"] is None else where["date"].isoformat(),
        {
            "numRecords": added["num_records"],
            "minValues": added["min"],
            "maxValues": added["max"],
        },
        added["modification_time"],
    )
    bounds = (added["min"] or {}, added["max"] or {})
    known = (each.get(name) for each in bounds for name in PLACED_BY)
    if added["num_records"] is None or None in known:
        raise ArchiveError(
            f"{root}: {file.path} was added without statistics, so it is unknown what"
            " should be in it"
        )
    return file


def compact_table(table: DeltaTable, root: str, file_bytes: int) -> None:
    """Compact the small files of a table; of two concurrent jobs, one succeeds.

    Args:
        table: the table; has the newest version afterwards.
        root: its directory, for errors.
        file_bytes: approximate size up to which files are compacted.

    Raises:
        CommitFailedError: another job has begun a compaction.
        ArchiveError: another engine has compacted at the same time.
    """
    with alone(table, root):
        table.optimize.compact(target_size=file_bytes)


@contextmanager
def alone(table: DeltaTable, root: str) -> Iterator[None]:
    """Exclude other compactions; the block compacts and commits.

    Raises:
        CommitFailedError: another job has begun a compaction.
        ArchiveError: another engine has compacted at the same time.
    """
    # The library lets two jobs that replace the same files both commit, which would
    # duplicate their rows. But a commit fails if a property has changed since it began,
    # so of two jobs only the one that begins last succeeds.
    table.update_incremental()
    begun = {COMPACTION: str(table.version())}
    table.alter.set_table_properties(begun, raise_if_not_exists=False)
    table.update_incremental()
    version = table.version()
    yield
    between = table.history(table.version() - version)[1:]
    if any(commit["operation"] == "OPTIMIZE" for commit in between):
        raise ArchiveError(
            f"{root}: another engine has compacted files at the same moment, so"
            f" messages may be stored twice: restore the table to version {version},"
            " and continue from there"
        )


def groups_of(files: Iterable[DataFile], file_bytes: int) -> list[list[DataFile]]:
    """Return groups of files to combine: two or more of one topic and day each."""
    groups: list[list[DataFile]] = []
    size_bytes = 0
    for file in sorted(files, key=lambda file: (file.topic, file.date or "")):
        last = groups[-1][0] if groups else file
        is_full = size_bytes + file.size_bytes > file_bytes
        if is_full or (last.topic, last.date) != (file.topic, file.date) or not groups:
            groups.append([])
            size_bytes = 0
        groups[-1].append(file)
        size_bytes += file.size_bytes
    return [group for group in groups if len(group) > 1]


@contextmanager
def table_errors(root: str) -> Iterator[None]:
    """Convert errors of the table's library to ArchiveError, with one-line texts."""
    try:
        yield
    except CommitFailedError as error:
        raise CommitRaceError(
            f"{root}: another job writes this archive: {_line_of(error)}"
        ) from error
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise ArchiveError(f"{root}: {_line_of(error)}") from error


@contextmanager
def may_lose(root: str) -> Iterator[None]:
    """Log a warning instead of CommitRaceError: files are compacted another time."""
    try:
        with table_errors(root):
            yield
    except CommitRaceError as error:
        _log.warning("small files stay until the next batch: error=%s", error)


def _line_of(error: Exception) -> str:
    return " ".join(_COLOURS.sub("", str(error)).split())

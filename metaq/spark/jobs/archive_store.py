"""An archive on its file system: its manifest, its data files, and their rows.

    topic=orders/date=2026-01-31/….parquet      messages, in the columns of the source
    _metaq/manifest/00000000000000000012.json   which files count; the highest is true
    _metaq/checkpoint/                          how far the streaming query has come
    _metaq/staging/batch-0000000007-0000000012/ files on their way in; not part of it

Data files are written to the staging directory, moved, and then named by a new
manifest: that is when their messages are in the archive.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import ArchiveError
from metaq.spark.jobs.files import ArchiveFiles
from metaq.spark.jobs.manifest import (
    MANIFEST_SUFFIX,
    ArchivedFile,
    ArchivedLog,
    Manifest,
    manifest_name,
    sum_logs,
)
from metaq.spark.schema import ROW_DDL

HIDDEN: Final = "_metaq/"
"""Directory of our files; Spark's own readers leave out names with an underscore."""
MANIFESTS: Final = f"{HIDDEN}manifest"
CHECKPOINT: Final = f"{HIDDEN}checkpoint"
STAGING: Final = f"{HIDDEN}staging"
MANIFESTS_KEPT: Final = 16
"""Older ones are deleted; a reader that has begun has its list of files already."""
SUFFIX: Final = ".parquet"
STAGED_NAME: Final = re.compile(r"[a-z]+-\d+-(\d{10})", re.ASCII)
"""A staged directory: purpose, and number of the manifest that will name its files."""
OWN_NAME: Final = re.compile(
    rf"topic=[^/]+/date=[^/]+/{STAGED_NAME.pattern}-\d{{5}}\.parquet", re.ASCII
)
"""A data file; other files below the archive's directory are not ours."""

DATE_OF_TIMESTAMP: Final = (
    "date_from_unix_date(CAST(unix_micros(timestamp) DIV 86400000000 AS INT))"
)
"""The UTC day, whatever the session's zone is; null where there is no timestamp."""
ARCHIVE_DDL: Final = f"{ROW_DDL}, date DATE"
"""A row of an archive: that of the source, and the UTC day of its timestamp."""
COLUMNS: Final = (*ROW_SCHEMA.names, "date")
ORDER: Final = ("topic", "broker_id", "partition", "offset")


class ArchiveStore:
    """One archive; at most one job writes it. Lives on the driver, one thread."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        """Open an archive, which need not exist yet.

        Args:
            spark: The session.
            path: Path or URL of its directory.

        Raises:
            ArchiveError: Its manifest cannot be read.
        """
        self._spark = spark
        self._files = ArchiveFiles(spark, path)
        self.manifest = self._load()
        """Contents of the archive, as far as this object knows."""

    @property
    def checkpoint(self) -> str:
        """URL of the checkpoint of the query that archives here."""
        return self._files.url_of(CHECKPOINT)

    @property
    def root(self) -> str:
        """URL of the archive."""
        return self._files.root

    def claim(self, query_id: str) -> None:
        """Take over the archive for a query, and delete the leftovers of killed jobs.

        What a job writes that has taken it over in turn is left alone. A job that
        still writes here fails at its next batch, because the number of its manifest
        is taken.

        Raises:
            ArchiveError: Another query archived here; or a manifest came in between,
                or all of them are gone.
        """
        known = self.manifest.query_id
        if known is not None and known != query_id:
            raise ArchiveError(
                f"{self.root}: was written by query {known}, not {query_id}: its"
                f" checkpoint {CHECKPOINT} is gone, and without it messages would be"
                " archived twice"
            )
        if known is None:
            self._refuse_lost_manifests()
        self.commit(replace(self.manifest, query_id=query_id))
        for name in self._files.list_names(STAGING):
            if self._is_left(STAGED_NAME.fullmatch(name)):
                self._files.delete(f"{STAGING}/{name}")
        named = {file.path for file in self.manifest.files}
        for file in self._files.list_files():
            if file.path not in named and self._is_left(OWN_NAME.fullmatch(file.path)):
                self._files.delete(file.path)

    def _refuse_lost_manifests(self) -> None:
        """Refuse an archive without a manifest: it is unknown which files count."""
        own = [f.path for f in self._files.list_files() if OWN_NAME.fullmatch(f.path)]
        names = self._files.list_names(MANIFESTS) if own else []
        if own and not any(name.endswith(MANIFEST_SUFFIX) for name in names):
            raise ArchiveError(
                f"{self.root}: has files of an archive, {own[0]} for one, but"
                f" {MANIFESTS} has no manifest that says which of them count"
            )

    def _is_left(self, name: "re.Match[str] | None") -> bool:
        """Whether an earlier job has written the file or directory of this name."""
        return name is not None and int(name[1]) <= self.manifest.number

    def commit(self, manifest: Manifest) -> None:
        """Make a manifest the next one.

        Raises:
            ArchiveError: Another job has made one of that number.
        """
        manifest = replace(manifest, number=self.manifest.number + 1)
        name = manifest_name(manifest.number)
        self._files.create(f"{MANIFESTS}/{name}", manifest.to_json().encode())
        there = self._files.list_names(MANIFESTS)
        if any(each.endswith(MANIFEST_SUFFIX) and each > name for each in there):
            # It was there, and has been deleted as an old one.
            self._files.delete(f"{MANIFESTS}/{name}")
            raise ArchiveError(
                f"{self.root}: has newer manifests than {name}: another job writes"
                " this archive"
            )
        self.manifest = manifest
        oldest = manifest_name(max(0, manifest.number - MANIFESTS_KEPT + 1))
        for each in there:
            if each < oldest:  # drafts of killed jobs as well
                self._files.delete(f"{MANIFESTS}/{each}")

    def write(self, rows: DataFrame, name: str) -> tuple[ArchivedFile, ...]:
        """Write rows as new data files; they count from the next manifest on.

        Within a file they are in the order of their partitions and offsets.

        Args:
            rows: The columns of the source, and `date`.
            name: Files, and the directory where they are staged, are called so, with
                the number of the manifest that will name them; files with a number of
                their own as well. No two jobs write a manifest of one number, so none
                has a file or a directory of this name.

        Returns:
            The files, counted by reading them back.

        Raises:
            ArchiveError: The file system refused, or does not show the written files.
        """
        stem = f"{name}-{self.manifest.number + 1:010}"
        staging = f"{STAGING}/{stem}"
        self._files.delete(staging)
        staged = self._files.url_of(staging)
        # Led by the directories: Spark would sort anew, and forget the rest.
        ordered = rows.sortWithinPartitions("topic", "date", *ORDER[1:])
        # In spite of the session's settings: compacted rows come out as one file.
        writer = ordered.write.option("maxRecordsPerFile", 0)
        writer.partitionBy("topic", "date").parquet(staged)
        held = self._count(staged)
        written = []
        for number, file in enumerate(self._files.list_files(staging)):
            if not file.path.endswith(SUFFIX):
                continue
            below = file.path.removeprefix(f"{staging}/")
            target = f"{below.rpartition('/')[0]}/{stem}-{number:05}{SUFFIX}"
            self._files.move(file.path, target)
            logs = held.pop(file.path, ())
            count = sum(log.message_count for log in logs)
            written.append(ArchivedFile(target, file.size_bytes, count, logs))
        if held:
            raise ArchiveError(
                f"{self.root}: files were read, but are not there: {', '.join(held)}"
            )
        self._files.delete(staging)
        return tuple(written)

    def _count(self, directory: str) -> dict[str, tuple[ArchivedLog, ...]]:
        return self._count_rows(self._spark.read.schema(ARCHIVE_DDL).parquet(directory))

    def _count_rows(self, rows: DataFrame) -> dict[str, tuple[ArchivedLog, ...]]:
        """Return the contents of each file by partition, read from the files."""
        name = sf.col("_metadata.file_path").alias("name")
        counted = (
            rows.select(name, *ORDER)
            .groupBy("name", *ORDER[:-1])
            .agg(
                sf.count(sf.lit(1)).alias("count"),
                sf.min("offset").alias("first"),
                sf.max("offset").alias("last"),
            )
            .orderBy("name", *ORDER[:-1])
        )
        found: dict[str, list[ArchivedLog]] = {}
        for row in counted.collect():
            broker_id, number = BrokerId(row["broker_id"]), row["partition"]
            log = ArchivedLog(
                TopicPartition(row["topic"], broker_id, number),
                row["count"],
                Offset(row["first"]),
                Offset(row["last"]),
            )
            found.setdefault(self._files.path_of(row["name"]), []).append(log)
        return {path: tuple(logs) for path, logs in found.items()}

    def present_files(self) -> tuple[ArchivedFile, ...]:
        """Return the files of the manifest that are there, whatever is in them.

        Raises:
            ArchiveError: One is gone whose contents are not in the manifest.
        """
        there = {file.path for file in self._files.list_files()}
        for file in self.manifest.files:
            if file.path not in there and not file.logs and file.message_count:
                raise ArchiveError(
                    f"{self.root}: {file.path} is gone with {file.message_count}"
                    " messages; its manifest is an old one, and does not say of which"
                    " partitions"
                )
        return tuple(file for file in self.manifest.files if file.path in there)

    def count_missing(self, files: Sequence[ArchivedFile]) -> tuple[ArchivedLog, ...]:
        """Return the part of the manifest's contents that is not in the files.

        Args:
            files: Those that are there.

        Returns:
            For each partition that lacks messages how many, and from where to where
            the files reached that lack them.
        """
        known = [file for file in files if file.logs]
        held = self._count_rows(self._parquet(known)) if known else {}
        missing = []
        for file in self.manifest.files:
            here = {log.partition: log for log in held.get(file.path, ())}
            for log in file.logs:
                found = here.get(log.partition)
                count = log.message_count - (found.message_count if found else 0)
                if count > 0:
                    missing.append(replace(log, message_count=count))
        return sum_logs(missing)

    def delete(self, files: Sequence[ArchivedFile]) -> None:
        """Delete data files that the manifest does not name any more."""
        for file in files:
            self._files.delete(file.path)

    def read(self, files: Sequence[ArchivedFile]) -> DataFrame:
        """Return the rows of some data files."""
        if not files:
            return self._spark.createDataFrame([], ARCHIVE_DDL)
        return self._parquet(files).select(*COLUMNS)

    def _parquet(self, files: Sequence[ArchivedFile]) -> DataFrame:
        urls = [self._files.url_of(file.path) for file in files]
        reader = self._spark.read.schema(ARCHIVE_DDL).option("basePath", self.root)
        return reader.parquet(*urls)

    def _load(self) -> Manifest:
        names = [
            file.path
            for file in self._files.list_files(MANIFESTS)
            if file.path.endswith(MANIFEST_SUFFIX)
        ]
        if not names:
            return Manifest()
        text = self._files.read(names[-1]).decode(errors="replace")
        return Manifest.from_json(text, name=self._files.url_of(names[-1]))


def read_archive(spark: SparkSession, path: str) -> DataFrame:
    """Return every message of an archive, each once, in no order.

    Files written meanwhile are not seen. A file that compaction has replaced
    meanwhile makes the query fail.

    Args:
        spark: The session.
        path: Path or URL of the archive.

    Returns:
        The columns of the source, and `date`: the UTC day of `timestamp`, null where
        there is none.

    Raises:
        ArchiveError: There is no archive.
    """
    store = open_archive(spark, path)
    return store.read(store.manifest.files)


def open_archive(spark: SparkSession, path: str) -> ArchiveStore:
    """Open an archive for reading.

    Raises:
        ArchiveError: There is no archive.
    """
    store = ArchiveStore(spark, path)
    if store.manifest.number == 0:
        raise ArchiveError(f"{store.root}: no archive: {MANIFESTS} has no manifest")
    return store

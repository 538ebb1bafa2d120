"""Put small files of an archive together; no message is gained or lost by it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from pyspark.sql import SparkSession

from metaq.spark.errors import ArchiveError
from metaq.spark.jobs.archive_store import ArchiveStore
from metaq.spark.jobs.failures import job_errors
from metaq.spark.jobs.manifest import ArchivedFile

FILE_BYTES: Final = 128 << 20
"""Files are put together up to about that size."""
SMALL_DIVISOR: Final = 2
"""A file is small below the goal divided by this."""


@dataclass(frozen=True, slots=True)
class CompactSummary:
    """Result of a compaction."""

    replaced_count: int
    """Files that are gone."""
    written_count: int
    """Files that came in their place."""
    message_count: int
    """Messages that moved."""


def plan_compaction(
    files: Iterable[ArchivedFile], *, file_bytes: int, count_min: int = 2
) -> list[tuple[ArchivedFile, ...]]:
    """Return which files become one, in order of their paths.

    Args:
        files: the files of a manifest, by path.
        file_bytes: greatest size of a new file, about.
        count_min: leave directories alone that have fewer small files, 2 or more.
    """
    plan: list[tuple[ArchivedFile, ...]] = []
    for _directory, each in groupby(files, key=lambda file: file.directory):
        small = [f for f in each if f.size_bytes < file_bytes // SMALL_DIVISOR]
        if len(small) < count_min:
            continue
        group: list[ArchivedFile] = []
        size_bytes = 0
        for file in small:
            if size_bytes + file.size_bytes > file_bytes:
                plan.append(tuple(group))
                group, size_bytes = [], 0
            group.append(file)
            size_bytes += file.size_bytes
        plan.append(tuple(group))
    return [group for group in plan if len(group) > 1]


def compact(
    spark: SparkSession, path: str, *, file_bytes: int = FILE_BYTES
) -> CompactSummary:
    """Put the small files of an archive together, while no job writes it.

    A kill at any moment leaves each message in the archive once. A reader that has
    begun before may fail, because its files are gone.

    Args:
        spark: The session.
        path: Path or URL of the archive.
        file_bytes: Files are put together up to about that size, 2 or more.

    Raises:
        ArchiveError: The archive is damaged, or has another writer.
        JobError: Spark failed.
    """
    with job_errors("compact"):
        return compact_store(ArchiveStore(spark, path), file_bytes=file_bytes)


def compact_store(
    store: ArchiveStore, *, file_bytes: int, count_min: int = 2
) -> CompactSummary:
    """Compact an open archive; see `plan_compaction`."""
    plan = plan_compaction(
        store.manifest.files, file_bytes=file_bytes, count_min=count_min
    )
    written = [_merge(store, group, turn) for turn, group in enumerate(plan)]
    replaced = {file for group in plan for file in group}
    if not replaced:
        return CompactSummary(0, 0, 0)
    kept = [file for file in store.manifest.files if file not in replaced]
    files = sorted([*kept, *written], key=lambda file: file.path)
    store.commit(replace(store.manifest, files=tuple(files)))
    store.delete(tuple(replaced))
    moved = sum(file.message_count for file in written)
    return CompactSummary(len(replaced), len(written), moved)


def _merge(
    store: ArchiveStore, group: Sequence[ArchivedFile], turn: int
) -> ArchivedFile:
    """Write one file with the messages of several."""
    (file,) = store.write(store.read(group).coalesce(1), f"merged-{turn:05}")
    expected = sum(each.message_count for each in group)
    if file.message_count != expected:
        raise ArchiveError(
            f"{store.root}: {len(group)} files of {file.directory} should have"
            f" {expected} messages, but have {file.message_count}"
        )
    return file

"""Put small files of an archive together; no message is gained or lost by it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from metaq.spark.jobs.archive_store import ArchiveStore, open_archive
from metaq.spark.jobs.data_files import DataFile

FILE_BYTES: Final = 128 << 20
"""Files are put together up to about that size."""
SMALL_DIVISOR: Final = 2
"""A file is small below the goal divided by this."""


@dataclass(frozen=True, slots=True)
class CompactSummary:
    """Result of a compaction."""

    replaced_count: int
    """Files that do not count any more."""
    written_count: int
    """Files that came in their place."""


def count_small(files: Iterable[DataFile], *, file_bytes: int) -> int:
    """Return the small files of the topic and day that has most of them.

    Args:
        files: files of a table.
        file_bytes: greatest size of a new file, about.
    """
    small = (f for f in files if f.size_bytes < file_bytes // SMALL_DIVISOR)
    counts = Counter((file.topic, file.date) for file in small)
    return max(counts.values(), default=0)


def compact(path: str, *, file_bytes: int = FILE_BYTES) -> CompactSummary:
    """Put the small files of an archive together.

    That is Delta's `OPTIMIZE`, in one commit, and its `VACUUM` behind it: a kill at any
    moment leaves each message in the archive once, and files that the table has not had
    for a week, or for as long as its properties say, are deleted. It runs in
    this process, without Spark.

    Args:
        path: Path or URL of the archive.
        file_bytes: Files are put together up to about that size, 2 or more.

    Raises:
        ArchiveError: There is no archive, it is damaged, or another job has changed
            the same files.
    """
    return compact_store(open_archive(path), file_bytes=file_bytes)


def compact_store(
    store: ArchiveStore, *, file_bytes: int, count_min: int = 2
) -> CompactSummary:
    """Compact an open archive when a topic and day has so many small files."""
    if count_small(store.files(), file_bytes=file_bytes) < count_min:
        return CompactSummary(0, 0)
    return CompactSummary(*store.compact(file_bytes))

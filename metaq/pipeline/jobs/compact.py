"""Put small files of an archive together; no message is gained or lost by it."""

from dataclasses import dataclass
from typing import Final

from metaq.pipeline.jobs.archive_store import ArchiveStore

FILE_BYTES: Final = 128 << 20
"""Files are put together up to about that size."""
SMALL_DIVISOR: Final = 2
"""A file is small below the goal divided by this."""


@dataclass(frozen=True, slots=True)
class CompactSummary:
    """Result of a compaction: files that were replaced, and by how many."""

    replaced_count: int
    written_count: int


def compact(path: str, *, file_bytes: int = FILE_BYTES) -> CompactSummary:
    """Put the small files of an archive together.

    They are written again with checksums, in one commit, and Delta's `VACUUM` follows:
    a kill at any moment leaves each message in the archive once, and files that the
    table has not had for a week, or for as long as its properties say, are deleted. It
    runs in this process, without Spark. Damaged files stay as they are, with a warning.

    Args:
        path: Path or URL of the archive.
        file_bytes: Files are put together up to about that size, 2 or more.

    Raises:
        ArchiveError: There is no archive, it is damaged, or another job has changed
            the same files.
    """
    return compact_store(ArchiveStore(path), file_bytes=file_bytes)


def compact_store(
    store: ArchiveStore, *, file_bytes: int, count_min: int = 2
) -> CompactSummary:
    """Compact an open archive when a topic and day has so many small files."""
    if store.count_small(file_bytes // SMALL_DIVISOR) < count_min:
        return CompactSummary(0, 0)
    return CompactSummary(*store.compact(file_bytes))

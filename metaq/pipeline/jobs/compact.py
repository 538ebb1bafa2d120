"""Compact the small files of an archive; messages stay the same."""

from dataclasses import dataclass
from typing import Final

from metaq.pipeline.jobs.archive_store import ArchiveStore

FILE_BYTES: Final = 128 << 20
"""Default for the approximate size up to which files are compacted."""
SMALL_DIVISOR: Final = 2
"""A file is small if it is below that size divided by this."""


@dataclass(frozen=True, slots=True)
class CompactSummary:
    """Result of a compaction: number of replaced files, and of new ones."""

    replaced_count: int
    written_count: int


def compact(path: str, *, file_bytes: int = FILE_BYTES) -> CompactSummary:
    """Compact the small files of an archive.

    They are rewritten with checksums, in one commit, so that a kill at any time leaves
    each message in the archive once. Then Delta's `VACUUM` deletes files removed from
    the table a week ago, or as long ago as its properties say. Runs in this process,
    without Spark. Damaged files are kept, with a warning.

    Args:
        path: path or URL of the archive.
        file_bytes: approximate size up to which files are compacted, 2 or more.

    Raises:
        ArchiveError: there is no archive, it is damaged, or another job has changed
            the same files.
    """
    return compact_store(ArchiveStore(path), file_bytes=file_bytes)


def compact_store(
    store: ArchiveStore, *, file_bytes: int, count_min: int = 2
) -> CompactSummary:
    """Compact an open archive if a topic and day has `count_min` small files."""
    if store.count_small(file_bytes // SMALL_DIVISOR) < count_min:
        return CompactSummary(0, 0)
    return CompactSummary(*store.compact(file_bytes))

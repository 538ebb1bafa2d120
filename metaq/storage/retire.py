"""Take a sealed segment out of a log's directory: delete it, or archive it.

    delete             <name>.meta goes, then its index
    archive            <name>.meta → <name>.meta.arc, then the index goes
    archive, zipped    <name>.meta.zip.tmp written, synced, renamed to <name>.meta.zip;
                       only then <name>.meta goes, then its index

Each name is durable before the next step. After a crash between two steps the segment
is fully there or fully gone: recovery removes a half archive and an index without its
segment; a whole archive beside its source is replaced by the next run. Until the
segment's own name is gone, an error leaves it as it was. Source: broker spec 2.9.
"""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from metaq.config.settings import DeleteKind, DeletePolicy
from metaq.errors import ClosedError, CorruptRecordError, StorageError
from metaq.fs import AppendFile, FileSystem, ReadFile
from metaq.model import Millis, Position, SizeBytes
from metaq.storage.damage import damage_in_spans
from metaq.storage.segment import Segment
from metaq.storage.span_index import (
    Span,
    SpanTotals,
    read_index,
    read_totals,
    spans_path,
    without_index,
)

ARCHIVE_SUFFIX: Final = ".arc"
ZIP_SUFFIX: Final = ".zip"

COPY_BYTES: Final = 1 << 20
"""Compressed at a time."""

_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""Earliest time that a zip entry can have."""


@dataclass(frozen=True, slots=True)
class AgeFacts:
    """What the disk says about a segment's age."""

    newest_append_ms: Millis | None
    """Newest append; None when the span index does not cover the whole segment."""
    mtime_ms: Millis
    """Time of the file's last change."""
    record_count: int
    """Records by its index, 0 where there is none."""


def age_facts(fs: FileSystem, segment: Segment) -> AgeFacts:
    """Return the age and record count of a sealed segment, from index and file.

    Raises:
        StorageError: The system refused something.
    """
    read = partial(read_totals, fs, segment.path, segment.base_offset)
    totals = without_index(read, SpanTotals(segment.base_offset, 0, None))
    mtime_ms = fs.mtime_ms(segment.path)
    is_whole = totals.end_offset == segment.end_offset
    newest = totals.newest_append_ms if is_whole else None
    return AgeFacts(newest, mtime_ms, totals.record_count)


def carry_on() -> None:
    """Want what is under way to be finished, however long it takes."""


def retire_segment(
    fs: FileSystem,
    segment: Segment,
    policy: DeletePolicy,
    *,
    require_wanted: Callable[[], None] = carry_on,
) -> None:
    """Delete or archive one sealed segment; blocks for as long as a copy takes.

    Args:
        fs: The disk.
        segment: A sealed segment that no reader can find any more; open files of it
            stay readable.
        policy: What becomes of it; its age is not asked.
        require_wanted: Called before anything goes, and again and again while it is
            compressed; what it raises ends that.

    Raises:
        ClosedError: `require_wanted` raised it; the segment stays.
        CorruptRecordError: It is to be compressed and its bytes are damaged: an
            archive of it would look whole. It stays.
        StorageError: The disk refused. The segment is there as it was, or gone with
            its index left over, which the next start removes.

    Durability: what is gone on return stays gone, and an archive is whole.
    """
    require_wanted()
    if policy.kind is DeleteKind.DELETE:
        fs.unlink(segment.path)
    elif policy.is_compressed:
        _write_zip(fs, segment, require_wanted)
        fs.unlink(segment.path)
    else:
        archive = segment.path.with_name(segment.path.name + ARCHIVE_SUFFIX)
        fs.rename(segment.path, archive)
    spans = spans_path(segment.path, segment.base_offset)
    if fs.exists(spans):
        fs.unlink(spans)


def _write_zip(
    fs: FileSystem, segment: Segment, require_wanted: Callable[[], None]
) -> None:
    """Make `<name>.meta.zip`, whole and durable, with one entry `<name>.meta`."""
    archive = segment.path.with_name(segment.path.name + ZIP_SUFFIX)
    temporary = archive.with_name(archive.name + ".tmp")
    if fs.exists(temporary):
        fs.unlink(temporary)
    source = fs.open_read(segment.path)
    try:
        _refuse_damage(fs, source, segment, require_wanted)
        _compress(fs, source, segment.path.name, temporary, require_wanted)
        require_wanted()
        fs.rename(temporary, archive)
    except (StorageError, ClosedError):
        # The error that matters is on its way; a leftover goes at the next start.
        with suppress(StorageError):
            fs.unlink(temporary)
        raise
    finally:
        source.close()


def _refuse_damage(
    fs: FileSystem,
    source: ReadFile,
    segment: Segment,
    require_wanted: Callable[[], None],
) -> None:
    index = read_index(fs, segment.path, segment.base_offset)
    if index is None:
        return
    spans = _while_wanted(index.spans, require_wanted)
    for damage in damage_in_spans(source, segment, spans):
        raise CorruptRecordError(f"segment is not archived: {damage}")


def _while_wanted(
    spans: Sequence[Span], require_wanted: Callable[[], None]
) -> Iterator[Span]:
    for span in spans:
        require_wanted()
        yield span


def _compress(
    fs: FileSystem,
    source: ReadFile,
    name: str,
    target: Path,
    require_wanted: Callable[[], None],
) -> None:
    """Write a zip of one file and sync it."""
    when = datetime.fromtimestamp(source.mtime_ms() // 1000, UTC).timetuple()[:6]
    entry = zipfile.ZipInfo(name, max(when, _ZIP_EPOCH))
    entry.compress_type = zipfile.ZIP_DEFLATED
    file = fs.open_append(target, create=True)
    try:
        with (
            zipfile.ZipFile(_Stream(file), "w") as archive,
            archive.open(entry, "w", force_zip64=True) as stream,
        ):
            position = Position(0)
            while data := source.read_at(position, SizeBytes(COPY_BYTES)):
                require_wanted()
                stream.write(data)
                position = Position(position + len(data))
        file.sync()
    finally:
        file.close()


class _Stream:
    """What `zipfile` asks of a stream that it cannot seek in."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file

    def write(self, data: bytes, /) -> int:
        """Append all of `data`."""
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is synced when it is whole."""

    def close(self) -> None:
        """Do nothing: the owner of the file closes it."""

"""Check every stored byte of a data directory, without changing any of it.

Each segment is held against its span index and walked record by record, names and sizes
are held against each other. What is wrong comes back as values: the caller prints them.
Where there is no index (a Java broker wrote the segment), the checksum of each payload
is all there is: ids and flags of such records are covered by nothing.

A directory that a broker is using can be checked too. Then bytes behind the last entry
of an active segment's index are not looked at, because they are being written; and a
segment that is gone when its turn comes was deleted by retention.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from metaq.errors import DiskError
from metaq.fs import FileSystem, ReadFile
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.damage import check_part, check_tail
from metaq.storage.listing import check_contiguity, list_partition, sort_orphans
from metaq.storage.opening import parse_log_directory_name
from metaq.storage.producer_file import PRODUCERS_NAME, read_notes
from metaq.storage.segment import META_SUFFIX, Damage, Segment
from metaq.storage.span_index import (
    INDEX_BYTES_MAX,
    SpanIndex,
    encode_index,
    read_index,
    spans_path,
)
from metaq.storage.unreadable import is_unreadable
from metaq.storage.walk import WINDOW_BYTES

PART_BYTES: Final = 8 << 20
"""Checked between two reports of progress."""


class FindingKind(enum.Enum):
    """What sort of thing is wrong; the value is the word for reports."""

    DAMAGE = "damage"
    """Bytes contradict a checksum or an invariant: the log will be stopped."""
    TORN_TAIL = "torn tail"
    """A crash left half a record; the next start cuts it."""
    INDEX = "span index"
    """The side index is damaged; the next start or the scrub makes it again."""
    PRODUCERS = "producer file"
    """Entries about producers are damaged; a batch sent again may be stored twice."""
    NAME = "name"
    """A file name makes no sense: the partition will be refused."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    """What sort of thing."""
    log_id: LogId
    """In which partition."""
    path: Path
    """In which file."""
    offset: Offset | None
    """First offset that is concerned; None where it is about the whole file."""
    next_good_offset: Offset | None
    """Where a reader can go on; None: nowhere behind it, or it does not matter."""
    detail: str
    """What is wrong, with both numbers."""

    def __str__(self) -> str:
        """Return one line with everything."""
        parts = [f"{self.kind.value}: {self.detail}: partition={self.log_id}"]
        parts.append(f"file={self.path}")
        if self.offset is not None:
            good = "none" if self.next_good_offset is None else self.next_good_offset
            parts.append(f"offset={self.offset} next_good_offset={good}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a check has come."""

    log_id: LogId
    """Partition at hand."""
    path: Path
    """Segment at hand."""
    checked_bytes: SizeBytes
    """Bytes checked so far, of all segments."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check of one data directory found."""

    log_count: int
    """Partitions."""
    segment_count: int
    """Segments."""
    checked_bytes: SizeBytes
    """Bytes of segments that were checked."""
    record_count: int
    """Good records."""
    findings: tuple[Finding, ...]
    """What is wrong; empty: nothing."""


def verify_directory(
    fs: FileSystem,
    directory: Path,
    *,
    in_use: bool,
    unsynced_bytes_max: SizeBytes,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> VerifyReport:
    """Check a data directory, or the one partition that the directory is.

    Args:
        fs: The disk; it is only read.
        directory: Holds partition directories, or is one.
        in_use: A broker is working in it at this moment.
        unsynced_bytes_max: How much a crash may tear: the bound of one group commit.
        on_progress: Called after every `PART_BYTES` or segment, whichever is less.

    Raises:
        StorageError: The disk refused to list, open or size a file. A refused read is
            a finding.
    """
    work = _Verification(fs, in_use, unsynced_bytes_max, on_progress)
    for log_id, path in list_logs(fs, directory):
        work.check_log(log_id, path)
    return work.report()


def list_logs(fs: FileSystem, directory: Path) -> Iterator[tuple[LogId, Path]]:
    """Yield the partition directories of a data directory, by name."""
    names = fs.list_directory(directory)
    itself = parse_log_directory_name(directory.name)
    if itself is not None and any(name.endswith(META_SUFFIX) for name in names):
        yield itself, directory
        return
    for name in names:
        log_id = parse_log_directory_name(name)
        if log_id is not None and fs.is_directory(directory / name):
            yield log_id, directory / name


class _Verification:
    """One check of a directory; collects what it finds."""

    def __init__(
        self,
        fs: FileSystem,
        in_use: bool,
        unsynced_bytes_max: SizeBytes,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._fs = fs
        self._in_use = in_use
        self._unsynced_bytes_max = unsynced_bytes_max
        self._on_progress = on_progress
        self._findings: list[Finding] = []
        self._logs = 0
        self._segments = 0
        self._checked_bytes = 0
        self._records = 0

    def report(self) -> VerifyReport:
        """Return what was found so far."""
        return VerifyReport(
            self._logs,
            self._segments,
            SizeBytes(self._checked_bytes),
            self._records,
            tuple(self._findings),
        )

    def check_log(self, log_id: LogId, path: Path) -> None:
        """Check one partition."""
        self._logs += 1
        listing = list_partition(self._fs, path)
        if listing.bad_name:
            self._add(FindingKind.NAME, log_id, path, listing.bad_name)
            return
        if not self._in_use:
            # A roll or a deletion under way looks like this for a moment.
            missing, _leftovers = sort_orphans(self._fs, listing)
            self._add_damage(log_id, missing)
            self._add_damage(log_id, check_contiguity(self._fs, listing.segments))
            flaw = read_notes(self._fs, path).flaw
            if flaw:
                producers = path / PRODUCERS_NAME
                self._add(FindingKind.PRODUCERS, log_id, producers, flaw)
        for segment in listing.segments:
            is_active = segment is listing.segments[-1]
            try:
                self._check_segment(log_id, segment, is_active=is_active)
            except DiskError as error:
                if is_unreadable(error):
                    # A bad sector: name it, and go on with what can be read.
                    self._add(FindingKind.DAMAGE, log_id, segment.path, str(error))
                elif not (self._in_use and error.errno_name == "ENOENT"):
                    raise

    def _check_segment(
        self, log_id: LogId, segment: Segment, *, is_active: bool
    ) -> None:
        is_settled = not (self._in_use and is_active)
        try:
            index = self._read_index(log_id, segment, is_settled=is_settled)
        except DiskError as error:
            if not is_unreadable(error):
                raise
            path = spans_path(segment.path, segment.base_offset)
            self._add(FindingKind.INDEX, log_id, path, str(error))
            index = SpanIndex(segment.base_offset)
        file = self._fs.open_read(segment.path)
        try:
            # Asked now: an index that grew meanwhile belongs to a file that did.
            segment = replace(segment, size_bytes=file.size())
            self._segments += 1
            end = index.end_offset
            if not is_active:
                end = max(end, segment.end_offset)
            start = self._check_parts(log_id, file, segment, index, end)
            if is_active and not self._in_use:
                self._check_tail(log_id, file, segment, start)
        finally:
            file.close()

    def _check_parts(
        self,
        log_id: LogId,
        file: ReadFile,
        segment: Segment,
        index: SpanIndex,
        end: Offset,
    ) -> Offset:
        """Check from the base offset to `end`; return where the good bytes end."""
        start = segment.base_offset
        while start < end:
            part = check_part(
                file,
                segment,
                index,
                start,
                bytes_max=PART_BYTES,
                span_bytes_min=WINDOW_BYTES,
            )
            self._add_damage(log_id, part.damage)
            for span in part.miscounted:
                path = spans_path(segment.path, segment.base_offset)
                text = f"record count is wrong: offset={span.base_offset}"
                self._add(FindingKind.INDEX, log_id, path, text)
            self._records += part.record_count
            self._checked_bytes += part.end - start
            start = part.end
            checked = SizeBytes(self._checked_bytes)
            self._on_progress(Progress(log_id, segment.path, checked))
            if start >= segment.end_offset:
                break
        return start

    def _check_tail(
        self, log_id: LogId, file: ReadFile, segment: Segment, start: Offset
    ) -> None:
        """Check what lies behind the index of the active segment, as a start would."""
        tail = check_tail(
            file,
            segment,
            start,
            unsynced_bytes_max=self._unsynced_bytes_max,
            span_bytes_min=WINDOW_BYTES,
            time_ms=file.mtime_ms(),
        )
        self._add_damage(log_id, tail.damage)
        if tail.flaw is not None:
            cut = segment.end_offset - tail.end
            text = f"{tail.flaw}: {cut} bytes will be cut"
            self._add(FindingKind.TORN_TAIL, log_id, segment.path, text, tail.end)
        self._records += sum(span.record_count for span in tail.spans)
        self._checked_bytes += segment.end_offset - start
        checked = SizeBytes(self._checked_bytes)
        self._on_progress(Progress(log_id, segment.path, checked))

    def _read_index(
        self, log_id: LogId, segment: Segment, *, is_settled: bool
    ) -> SpanIndex:
        """Return what is believed of an index; a settled one is compared with that."""
        index = read_index(self._fs, segment.path, segment.base_offset)
        if is_settled:
            self._check_index(log_id, segment, index)
        return index or SpanIndex(segment.base_offset)

    def _check_index(
        self, log_id: LogId, segment: Segment, index: SpanIndex | None
    ) -> None:
        """Compare what is believed of an index with what its file has."""
        path = spans_path(segment.path, segment.base_offset)
        if not self._fs.exists(path):
            return
        if index is None:
            self._add(FindingKind.INDEX, log_id, path, "header is damaged")
            return
        data = self._fs.read_file(path, INDEX_BYTES_MAX)
        good = encode_index(index)
        if data not in (good, encode_index(index, is_sealed=True)):
            size, believed = len(data), len(good)
            text = (
                f"entries are damaged: {believed} bytes are good, the file has {size}"
            )
            self._add(FindingKind.INDEX, log_id, path, text)

    def _add(
        self,
        kind: FindingKind,
        log_id: LogId,
        path: Path,
        text: str,
        offset: Offset | None = None,
    ) -> None:
        self._findings.append(Finding(kind, log_id, path, offset, None, text))

    def _add_damage(self, log_id: LogId, damage: Iterable[Damage]) -> None:
        for found in damage:
            self._findings.append(
                Finding(
                    FindingKind.DAMAGE,
                    log_id,
                    found.path,
                    found.offset,
                    found.next_good_offset,
                    found.detail,
                )
            )

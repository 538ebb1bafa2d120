"""Check every stored byte of a data directory, without changing any of it.

Each segment is compared with its span index and walked record by record; names and
sizes are compared with each other. Faults are returned as values, for the caller to
print. Without an index (a Java broker wrote the segment) there is only the checksum of
each
payload: nothing covers ids and flags of such records.

The result is compared with the record of what the directory has held, as at a start.

A directory that a broker is using can be checked too. Then a flaw after the last entry
of an active segment's index counts as a write in progress, if a crash could explain it;
a segment that is missing when its turn comes was removed by retention; and a fault in a
partition counts only if a second look finds it, too.
"""

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from metaq.errors import DiskError, MissingFileError
from metaq.fs import FileSystem, ReadFile
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.damage import Part, check_parts, check_tail, merge_damage
from metaq.storage.holdings import Extent, Holdings
from metaq.storage.inventory import (
    TRANSACTIONS,
    losses_by_record,
    read_holdings,
    with_cure,
)
from metaq.storage.listing import check_names
from metaq.storage.opening import (
    extent_of,
    find_logs,
    listed_extents,
    parse_log_directory_name,
    partition_names,
)
from metaq.storage.producer_file import PRODUCERS_NAME, read_notes
from metaq.storage.segment import META_SUFFIX, Damage, Segment
from metaq.storage.span_index import (
    INDEX_BYTES_MAX,
    SpanIndex,
    encode_index,
    is_unreadable,
    read_index,
    spans_path,
)
from metaq.storage.walk import WINDOW_BYTES

PART_BYTES: Final = 8 << 20
"""Bytes checked between two reports of progress."""


class FindingKind(enum.Enum):
    """Kind of a finding; the value is the word for reports."""

    DAMAGE = "damage"
    """Bytes contradict a checksum or an invariant: the log will be stopped."""
    TORN_TAIL = "torn tail"
    """A crash left part of a record; the next start cuts it."""
    INDEX = "span index"
    """The span index is damaged; the next start or the scrub makes it again."""
    PRODUCERS = "producer file"
    """Entries about producers are damaged; a batch sent again may be stored twice."""
    NAME = "name"
    """A file name is not that of a segment: the partition will be refused."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault."""

    kind: FindingKind
    log_id: LogId
    path: Path
    offset: Offset | None
    """First offset concerned; None if the whole file is."""
    next_good_offset: Offset | None
    """Offset where a reader can resume; None: there is none, or it is irrelevant."""
    detail: str

    @property
    def key(self) -> tuple[FindingKind, Path, Offset | None, Offset | None]:
        """Return a key that is the same when the fault is found again."""
        return self.kind, self.path, self.offset, self.next_good_offset

    def __str__(self) -> str:
        """Return one line with all fields."""
        parts = [f"{self.kind.value}: {self.detail}: partition={self.log_id}"]
        parts.append(f"file={self.path}")
        if self.offset is not None:
            good = "none" if self.next_good_offset is None else self.next_good_offset
            parts.append(f"offset={self.offset} next_good_offset={good}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of checking one data directory."""

    log_count: int
    segment_count: int
    checked_bytes: SizeBytes
    record_count: int
    findings: tuple[Finding, ...]
    """Faults found; empty if there are none."""


def verify_directory(
    fs: FileSystem,
    directory: Path,
    *,
    in_use: bool,
    unsynced_bytes_max: SizeBytes,
    on_progress: Callable[[int], None] = lambda _checked_bytes: None,
) -> VerifyReport:
    """Check a data directory, or a partition directory.

    Args:
        fs: The disk; it is only read.
        directory: Holds partition directories, or is one.
        in_use: Whether a broker is using it.
        unsynced_bytes_max: Maximum number of bytes that a crash may tear: the size of a
            group commit.
        on_progress: Called with the number of bytes checked so far, over all segments,
            after every `PART_BYTES` or segment, whichever is less.

    Raises:
        StorageError: The disk refuses to list, open or size a file. A refused read is a
            finding.
    """
    findings: list[Finding] = []
    segment_count = record_count = checked_bytes = 0
    itself = _partition_of(directory, fs.list_directory(directory))
    root = directory if itself is None else directory.parent
    # Read first: the bytes that it names were synced by then.
    record = read_holdings(fs, root)
    checks: dict[LogId, _LogCheck] = {}
    for log_id, path in list_logs(fs, directory):
        start = partial(_LogCheck, fs, log_id, path, in_use, unsynced_bytes_max)
        check = start(on_progress, checked_bytes).run()
        if in_use and check.findings:
            again = start().run()
            again.keep({each.key for each in check.findings})
            check = again
        checks[log_id] = check
        segment_count += check.segment_count
        record_count += check.record_count
        checked_bytes += check.checked_bytes
    losses = {} if record is None else _find_losses(fs, root, record, checks)
    for log_id, check in checks.items():
        loss = losses.pop(log_id, None)
        if loss is not None and not check.is_refused:
            check.damage = merge_damage((*check.damage, loss))
        findings += check.findings
    if itself is None:
        findings += [_damage_finding(log_id, loss) for log_id, loss in losses.items()]
    return VerifyReport(
        len(checks),
        segment_count,
        SizeBytes(checked_bytes),
        record_count,
        tuple(findings),
    )


def _find_losses(
    fs: FileSystem, root: Path, record: Holdings, checks: Mapping[LogId, "_LogCheck"]
) -> dict[LogId, Damage]:
    """Return the losses of partitions, compared with their data directory's record.

    While a broker runs, a topic may be deleted and created again: a loss counts only if
    the record still has it at a second look.
    """
    if record.is_accepted:
        return {}
    others = set(partition_names(fs, root)) - set(map(str, checks))
    found = listed_extents(fs, root, others)
    found |= {str(log_id): check.extent for log_id, check in checks.items()}
    losses = losses_by_record(fs, root, record, found, root / TRANSACTIONS)
    if losses:
        record = read_holdings(fs, root) or record
        lost = {name: extent for name, extent in found.items() if name not in losses}
        lost |= listed_extents(fs, root, losses)
        again = losses_by_record(fs, root, record, lost, root / TRANSACTIONS)
        losses = {name: loss for name, loss in losses.items() if name in again}
    return {
        log_id: with_cure(root, loss)
        for name, loss in losses.items()
        if (log_id := parse_log_directory_name(name)) is not None
    }


def _damage_finding(log_id: LogId, found: Damage) -> Finding:
    return Finding(
        FindingKind.DAMAGE,
        log_id,
        found.path,
        found.offset,
        found.next_good_offset,
        found.detail,
    )


def list_logs(fs: FileSystem, directory: Path) -> Iterator[tuple[LogId, Path]]:
    """Yield the partition directories of a data directory, by name."""
    itself = _partition_of(directory, fs.list_directory(directory))
    if itself is not None:
        yield itself, directory
        return
    for name, log_id in find_logs(fs, directory).items():
        yield log_id, directory / name


def _partition_of(directory: Path, names: Collection[str]) -> LogId | None:
    """Return the partition of a directory with these names; None if it is not one."""
    has_segment = any(name.endswith(META_SUFFIX) for name in names)
    return parse_log_directory_name(directory.name) if has_segment else None


@dataclass(slots=True, eq=False)
class _LogCheck:
    """One check of a partition directory, with its findings."""

    fs: FileSystem
    log_id: LogId
    directory: Path
    in_use: bool
    unsynced_bytes_max: SizeBytes
    on_progress: Callable[[int], None] = lambda _checked_bytes: None
    """Called after every part."""
    before_bytes: int = 0
    """Bytes checked in other partitions."""
    damage: tuple[Damage, ...] = ()
    """Damaged ranges, merged and sorted."""
    extent: Extent | None = None
    """Offsets that a start would find; None without a segment."""
    is_refused: bool = False
    """Whether the partition is unreadable as a whole; `findings` have the reason."""
    segment_count: int = 0
    record_count: int = 0
    checked_bytes: int = 0
    _damage: list[Damage] = field(default_factory=list)
    _others: list[Finding] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """All faults found."""
        damage = [_damage_finding(self.log_id, each) for each in self.damage]
        return self._others + damage

    def keep(self, keys: Collection[object]) -> None:
        """Drop findings with other keys."""
        self._others = [each for each in self._others if each.key in keys]
        self.damage = tuple(
            each
            for each in self.damage
            if _damage_finding(self.log_id, each).key in keys
        )

    def run(self) -> "_LogCheck":
        """Check names and sizes, and then every byte; call once."""
        names = check_names(self.fs, self.directory, in_use=self.in_use)
        if names.bad_name:
            self.is_refused = True
            self._add(FindingKind.NAME, self.directory, names.bad_name)
            return self
        self._damage += names.damage
        self.is_refused = bool(names.damage) and not names.segments
        self.extent = extent_of(names.segments)
        if not self.in_use:
            flaw = read_notes(self.fs, self.directory).flaw
            if flaw:
                path = self.directory / PRODUCERS_NAME
                self._add(FindingKind.PRODUCERS, path, flaw)
        for segment in names.segments:
            try:
                self._check_segment(segment, is_active=segment is names.segments[-1])
            except DiskError as error:
                if is_unreadable(error):
                    # Report it, and continue with the readable rest.
                    start, end = segment.base_offset, segment.end_offset
                    self._damage.append(Damage(segment.path, start, end, str(error)))
                elif not (self.in_use and isinstance(error, MissingFileError)):
                    raise
        self.damage = merge_damage(self._damage)
        return self

    def _check_segment(self, segment: Segment, *, is_active: bool) -> None:
        index = self._read_index(segment, is_settled=not (self.in_use and is_active))
        with self.fs.open_read(segment.path) as file:
            if is_active:
                # Read after the index: if that has grown since the listing, so has it.
                segment = replace(segment, size_bytes=file.size())
            else:
                index = index.until(segment.end_offset)
            self.segment_count += 1
            end = index.end_offset if is_active else segment.end_offset
            start = segment.base_offset
            parts = check_parts(file, segment, index, start, end, bytes_max=PART_BYTES)
            for part in parts:
                self._add_part(segment, part, start)
                start = part.end
            if is_active:
                self._check_tail(file, segment, start)

    def _add_part(self, segment: Segment, part: Part, start: Offset) -> None:
        self._damage += part.damage
        for span in part.miscounted:
            path = spans_path(segment.path, segment.base_offset)
            text = f"record count is wrong: offset={span.base_offset}"
            self._add(FindingKind.INDEX, path, text)
        self.record_count += part.record_count
        self.checked_bytes += part.end - start
        self.on_progress(self.before_bytes + self.checked_bytes)

    def _check_tail(self, file: ReadFile, segment: Segment, start: Offset) -> None:
        """Check the bytes after the active segment's index, as a start would do."""
        tail = check_tail(
            file,
            segment,
            start,
            unsynced_bytes_max=self.unsynced_bytes_max,
            span_bytes_min=WINDOW_BYTES,
            time_ms=file.mtime_ms(),
        )
        self._damage += tail.damage
        assert self.extent is not None, segment
        self.extent = self.extent._replace(end=tail.end)
        if self.in_use:
            return
        if tail.flaw is not None:
            cut = segment.end_offset - tail.end
            text = f"{tail.flaw}: {cut} bytes will be cut"
            self._add(FindingKind.TORN_TAIL, segment.path, text, tail.end)
        self.record_count += sum(span.record_count for span in tail.spans)
        self.checked_bytes += segment.end_offset - start
        self.on_progress(self.before_bytes + self.checked_bytes)

    def _read_index(self, segment: Segment, *, is_settled: bool) -> SpanIndex:
        """Return the valid part of an index; a settled file must be all valid."""
        nothing = SpanIndex(segment.base_offset)
        try:
            index = read_index(self.fs, segment.path, segment.base_offset)
            if is_settled:
                self._check_index(segment, index)
        except DiskError as error:
            if not is_unreadable(error):
                raise
            path = spans_path(segment.path, segment.base_offset)
            self._add(FindingKind.INDEX, path, str(error))
            return nothing
        return index or nothing

    def _check_index(self, segment: Segment, index: SpanIndex | None) -> None:
        """Compare the valid part of an index with its file."""
        path = spans_path(segment.path, segment.base_offset)
        if not self.fs.exists(path):
            return
        if index is None:
            self._add(FindingKind.INDEX, path, "header is damaged")
            return
        data = self.fs.read_file(path, INDEX_BYTES_MAX)
        good = encode_index(index)
        if data not in (good, encode_index(index, is_sealed=True)):
            size, believed = len(data), len(good)
            text = (
                f"entries are damaged: {believed} bytes are good, the file has {size}"
            )
            self._add(FindingKind.INDEX, path, text)

    def _add(
        self, kind: FindingKind, path: Path, text: str, offset: Offset | None = None
    ) -> None:
        self._others.append(Finding(kind, self.log_id, path, offset, None, text))

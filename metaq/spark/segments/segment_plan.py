"""Plan of one query: segment files, split at record boundaries, divided among tasks.

Boundaries are taken from the span index. Bytes without an index (written by a Java
broker, or archived) are walked from header to header, which reads them once on the
driver. That is worthwhile for a few files; beyond WALK_BYTES_MAX, each file is one
split, as is every short file. So is a zip, which can only be unpacked from its start.

    <data directory>/<topic>-<partition>/<base offset>.meta        a segment
                                         <base offset>.meta.arc    archived
                                         <base offset>.meta.zip    archived, compressed

Only the name of the directory has the topic and the partition, so a moved archive must
keep it. Directories are never merged: two of them may have partition 0 of one topic
from two brokers. Source: docs/metaq-1.4/broker.md 2.1, 2.9.
"""

import enum
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import Final, TypeAlias

from metaq.client.names import name_few
from metaq.errors import CorruptRecordError, DiskError, MissingFileError, StorageError
from metaq.fs import FileSystem
from metaq.model import (
    BrokerId,
    LogId,
    MessageId,
    Millis,
    Offset,
    Position,
    SizeBytes,
    TopicPartition,
    is_internal,
)
from metaq.record.ids import BROKER_ID_MAX, SEQUENCE_BITS
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.spark.errors import OptionError
from metaq.spark.record_bounds import Bounds, PushedFilters
from metaq.spark.segments.segment_options import SegmentOptions
from metaq.storage.listing import parse_base_offset
from metaq.storage.opening import parse_log_directory_name
from metaq.storage.retention_run import ARCHIVE_SUFFIX, ZIP_SUFFIX
from metaq.storage.segment import META_SUFFIX, Damage
from metaq.storage.segment_source import open_source, unpacked_size
from metaq.storage.span_index import SpanIndex, read_index
from metaq.storage.walk import WINDOW_BYTES, RangeReader

_WILDCARD: Final = re.compile(r"[*?\[]")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_Wanted: TypeAlias = dict[tuple[Path, str], tuple[Path, set[str] | None]]
"""Resolved path and name → partition directory as given, and its files (None: all)."""


class FileKind(enum.Enum):
    """Form of a segment's file; the value is the suffix of the file name."""

    PLAIN = META_SUFFIX
    """As written by a broker; may be growing."""
    ARCHIVED = META_SUFFIX + ARCHIVE_SUFFIX
    """The same bytes, archived."""
    ZIPPED = META_SUFFIX + ZIP_SUFFIX
    """Compressed as the only entry of a zip; readable only from its start."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One file with the bytes of one segment."""

    path: Path
    log_id: LogId
    """Topic and partition, from the name of the directory."""
    base_offset: Offset
    size_bytes: SizeBytes
    """Bytes of records, unpacked; of an active segment, when it was listed."""
    kind: FileKind
    is_active: bool = False
    """Whether it is the newest segment of its directory, which may be growing."""
    flaw: str = ""
    """Reason why the file is unreadable, with a size of 0; "" if it is readable."""

    @property
    def end_offset(self) -> Offset:
        """Offset after its last byte."""
        return Offset(self.base_offset + self.size_bytes)


def find_segments(fs: FileSystem, patterns: Iterable[str]) -> tuple[SegmentFile, ...]:
    """Return the segment files of paths, each once.

    Args:
        fs: the disk.
        patterns: data directories, partition directories or segment files; `*`, `?`
            and `[…]` match within one component of the path.

    Returns:
        Files by directory, then by base offset. If a crash left both a segment and its
        archive, only the segment.

    Raises:
        OptionError: a path does not exist, or is not local.
        StorageError: a disk error, or an invalid name of a segment.
    """
    wanted: _Wanted = {}
    for pattern in patterns:
        for path in _expand(fs, pattern):
            _sort_in(fs, path, wanted)
    files: list[SegmentFile] = []
    for directory, names in sorted(wanted.values(), key=itemgetter(0)):
        found = _list_segments(fs, directory)
        files += [f for f in found if names is None or f.path.name in names]
    return tuple(files)


def _expand(fs: FileSystem, pattern: str) -> list[Path]:
    """Return the existing paths that a pattern matches."""
    scheme = _SCHEME.match(pattern)
    if scheme is not None and scheme[1] != "file":
        raise OptionError(
            f"path={pattern}: expected a path that every executor has mounted, got"
            f" the scheme {scheme[1]!r}"
        )
    text = pattern.removeprefix("file:")
    text = "/" + text.lstrip("/") if text.startswith("//") else text
    paths = [Path(Path(text).anchor)]
    for step in Path(text).parts[1:] if Path(text).anchor else Path(text).parts:
        if not _WILDCARD.search(step):
            paths = [path / step for path in paths]
            continue
        rooms = [path for path in paths if fs.is_directory(path)]
        paths = [
            room / name
            for room in rooms
            for name in fs.list_directory(room)
            if fnmatchcase(name, step) and not name.startswith(".")
        ]
    paths = [path for path in paths if fs.exists(path)]
    if not paths:
        raise OptionError(f"path={pattern}: expected a file or directory, got none")
    if paths == [Path(text)] and not fs.is_directory(paths[0]):
        _name_log(paths[0].parent)
        if _split_name(paths[0].name) is None:
            names = ", ".join(f"<offset>{kind.value}" for kind in FileKind)
            raise OptionError(f"path={pattern}: expected a segment, named {names}")
    return paths


def _sort_in(fs: FileSystem, path: Path, wanted: _Wanted) -> None:
    """Add the segments of a path to `wanted`."""
    if not fs.is_directory(path):
        _name_log(path.parent)
        _want(wanted, path.parent, path.name)
        return
    if parse_log_directory_name(path.name) is not None and any(
        _split_name(name) is not None for name in fs.list_directory(path)
    ):
        _want(wanted, path, None)
        return
    for name in fs.list_directory(path):
        room = path / name
        if parse_log_directory_name(name) is not None and fs.is_directory(room):
            _want(wanted, room, None)


def _want(wanted: _Wanted, directory: Path, name: str | None) -> None:
    """Add a file of a partition directory to `wanted`, or all its files for None.

    A directory reached by several links is read once. Its name as given, even that of
    a link, identifies the partition.
    """
    place = directory.resolve(), directory.name
    path, names = wanted.setdefault(place, (directory, set()))
    if name is None:
        wanted[place] = path, None
    elif names is not None:
        names.add(name)


def _list_segments(fs: FileSystem, directory: Path) -> list[SegmentFile]:
    """Return the segments of a partition directory, by base offset."""
    log_id = _name_log(directory)
    chosen: dict[Offset, tuple[FileKind, Path]] = {}
    for name in fs.list_directory(directory):
        split = _split_name(name)
        if split is None:
            continue
        kind, text = split
        path = directory / name
        base = parse_base_offset(text)
        if base is None:
            raise StorageError(f"segment name is not a number: path={path}")
        other = chosen.get(base)
        if other is not None and other[0] is kind:
            raise StorageError(
                f"two segments have one base offset: directory={directory}"
                f" {other[1].name} {name}"
            )
        if other is None or _rank(kind) < _rank(other[0]):
            chosen[base] = kind, path
    newest = max(chosen, default=None)
    files = []
    for base, (kind, path) in sorted(chosen.items()):
        size, flaw = SizeBytes(0), ""
        try:
            size = unpacked_size(fs, path, is_zip=kind is FileKind.ZIPPED)
        except CorruptRecordError as error:
            flaw = str(error)
        except MissingFileError:
            continue  # removed by retention since the directory was listed
        except DiskError as error:
            if error.operation != "read":
                raise
            flaw = str(error)
        is_active = base == newest and kind is FileKind.PLAIN
        files.append(SegmentFile(path, log_id, base, size, kind, is_active, flaw))
    return files


def _name_log(directory: Path) -> LogId:
    log_id = parse_log_directory_name(directory.name)
    if log_id is None:
        raise OptionError(
            f"path={directory}: expected a directory named <topic>-<partition>,"
            f" got {directory.name!r}"
        )
    return log_id


def _split_name(name: str) -> tuple[FileKind, str] | None:
    """Return kind and base offset text of a segment's file name; None for others."""
    for kind in FileKind:
        if name.endswith(kind.value):
            return kind, name.removesuffix(kind.value)
    return None


def _rank(kind: FileKind) -> int:
    """Return the rank of a kind; the lowest of a segment's files is read."""
    return list(FileKind).index(kind)


NO_BROKER: Final = BrokerId(-1)
"""Broker of a file whose ids were stamped by a Java broker, and do not name it."""

WALK_BYTES_MAX: Final = SizeBytes(4 << 30)
"""Maximum bytes walked per query on the driver, in some seconds; later files are not
split."""

_LENGTH: Final = Struct(">i")


@dataclass(frozen=True, slots=True)
class Split:
    """A range of one segment file that one task reads; picklable."""

    file: SegmentFile
    broker_id: BrokerId
    """Broker of its records; -1 if unknown."""
    bounds: Bounds
    start: Offset
    end: Offset
    """Offset after its last byte, a record boundary unless `may_be_torn`."""
    may_be_torn: bool = False
    """Whether it may end with a torn tail: its bytes may not have been synced, after a
    crash or by a running broker."""

    @property
    def size_bytes(self) -> SizeBytes:
        """Bytes of records in its range."""
        return SizeBytes(self.end - self.start)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Plan of a query."""

    tasks: tuple[tuple[Split, ...], ...]
    """Splits by task; every wanted record is in exactly one."""
    unreadable: tuple[Damage, ...]


def plan_query(
    fs: FileSystem,
    options: SegmentOptions,
    pushed: PushedFilters,
    walk_bytes_max: int = WALK_BYTES_MAX,
) -> SegmentPlan:
    """Find the files, and divide them into tasks of about the size in the options.

    Raises:
        OptionError: a path does not exist, or names no partition; or there is no file
            of a topic or partition named in the options.
        StorageError: a disk error.
    """
    found = find_segments(fs, options.paths)
    _require_topics(options, {file.log_id.topic for file in found})
    files = [file for file in found if options.chooses_topic(file.log_id.topic)]
    if options.leaves_out_internal:
        files = [f for f in files if not is_internal(f.log_id.topic)] or files
    placed = list(place_files(fs, files, options.broker_id))
    _require_partitions(options, files, placed)
    splits: list[Split] = []
    splitter = _Splitter(fs, options.bytes_per_partition, walk_bytes_max)
    for file, broker_id in placed:
        bounds = _bounds_of(file, broker_id, options, pushed)
        if bounds is not None:
            splits += splitter.split(file, broker_id, bounds)
    tasks = _pack(splits, options.bytes_per_partition)
    unreadable = (Damage(f.path, f.base_offset, None, f.flaw) for f in files if f.flaw)
    return SegmentPlan(tasks, tuple(unreadable))


def _require_topics(options: SegmentOptions, there: Collection[str]) -> None:
    """Refuse a topic of `subscribe` without files."""
    for topic in sorted({*options.topics}.difference(there)):
        raise OptionError(
            f"subscribe: no file is of topic {topic!r}; topics of the files are:"
            f" {name_few(sorted(there)) or 'none'}"
        )


def _require_partitions(
    options: SegmentOptions,
    files: Iterable[SegmentFile],
    placed: Iterable[tuple[SegmentFile, BrokerId]],
) -> None:
    """Refuse a named partition without files.

    Message ids name the broker. An empty file may belong to any broker.
    """
    brokers: dict[LogId, set[BrokerId]] = {file.log_id: set() for file in files}
    for file, broker_id in placed:
        if file.size_bytes:
            brokers[file.log_id].add(broker_id)
    for partition in sorted(options.named):
        there = brokers.get(LogId(partition.topic, partition.partition))
        if there is not None and NO_BROKER in there:
            raise OptionError(
                f"{partition}: the ids of its messages do not name their broker: name"
                " it by brokerId"
            )
        if there is None or (there and partition.broker_id not in there):
            others = [f"{each}-{partition.partition}" for each in sorted(there or ())]
            raise OptionError(
                f"{partition}: no file is of this partition; of topic"
                f" {partition.topic} and its number there are:"
                f" {name_few(others) or 'none'}"
            )


def _bounds_of(
    file: SegmentFile,
    broker_id: BrokerId,
    options: SegmentOptions,
    pushed: PushedFilters,
) -> Bounds | None:
    """Return the range to read of a file; None if it is not read."""
    log_id = file.log_id
    partition = TopicPartition(log_id.topic, broker_id, log_id.partition)
    asked = options.bounds_of(partition)
    if asked is None or not pushed.allows(partition):
        return None
    return asked.narrowed(pushed.bounds)


def _pack(
    splits: Iterable[Split], bytes_max: SizeBytes
) -> tuple[tuple[Split, ...], ...]:
    """Combine small splits into tasks, in order: a task for each would cost more."""
    packs: list[list[Split]] = []
    size = 0
    for split in splits:
        if not packs or size + split.size_bytes > bytes_max:
            packs.append([])
            size = 0
        packs[-1].append(split)
        size += split.size_bytes
    return tuple(tuple(pack) for pack in packs)


# -- cutting --------------------------------------------------------------------------


def place_files(
    fs: FileSystem, files: Iterable[SegmentFile], broker_id: BrokerId | None
) -> Iterator[tuple[SegmentFile, BrokerId]]:
    """Yield the readable files with their brokers, named by the ids of first records.

    Args:
        fs: the disk.
        files: by directory, then by base offset.
        broker_id: broker of all files; None takes it from the ids.

    Raises:
        StorageError: a disk error, or an archive is damaged.
    """
    for _directory, group in groupby(files, key=lambda file: file.path.parent):
        known = NO_BROKER if broker_id is None else broker_id
        for file in group:
            if file.flaw:
                continue
            if broker_id is None and (first := _first_id(fs, file)) is not None:
                known = BrokerId((first >> SEQUENCE_BITS) & BROKER_ID_MAX)
            yield file, known


def _first_id(fs: FileSystem, file: SegmentFile) -> MessageId | None:
    """Return the id of a file's first record; None if none names a broker."""
    is_zip = file.kind is FileKind.ZIPPED
    with closing(open_source(fs, file.path, is_zip=is_zip)) as source:
        try:
            header = source.read_at(Position(0), SizeBytes(HEADER_BYTES))
        except CorruptRecordError:
            return None  # reported when the file is read
        except DiskError as error:
            if error.operation != "read":
                raise
            return None  # a bad sector: reported by the task that reads it
    if len(header) < HEADER_BYTES:
        return None
    _length, _checksum, message_id, _flag = HEADER.unpack(header)
    return MessageId(message_id) if message_id > 0 else None


@dataclass(slots=True)
class _Splitter:
    """Splits the files of one query. Owner: its plan."""

    fs: FileSystem
    bytes_max: int
    """A split ends at the first boundary that reaches this size."""
    left_bytes: int
    """Bytes that may still be walked."""

    def split(
        self, file: SegmentFile, broker_id: BrokerId, bounds: Bounds
    ) -> list[Split]:
        """Cut a file into splits; omit those outside of `bounds`.

        By time a file is omitted only if its index shows that its last append was too
        early. Message ids do not show that: messages of a transaction have the ids of
        their puts, and may follow newer ones, even at the start of a file.

        The splits are in order, and cover every record within the bounds. The bytes of
        an active segment after its index are a separate split, which may be torn.

        Raises:
            StorageError: a disk error.
        """
        index = None
        if not (file.is_active or bounds.overlaps(file.base_offset, file.end_offset)):
            return []
        if file.kind is FileKind.PLAIN:
            index = read_index(self.fs, file.path, file.base_offset)
        if not file.is_active and _is_too_old(file, index, bounds.start_ms):
            return []
        end = tail = file.end_offset
        if file.is_active:
            # The index may have been read later than the size: then its bytes exist.
            tail = file.base_offset if index is None else index.end_offset
            end = max(end, tail)
        cuts = [file.base_offset, *self._cuts(file, index, tail), tail, end]
        return [
            Split(file, broker_id, bounds, one, two, may_be_torn=one >= tail)
            for one, two in pairwise(cuts)
            if one < two and bounds.overlaps(one, two)
        ]

    def _cuts(
        self, file: SegmentFile, index: SpanIndex | None, end: Offset
    ) -> Iterator[Offset]:
        """Yield the offsets at which to cut, strictly inside [base offset, end)."""
        last = covered = file.base_offset
        if file.kind is FileKind.ZIPPED or end - last <= self.bytes_max:
            return
        for span in index.spans if index is not None else ():
            if span.end_offset >= end:
                return
            covered = span.end_offset
            if covered - last >= self.bytes_max:
                yield covered
                last = covered
        if end - last > self.bytes_max and end - covered <= self.left_bytes:
            self.left_bytes -= end - covered
            yield from self._walk_cuts(file, covered, end, last + self.bytes_max)

    def _walk_cuts(
        self, file: SegmentFile, start: Offset, end: Offset, target: int
    ) -> Iterator[Offset]:
        """Yield the first record in [start, end) at or after `target`, and so on.

        Reads only headers, and stops at a negative length. A damaged length may lead to
        a wrong cut: then the split before it reports the damage, the one after it
        resynchronises as after any damage, and the record at the cut is lost with it.
        """
        with closing(self.fs.open_read(file.path)) as plain:
            base, offset = file.base_offset, start
            reader = RangeReader(plain, Position(start - base), Position(end - base))
            while offset + HEADER_BYTES <= end:
                window = reader.read(Position(offset - base), WINDOW_BYTES)
                at, limit = 0, len(window) - HEADER_BYTES
                if limit < 0:
                    return
                while at <= limit:
                    if offset + at >= target:
                        yield Offset(offset + at)
                        target = offset + at + self.bytes_max
                    (length,) = _LENGTH.unpack_from(window, at)
                    if length < 0:
                        return
                    at += HEADER_BYTES + length
                offset = Offset(offset + at)


def _is_too_old(
    file: SegmentFile, index: SpanIndex | None, start_ms: Millis | None
) -> bool:
    """Return whether the whole file was certainly appended before a time."""
    if start_ms is None or index is None or index.end_offset < file.end_offset:
        return False
    return all(span.append_time_ms < start_ms for span in index.spans)

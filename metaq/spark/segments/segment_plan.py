"""Plan of one query: segment files, cut on record boundaries, shared out among tasks.

A boundary is believed where the span index names it. Bytes without an index (a Java
broker wrote them, or they are archived) are walked from header to header, which reads
them once on the driver. That pays for a few files; where there are many, each of them
is one split, as is every file that is short enough. So is a zip: it can only be
unpacked from its start.

    <data directory>/<topic>-<partition>/<base offset>.meta        a segment
                                         <base offset>.meta.arc    archived
                                         <base offset>.meta.zip    archived, compressed

Only the name of the directory has the topic and the partition, so an archive keeps it
when it is moved elsewhere. Directories are never joined: two of them may hold partition
0 of one topic from two brokers. Source: docs/metaq-1.4/broker.md 2.1, 2.9.
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
"""Place → partition directory as it was named, and its files; None for all."""


class FileKind(enum.Enum):
    """Form of the bytes in a segment's file; the value ends the file's name."""

    PLAIN = META_SUFFIX
    """As a broker wrote them; the file may be growing."""
    ARCHIVED = META_SUFFIX + ARCHIVE_SUFFIX
    """The same bytes, out of use."""
    ZIPPED = META_SUFFIX + ZIP_SUFFIX
    """Compressed as the only entry of a zip; readable from its start only."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One file with the bytes of one segment."""

    path: Path
    log_id: LogId
    """Partition, by the name of the directory."""
    base_offset: Offset
    size_bytes: SizeBytes
    """Bytes of records; of a zip, unpacked. Of an active segment, at that moment."""
    kind: FileKind
    is_active: bool = False
    """The newest segment of its directory: a broker may be writing to its end."""
    flaw: str = ""
    """Reason why nothing of the file can be read, its size is 0 then; empty: none."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after its last byte."""
        return Offset(self.base_offset + self.size_bytes)


def find_segments(fs: FileSystem, patterns: Iterable[str]) -> tuple[SegmentFile, ...]:
    """Return the segment files that some paths mean, each once.

    Args:
        fs: The disk.
        patterns: Data directories, partition directories or segment files; `*`, `?`
            and `[…]` match within one step of the path.

    Returns:
        By directory, then by base offset. Where a crash left a segment beside its
        archive, the segment alone.

    Raises:
        OptionError: A path does not exist, or is on no disk of this machine.
        StorageError: The disk refused, or a name makes no sense.
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
    """Add a file of a partition directory to `wanted`, or all of them for None.

    Links lead to one directory by several paths; it is read once. Its own name says
    which partition it is, also where that is the name of a link.
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
            continue  # retention took it between the list and this line
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
    """Return kind and base offset of a segment's file name; None for other files."""
    for kind in FileKind:
        if name.endswith(kind.value):
            return kind, name.removesuffix(kind.value)
    return None


def _rank(kind: FileKind) -> int:
    """Return which of two files of one segment is read: the lower one."""
    return list(FileKind).index(kind)


NO_BROKER: Final = BrokerId(-1)
"""Broker of a file whose ids do not name it: a Java broker stamped them."""

WALK_BYTES_MAX: Final = SizeBytes(4 << 30)
"""Walked per query on the driver, some seconds' worth; files beyond stay whole."""

_LENGTH: Final = Struct(">i")


@dataclass(frozen=True, slots=True)
class Split:
    """A range of one segment file that one task reads; picklable."""

    file: SegmentFile
    broker_id: BrokerId
    """Broker that its records come from; -1: unknown."""
    bounds: Bounds
    start: Offset
    end: Offset
    """Offset after its last byte, a record boundary unless `may_be_torn`."""
    may_be_torn: bool = False
    """Nothing proves that its bytes were ever synced: a crash, or a broker at work,
    explains a flaw at its end."""

    @property
    def size_bytes(self) -> SizeBytes:
        """Return how many bytes of records it spans."""
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
    """Look at the files, and give each task about as many bytes as the options say.

    Raises:
        OptionError: A path does not exist, or names no partition; or no file is of a
            topic or partition that the options name.
        StorageError: The disk refused.
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
    """Refuse a topic of `subscribe` of which there is no file."""
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
    """Refuse a partition that is named and of which there is no file.

    Message ids name its broker. A file without any may be of each broker.
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
    """Return the wanted range of a file; None: none."""
    log_id = file.log_id
    partition = TopicPartition(log_id.topic, broker_id, log_id.partition)
    asked = options.bounds_of(partition)
    if asked is None or not pushed.allows(partition):
        return None
    return asked.narrowed(pushed.bounds)


def _pack(
    splits: Iterable[Split], bytes_max: SizeBytes
) -> tuple[tuple[Split, ...], ...]:
    """Put small splits together, in order: a task for each would cost more."""
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
    """Yield the readable files with their brokers, by the ids of first records.

    Args:
        fs: The disk.
        files: By directory, then by base offset.
        broker_id: Of all files, where the caller knows better than the ids.

    Raises:
        StorageError: The disk refused, or an archive is damaged.
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
            return None  # named when the file is read
        except DiskError as error:
            if error.operation != "read":
                raise
            return None  # a bad sector: the task that reads it fails, or names it
    if len(header) < HEADER_BYTES:
        return None
    _length, _checksum, message_id, _flag = HEADER.unpack(header)
    return MessageId(message_id) if message_id > 0 else None


@dataclass(slots=True)
class _Splitter:
    """Cuts the files of one query. Owner: its plan."""

    fs: FileSystem
    bytes_max: int
    """A split ends at the first boundary that reaches this size."""
    left_bytes: int

    def split(
        self, file: SegmentFile, broker_id: BrokerId, bounds: Bounds
    ) -> list[Split]:
        """Cut a file into splits; leave out those that hold no offset in `bounds`.

        Times leave out a file only where its index says that the last append was too
        early. Ids do not show it: messages of a transaction have the ids of their puts,
        and may follow younger ones, also as the first of a file.

        The splits are in order, and cover every record within the bounds. The bytes of
        an active segment after its index are a split of their own, which may be torn.

        Raises:
            StorageError: The disk refused.
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
            # The index may be newer than the size: its bytes are there by now.
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
        """Yield the offsets between the ends of [base offset, end) at which to cut."""
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

        Only headers are looked at, and the walk ends at one that is none. A damaged
        length may lead it astray: the split before such a cut names the damage, the one
        after it finds its way as after any damage, and the record under the cut is lost
        with it.
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
    """Whether all of a file was appended before a time."""
    if start_ms is None or index is None or index.end_offset < file.end_offset:
        return False
    return all(span.append_time_ms < start_ms for span in index.spans)

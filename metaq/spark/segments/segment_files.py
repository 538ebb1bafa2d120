"""Segment files below some paths: their partitions and kinds.

    <data directory>/<topic>-<partition>/<base offset>.meta        a segment
                                         <base offset>.meta.arc    archived
                                         <base offset>.meta.zip    archived, compressed

Only the name of the directory has the topic and the partition, so an archive keeps it
when it is moved elsewhere. Directories are never joined: two of them may hold partition
0 of one topic from two brokers. Source: docs/metaq-1.4/broker.md 2.1, 2.9.
"""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeAlias

from metaq.errors import CorruptRecordError, DiskError, StorageError
from metaq.fs import FileSystem
from metaq.model import LogId, Offset, SizeBytes
from metaq.spark.errors import OptionError
from metaq.storage.listing import parse_base_offset
from metaq.storage.opening import parse_log_directory_name
from metaq.storage.retention_run import ARCHIVE_SUFFIX, ZIP_SUFFIX
from metaq.storage.segment import META_SUFFIX
from metaq.storage.segment_source import unpacked_size

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
        except DiskError as error:
            if error.errno_name == "ENOENT":
                continue  # retention took it between the list and this line
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

"""Follow a growing file line by line, through rotation, from a bookmark.

Theory of operation. A bookmark is an inode, a position, and a checksum of the bytes
before the position. It is valid while the file has those bytes there. So a file that
was truncated and rewritten is noticed even if it is longer than before, and a reused
inode is not mistaken for the old file.

    rename + create   the path has another inode. The open file is read to its end, and
                      for ROTATED_S longer, because the writer may not have opened the
                      new file yet. Then the next file is opened: the oldest rotated
                      file that is younger, or the path itself.
    copy + truncate   the bytes before the bookmark are gone. The rotated file that has
                      them is the copy: its rest is read first.
    restart           the bookmark is searched in the path and the rotated files;
                      reading continues there as above.

The name of a rotated file is the path's name, then numbers, dots and dashes, as in
`app.log.1` and `app.log-20260131`. Compressed and unreadable files are not read: their
unread rest is lost, which is logged.

Only complete lines are returned; the last line of a file waits for its line end. The
last line of a rotated file is complete once the file has stopped growing.
"""

import logging
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metaq.errors import ClientError

_log = logging.getLogger(__name__)

CHECK_BYTES: Final = 256
"""Number of bytes before a position that identify a file."""
CHUNK_BYTES: Final = 1024 * 1024
LINE_BYTES_MAX: Final = 64 * 1024 * 1024
DONE_MAX: Final = 64
"""Number of files remembered as read to their end, since their times may be equal."""
ROTATED_S: Final = 1.0
"""Time for which a writer may still write to a file after renaming it, seconds."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A position in a file, with the means to find it again."""

    inode: int
    position: int
    """Position of the next line, bytes."""
    check_bytes: int
    """Number of bytes before the position in the checksum."""
    check: int
    """CRC-32 of those bytes."""


UNOPENED: Final = Bookmark(0, 0, 0, 0)
"""The bookmark before the file exists: all of its lines are new."""


class FileFollower:
    """Reads the lines of one path, through its rotation. Owned by one thread."""

    def __init__(
        self,
        path: Path,
        *,
        bookmark: Bookmark | None,
        from_start: bool,
        monotonic_s: Callable[[], float] = time.monotonic,
        chunk_bytes: int = CHUNK_BYTES,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        """Open the file if it exists; else `read` tries again.

        Args:
            path: file to follow; it may not exist yet.
            bookmark: position to continue at; None the first time.
            from_start: without a bookmark, read the present lines too.
            monotonic_s: monotonic clock.
            chunk_bytes: bytes per read.
            line_bytes_max: maximum length of a line.
        """
        self._path = path
        self._monotonic_s = monotonic_s
        self._chunk_bytes = chunk_bytes
        self._line_bytes_max = line_bytes_max
        self._fd: int | None = None
        self._position = 0
        self._tail = b""  # the last CHECK_BYTES before the position
        self._rest = b""  # start of a line that has no end yet
        self._rotated_s: float | None = None
        self._done: deque[int] = deque(maxlen=DONE_MAX)
        self.lost_count = 0
        """Number of times that an unread rest was lost: truncated, removed,
        unreadable."""
        if bookmark is not None:
            self._resume(bookmark)
        elif self._open(path) and not from_start:
            self._skip_all()

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @property
    def bookmark(self) -> Bookmark:
        """Position after the last line returned; `UNOPENED` without an open file."""
        if self._fd is None:
            return UNOPENED
        # The start of an incomplete line will be read again.
        known = self._tail[: len(self._tail) - len(self._rest)]
        if len(self._rest) >= len(self._tail):
            known = b""
        return Bookmark(
            os.fstat(self._fd).st_ino,
            self._position - len(self._rest),
            len(known),
            zlib.crc32(known),
        )

    def read(self) -> list[bytes]:
        """Return the next complete lines, without line ends; [] if there are none."""
        if self._fd is None and not self._open(self._path):
            return []
        lines = self._read_on()
        if lines:
            self._rotated_s = None
            return lines
        return self._turn_page()

    # -- within one file --------------------------------------------------------------

    def _open(self, path: Path, position: int = 0) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self.close()
        self._fd, self._position = fd, position
        first = max(0, position - CHECK_BYTES)
        self._tail = os.pread(fd, position - first, first)
        self._rotated_s = None
        return True

    def _skip_all(self) -> None:
        """Go to the start of the last, incomplete line."""
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        first = max(0, size - self._chunk_bytes)
        data = os.pread(self._fd, size - first, first)
        self._position = first + data.rfind(b"\n") + 1
        self._tail = data[: self._position - first][-CHECK_BYTES:]

    def _read_on(self) -> list[bytes]:
        """Return complete lines; [] at the present end of the file."""
        assert self._fd is not None
        while True:
            first = self._position - len(self._tail)
            data = os.pread(self._fd, len(self._tail) + self._chunk_bytes, first)
            if not data.startswith(self._tail):
                return self._on_cut()
            fresh = data[len(self._tail) :]
            if not fresh:
                return []
            self._position += len(fresh)
            self._tail = data[-CHECK_BYTES:]
            head, end, rest = fresh.rpartition(b"\n")
            if end:
                lines = (self._rest + head).split(b"\n")
                self._rest = rest
                return lines
            self._rest += fresh
            if len(self._rest) > self._line_bytes_max:
                raise ClientError(
                    f"{self._path}: line at {self._position - len(self._rest)} is"
                    f" longer than {self._line_bytes_max:,} bytes"
                )

    def _open_at(self, paths: Iterable[Path], bookmark: Bookmark) -> bool:
        """Open the first file in which a bookmark is valid; return False if none."""
        refused = []
        for path in paths:
            try:
                if _is_at(path, bookmark) and self._open(path, bookmark.position):
                    return True
            except PermissionError:
                if path == self._path:
                    raise
                refused.append(path.name)
        if refused:
            _log.warning(
                "no permission to read rotated files: names=%s; lines may be missing",
                ",".join(dict.fromkeys(refused)),
            )
        return False

    def _end_line(self) -> list[bytes]:
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    # -- from file to file ------------------------------------------------------------

    def _on_cut(self) -> list[bytes]:
        """Continue in the copy of a truncated file; without a copy, at its start."""
        assert self._fd is not None
        if self._tail:
            check = zlib.crc32(self._tail)
            mark = Bookmark(0, self._position, len(self._tail), check)
            if self._open_at(reversed(self._rotated()), mark):
                return self._read_on()
        self.lost_count += 1
        _log.warning(
            "file was truncated: path=%s position=%d; lines written since the last read"
            " are lost",
            self._path,
            self._position,
        )
        lines = self._end_line()
        self._position, self._tail = 0, b""
        return lines

    def _turn_page(self) -> list[bytes]:
        """Open the next file, if any, ROTATED_S after it was first seen."""
        assert self._fd is not None
        ours = os.fstat(self._fd)
        successor = self._successor(ours)
        if successor is None:
            self._rotated_s = None
            return []
        now_s = self._monotonic_s()
        if self._rotated_s is None:
            self._rotated_s = now_s
        if now_s - self._rotated_s < ROTATED_S:
            return []
        lines = self._end_line()
        if not self._open_next(successor):
            # It was renamed before it could be opened, or is skipped; try again.
            self._rest = b"".join(lines)
            return []
        self._done.append(ours.st_ino)
        return lines or self._read_on()

    def _open_next(self, path: Path) -> bool:
        inode = _inode(path)
        try:
            return self._open(path)
        except PermissionError:
            if path == self._path or inode is None:
                raise
        self._done.append(inode)
        self.lost_count += 1
        _log.warning(
            "rotated file may not be read: path=%s; its lines are missing", path
        )
        return False

    def _successor(self, ours: os.stat_result) -> Path | None:
        """Return the file after ours; None if the path still is ours, or is missing."""
        there = _stat(self._path)
        if there is None or (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return None
        for path in self._rotated():
            status = _stat(path)
            if status is None or status.st_ino in {ours.st_ino, *self._done}:
                continue
            if status.st_mtime_ns >= ours.st_mtime_ns:
                return path
        return self._path

    def _rotated(self) -> list[Path]:
        """Return the rotated files, oldest first."""
        found = []
        for path in self._siblings():
            status = _stat(path)
            if status is not None:
                found.append((status.st_mtime_ns, path))
        return [path for _mtime, path in sorted(found)]

    def _siblings(self) -> Iterator[Path]:
        name = re.escape(self._path.name)
        pattern = re.compile(name + r"[.\-_][0-9][0-9.\-_:T]*", re.ASCII)
        for path in self._path.parent.iterdir():
            # A directory may have such a name too.
            if pattern.fullmatch(path.name) and path.is_file():
                yield path

    def _resume(self, bookmark: Bookmark) -> None:
        if bookmark == UNOPENED:
            self._open(self._path)
            return
        candidates = [self._path, *reversed(self._rotated())]
        same = [p for p in candidates if _inode(p) == bookmark.inode]
        # A copy has another inode; without bytes to compare, every file would match.
        copies = candidates if bookmark.check_bytes else []
        if self._open_at((*same, *copies), bookmark):
            return
        self.lost_count += 1
        _log.warning(
            "file was rotated away while it was not followed: path=%s position=%d;"
            " lines may be missing",
            self._path,
            bookmark.position,
        )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _inode(path: Path) -> int | None:
    status = _stat(path)
    return None if status is None else status.st_ino


def _is_at(path: Path, bookmark: Bookmark) -> bool:
    """Return whether a bookmark is valid in a file."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < bookmark.position:
                return False
            file.seek(bookmark.position - bookmark.check_bytes)
            data = file.read(bookmark.check_bytes)
    except FileNotFoundError:
        return False
    return zlib.crc32(data) == bookmark.check

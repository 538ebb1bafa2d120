"""A file of frames: a journal that is appended to, and replaced to make it smaller.

    header, 16 bytes
    byte  0          8         12      16
          +----------+---------+-------+
          | magic    | version | crc   |
          | 8 bytes  | u32 = 1 | u32   |
          +----------+---------+-------+
    frame
    byte  0        4       8       9         13       21
          +--------+-------+-------+---------+--------+------+
          | marker | crc   | kind  | length  | number | body |
          | 4      | u32   | u8    | u32     | u64    |      |
          +--------+-------+-------+---------+--------+------+

Big-endian; `crc` is the CRC-32 of the bytes after it in the frame, or before it in the
header. Magic, kinds, numbers and bodies belong to the owner. Each write is one frame,
synced before the next one. So a crash leaves at most one incomplete frame, the last: a
torn tail, which is cut when the file is opened. An incomplete frame before a complete
one is damage, and the file does not open.

Obsolete frames stay in the file until the owner writes the others to a new one,
`<name>.new`, which replaces it. After a failure the file can not be used until it is
opened again, except after a full disk: then it ends where it ended before.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from metaq.errors import (
    CorruptRecordError,
    LogDirOfflineError,
    NoSpaceError,
    StorageError,
)
from metaq.fs.file_system import FileSystem
from metaq.fs.files import AppendFile, ReadFile
from metaq.model import Position, SizeBytes

_log = logging.getLogger(__name__)

VERSION: Final = 1
HEADER: Final = Struct(">8sII")
MARKER: Final = b"\xd7MqE"
FRAME: Final = Struct(">4sIBIQ")

PIECE_BYTES: Final = 1 << 20
"""Bytes read at once in a search for a marker."""

_CRC_END: Final = 8


class StoredFrame(NamedTuple):
    """A complete frame and its position in the file."""

    position: int
    size: int
    """Size of the whole frame, bytes."""
    kind: int
    number: int
    body: bytes


def encode_header(magic: bytes) -> bytes:
    """Return the header of a file; `magic` has eight bytes."""
    packed = HEADER.pack(magic, VERSION, 0)[:-4]
    return packed + crc32(packed).to_bytes(4, "big")


def encode_frame(kind: int, number: int, body: bytes) -> bytes:
    """Return one frame."""
    packed = FRAME.pack(MARKER, 0, kind, len(body), number)[_CRC_END:] + body
    return MARKER + crc32(packed).to_bytes(4, "big") + packed


def read_frames(fs: FileSystem, path: Path, magic: bytes) -> Iterator[StoredFrame]:
    """Yield the complete frames of a file in order, without changing it. Blocks.

    Raises:
        CorruptRecordError: the header, or a frame before a complete one, is damaged.
        MissingFileError: there is no such file.
        DiskError: the disk refuses.
    """
    with fs.open_read(path) as file:
        yield from _frames(file, path, magic)


class FrameFile:
    """A file of frames, open for reading and appending. Owner: the caller.

    Calls block on the disk; one at a time, on any thread.
    """

    def __init__(self, fs: FileSystem, path: Path, magic: bytes) -> None:
        """Create an object for a file; call `open` first.

        Args:
            fs: the disk.
            path: the file, in a directory that is exclusively ours.
            magic: first eight bytes; distinguishes the files of one owner from others.
        """
        self.end = HEADER.size
        """Position after the last complete frame."""
        self.failure: StorageError | None = None
        """Error after which the file can not be read or written, or None."""
        self._fs = fs
        self._path = path
        self._magic = magic
        self._new_path = path.with_name(f"{path.name}.new")
        self._writer: AppendFile | None = None
        self._reader: ReadFile | None = None

    def open(self, on_frame: Callable[[StoredFrame], None]) -> None:
        """Open the file, create it if it is missing, and cut a torn tail.

        Args:
            on_frame: called with each frame, in order.

        Raises:
            CorruptRecordError: bytes are damaged in a way that no crash explains.
            StorageError: the disk refuses. After either error call `close`.
        """
        if not self._fs.exists(self._path):
            self._fs.write_atomically(self._path, encode_header(self._magic))
        self._fs.discard(self._new_path)
        self._writer, self._reader = self._open_files()
        for frame in _frames(self._reader, self._path, self._magic):
            self.end = frame.position + frame.size
            on_frame(frame)
        size = self._reader.size()
        if self.end < size:
            _log.warning(
                "torn tail cut: file=%s position=%d bytes=%d",
                self._path,
                self.end,
                size - self.end,
            )
            self._writer.truncate(SizeBytes(self.end))
            self._writer.sync()

    def append(self, kind: int, number: int, body: bytes) -> StoredFrame:
        """Append one frame; it is synced on return.

        Raises:
            NoSpaceError: it was not written; a later try may succeed.
            StorageError: the disk refused now or before; it may have been written.
        """
        frame = encode_frame(kind, number, body)
        self._write(frame)
        self.end += len(frame)
        return StoredFrame(self.end - len(frame), len(frame), kind, number, body)

    def _write(self, frame: bytes) -> None:
        if self.failure is not None:
            raise LogDirOfflineError(str(self.failure)) from self.failure
        assert self._writer is not None, "opened"
        full = None
        try:
            try:
                self._writer.write(frame)
            except NoSpaceError as error:
                full = error
                self._writer.truncate(SizeBytes(self.end))
            else:
                self._writer.sync()
        except StorageError as error:
            self.failure = error
            raise
        if full is not None:
            raise full

    def clear(self) -> None:
        """Cut all frames; synced on return. It needs no free space.

        Raises:
            StorageError: the disk refused, now or before; they may be there.
        """
        if self.failure is not None:
            raise LogDirOfflineError(str(self.failure)) from self.failure
        assert self._writer is not None, "opened"
        try:
            self._writer.truncate(SizeBytes(HEADER.size))
            self._writer.sync()
        except StorageError as error:
            self.failure = error
            raise
        self.end = HEADER.size

    def read(self, position: int, size: int) -> StoredFrame:
        """Return the frame at a position.

        Raises:
            CorruptRecordError: the bytes are damaged.
            StorageError: the file is closed, or the disk refuses.
        """
        if self._reader is None:
            raise self._closed()
        frame = _read_frame(self._reader, position, position + size)
        if frame is None:
            raise CorruptRecordError(f"{self._path}: damaged at position {position}")
        return frame

    def replace(self, frames: Iterable[tuple[int, int, bytes]]) -> None:
        """Replace the file by one with only these frames.

        Args:
            frames: kind, number and body of each; the iterator may call `read`.

        Raises:
            NoSpaceError: nothing has changed.
            StorageError: a frame could not be read or written, and nothing has changed;
                or it is unknown which of the two files has the name: `failure` is set.
        """
        end = HEADER.size
        self._fs.discard(self._new_path)
        file = self._fs.open_append(self._new_path, create=True)
        try:
            file.write(encode_header(self._magic))
            for each in frames:
                frame = encode_frame(*each)
                file.write(frame)
                end += len(frame)
            file.sync()
        finally:
            file.close()
        try:
            self._fs.rename(self._new_path, self._path)
            self._close_files()
            self._writer, self._reader = self._open_files()
        except StorageError as error:
            # Only a restart can find out which of the two files has the name.
            self.failure = error
            raise
        self.end = end

    def close(self) -> None:
        """Close the file; never raises; a second call does nothing."""
        self.failure = self.failure or self._closed()
        self._close_files()

    def _closed(self) -> LogDirOfflineError:
        return LogDirOfflineError(
            f"{self._path.name} is closed: directory={self._path.parent}"
        )

    def _open_files(self) -> tuple[AppendFile, ReadFile]:
        self._writer = self._fs.open_append(self._path, create=False)
        self._reader = self._fs.open_read(self._path)
        return self._writer, self._reader

    def _close_files(self) -> None:
        for file in (self._writer, self._reader):
            if file is not None:
                file.abandon()
        self._writer = self._reader = None


def _frames(file: ReadFile, path: Path, magic: bytes) -> Iterator[StoredFrame]:
    size = file.size()
    header = file.read_at(Position(0), SizeBytes(HEADER.size))
    if header != encode_header(magic):
        raise CorruptRecordError(f"{path}: the header is damaged")
    end = HEADER.size
    while (frame := _read_frame(file, end, size)) is not None:
        yield frame
        end += frame.size
    good = _find_frame(file, end + 1, size) if end < size else None
    if good is not None:
        raise CorruptRecordError(
            f"{path}: damaged at position {end}; the next whole entry is at {good}"
        )


def _read_frame(file: ReadFile, position: int, end: int) -> StoredFrame | None:
    """Return the complete frame at a position, or None."""
    head = file.read_at(Position(position), SizeBytes(FRAME.size))
    if len(head) < FRAME.size:
        return None
    marker, crc, kind, length, number = FRAME.unpack(head)
    size = FRAME.size + length
    if marker != MARKER or position + size > end:
        return None
    body = file.read_at(Position(position + FRAME.size), SizeBytes(length))
    if crc32(body, crc32(head[_CRC_END:])) != crc:
        return None
    return StoredFrame(position, size, kind, number, body)


def _find_frame(file: ReadFile, start: int, end: int) -> int | None:
    """Return the position of the first complete frame at or after `start`."""
    for position in find_markers(file, start, end):
        if _read_frame(file, position, end) is not None:
            return position
    return None


def find_markers(
    file: ReadFile, start: int, end: int, piece_bytes: int = PIECE_BYTES
) -> Iterator[int]:
    """Yield every position of the marker's bytes, reading in pieces."""
    overlap = len(MARKER) - 1
    while start < end:
        piece = file.read_at(Position(start), SizeBytes(piece_bytes))
        at = piece.find(MARKER)
        while at >= 0:
            yield start + at
            at = piece.find(MARKER, at + 1)
        if len(piece) <= overlap:
            return
        start += len(piece) - overlap

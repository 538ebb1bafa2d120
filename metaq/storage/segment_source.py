"""The bytes of one segment file, read forwards, plain or from a zip.

A zip is unpacked while it is read, one piece at a time in memory and without a
temporary file. That is why it can only be read forwards.
"""

import io
import zipfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol

from metaq.errors import CorruptRecordError
from metaq.fs import FileSystem, ReadFile
from metaq.model import Position, SizeBytes


class SegmentSource(Protocol):
    """Byte source of a segment reader, which owns and closes it."""

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        """Return `size` bytes from `position`; fewer only at the end of the segment."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


def unpacked_size(fs: FileSystem, path: Path, *, is_zip: bool) -> SizeBytes:
    """Return the size of a segment's records in bytes; see `open_source`."""
    if not is_zip:
        return fs.size_of(path)
    with closing(ZipSource(fs.open_read(path))) as source:
        return source.size_bytes


def open_source(fs: FileSystem, path: Path, *, is_zip: bool) -> SegmentSource:
    """Open a segment file.

    Raises:
        CorruptRecordError: It is not a zip, but should be, or not one that retention
            makes.
        StorageError: The disk refuses.
    """
    file = fs.open_read(path)
    return ZipSource(file) if is_zip else file


class ZipSource:
    """The only entry of a zip, read forwards; not thread-safe.

    It owns the file, even if the constructor raises. Memory: twice the result of one
    call, and a window of the decompressor.
    """

    def __init__(self, file: ReadFile) -> None:
        """Read the directory of the zip.

        Raises:
            CorruptRecordError: It is not a zip, does not have exactly one entry, or
                its entry cannot be unpacked in pieces.
        """
        self._file = file
        self._held = b""
        self._start = 0
        self._flaw: Exception | None = None
        try:
            self._archive = zipfile.ZipFile(io.BufferedReader(_FileStream(file)))
            entry = _entry_of(self._archive)
            self._stream = self._archive.open(entry)
        except _BAD_ZIP as error:
            file.close()
            raise _corrupt(error) from error
        except BaseException:
            file.close()
            raise
        self.size_bytes = SizeBytes(entry.file_size)
        """Size of the segment, bytes, according to the directory of the zip."""

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        """Return bytes from `position`, which is in or at the end of the last result.

        Fewer than `size` are returned at the end of the segment, or before damage.

        Raises:
            CorruptRecordError: The compressed bytes are damaged, and there are no more
                good ones than the last call returned.
            StorageError: The disk refuses.
        """
        assert self._start <= position <= self._start + len(self._held)
        parts = [self._held[position - self._start :]]
        missing = size - len(parts[0])
        while missing > 0 and (part := self._unpack(missing)):
            parts.append(part)
            missing -= len(part)
        if self._flaw is not None and len(parts) == 1:
            raise _corrupt(self._flaw) from self._flaw
        self._held, self._start = b"".join(parts), position
        return self._held[:size]

    def _unpack(self, size: int) -> bytes:
        """Return some bytes; empty at the end, or where damage begins."""
        if self._flaw is None:
            try:
                return self._stream.read(min(size, _STEP_BYTES))
            except _BAD_ZIP as error:
                self._flaw = error
        return b""

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._stream.close()
        self._archive.close()
        self._file.close()


def _entry_of(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the only entry, which must be unpackable in pieces."""
    (entry,) = archive.infolist()
    if entry.compress_type not in _METHODS:
        raise zipfile.BadZipFile(
            f"expected an entry stored or deflated, got method {entry.compress_type}"
        )
    return entry


class _FileStream(io.RawIOBase):
    """Seekable input stream for `zipfile` over a file that it does not own."""

    def __init__(self, file: ReadFile) -> None:
        self._from = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        start = starts[whence] if whence in starts else self._from.size()
        self._position = start + offset
        return self._position

    def readinto(self, target: bytearray | memoryview, /) -> int:  # type: ignore[override]  # any buffer will do
        count = self._from.read_into(Position(self._position), memoryview(target))
        self._position += count
        return count


_STEP_BYTES: Final = 1 << 16
"""Maximum number of bytes unpacked at once, and so lost before damage."""
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Retention deflates. With bzip2 and LZMA, Python unpacks 4 KiB in one step, which may
produce gigabytes."""
_BAD_ZIP: Final = (
    zipfile.BadZipFile,
    ValueError,  # not exactly one entry
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression method that Python does not know
    RuntimeError,  # an encrypted entry
)


def _corrupt(error: Exception) -> CorruptRecordError:
    """Return the error for the caller, which adds the file and offsets."""
    return CorruptRecordError(f"archive is damaged: {error}")

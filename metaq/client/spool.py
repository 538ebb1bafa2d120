"""The spool: messages kept on the local disk until they are taken.

One directory, one file, one owner (the directory is locked). A message is on disk when
`append` returns, and gone for good when `remove` returns. Messages come out in the
order in which they went in.

    name: spool

    header, 16 bytes
    byte  0          8         12      16
          +----------+---------+-------+
          | MQ-SPOOL | version | crc   |
          | 8 bytes  | u32 = 1 | u32   |
          +----------+---------+-------+
    entry
    byte  0        4       8       9         13       21
          +--------+-------+-------+---------+--------+------+
          | marker | crc   | kind  | length  | number | body |
          | 4      | u32   | u8    | u32     | u64    |      |
          +--------+-------+-------+---------+--------+------+
    body of kind 1, a message
          | broker i32 | partition i32 | id i64 | offset i64 | next offset i64 |
          | topic length u32 | text length i32 | topic | text | data |
          text length n >= 0: n bytes, the attribute; -1: no attribute;
          n <= -2: -2 - n bytes, key, headers and attribute (`record/flags.py`)
    body of kind 2, messages removed:  u64 numbers

Big-endian; texts are UTF-8; `crc` is the CRC-32 of the entry after it. Each write is
one entry, and is synced before the next one. So a crash leaves at most one entry that
is not whole, the last one: a torn tail, which is cut when the spool is opened. An entry
that is not whole with a whole one after it is damage, and the spool does not open.

Removed messages stay in the file until they are the larger part of it; then the rest is
written to a new file, which replaces the old one.
"""

import logging
import struct
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from urllib.parse import quote

from metaq.errors import (
    CorruptRecordError,
    LogDirOfflineError,
    NoSpaceError,
    StorageError,
)
from metaq.fs import AppendFile, FileSystem, ReadFile
from metaq.model import (
    BrokerId,
    HeaderPairs,
    Message,
    MessageId,
    Offset,
    Position,
    SizeBytes,
    TopicPartition,
)
from metaq.record.checksum import crc32, with_crc
from metaq.record.flags import encode_properties, join_properties, split_properties

_log = logging.getLogger(__name__)

FILE_NAME: Final = "spool"

NEW_NAME: Final = "spool.new"
"""Name of the file while it is rewritten without removed messages."""

MAGIC: Final = b"MQ-SPOOL"
VERSION: Final = 1
HEADER: Final = Struct(">8sII")
MARKER: Final = b"\xd7MqE"
ENTRY: Final = Struct(">4sIBIQ")
MESSAGE: Final = Struct(">iiqqqIi")

SPOOL_BYTES_MAX: Final = SizeBytes(1 << 30)

SPOOL_THREADS_MAX: Final = 8
"""Calls of the spools of one producer, or of one run, that wait for the disk at once;
the others wait for those."""

COMPACT_BYTES: Final = 1 << 20
"""The file is rewritten when removed messages take so much, and half of it."""

_CRC_END: Final = 8
_ADD: Final = 1
_REMOVE: Final = 2
_NO_ATTRIBUTE: Final = -1
_HAS_PROPERTIES: Final = -2


class _Place(NamedTuple):
    position: Position
    size: SizeBytes


class _Entry(NamedTuple):
    kind: int
    number: int
    body: bytes
    size: int


class Spool:
    """Messages on the local disk, in order. Owner: the caller.

    Concurrency: any thread; calls follow each other. All of them block on the disk.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        *,
        size_bytes_max: SizeBytes = SPOOL_BYTES_MAX,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        """Open the spool of a directory, made if it is missing, and repair its tail.

        Args:
            fs: the disk.
            directory: its own directory.
            size_bytes_max: `append` lets the file grow to this.
            compact_bytes: least bytes of removed messages that are worth a new file.

        Raises:
            LogDirLockedError: another process, or another spool of this one, has it.
            CorruptRecordError: bytes are damaged that a crash cannot have damaged.
            StorageError: the disk refuses.
        """
        for level in (*reversed(directory.parents), directory):
            if not fs.is_directory(level):
                fs.make_directory(level)
        self.directory: Final = directory
        self._fs = fs
        self._path = directory / FILE_NAME
        self._dir_lock = fs.lock_directory(directory)
        self._size_bytes_max = size_bytes_max
        self._compact_bytes = compact_bytes
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._next_number = 1
        self._end = HEADER.size
        self._live_bytes = 0
        self._writer: AppendFile | None = None
        self._reader: ReadFile | None = None
        self._failure: StorageError | None = None
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    # -- life -------------------------------------------------------------------------

    def _recover(self) -> None:
        if not self._fs.exists(self._path):
            self._fs.write_atomically(self._path, encode_header())
        self._fs.discard(self.directory / NEW_NAME)
        self._open_files()
        assert self._reader is not None
        assert self._writer is not None
        size = self._reader.size()
        header = self._reader.read_at(Position(0), SizeBytes(HEADER.size))
        if header != encode_header():
            raise CorruptRecordError(f"{self._path}: the header is damaged")
        while (entry := _read_entry(self._reader, self._end, size)) is not None:
            self._learn(entry)
        if self._end == size:
            return
        good = _find_entry(self._reader, self._end + 1, size)
        if good is not None:
            raise CorruptRecordError(
                f"{self._path}: damaged at position {self._end}; the next whole entry"
                f" is at {good}"
            )
        _log.warning(
            "torn tail cut: file=%s position=%d bytes=%d",
            self._path,
            self._end,
            size - self._end,
        )
        self._writer.truncate(SizeBytes(self._end))
        self._writer.sync()

    def _learn(self, entry: _Entry) -> None:
        """Take a whole entry at the end of the known ones."""
        if entry.kind == _ADD:
            self._places[entry.number] = _Place(
                Position(self._end), SizeBytes(entry.size)
            )
            self._live_bytes += entry.size
            self._next_number = entry.number + 1
        else:
            for (number,) in struct.iter_unpack(">Q", entry.body):
                place = self._places.pop(number, None)
                self._live_bytes -= place.size if place else 0
        self._end += entry.size

    def _open_files(self) -> None:
        self._writer = self._fs.open_append(self._path, create=False)
        self._reader = self._fs.open_read(self._path)

    def _close_files(self) -> None:
        for file in (self._writer, self._reader):
            if file is not None:
                file.abandon()
        self._writer = self._reader = None

    def close(self) -> None:
        """Close the file and unlock the directory; never raises, harmless twice."""
        with self._lock:
            self._failure = self._failure or LogDirOfflineError(
                f"spool is closed: directory={self.directory}"
            )
            self._close_files()
            with suppress(StorageError):
                self._dir_lock.release()

    # -- messages ---------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of messages in it."""
        return len(self._places)

    def append(self, message: Message) -> int:
        """Add a message after the others; it is on disk when this returns.

        Returns:
            Its number in the spool; numbers rise.

        Raises:
            NoSpaceError: no room on the disk, or within the spool's bound; a later
                try may succeed.
            StorageError: the disk refused, now or before; the message is in doubt.
        """
        body = encode_message(message)
        with self._lock:
            number = self._next_number
            entry = encode_entry(_ADD, number, body)
            if self._end + len(entry) > self._size_bytes_max:
                self._compact()
            if self._end + len(entry) > self._size_bytes_max:
                raise NoSpaceError(
                    f"spool is full: directory={self.directory} expected at most"
                    f" {self._size_bytes_max} bytes, got {self._end + len(entry)}"
                )
            self._write(entry)
            self._learn(_Entry(_ADD, number, b"", len(entry)))
            return number

    def remove(self, numbers: Collection[int]) -> None:
        """Forget messages; they do not come back when this has returned.

        Args:
            numbers: from `append` or `numbers`; unknown ones are ignored.

        Raises:
            StorageError: as for `append`; the messages may come back.
        """
        with self._lock:
            known = [number for number in numbers if number in self._places]
            if not known:
                return
            body = struct.pack(f">{len(known)}Q", *known)
            entry = encode_entry(_REMOVE, 0, body)
            self._write(entry)
            self._learn(_Entry(_REMOVE, 0, body, len(entry)))
            garbage = self._end - HEADER.size - self._live_bytes
            if garbage >= max(self._compact_bytes, self._live_bytes):
                self._compact()

    def numbers(self, count_max: int | None = None) -> list[int]:
        """Return the numbers of the messages in it, oldest first."""
        with self._lock:
            return list(islice(self._places, count_max))

    def read(self, number: int) -> Message | None:
        """Return a message; None when it was removed.

        Raises:
            StorageError: the spool is closed, the disk refused, or the bytes are
                damaged.
        """
        with self._lock:
            place = self._places.get(number)
            return None if place is None else decode_message(self._read(place).body)

    def _read(self, place: _Place) -> _Entry:
        if self._reader is None:
            raise LogDirOfflineError(f"spool is closed: directory={self.directory}")
        end = place.position + place.size
        entry = _read_entry(self._reader, place.position, end)
        if entry is None:
            raise CorruptRecordError(
                f"{self._path}: damaged at position {place.position}"
            )
        return entry

    # -- the file ---------------------------------------------------------------------

    def _write(self, entry: bytes) -> None:
        """Write and sync one entry; after a failure the file ends where it did."""
        if self._failure is not None:
            raise LogDirOfflineError(str(self._failure)) from self._failure
        assert self._writer is not None
        full = None
        try:
            try:
                self._writer.write(entry)
            except NoSpaceError as error:
                full = error
                self._writer.truncate(SizeBytes(self._end))
            else:
                self._writer.sync()
        except StorageError as error:
            self._failure = error
            raise
        if full is not None:
            raise full

    def _compact(self) -> None:
        """Write the rest to a new file, and go on with that."""
        if self._failure is not None or self._end == HEADER.size + self._live_bytes:
            return
        path = self.directory / NEW_NAME
        try:
            self._write_new(path)
        except NoSpaceError as error:
            _log.warning("spool not made smaller: %s", error)
            return
        try:
            self._fs.rename(path, self._path)
            self._close_files()
            self._open_files()
        except StorageError as error:
            # Which of the two files has the name now, only a restart can find out.
            self._failure = error
            raise
        position = HEADER.size
        for number, place in self._places.items():
            self._places[number] = _Place(Position(position), place.size)
            position += place.size
        self._end = position

    def _write_new(self, path: Path) -> None:
        self._fs.discard(path)
        file = self._fs.open_append(path, create=True)
        try:
            file.write(encode_header())
            for number, place in self._places.items():
                file.write(encode_entry(_ADD, number, self._read(place).body))
            file.sync()
        finally:
            file.close()


def spool_name(topic: str, owner: str) -> str:
    """Return the name of a spool's directory: `<topic>@<owner>`, safe on any disk.

    Args:
        topic: topic name.
        owner: distinguishes spools of one topic: a group, or a partition.

    Returns:
        Both percent-encoded, so that neither can hold a `@` or a `/`.
    """
    return f"{quote(topic, safe='')}@{quote(owner, safe='')}"


# -- bytes ----------------------------------------------------------------------------


def encode_header() -> bytes:
    """Return the first bytes of the file."""
    return with_crc(HEADER.pack(MAGIC, VERSION, 0))


def encode_entry(kind: int, number: int, body: bytes) -> bytes:
    """Return one entry."""
    packed = ENTRY.pack(MARKER, 0, kind, len(body), number)[_CRC_END:] + body
    return MARKER + crc32(packed).to_bytes(4, "big") + packed


def encode_message(message: Message) -> bytes:
    """Return the body of a message's entry."""
    topic = message.topic.encode(errors="surrogatepass")
    attribute = message.attribute
    line = encode_properties(message.key, message.header_pairs)
    joined = join_properties(line, attribute) if line else attribute or ""
    text = joined.encode(errors="surrogatepass")
    if line:
        text_length = _HAS_PROPERTIES - len(text)
    else:
        text_length = _NO_ATTRIBUTE if attribute is None else len(text)
    head = MESSAGE.pack(
        message.partition.broker_id,
        message.partition.partition,
        message.id,
        message.offset,
        message.next_offset,
        len(topic),
        text_length,
    )
    return b"".join((head, topic, text, message.data))


def decode_message(body: bytes) -> Message:
    """Return the message of an entry whose checksum is right."""
    broker, partition, message_id, offset, next_offset, topic_length, length = (
        MESSAGE.unpack_from(body)
    )
    at = MESSAGE.size + topic_length
    topic = body[MESSAGE.size : at].decode(errors="surrogatepass")
    attribute, key = None, None
    headers: HeaderPairs = ()
    if length != _NO_ATTRIBUTE:
        has_properties = length <= _HAS_PROPERTIES
        text_end = at + (_HAS_PROPERTIES - length if has_properties else length)
        attribute = body[at:text_end].decode(errors="surrogatepass")
        if has_properties:
            key, headers, attribute = split_properties(attribute)
        at = text_end
    return Message(
        topic,
        body[at:],
        attribute,
        MessageId(message_id),
        TopicPartition(topic, BrokerId(broker), partition),
        Offset(offset),
        Offset(next_offset),
        key,
        headers,
    )


def _read_entry(file: ReadFile, position: int, end: int) -> _Entry | None:
    """Return the whole entry at a position; None when there is none."""
    head = file.read_at(Position(position), SizeBytes(ENTRY.size))
    if len(head) < ENTRY.size:
        return None
    marker, crc, kind, length, number = ENTRY.unpack(head)
    size = ENTRY.size + length
    if marker != MARKER or position + size > end:
        return None
    body = file.read_at(Position(position + ENTRY.size), SizeBytes(length))
    if crc32(body, crc32(head[_CRC_END:])) != crc:
        return None
    return _Entry(kind, number, body, size)


def _find_entry(file: ReadFile, start: int, end: int) -> int | None:
    """Return the position of the first whole entry at or after `start`."""
    for position in find_markers(file, start, end):
        if _read_entry(file, position, end) is not None:
            return position
    return None


def find_markers(
    file: ReadFile, start: int, end: int, piece_bytes: int = COMPACT_BYTES
) -> Iterator[int]:
    """Yield every position of the marker's bytes, a piece of the file at a time."""
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

"""The spool: messages kept on the local disk until they are removed.

One directory, one file, one owner (the directory is locked). Messages are kept in the
order of their addition. A message is on disk when `append` returns, and its removal
when `remove` returns.

    name: spool, a file of frames (`fs/frame_file.py`), magic MQ-SPOOL

    body of kind 1, a message
          | broker i32 | partition i32 | id i64 | offset i64 | next offset i64 |
          | topic length u32 | text length i32 | topic | text | data |
          text length n >= 0: n bytes, the attribute; -1: no attribute;
          n <= -2: -2 - n bytes, key, headers and attribute (`record/flags.py`)
    body of kind 2, removed messages:  u64 numbers

Big-endian; texts are UTF-8. The number of a frame is that of its message.

Removed messages stay in the file until they are the larger part of it. Then the others
are written to a new file, which replaces it.
"""

import logging
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from urllib.parse import quote

from metaq.errors import NoSpaceError, StorageError
from metaq.fs import FileSystem
from metaq.fs.frame_file import FRAME, HEADER, FrameFile, StoredFrame
from metaq.model import (
    BrokerId,
    HeaderPairs,
    Message,
    MessageId,
    Offset,
    SizeBytes,
    TopicPartition,
)
from metaq.record.flags import encode_properties, join_properties, split_properties

_log = logging.getLogger(__name__)

FILE_NAME: Final = "spool"

MAGIC: Final = b"MQ-SPOOL"
MESSAGE: Final = Struct(">iiqqqIi")

SPOOL_BYTES_MAX: Final = SizeBytes(1 << 30)

SPOOL_THREADS_MAX: Final = 8
"""Maximum number of concurrent disk calls for the spools of one producer or run."""

COMPACT_BYTES: Final = 1 << 20
"""The file is rewritten when removed messages take so much, and half of it."""
REMOVED_COUNT_MAX: Final = 4096
"""Maximum number of messages that one frame removes."""

_ADD: Final = 1
_REMOVE: Final = 2
_NO_ATTRIBUTE: Final = -1
_HAS_PROPERTIES: Final = -2


class _Place(NamedTuple):
    position: int
    size: int


class Spool:
    """Messages on the local disk, in order. Owned by its creator.

    Concurrency: any thread; a lock serialises the calls, which block on the disk.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        *,
        size_bytes_max: SizeBytes = SPOOL_BYTES_MAX,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        """Open the spool of a directory, creating it if it is missing; cut a torn tail.

        Args:
            fs: the file system.
            directory: directory of this spool alone.
            size_bytes_max: maximum size of the file.
            compact_bytes: as COMPACT_BYTES.

        Raises:
            LogDirLockedError: this or another process has the spool open.
            CorruptRecordError: there is damage that a crash cannot explain.
            StorageError: the disk refuses.
        """
        for level in (*reversed(directory.parents), directory):
            if not fs.is_directory(level):
                fs.make_directory(level)
        self.directory: Final = directory
        self._file = FrameFile(fs, directory / FILE_NAME, MAGIC)
        self._dir_lock = fs.lock_directory(directory)
        self._size_bytes_max = size_bytes_max
        self._compact_bytes = compact_bytes
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._unwritten: list[int] = []
        """Removed messages whose removal is not on disk: it found no space."""
        self._next_number = 1
        self._live_bytes = 0
        try:
            self._file.open(self._learn)
        except BaseException:
            self.close()
            raise

    # -- life -------------------------------------------------------------------------

    def _learn(self, frame: StoredFrame) -> None:
        """Apply the frame that follows the known ones."""
        if frame.kind == _ADD:
            self._places[frame.number] = _Place(frame.position, frame.size)
            self._live_bytes += frame.size
            self._next_number = frame.number + 1
        else:
            for (number,) in struct.iter_unpack(">Q", frame.body):
                place = self._places.pop(number, None)
                self._live_bytes -= place.size if place else 0

    def close(self) -> None:
        """Close the file and unlock the directory. Never raises; idempotent."""
        with self._lock:
            self._file.close()
            with suppress(StorageError):
                self._dir_lock.release()

    # -- messages ---------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of messages in the spool."""
        return len(self._places)

    def append(self, message: Message) -> int:
        """Append a message; it is on disk on return.

        Returns:
            Its number in the spool; numbers increase.

        Raises:
            NoSpaceError: the disk or the spool is full; a later try may succeed.
            StorageError: the disk refuses, or has refused before; the message is in
                doubt.
        """
        body = encode_message(message)
        size = FRAME.size + len(body)
        with self._lock:
            number = self._next_number
            if self._file.end + size > self._size_bytes_max:
                self._compact()
            if self._file.end + size > self._size_bytes_max:
                raise NoSpaceError(
                    f"spool is full: directory={self.directory} expected at most"
                    f" {self._size_bytes_max} bytes, got {self._file.end + size}"
                )
            self._learn(self._file.append(_ADD, number, body))
            return number

    def remove(self, numbers: Collection[int]) -> None:
        """Remove messages, and make this and earlier removals durable.

        Args:
            numbers: from `append` or `numbers`; unknown ones are ignored. An empty one
                only makes earlier removals durable.

        Raises:
            StorageError: as for `append`. The messages are removed, but a removal that
                is not on disk is undone by a restart; the next call writes it.
        """
        with self._lock:
            for number in numbers:
                if (place := self._places.pop(number, None)) is not None:
                    self._live_bytes -= place.size
                    self._unwritten.append(number)
            if not self._unwritten:
                return
            try:
                while self._unwritten:
                    some = self._unwritten[:REMOVED_COUNT_MAX]
                    self._file.append(_REMOVE, 0, struct.pack(f">{len(some)}Q", *some))
                    del self._unwritten[:REMOVED_COUNT_MAX]
            except NoSpaceError:
                if self._places:
                    raise
                self._file.clear()
                self._unwritten.clear()
            garbage = self._file.end - HEADER.size - self._live_bytes
            if garbage >= max(self._compact_bytes, self._live_bytes):
                self._compact()

    def numbers(self, count_max: int | None = None) -> list[int]:
        """Return the numbers of the messages, oldest first; at most `count_max`."""
        with self._lock:
            return list(islice(self._places, count_max))

    def read(self, number: int) -> Message | None:
        """Return a message; None if it was removed.

        Raises:
            StorageError: the spool is closed, the disk refuses, or the bytes are
                damaged.
        """
        with self._lock:
            place = self._places.get(number)
            if place is None:
                return None
            return decode_message(self._file.read(*place).body)

    def _compact(self) -> None:
        """Replace the file by one without removed messages."""
        is_whole = self._file.end == HEADER.size + self._live_bytes
        if self._file.failure is not None or is_whole:
            return
        frames = (
            (_ADD, number, self._file.read(*place).body)
            for number, place in self._places.items()
        )
        try:
            self._file.replace(frames)
        except NoSpaceError as error:
            _log.warning("spool not compacted: %s", error)
            return
        self._unwritten.clear()
        position = HEADER.size
        for number, place in self._places.items():
            self._places[number] = _Place(position, place.size)
            position += place.size


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


def encode_message(message: Message) -> bytes:
    """Return the body of the frame of a message."""
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
    """Return the message of a frame body whose checksum is right."""
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

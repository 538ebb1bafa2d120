"""Offsets in commit records, rewritten in place, those of many records by one write.

A commit record is written with bounds for offsets, and rewritten when its batches are
about to be written (`applier.py`). Records that came to the journal in one group have
their batches in one group of their partition, too. So a *block* keeps the bytes of the
redo file from the first offset of such records to the last, and what was noted there is
written in one go, with the bytes between: they are those of the file.

    redo file   … puts | commit: offset | puts | commit: offset, offset | puts | …
    block                       [---------------------------------]
    written                     [------------------------] from the first that was noted
                                                           since to the last

    Invariant: no byte of a file is in two blocks, and nothing else rewrites one that
    is in a block. Partitions of two directories have two threads; the lock of the file
    is held while a block of it changes, or is written.
"""

import logging
from collections.abc import Iterable
from threading import Lock
from typing import Final

from metaq.errors import StorageError
from metaq.fs import Buffer, UpdateFile
from metaq.model import Offset, Position
from metaq.txn.records import OFFSET

BLOCK_BYTES_MAX: Final = 16 * 1024
"""Longest block of several records: more bytes cost what a second write does."""

log = logging.getLogger(__name__)


class PlacesFile:
    """A redo file, open for its offsets. Any thread."""

    __slots__ = ("_file", "lock")

    def __init__(self, file: UpdateFile) -> None:
        self._file: UpdateFile | None = file
        self.lock: Final = Lock()
        """Guards blocks, and a descriptor that may be another file's once closed."""

    def write_at(self, position: int, data: bytes) -> None:
        """Write bytes of a block, unless the file is closed; under the lock.

        Raises:
            StorageError: the disk refuses.
        """
        if self._file is not None:
            self._file.write_at(Position(position), data)

    def close(self) -> None:
        """Close; nothing is written any more."""
        with self.lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()


class PlaceBlock:
    """Bytes of a redo file in which offsets may be rewritten. Any thread."""

    __slots__ = ("_data", "_file", "_high", "_low", "_start")

    def __init__(self, file: PlacesFile, start: int) -> None:
        """Begin at a position of a file, without bytes."""
        self._file = file
        self._start = start
        self._data = bytearray()
        self._low = self._high = 0
        """Bytes to be written."""

    def extend(self, data: Buffer) -> None:
        """Take in what follows in the file; before the first `note`."""
        self._data += data

    def note(self, position: int, offset: Offset) -> None:
        """Set the offset at a position of the file; `write` is to follow."""
        at = position - self._start
        with self._file.lock:
            OFFSET.pack_into(self._data, at, offset)
            is_first = self._low == self._high
            self._low = at if is_first else min(self._low, at)
            self._high = max(self._high, at + OFFSET.size)

    def write(self) -> None:
        """Write what was noted; nothing when another thread has done that.

        A failure costs a Java broker the places: it would append the batches again.
        """
        with self._file.lock:
            low, high, self._low, self._high = self._low, self._high, 0, 0
            if low == high:
                return
            try:
                self._file.write_at(self._start + low, bytes(self._data[low:high]))
            except StorageError as error:
                log.warning("places of batches not written: error=%s", error)


def make_blocks(
    file: PlacesFile, start: int, data: Buffer, ranges: Iterable[tuple[int, int]]
) -> list[PlaceBlock]:
    """Return the block of each record; those that lie close together share one.

    Args:
        file: where the records were written.
        start: position of the data.
        data: the records, and what stands between them.
        ranges: first byte of each record's offsets in the data and the one behind
            them, in order.
    """
    blocks: list[PlaceBlock] = []
    first = done = 0
    for low, high in ranges:
        if not blocks or high - first > BLOCK_BYTES_MAX:
            first = done = low
            block = PlaceBlock(file, start + first)
        block.extend(data[done:high])
        done = high
        blocks.append(block)
    return blocks

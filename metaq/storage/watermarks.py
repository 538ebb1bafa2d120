"""High watermarks of a replica's logs, kept across a restart.

A replica that starts does not know which of its bytes all in-sync copies have; before
it has asked a leader it shows readers the bytes below the last known high watermark. So
each data directory of a replica has one file with a slot for each log. A slot is
written in place when the high watermark has moved, at most once in `WRITE_INTERVAL_S`,
and the file is synced at a clean stop only, because an old watermark is as valid as a
new one.

    name: watermarks, in the data directory; a broker without replicas has none

    header, 32 bytes
    byte  0          8         12                      28      32
          +----------+---------+-----------------------+-------+
          | MQ-MARKS | version | 0                     | crc   |
          | 8 bytes  | u32 = 1 | 16 bytes              | u32   |
          +----------+---------+-----------------------+-------+
    slot, 32 bytes each, in any order
    byte  0            8                16          24     28      32
          +------------+----------------+-----------+------+-------+
          | log number | high watermark | log start | 0    | crc   |
          | u64        | i64            | i64       | u32  | u32   |
          +------------+----------------+-----------+------+-------+

Big-endian; `crc` is the CRC-32 of the bytes before it. A *log number* is random,
assigned when the log is created: a deleted topic that is created again has the same
name and another number. A damaged slot is ignored; after a damaged header the whole
file is. The first write after a start replaces the file by one with the present logs.
If a watermark is higher than the end of its log, committed bytes are missing; the
code that opens the log must report it.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from metaq.errors import DiskError, NoSpaceError
from metaq.fs import FileSystem, UpdateFile
from metaq.model import LogId, Offset, Position, SizeBytes
from metaq.record.checksum import has_crc, with_crc
from metaq.storage.holdings import Extent
from metaq.storage.span_index import is_unreadable

_log = logging.getLogger(__name__)

WATERMARKS_NAME: Final = "watermarks"
"""Name of the file: without a dash, so it is no partition."""

WRITE_INTERVAL_S: Final = 1.0
"""Minimum time between two writes of changed slots."""

FILE_BYTES_MAX: Final = SizeBytes(64 << 20)
"""A larger file is not read whole: it would have two million logs."""

MAGIC: Final = b"MQ-MARKS"
VERSION: Final = 1
HEADER: Final = Struct(">8sI16xI")
SLOT: Final = Struct(">QqqII")
SLOT_BYTES: Final = SLOT.size
"""32; the header has the same size."""


class Watermark(NamedTuple):
    """Last known offsets of one log of a replica."""

    number: int
    """Log number, unsigned, 64 bits."""
    high_watermark: Offset
    log_start: Offset


def encode_header() -> bytes:
    """Return the first 32 bytes."""
    return with_crc(HEADER.pack(MAGIC, VERSION, 0))


def encode_slot(mark: Watermark) -> bytes:
    """Return the 32 bytes of one slot."""
    return with_crc(SLOT.pack(*mark, 0, 0))


def decode_watermarks(data: bytes) -> dict[int, Watermark] | None:
    """Return the valid slots by log number; None if the header is damaged."""
    if data[: HEADER.size] != encode_header():
        return None
    found: dict[int, Watermark] = {}
    for start in range(HEADER.size, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        slot = data[start : start + SLOT_BYTES]
        if has_crc(slot):
            number, high_watermark, log_start, _zero, _crc = SLOT.unpack(slot)
            mark = Watermark(number, Offset(high_watermark), Offset(log_start))
            # Of two slots with one number, both were true once.
            found[number] = max(mark, found.get(number, mark))
    return found


def read_watermarks(fs: FileSystem, directory: Path) -> dict[int, Watermark]:
    """Return the watermarks of a data directory by log number; empty without a file.

    Raises:
        StorageError: the disk refuses more than this file.
    """
    path = directory / WATERMARKS_NAME
    try:
        file = fs.try_open_read(path)
        if file is None:
            return {}
        with file:
            size = min(file.size(), FILE_BYTES_MAX)
            found = decode_watermarks(file.read_at(Position(0), SizeBytes(size)))
        if found is not None:
            return found
        _log.error("watermarks not believed: file=%s header is damaged", path)
    except DiskError as error:
        if not is_unreadable(error):
            raise
        _log.error("going on without watermarks: %s", error)
    return {}


class KnownWatermarks:
    """Watermarks in the data directories of a replica at its start."""

    def __init__(
        self,
        fs: FileSystem,
        paths: Iterable[Path],
        numbers: Mapping[LogId, int],
        starts: Mapping[LogId, Offset],
    ) -> None:
        """Read the files of all data directories; blocks.

        Args:
            fs: the disk.
            paths: all data directories.
            numbers: the logs of this replica, with their numbers.
            starts: start offsets of logs; others start at 0.

        Raises:
            StorageError: a disk refuses.
        """
        self.numbers: Final = numbers
        """The logs of this replica, with their numbers."""
        self.starts: Final = starts
        """Their start offsets; others start at 0."""
        self.too_short: Final = set[LogId]()
        """Logs that lack bytes which every in-sync copy has had; see `extent_of`."""
        self._fs = fs
        self._marks = {path: read_watermarks(fs, path) for path in paths}

    def extent_of(self, path: Path, log_id: LogId, found: Extent) -> Extent:
        """Return the part of a recovered log below its high watermark.

        Args:
            path: its data directory.
            log_id: the partition; without a number its watermark is its start.
            found: its offsets after recovery.
        """
        mark = self._marks[path].get(self.numbers.get(log_id, -1))
        end = found.start if mark is None else max(found.start, mark.high_watermark)
        if end > found.end and log_id not in self.too_short:
            self.too_short.add(log_id)
            _log.error(
                "log lacks bytes that were readable: partition=%s expected_end=%d"
                " end=%d",
                log_id,
                end,
                found.end,
            )
        return Extent(found.start, min(end, found.end))

    def has_lost(self, log_id: LogId) -> bool:
        """Return whether a log without segments had readable bytes since its start.

        With the same number it may have been started again after such bytes.
        """
        number, start = self.numbers[log_id], self.starts.get(log_id, Offset(0))
        known = (marks.get(number) for marks in self._marks.values())
        return any(
            mark and mark.high_watermark > max(mark.log_start, start) for mark in known
        )

    def file_of(self, path: Path) -> "WatermarkFile":
        """Return the writer that continues the file of a data directory."""
        living = set(self.numbers.values())
        marks = self._marks[path].values()
        return WatermarkFile(
            self._fs, path, (mark for mark in marks if mark.number in living)
        )


class WatermarkFile:
    """Writes the slots of one data directory. Owner: the storage thread."""

    def __init__(
        self, fs: FileSystem, directory: Path, marks: Iterable[Watermark]
    ) -> None:
        """Continue with these watermarks; opens no file yet."""
        self._fs = fs
        self._path = directory / WATERMARKS_NAME
        self._marks = {mark.number: mark for mark in marks}
        self._slots: dict[int, int] = {}
        self._file: UpdateFile | None = None

    def write(self, marks: Collection[Watermark]) -> None:
        """Write watermarks that have moved; without space the file is unchanged.

        Raises:
            DiskError: the disk refuses; the state of the file is unknown.
        """
        try:
            self._write(marks)
        except NoSpaceError as error:
            _log.warning("watermarks not written: file=%s error=%s", self._path, error)

    def _write(self, marks: Collection[Watermark]) -> None:
        self._marks.update((mark.number, mark) for mark in marks)
        if self._file is None:
            self._slots = {number: at for at, number in enumerate(self._marks)}
            slots = b"".join(map(encode_slot, self._marks.values()))
            self._fs.write_atomically(self._path, encode_header() + slots)
            self._file = self._fs.open_update(self._path)
            return
        for mark in marks:
            at = self._slots.setdefault(mark.number, len(self._slots))
            position = Position(HEADER.size + at * SLOT_BYTES)
            self._file.write_at(position, encode_slot(mark))

    def lower(self, mark: Watermark) -> None:
        """Write and sync a watermark that is lower than before, for a log to be cut.

        Without space the higher one stays, and the next start finds the log too short.

        Raises:
            DiskError: the disk refuses; the state of the file is unknown.
        """
        known = self._marks.get(mark.number, mark)
        if known.high_watermark > mark.high_watermark:
            self.write([mark])
            if self._file is not None:
                self._file.sync()

    def close(self, marks: Collection[Watermark]) -> None:
        """Write the last watermarks, sync and close, for a clean stop.

        Raises:
            DiskError: the disk refuses; the file is closed all the same.
        """
        try:
            self.write(marks)
            if self._file is not None:
                self._file.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without syncing; never raises."""
        file, self._file = self._file, None
        if file is not None:
            file.abandon()

"""The producer file: batches of producers that a partition remembers across a restart.

Theory of operation. The storage thread notes each batch with a producer here *before*
it writes the records of the group; so after a kill every stored batch is noted. The
file is not synced with the group: that would be a second wait for the device
(docs/decisions/0010-the-producer-file-is-not-synced.md). So after a power cut a batch
may be stored and not noted, and its repetition is stored again. A note counts only if
the log has the batch: all of its bytes, and its first id at its offset. So a note of a
batch that was not written, or refused on a full disk, is ignored.

    name: producers, in the partition's directory; a Java broker ignores it

    header, 16 bytes
    byte  0          8         12      16
          +----------+---------+-------+
          | MQ-PRODS | version | crc   |
          | 8 bytes  | u32 = 1 | u32   |
          +----------+---------+-------+
    entry, 104 bytes each, in the order of the appends
    byte  0          64         72      76         80         88       96       100
          +----------+----------+-------+----------+----------+--------+--------+-----+
          | producer | sequence | count | checksum | first id | offset | length | crc |
          | 64 bytes | i64      | u32   | i32      | i64      | i64    | u32    | u32 |
          +----------+----------+-------+----------+----------+--------+--------+-----+

Big-endian; `producer` is padded with zeros; `crc` is the CRC-32 of the bytes of header
or entry before it. Entries have one size, so a torn one damages only itself. When there
are too many, the file is replaced, through a temporary file, by one with the remembered
batches only; so it is at the first note after a start. Deleting the file loses the
memory of producers, but no records. Keep in step: docs/storage.md, `producers.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from metaq.errors import DiskError
from metaq.fs import Buffer, FileSystem, UpdateFile
from metaq.model import MessageId, Offset, Position, SizeBytes
from metaq.record.checksum import has_crc, with_crc
from metaq.record.layout import HEADER as RECORD_HEADER
from metaq.record.layout import HEADER_BYTES as RECORD_HEADER_BYTES
from metaq.storage.producers import BATCHES_KEPT, ProducerTable, StoredBatch
from metaq.storage.segment import Segment
from metaq.storage.span_index import is_unreadable

PRODUCERS_NAME: Final = "producers"
"""Name of the file; MetaQ ignores it."""

MAGIC: Final = b"MQ-PRODS"
VERSION: Final = 1
HEADER: Final = Struct(">8sII")
"""Magic, version, crc."""
ENTRY: Final = Struct(">64sqIiqqII")
"""Producer, sequence, count, checksum, first id, offset, length, crc."""
ENTRY_BYTES: Final = ENTRY.size
"""104."""

FILE_FACTOR: Final = 4
"""Maximum number of entries in the file, as a multiple of the remembered batches."""

FILE_BYTES_MAX: Final = SizeBytes(64 << 20)
"""A larger file is not read: ours are smaller with any settings."""


@dataclass(frozen=True, slots=True)
class Notes:
    """Contents of a producer file."""

    batches: tuple[StoredBatch, ...] = ()
    flaw: str = ""
    """Fault after the valid part; "" for none."""


# -- bytes ----------------------------------------------------------------------------


def encode_header() -> bytes:
    """Return the first 16 bytes."""
    return with_crc(HEADER.pack(MAGIC, VERSION, 0))


def encode_entry(batch: StoredBatch) -> bytes:
    """Return the 104 bytes of one entry; a field out of range is a bug."""
    return with_crc(pack_entry(batch))


def pack_entry(batch: StoredBatch) -> bytes:
    """Return the bytes of an entry, with 0 as its checksum."""
    return ENTRY.pack(
        batch.producer.encode("ascii"),
        batch.sequence,
        batch.count,
        batch.checksum,
        batch.first_id,
        batch.offset,
        batch.size_bytes,
        0,
    )


def decode_notes(data: bytes) -> Notes:
    """Return the valid notes of a producer file."""
    if data[: HEADER.size] != encode_header():
        return Notes((), "header is damaged")
    size = len(data) - HEADER.size
    whole = size // ENTRY_BYTES
    batches = []
    for number in range(whole):
        start = HEADER.size + number * ENTRY_BYTES
        batch = _decode_entry(data[start : start + ENTRY_BYTES])
        if batch is not None:
            batches.append(batch)
    flaw = ""
    if len(batches) < whole or size % ENTRY_BYTES:
        flaw = (
            f"entries are damaged: {len(batches)} are good, the file has {size} bytes"
            f" of them"
        )
    return Notes(tuple(batches), flaw)


def _decode_entry(data: bytes) -> StoredBatch | None:
    # With a valid checksum we wrote it, so the name is valid, too.
    return unpack_entry(data) if has_crc(data) else None


def unpack_entry(data: Buffer) -> StoredBatch:
    """Return the batch of an entry, without verifying its checksum."""
    name, sequence, count, checksum, first_id, offset, size, _crc = ENTRY.unpack(data)
    producer = name.rstrip(b"\0").decode("ascii", "replace")
    return StoredBatch(
        producer,
        sequence,
        count,
        checksum,
        MessageId(first_id),
        Offset(offset),
        SizeBytes(size),
    )


# -- recovery -------------------------------------------------------------------------


def read_notes(
    fs: FileSystem, directory: Path, bytes_max: int = FILE_BYTES_MAX
) -> Notes:
    """Read the producer file of a partition; empty if there is none.

    For an unreadable file the result is empty and has a flaw.

    Raises:
        StorageError: The disk refuses more than this file.
    """
    path = directory / PRODUCERS_NAME
    try:
        file = fs.try_open_read(path)
        if file is None:
            return Notes()
        with file:
            size = file.size()
            if size > bytes_max:
                return Notes((), f"expected at most {bytes_max} bytes, got {size}")
            return decode_notes(file.read_at(Position(0), size))
    except DiskError as error:
        if not is_unreadable(error):
            raise
        return Notes((), str(error))


def stored_batches(
    fs: FileSystem,
    segments: Sequence[Segment],
    noted: Sequence[StoredBatch],
    *,
    producer_count_max: int,
) -> tuple[StoredBatch, ...]:
    """Return the noted batches that are still in the log.

    Args:
        fs: The disk.
        segments: The recovered log, in order.
        noted: Entries of the producer file, in its order.
        producer_count_max: Maximum number of producers, those noted last.

    Returns:
        At most `BATCHES_KEPT` of each producer, in the order of the appends.
    """
    counts: dict[str, int] = {}
    kept: list[StoredBatch] = []
    for batch in reversed(noted):
        count = counts.get(batch.producer, 0)
        is_wanted = count < BATCHES_KEPT and (count or len(counts) < producer_count_max)
        if is_wanted and _is_stored(fs, segments, batch):
            counts[batch.producer] = count + 1
            kept.append(batch)
    return tuple(reversed(kept))


def torn_batch(
    fs: FileSystem,
    segment: Segment,
    noted: Iterable[StoredBatch],
    *,
    covered_end: Offset,
    end: Offset,
) -> StoredBatch | None:
    """Return a noted batch of which a log that ends at `end` has only a part.

    A batch is stored as a whole or not at all, so recovery cuts the part off.

    Args:
        fs: The disk.
        segment: The active segment.
        noted: Entries of the producer file.
        covered_end: End of the bytes that the span index covers; never cut.
        end: End of the last whole record.
    """
    for batch in noted:
        is_cut = covered_end <= batch.offset < end < batch.end_offset
        if is_cut and _first_id(fs, segment, batch.offset) == batch.first_id:
            return batch
    return None


def _is_stored(fs: FileSystem, segments: Sequence[Segment], batch: StoredBatch) -> bool:
    for segment in segments:
        if segment.contains(batch.offset):
            is_whole = batch.end_offset <= segment.end_offset
            return is_whole and _first_id(fs, segment, batch.offset) == batch.first_id
    return False


def _first_id(fs: FileSystem, segment: Segment, offset: Offset) -> MessageId | None:
    """Return the id at `offset`, if a record begins there; None if it is cut."""
    with fs.open_read(segment.path) as file:
        size = SizeBytes(RECORD_HEADER_BYTES)
        header = file.read_at(segment.position_of(offset), size)
    if len(header) < RECORD_HEADER_BYTES:
        return None
    return MessageId(RECORD_HEADER.unpack(header)[2])


def write_notes(
    fs: FileSystem, directory: Path, batches: Iterable[StoredBatch]
) -> None:
    """Replace the producer file of a partition by one with these batches.

    Raises:
        NoSpaceError: The old one is still there.
        DiskError: The disk refuses; the old or the new one is there.
    """
    entries = b"".join(map(encode_entry, batches))
    fs.write_atomically(directory / PRODUCERS_NAME, encode_header() + entries)


# -- writer ---------------------------------------------------------------------------


class ProducerFile:
    """Notes batches in the producer file. Owner: the storage thread of the partition.

    Call `note` before the records are written, and `keep` after it. If the group is
    refused in between, the next note overwrites its entries.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        *,
        producer_count_max: int,
        batches: Iterable[StoredBatch] = (),
    ) -> None:
        """Continue with the batches that recovery found; opens no file yet."""
        self._fs = fs
        self._path = directory / PRODUCERS_NAME
        self._entries_max = FILE_FACTOR * BATCHES_KEPT * producer_count_max
        self._file: UpdateFile | None = None
        self._entries = 0
        self._table = ProducerTable(producer_count_max)
        for batch in batches:
            self._table.add(batch)

    def is_rewrite_due(self, count: int) -> bool:
        """Return whether a note of `count` batches would rewrite the file."""
        return self._file is None or self._entries + count > self._entries_max

    def note(self, batches: Sequence[StoredBatch]) -> None:
        """Write entries for batches whose records are about to be written.

        Raises:
            NoSpaceError: nothing is noted; a later try may succeed.
            DiskError: the state of the file is unknown.
        """
        if self.is_rewrite_due(len(batches)):
            self._rewrite()
        assert self._file is not None
        position = Position(HEADER.size + self._entries * ENTRY_BYTES)
        self._file.write_at(position, b"".join(map(encode_entry, batches)))

    def keep(self, batches: Sequence[StoredBatch]) -> None:
        """Keep the last noted entries, because their records are written."""
        self._entries += len(batches)
        for batch in batches:
            self._table.add(batch)

    def close(self) -> None:
        """Sync and close, for a clean stop; a second call does nothing.

        Raises:
            DiskError: the disk refuses; the file is closed all the same.
        """
        try:
            if self._file is not None:
                self._file.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without syncing; never raises."""
        file, self._file = self._file, None
        if file is not None:
            file.abandon()

    def _rewrite(self) -> None:
        """Replace the file by one with the remembered batches only, and open it."""
        self.abandon()
        batches = tuple(self._table)
        write_notes(self._fs, self._path.parent, batches)
        self._file = self._fs.open_update(self._path)
        self._entries = len(batches)
